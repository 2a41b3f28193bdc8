"""The command line as a user meets it: real processes, exit codes, and nothing but JSON on standard output."""

import hashlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from small import write_recipe

from zephon import Stream
from zephon.command.cli import main
from zephon.command.explain import explain
from zephon.command.rehearse import rehearse
from zephon.ledger import read_ledger


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


def test_explain_times_what_a_run_does(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zephon.command.explain._TOKENS", 200_000)
    with Stream.open(recipe) as stream:
        cost = explain(stream).cpu_s_per_mtoken
    assert list(cost) == ["read", "measure", "mix and pack", "materialise", "digest"]
    assert min(cost.values()) > 0


def test_check_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "check", recipe, "--dp", 2, "--json")
    *named, a, b, whole = lines(out)
    assert [one["for"] for one in named] == ["modality 'text' of 'a'", "modality 'text' of 'b'"]
    assert code == 0
    assert (a["source"], a["rows"], a["share"], b["chunks"]) == ("a", 100, 0.7, 17)
    assert [one["dp"] for one in whole["ranks"]] == [1, 2, 4]  # type: ignore[attr-defined]


def test_a_finite_stream_has_no_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sequences were given out as lanes, which no recipe could have asked for."""
    recipe = finite(tmp_path)
    code, out = run(capsys, "check", recipe, "--json")
    whole = lines(out)[-1]
    assert (code, set(whole)) == (0, {"global_batch_size", "seq_len", "ranks"})
    assert whole["ranks"] == [{"dp": dp, "sequences_per_rank": 8 // dp} for dp in (1, 2, 4, 8)]


def test_a_rank_of_a_finite_stream_counts_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counted the tokens of all ranks, and so looked as much faster as there were ranks."""
    recipe = finite(tmp_path)
    (whole,) = lines(run(capsys, "run", recipe, "--json")[1])
    half = [lines(run(capsys, "run", recipe, "--dp", 2, "--rank", rank, "--json")[1])[0] for rank in range(2)]
    for name in ("tokens", "padding"):
        assert sum(int(str(one[name])) for one in half) in (whole[name], int(str(whole[name])) - 1)
    assert whole["steps"] == half[0]["steps"] == half[1]["steps"] != 0


def test_a_run_that_goes_on_counts_from_there(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was noted before stood in the report of the rest too."""
    with (recipe.parent / "a" / "two.jsonl").open("a") as file:
        file.write('{"text": ""}\n' * 40)
    saved = recipe.parent / "saved"
    first = lines(run(capsys, "run", recipe, "--steps", 9, "--save", saved, "--json")[1])[0]
    rest = lines(run(capsys, "run", recipe, "--steps", 20, "--resume", saved, "--json")[1])[0]
    whole = lines(run(capsys, "run", recipe, "--steps", 20, "--json")[1])[0]
    empty = [one["dropped"]["a"]["empty"] for one in (first, rest, whole)]  # type: ignore[index]
    assert min(empty) > 0
    assert empty[0] + empty[1] == empty[2]


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


@pytest.mark.parametrize("steps", [[], ["--steps", "100000000"]])
def test_run_until_interrupted_still_reports_and_saves(recipe: Path, steps: list[str]) -> None:
    ledger, saved = recipe.parent / "l.jsonl", recipe.parent / "saved"
    command = [sys.executable, "-m", "zephon", "run", str(recipe), "--json", "--ledger", str(ledger)]

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # under nohup it is ignored, and children inherit that

    process = subprocess.Popen(
        [*command, "--save", str(saved), *steps],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    )
    deadline = time.monotonic() + 60
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
    taken = lines(out)[0]["steps"]
    assert taken == max(read_ledger(ledger)) > 0
    assert [path.name for path in saved.iterdir()] == [f"step-{taken}"]


@pytest.mark.parametrize("command", ["digest", "export"])
def test_ctrl_c_ends_behind_a_whole_step_and_keeps_it(recipe: Path, command: str) -> None:
    out, saved = recipe.parent / "out", recipe.parent / "saved"
    options = ["--out", str(out), "--json"] if command == "export" else ["--dp", "4", "--save", str(saved)]
    process = subprocess.Popen(
        [sys.executable, "-m", "zephon", command, str(recipe), "--steps", "100000000", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Stopping after this step" in said
    steps = [line["step"] for line in lines(first + rest)]
    assert steps == list(range(1, len(steps) + 1))
    if command == "export":
        assert [path.name for path in sorted(out.iterdir())] == [f"step-{step:06d}.npz" for step in steps]
        assert all(np.load(path).files for path in out.iterdir())
    else:
        assert [path.name for path in saved.iterdir()] == [f"step-{len(steps)}"]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_amid_a_step_waits_for_it_and_a_second_one_does_not(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Between a step that was handed over and its line in the ledger, the state that was saved was ahead of it."""
    noted: list[int] = []
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        real = loader.step_records

        def interrupted() -> object:
            found = real()
            for _ in range(times * (loader.step == 3)):
                os.kill(os.getpid(), signal.SIGINT)
            return found

        monkeypatch.setattr(loader, "step_records", interrupted)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if times == 1:
                assert rehearse(stream, loader, None, lambda _: noted.append(loader.step)).steps == 3
            else:
                with pytest.raises(KeyboardInterrupt):
                    rehearse(stream, loader, None, lambda _: noted.append(loader.step))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, handler)
    assert noted == [1, 2, 3][: 4 - times]


