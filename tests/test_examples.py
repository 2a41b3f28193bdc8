"""Every example runs, and stays short."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(
    path for path in (Path(__file__).parent.parent / "examples").glob("*.py") if not path.name.startswith("_")
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert len(path.read_text().splitlines()) <= 70


def test_the_list_of_examples_is_complete() -> None:
    readme = (EXAMPLES[0].parent / "README.md").read_text()
    assert all(f"`{path.name}`" in readme for path in EXAMPLES)
