"""Runs the benchmarks of the loader itself and draws their pictures.

    python -m benchmarks [--text RECIPE] [--images RECIPE]

Without `--text` a corpus is made from this machine's texts; without `--images` images are left out.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks import corpus


@dataclass
class Args:
    text: Path | None = None
    """A recipe with text."""
    images: Path | None = None
    """A recipe with images."""
    rounds: int = 3


def main() -> None:
    args = tyro.cli(Args)
    with tempfile.TemporaryDirectory() as folder:
        text = args.text or corpus.make(Path(folder), 100.0)
        run("lanes", text, "--rounds", str(args.rounds))
        run("state", text)
        run("memory", text)
        run("isolation", text, "--rounds", str(args.rounds))
        run("flame", text)
        if args.images:
            run("lanes", args.images, "--name", "lanes_images", "--lanes", "1", "8", "64", "--rounds", str(args.rounds))
            run("memory", args.images, "--name", "memory_images")
            run("flame", args.images, "--name", "images")
    run("figures")


def run(name: str, *arguments: str | Path) -> None:
    print(f"\n== {name} {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