def test_ctrl_c_waits_until_a_step_is_noted(recipe: Path) -> None:
    noted: list[int] = []
    with Stream.open(recipe) as stream:
        loader = stream.loader()

        def after(_: object) -> None:
            if loader.step == 3:
                os.kill(os.getpid(), signal.SIGINT)
            noted.append(loader.step)

        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            assert rehearse(stream, loader, None, after).steps == 3
        finally:
            signal.signal(signal.SIGINT, handler)
    assert noted == [1, 2, 3]


def finite(folder: Path, size: int = 8) -> Path:
    path = write_recipe(folder, size=size, tail='[mix]\non_end = "renormalise"')
    path.write_text(path.read_text().replace("lanes = 4\n", ""))
    return path


def test_the_last_step_of_finite_data_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, saved = finite(tmp_path), [tmp_path / name for name in ("one", "two", "three")]
    code, out = run(capsys, "digest", recipe, "--save", saved[0])
    last = len(lines(out))
    assert code == 0
    assert run(capsys, "digest", recipe, "--steps", 10**6, "--dp", 2, "--save", saved[1]) == (0, out)
    assert run(capsys, "run", recipe, "--steps", 10**6, "--save", saved[2])[0] == 0
    for folder in saved:
        assert [path.name for path in folder.iterdir()] == [f"step-{last}"]
    assert run(capsys, "digest", recipe, "--resume", saved[0]) == (0, "")


@pytest.mark.parametrize("command", ["digest", "run"])
def test_a_state_that_could_not_be_saved_is_an_error(tmp_path: Path, command: str) -> None:
    recipe, saved = finite(tmp_path), tmp_path / "saved"
    done = zephon(command, recipe, "--save", saved, "--save-at", 10**5)
    assert done.returncode == 1
    assert "--save-at 100000 was not reached" in done.stderr
    assert done.stdout  # all the same, what there was
    assert not list(saved.iterdir())
    zephon("digest", recipe, "--save", saved)
    done = zephon(command, recipe, "--resume", saved, "--save", tmp_path / "again")
    assert done.returncode == 1
    assert "there is no state of it to save" in done.stderr


