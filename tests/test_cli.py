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

from zephon.cli import main


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
    a, b, whole = lines(out)
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
    assert not [file for file in saved.iterdir() if file.suffix]


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
    code, out = run(capsys, "verify", a, b, "--json")
    assert code == 1
    assert lines(out) == [{"compared": 4, "only_in_one": 0, "step": 3, "lanes": ["00001"]}]
    b.write_text("".join(ledger.splitlines(keepends=True)[:0]) + '{"step": 99, "lanes": {}}\n')
    assert run(capsys, "verify", a, b)[0] == 2


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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (recipe.parent / "l.jsonl").exists() or not (recipe.parent / "l.jsonl").stat().st_size:
        assert time.monotonic() < deadline
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
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
