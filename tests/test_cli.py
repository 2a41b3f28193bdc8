"""The command line as a user meets it: real processes, exit codes, and nothing but JSON on standard output."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import write_recipe

from zephon.command.cli import main


def zephon(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "zephon", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lines(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Run the command in this process; the fast way."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    return int(stop.value.code or 0), capsys.readouterr().out


def test_check_says_what_holds(recipe: Path) -> None:
    done = zephon("check", recipe)
    assert done.returncode == 0
    assert "70.00%" in done.stdout
    assert "The recipe holds" in done.stdout


def test_check_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "check", recipe, "--dp", 2, "--json")
    *named, a, b, whole = lines(out)
    assert [one["for"] for one in named] == ["modality 'text' of 'a'", "modality 'text' of 'b'"]
    assert code == 0
    assert (a["source"], a["rows"], a["share"], b["chunks"]) == ("a", 100, 0.7, 17)
    assert [one["dp"] for one in whole["ranks"]] == [1, 2, 4]  # type: ignore[attr-defined]


def test_help_teaches() -> None:
    top = zephon("--help").stdout
    assert all(word in top for word in ("check", "run", "digest", "export", "verify", "SHA-256"))
    for command in ("check", "run", "digest", "export", "verify"):
        done = zephon(command, "--help")
        assert done.returncode == 0
        assert len(done.stdout) > 400


@pytest.mark.parametrize(
    "args",
    [
        ["check", "nowhere.toml"],
        ["check"],
        ["chekc", "x"],
        ["digest", "RECIPE"],
        ["digest", "RECIPE", "--steps", "0"],
        ["run", "RECIPE", "--steps", "-1"],
        ["export", "RECIPE", "--out", "x"],
        ["run", "RECIPE", "--steps", "2", "--save-at", "1"],
        ["run", "RECIPE", "--steps", "2", "--save", "x", "--save-at", "5"],
        ["run", "RECIPE", "--steps", "2", "--save", "x", "--save-at", "-1"],
        ["check", "RECIPE", "--seq-len", "0", "--global-batch-size", "8"],
        ["run", "RECIPE", "--steps", "1", "--ledger", "RECIPE"],
        ["digest", "RECIPE", "--steps", "2", "--dp", "3"],
        ["check", "RECIPE", "--dp", "5"],
        ["run", "RECIPE", "--steps", "1", "--dp", "2", "--rank", "2"],
        ["run", "RECIPE", "--steps", "x"],
        ["run", "RECIPE", "--steps", "2", "--resume", "nowhere"],
        ["verify", "nowhere", "nowhere"],
        ["check", "RECIPE", "--seq-len", "64", "--global-batch-size", "8"],
        ["check", "RECIPE", "--seq-len", "64"],
        ["check", "RECIPE", "--tokenizer", "nowhere"],
    ],
)
def test_bad_usage_ends_with_2_and_no_traceback(recipe: Path, args: list[str]) -> None:
    done = zephon(*(str(recipe) if arg == "RECIPE" else arg for arg in args))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr or done.stdout


def test_bad_data_ends_with_1_and_no_traceback(recipe: Path) -> None:
    with (recipe.parent / "a" / "two.jsonl").open("a") as file:
        file.write("{broken\n")
    done = zephon("digest", recipe, "--steps", 40)
    assert done.returncode == 1
    assert "two.jsonl, line 41" in done.stderr
    assert "Traceback" not in done.stderr


def test_digests_are_the_same_for_every_number_of_ranks_and_after_a_resume(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = run(capsys, "digest", recipe, "--steps", 6)
    assert [line["step"] for line in lines(whole)] == [1, 2, 3, 4, 5, 6]
    saved = recipe.parent / "saved"
    _, out = run(capsys, "digest", recipe, "--steps", 6, "--dp", 2, "--save", saved, "--save-at", 3)
    assert out == whole
    _, rest = run(capsys, "digest", recipe, "--steps", 6, "--dp", 4, "--resume", saved)
    assert lines(rest) == lines(whole)[3:]
    assert sorted(file.name for file in (saved / "step-3").iterdir()) == [
        "header",
        *(f"lane_0000{i}" for i in range(4)),
    ]
    assert run(capsys, "digest", recipe, "--steps", 3, "--resume", saved)[0] == 2  # nothing left to do
    run(capsys, "digest", recipe, "--steps", 5, "--resume", saved, "--save", saved)
    (saved / "step-5" / "lane_00002").unlink()  # a save that was killed half-way
    _, rest = run(capsys, "digest", recipe, "--steps", 6, "--dp", 4, "--resume", saved)
    assert lines(rest) == lines(whole)[3:]


def test_export_holds_what_the_digests_say(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = recipe.parent / "out"
    assert run(capsys, "export", recipe, "--steps", 2, "--out", out)[0] == 0
    _, ledger = run(capsys, "digest", recipe, "--steps", 2, "--lanes")
    for line in lines(ledger):
        with np.load(out / f"step-{line['step']:06d}.npz") as file:
            arrays = dict(file)
        lanes: dict[str, list[str]] = {}
        for key in sorted(arrays):
            lanes.setdefault(key.split(".")[0], []).append(key)
        whole = hashlib.sha256()
        for lane, keys in sorted(lanes.items()):
            digest = hashlib.sha256()  # the recipe of the design, written out by hand
            for key in keys:
                name, array = key.split(".")[2].encode(), arrays[key]
                kind = array.dtype.str.encode()
                digest.update(struct.pack("<q", len(name)) + name + struct.pack("<q", len(kind)) + kind)
                digest.update(struct.pack("<q", array.ndim) + struct.pack("<q", array.shape[0]) + array.tobytes())
            assert digest.hexdigest() == line["lanes"][lane]  # type: ignore[index]
            whole.update(digest.digest())
        assert whole.hexdigest() == line["sha256"]


def test_verify_names_step_and_lane(recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, ledger = run(capsys, "digest", recipe, "--steps", 4, "--lanes")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(ledger)
    b.write_text(ledger)
    assert run(capsys, "verify", a, b) == (0, "4 steps compared, all equal (0 steps are in one of them only).\n")
    changed = lines(ledger)
    changed[2]["lanes"]["00001"] = "0" * 64  # type: ignore[index]
    b.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert run(capsys, "verify", a, b)[0] == 2  # the step's own sha256 does not fit
    for line in changed:
        del line["sha256"]
    b.write_text("".join(json.dumps(line) + "\n" for line in changed))
    code, out = run(capsys, "verify", a, b, "--json")
    assert code == 1
    assert lines(out) == [{"compared": 4, "step": 3, "lanes": ["00001"], "only": 0, "lacking": False, "incomplete": 0}]
    b.write_text('{"step": 99, "lanes": {}}\n')
    assert run(capsys, "verify", a, b)[0] == 2
    some = [{**line, "lanes": {"00001": line["lanes"]["00001"]}} for line in changed[:1]]  # type: ignore[index]
    a.write_text(json.dumps(some[0]) + "\n")
    b.write_text(json.dumps(some[0]) + "\n")
    code, out = run(capsys, "verify", a, b)
    assert code == 1
    assert "1 of 1 steps lack lanes in both" in out


def test_what_exists_and_is_no_ledger_is_left_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = recipe.parent / "precious"
    precious.write_text("no line end")
    assert run(capsys, "run", recipe, "--steps", 1, "--ledger", precious)[0] == 2
    assert precious.read_text() == "no line end"


def test_files_that_cannot_be_used_end_with_1_and_no_traceback(recipe: Path) -> None:
    for args in (["--save", "/proc/x"], ["--save", recipe], ["--ledger", recipe.parent]):
        done = zephon("run", recipe, "--steps", 2, *args)
        assert done.returncode in (1, 2), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith(("failed", "error"))


def test_messages_show_brackets_and_odd_names(recipe: Path) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace('name = "a"', 'name = "x[/red]\u6f22"').replace("[shuffle]", "[shufle]"))
    done = zephon("check", recipe)
    assert done.returncode == 2
    recipe.write_text(text.replace('name = "a"', 'name = "x[/red]\u6f22"'))
    command = [sys.executable, "-m", "zephon", "check", str(recipe)]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"x[/red]" in done.stdout
    recipe.write_text("lanes = 1\nsources = 3\n")
    assert "[[sources]]" in zephon("check", recipe).stderr


def test_ranks_that_run_alone_write_one_ledger_and_one_state(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ledger, saved = tmp_path / "ledger", tmp_path / "saved"
    for rank in range(2):
        code, _ = run(
            capsys, "run", recipe, "--dp", 2, "--rank", rank, "--steps", 4, "--ledger", ledger / f"{rank}.jsonl",
            "--save", saved, "--save-at", 2, "--json",
        )  # fmt: skip
        assert code == 0
    resumed = tmp_path / "resumed"
    for rank in range(4):
        run(
            capsys,
            "run",
            recipe,
            "--dp",
            4,
            "--rank",
            rank,
            "--steps",
            4,
            "--ledger",
            resumed / f"{rank}.jsonl",
            "--resume",
            saved,
        )
    _, whole = run(capsys, "digest", recipe, "--steps", 4, "--lanes")
    (tmp_path / "whole.jsonl").write_text(whole)
    assert run(capsys, "verify", ledger, tmp_path / "whole.jsonl")[1].startswith("4 steps compared, all equal")
    assert run(capsys, "verify", resumed, tmp_path / "whole.jsonl")[1].startswith(
        "2 steps compared, all equal (2 steps"
    )


def test_run_reports_what_it_cost(recipe: Path) -> None:
    done = zephon("run", recipe, "--steps", 5, "--json")
    assert done.returncode == 0
    (report,) = lines(done.stdout)
    keys = {"tokens_per_s", "cpu_s_per_mtoken", "peak_pss_mb", "first_batch_s", "shares", "padding", "dropped"}
    assert keys <= report.keys()
    assert report["tokens"] == 5 * 8 * 32
    assert report["padding"] == 0
    assert report["peak_pss_mb"] > 10  # type: ignore[operator]


def test_run_until_interrupted_still_reports(recipe: Path) -> None:
    import signal
    import time

    command = [
        sys.executable,
        "-m",
        "zephon",
        "run",
        str(recipe),
        "--json",
        "--ledger",
        str(recipe.parent / "l.jsonl"),
    ]

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # under nohup it is ignored, and children inherit that

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    ledger, deadline = recipe.parent / "l.jsonl", time.monotonic() + 60
    try:
        while not ledger.exists() or not ledger.stat().st_size:
            assert time.monotonic() < deadline
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert lines(out)[0]["steps"] > 0  # type: ignore[operator]


def test_a_recipe_without_batch_and_tokenizer_takes_them_from_the_command_line(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = run(capsys, "digest", recipe, "--steps", 2)
    text = recipe.read_text()
    tokenizer = text.split('path = "')[1].split('"')[0]
    start, end = text.index("[batch]"), text.index("[[sources]]")
    recipe.write_text(text[:start] + text[end:])
    assert run(capsys, "digest", recipe, "--steps", 2)[0] == 2
    code, out = run(
        capsys, "digest", recipe, "--steps", 2, "--seq-len", 32, "--global-batch-size", 8, "--tokenizer", tokenizer
    )
    assert code == 0
    assert out == whole
