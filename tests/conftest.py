"""What all tests share: fixtures, Hypothesis settings, and `--fail-on-skip`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: replays must add in the order of the runs

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip", action="store_true", help="fail the run if a test is skipped for want of anything but a GPU"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = [item for item in items if item.get_closest_marker("gpu")]
    if needed:
        import torch

        if not torch.cuda.is_available():
            for item in needed:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--fail-on-skip") and _skipped:
        print(f"\nskipped, which --fail-on-skip does not allow: {_skipped}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
