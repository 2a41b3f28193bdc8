"""Ledgers survive kills and resumes, and comparing them finds the first difference."""

import json
from pathlib import Path

import pytest

from zephon import UsageError
from zephon.ledger import LedgerWriter, compare_ledgers, read_ledger

ONE, TWO = bytes(32), bytes([1]) * 32


def write(path: Path, steps: dict[int, dict[int, bytes]]) -> Path:
    writer = LedgerWriter(path)
    for step, lanes in steps.items():
        writer.write(step, lanes)
    writer.close()
    return path


def test_ranks_are_merged(tmp_path: Path) -> None:
    write(tmp_path / "l" / "rank_0.jsonl", {1: {0: ONE, 1: ONE}})
    write(tmp_path / "l" / "rank_1.jsonl", {1: {2: TWO}})
    assert read_ledger(tmp_path / "l") == {1: {"00000": ONE.hex(), "00001": ONE.hex(), "00002": TWO.hex()}}


@pytest.mark.parametrize("torn", [b'{"step": 3, "la', b'{"step": 3, "lanes": {"' + b"x" * 200_000])
def test_a_torn_line_is_cut_off_and_written_again(tmp_path: Path, torn: bytes) -> None:
    path = write(tmp_path / "l.jsonl", {1: {0: ONE}, 2: {0: ONE}})
    with path.open("ab") as file:
        file.write(torn)
    assert sorted(read_ledger(path)) == [1, 2]
    write(path, {3: {0: ONE}})
    assert sorted(read_ledger(path)) == [1, 2, 3]


def test_a_file_that_is_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_bytes(b'{"step')
    assert write(path, {1: {0: ONE}}).read_text().count("\n") == 1
    assert sorted(read_ledger(path)) == [1]


def test_a_file_that_is_no_ledger_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"no line end")
    with pytest.raises(UsageError, match="is no ledger; it is left as it is"):
        LedgerWriter(path)
    assert path.read_bytes() == b"no line end"


def test_a_step_may_be_written_twice_if_both_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", {1: {0: ONE}})
    write(path, {1: {0: ONE}})
    assert sorted(read_ledger(path)) == [1]
    write(path, {1: {0: TWO}})
    with pytest.raises(UsageError, match="two digests for lane 00000 of step 1"):
        read_ledger(path)


def history(*changes: tuple[int, str]) -> bytes:
    """A header after these changes."""
    return json.dumps({"history": [{"step": step, "allowed": [what]} for step, what in changes]}).encode()


def go_on(path: Path, header: bytes, steps: dict[int, bytes]) -> None:
    writer = LedgerWriter(path)
    writer.begin(header)
    for step, digest in steps.items():
        writer.write(step, {0: digest})
    writer.close()


def test_the_latest_start_counts_where_histories_part(tmp_path: Path) -> None:
    """On the same ranks or on others, whose files lie beside; only what was allowed explains other digests."""
    one, other = tmp_path / "l" / "one.jsonl", tmp_path / "l" / "other.jsonl"
    go_on(one, history(), dict.fromkeys(range(1, 9), ONE))
    go_on(one, history((4, "weights")), dict.fromkeys((5, 6), TWO))
    expected = {step: {"00000": (TWO if step > 4 else ONE).hex()} for step in range(1, 7)}
    assert read_ledger(one) == read_ledger(one.parent) == expected
    go_on(other, history((4, "weights")), dict.fromkeys((5, 6, 7), TWO))
    assert read_ledger(one.parent) == expected | {7: {"00000": TWO.hex()}}
    go_on(other, history((6, "weights")), {7: TWO})  # from a state of the first history
    assert read_ledger(one.parent) == {step: {"00000": (TWO if step > 6 else ONE).hex()} for step in range(1, 8)}
    go_on(one, history(), dict.fromkeys((7, 8), ONE))
    assert read_ledger(one.parent) == {step: {"00000": ONE.hex()} for step in range(1, 9)}
    go_on(other, history((4, "weights")), {6: ONE})
    with pytest.raises(UsageError, match="two digests for lane 00000 of step 6"):
        read_ledger(one.parent)


@pytest.mark.parametrize("run", ["x", {"started": 1}, {"started": "x", "history": []}, {"started": 1, "history": [1]}])
def test_a_damaged_start_is_refused_by_line(tmp_path: Path, run: object) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text(json.dumps({"step": 1, "lanes": {}, "run": run}) + "\n")
    with pytest.raises(UsageError, match=r"l\.jsonl, line 1 is no line of a ledger"):
        read_ledger(path)


def test_other_files_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text('{"step": 1, "lanes": {}}\n{"step": 2, "sha256": "x"}\n')
    with pytest.raises(UsageError, match=r"l\.jsonl, line 2 is no line of a ledger"):
        read_ledger(path)
    with pytest.raises(UsageError, match="neither a ledger file nor a folder"):
        read_ledger(tmp_path / "nowhere")


def test_a_missing_lane_differs_and_a_missing_step_is_counted() -> None:
    a = {1: {"00000": "x", "00001": "y"}, 2: {"00000": "x"}}
    found = compare_ledgers(a, {1: {"00000": "x"}})
    assert (found.compared, found.step, found.lanes, found.only) == (1, 1, ["00001"], 1)
    assert compare_ledgers(a, a).step is None
    assert compare_ledgers(a, a).incomplete == 1
