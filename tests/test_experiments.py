"""The published experiments: their arithmetic, and all of them in their quick form."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments import jobs, resize, tables
from benchmarks.experiments.spread import largest, spread

ROOT = Path(__file__).parent.parent
KINDS = ("ours", "stock", "floor")


def scores(seed: int, seeds: int, runs: int, windows: int) -> Any:
    return np.random.default_rng(seed).normal(size=(seeds, runs, windows))


@given(st.integers(0, 99), st.integers(1, 3), st.integers(2, 4), st.integers(1, 9))
def test_the_spread_is_that_of_a_plain_loop(seed: int, seeds: int, runs: int, windows: int) -> None:
    table, weights = scores(seed, seeds, runs, windows), np.arange(1.0, windows + 1)
    means = [[sum(run) / sum(weights) for run in one] for one in table.tolist()]
    plain = sum(max(one) - min(one) for one in means) / seeds
    assert largest(table, weights, np.arange(seeds), np.ones(windows)) == pytest.approx(plain)


@settings(max_examples=10)
@given(st.integers(0, 99), st.floats(0.1, 9.0))
def test_runs_that_are_alike_have_no_spread_and_one_that_is_off_by_a_constant_has_that(seed: int, off: float) -> None:
    same = np.repeat(scores(seed, 3, 1, 20), 4, axis=1)
    other = same.copy()
    other[:, 2] += off
    found = spread({"ours": same, "stock": other, "floor": same}, np.ones(20), least=0.01)
    assert found["ours"] == [0.0, 0.0, 0.0]
    assert found["ours less floor"] == [0.0, 0.0, 0.0]
    assert found["stock"] == pytest.approx([off] * 3)
    assert found["stock by ours"] == pytest.approx([off / 0.01] * 3)


def test_the_interval_of_noise_is_as_wide_as_that_of_fresh_noise() -> None:
    tables: dict[str, Any] = dict.fromkeys(KINDS, scores(1, 1, 2, 400))
    middle, low, high = spread(tables, np.ones(400), least=1e-9)["ours"]
    fresh = [largest(scores(n, 1, 2, 400), np.ones(400), np.arange(1), np.ones(400)) for n in range(2, 300)]
    assert low <= middle <= high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(2 / 400), rel=0.45)
    assert low <= np.median(fresh) <= high


def test_a_result_is_made_once_and_only_whole_ones_count(tmp_path: Path) -> None:
    file, made = tmp_path / "results" / "one.json", list[int]()

    def make() -> dict[str, Any]:
        made.append(1)
        if len(made) == 1:
            raise jobs.JobFailedError("killed in the middle")
        return {"made": len(made)}

    with pytest.raises(jobs.JobFailedError):
        jobs.once(file, make)
    assert not file.exists()
    assert jobs.once(file, make) == {"made": 2} == jobs.once(file, make)


@pytest.mark.parametrize(
    ("found", "compared", "equal", "first"),
    [
        ({3: "c", 4: "d"}, 2, 2, None),
        ({3: "c", 4: "x"}, 2, 1, 4),  # another batch
        ({4: "d"}, 1, 1, None),  # a step is missing
        ({}, 0, 0, None),
    ],
)
def test_batches_that_differ_or_are_missing_are_counted(
    found: resize.Digests, compared: int, equal: int, first: int | None
) -> None:
    row = resize.row("ours", "text", "2 → 1", {1: "a", 2: "b", 3: "c", 4: "d"}, found, expected=2)
    assert (row["compared"], row["equal"], row["first difference"]) == (compared, equal, first)
    assert resize.verdicts([row])["every batch of ours is equal"] is (equal == 2)


def test_no_rows_hold_no_promise() -> None:
    assert not any(resize.verdicts([]).values())


def test_tables_go_between_their_marks_and_again() -> None:
    page = "a\n<!-- order -->\n<!-- end of order -->\nb\n<!-- saves -->\nold\n<!-- end of saves -->\nc\n"
    once = tables.insert(page, {"order": "one", "saves": "two"})
    assert [line for line in once.splitlines() if line and "<!--" not in line] == ["a", "one", "b", "two", "c"]
    assert tables.insert(once, {"order": "one"}) == once
    with pytest.raises(ValueError, match="no place for resize"):
        tables.insert(once, {"resize": "three"})
    readme = (ROOT / "benchmarks" / "experiments" / "README.md").read_text()
    tables.insert(readme, dict.fromkeys(("resize", "order", "throughput", "saves"), ""))


def test_a_job_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(jobs.JobFailedError, match="no_such_run"):
        jobs.train(tmp_path / "run", tmp_path, 1, "no_such_run")


@pytest.mark.slow
def test_all_experiments_hold_in_their_quick_form(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.experiments", "--quick", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for name in ("resize", "order", "throughput", "saves"):
        assert [what for what, held in results[name]["verdicts"].items() if not held] == [], name
    assert all(same == expected > 0 for same, expected in results["order"]["equal steps"]["ours"].values())
    docs = results["order"]["spreads"]["docs"]
    assert docs["stock"][0] > 1000 * docs["ours"][0]
    assert all(row["exact"] for row in results["saves"]["rows"])
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 0
    assert "done:" not in again.stdout  # nothing was run again