@pytest.mark.parametrize("place", ["/proc/x", "RECIPE", "/proc"])
@pytest.mark.parametrize("option", ["--save", "--out", "--ledger", "--skipped"])
def test_where_nothing_can_be_written_nothing_is_run(recipe: Path, place: str, option: str) -> None:
    place = place.replace("RECIPE", str(recipe))
    command = {"--out": "export", "--ledger": "run"}.get(option, "digest")
    file = "/one.jsonl" if option in ("--ledger", "--skipped") else ""
    done = zephon(command, recipe, "--steps", 2, option, f"{place}{file}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {place} is no folder that can be written to" in done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["digest", "--save", "state"], "state/step-3/header"),
        (["run", "--ledger", "ledger.jsonl"], "ledger.jsonl"),
        (["run", "--skipped", "skipped.jsonl"], "skipped.jsonl"),
        (["export", "--out", "out"], "out/step-000001.npz"),
    ],
)
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, args: list[str], named: str) -> None:
    recipe = skipping(tmp_path, rows=40)
    zephon("check", recipe)  # has the index made

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    command = [sys.executable, "-m", "zephon", args[0], str(recipe), "--steps", "3", *args[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, preexec_fn=full)
    assert done.returncode == 1, done.stderr
    assert f"File too large: '{named}'" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_a_full_disk_under_standard_output(recipe: Path) -> None:
    command = [sys.executable, "-m", "zephon", "digest", str(recipe), "--steps", "1"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "No space left on device: 'standard output'" in done.stderr


def skipping(folder: Path, rows: int = 3) -> Path:
    """A recipe that skips `rows` bad rows, among the first."""
    path = write_recipe(folder, size=4)
    path.write_text(path.read_text().replace("weight = 0.7", 'weight = 0.7\non_error = "skip"\nmax_bad = 1000', 1))
    (folder / "a" / "zero.jsonl").write_text("".join(f"{{bad {row}\n" for row in range(rows)))
    return path


@pytest.mark.parametrize("command", [["run"], ["digest"], ["export", "--out", "OUT"]])
def test_bad_rows_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    recipe, listed = skipping(tmp_path), tmp_path / "list" / "skipped.jsonl"
    args = [str(tmp_path / "out") if arg == "OUT" else arg for arg in command[1:]]
    assert run(capsys, command[0], recipe, *args, "--steps", 120, "--skipped", listed)[0] == 0
    found = lines(run(capsys, "skipped", listed, "--json")[1])
    places = sorted(str(row["place"]).split("/")[-1].rsplit(",", 1)[0] for row in found)
    assert places == [f"zero.jsonl, row {row}" for row in range(3)]


@pytest.mark.parametrize("option", ["--skipped", "--ledger"])
@pytest.mark.parametrize("what", ["corpus", "RECIPE", "tok", "log", "one"])
def test_what_exists_and_is_no_list_of_ours_is_left_alone(tmp_path: Path, option: str, what: str) -> None:
    recipe, precious = skipping(tmp_path), tmp_path / what
    if what == "RECIPE":
        precious = recipe
    elif what == "tok":
        precious.mkdir()
    else:  # the same first key does not make it one
        first = {"source": "web"} if option == "--skipped" else {"step": 1}
        rows = [json.dumps({**first, "text": "x"}), json.dumps({**first, "loss": 2.5})]
        precious.write_text({"corpus": "\n".join(rows) + "\n", "log": rows[1] + "\n", "one": rows[0]}[what])
    before = precious.read_bytes() if precious.is_file() else b""
    done = zephon("run", recipe, "--steps", 12, option, precious)
    assert done.returncode == 2, done.stderr
    assert str(precious) in done.stderr.replace("\n", "")
    assert precious.is_dir() or precious.read_bytes() == before


def test_other_history_supersedes_what_a_ledger_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Back to an older state with other weights, on other ranks, and back again to the old ones: no step disagrees."""
    old = write_recipe(tmp_path)
    new = old.with_name("new.toml")
    new.write_text(old.read_text().replace("0.7", "0.2"))
    saved, ledger = tmp_path / "saved", tmp_path / "ledger"

    def ranks(recipe: Path, dp: int, last: int, *more: object) -> None:
        for rank in range(dp):
            file = ledger / f"{rank}_of_{dp}.jsonl"
            options = ["--dp", dp, "--rank", rank, "--steps", last, "--ledger", file, "--json", *more]
            assert run(capsys, "run", recipe, *options)[0] == 0

    def expect(recipe: Path, *more: object) -> None:
        whole = tmp_path / "whole.jsonl"
        first = run(capsys, "digest", old, "--steps", 4, "--lanes")[1]
        whole.write_text(first + run(capsys, "digest", recipe, "--steps", 8, "--lanes", "--resume", saved, *more)[1])
        assert run(capsys, "verify", ledger, whole) == (
            0,
            "8 steps compared, all equal (0 steps are in one of them only).\n",
        )

    ranks(old, 1, 6, "--save", saved, "--save-at", 4)
    ranks(old, 1, 8, "--resume", saved)
    expect(old)
    for dp in (1, 2, 2):  # the last time as it was: both must agree
        ranks(new, dp, 8, "--resume", saved, "--allow", "weights")
        expect(new, "--allow", "weights")
    ranks(old, 4, 8, "--resume", saved)
    expect(old)
    newer = new.with_name("newer.toml")  # in the same place, without what had been allowed: other data, unexplained
    newer.write_text(old.read_text().replace("seed = 7", "seed = 8"))
    ranks(newer, 4, 2)
    code, _ = run(capsys, "verify", ledger, ledger)
    assert code == 2


def test_an_export_does_not_mix_with_another(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = recipe.parent / "out"
    assert run(capsys, "export", recipe, "--steps", 3, "--out", out)[0] == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    done = zephon("export", recipe, "--steps", 1, "--out", out)
    assert done.returncode == 2
    assert "holds step-*.npz files already" in done.stderr
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"zephon {version('zephon-lanes')}\n")


def test_a_run_without_a_step_claims_no_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = finite(tmp_path, size=4096)  # more than there is
    code, out = run(capsys, "run", recipe, "--json")
    (report,) = lines(out)
    assert code == 0
    assert (report["steps"], report["tokens_per_s"]) == (0, 0)
    assert report["cpu_s_per_mtoken"] is report["first_batch_s"] is None
    assert "start-up" in run(capsys, "run", recipe)[1]


def test_ranks_share_sequences_of_a_finite_stream(tmp_path: Path) -> None:
    recipe = finite(tmp_path)
    for command in (["check"], ["digest"], ["run", "--rank", "0"]):
        done = zephon(command[0], recipe, "--dp", 3, *command[1:])
        assert done.returncode == 2
        assert "3 data-parallel ranks cannot share the 8 sequences of a global batch" in " ".join(done.stderr.split())


def test_check_speaks_of_lanes_where_there_are_some(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for make, said in ((lambda: recipe, True), (lambda: finite(tmp_path), False)):
        code, out = run(capsys, "check", make())
        assert (code, "lanes a rank" in out) == (0, said)
        assert "sequences a rank" in out


def test_files_of_two_saves_are_no_state(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A save over another of that step, after an allowed difference, was killed half-way."""
    saved, other = recipe.parent / "saved", recipe.parent / "other"
    _, whole = run(capsys, "digest", recipe, "--steps", 4, "--save", saved, "--save-at", 2)
    run(capsys, "digest", recipe, "--steps", 3, "--save", saved)
    run(capsys, "digest", recipe, "--steps", 4, "--save", saved)
    new = recipe.with_name("new.toml")
    new.write_text(recipe.read_text().replace("0.7", "0.2"))
    run(capsys, "digest", new, "--steps", 4, "--resume", saved, "--allow", "weights")
    (saved / "step-4").rename(recipe.parent / "step-4")
    run(capsys, "digest", new, "--steps", 4, "--resume", saved, "--allow", "weights", "--save", other)
    (recipe.parent / "step-4").rename(saved / "step-4")
    for name in ("header", "lane_00000", "lane_00001"):  # in the order in which a save writes
        (saved / "step-4" / name).write_bytes((other / "step-4" / name).read_bytes())
        done = zephon("digest", recipe, "--steps", 4, "--resume", saved)
        assert lines(done.stdout) == lines(whole)[3:]
        assert "mixes those of two saves" in " ".join(done.stderr.split())


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
