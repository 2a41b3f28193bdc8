"""The claims that this kind of loader is known for, repeated at the size that CPUs allow.

    python -m benchmarks.experiments [--quick] [--only resize order throughput saves] [--out FOLDER]

Run it in the root of a checkout. Every run's result is a file under FOLDER; those that are there are not made again,
so a run that was stopped goes on where it was. README.md beside this file says what each experiment asks.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the order of sums must not depend on the machine's cores

import tyro

from benchmarks.experiments import order, pictures, resize, saves, tables, throughput
from benchmarks.experiments.jobs import REPOSITORY
from benchmarks.peers import venvs
from benchmarks.report import RESULTS, machine, write

README = Path(__file__).with_name("README.md")
NAMES = ("resize", "order", "throughput", "saves")


@dataclass
class Args:
    """Repeat the published experiments."""

    quick: bool = False
    """Everything small, without peers that need environments of their own (which come from a package index)."""
    only: tuple[str, ...] = NAMES
    """Which of resize, order, throughput and saves."""
    out: Path | None = None
    """Where runs and results live; .bench/experiments, or .bench/experiments-quick, where left out."""


def run(args: Args) -> dict[str, Any]:
    """Measure what is missing and write tables and pictures, those of the full form beside this file and in `results`.

    Returns:
        Results by experiment.

    Raises:
        SystemExit: an experiment that does not exist, or a folder with results of other sizes.
    """
    if unknown := set(args.only) - set(NAMES):
        raise SystemExit(f"There is no experiment {sorted(unknown)}; there are {', '.join(NAMES)}.")
    out = args.out or REPOSITORY / ".bench" / ("experiments-quick" if args.quick else "experiments")
    out = out.resolve()
    venvs.ROOT = out / "peers"  # environments and converted data of peers are kept with the rest
    venvs.ROOT.mkdir(parents=True, exist_ok=True)
    sizes = {one: one.QUICK if args.quick else one.FULL for one in (resize, order, throughput, saves)}
    stamp, said = out / "sizes.txt", "".join(f"{one.__name__}: {size}\n" for one, size in sizes.items())
    if stamp.exists() and stamp.read_text() != said:
        raise SystemExit(
            f"{out} holds results of another size or version, which would be taken for those of this one. Name "
            "another folder with --out, or remove it."
        )
    stamp.write_text(said)
    makes = {
        "resize": lambda: resize.measure(out / "resize", sizes[resize], not args.quick),
        "order": lambda: order.measure(out / "order", sizes[order]),
        "throughput": lambda: throughput.measure(out / "throughput", sizes[throughput]),
        "saves": lambda: saves.measure(out / "saves", sizes[saves], not args.quick),
    }
    results = {name: makes[name]() for name in NAMES if name in args.only}
    (out / "results.json").write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    parts = tables.markdown(results)
    (out / "tables.md").write_text("\n\n".join(parts.values()) + "\n")
    if not args.quick:
        README.write_text(tables.insert(README.read_text(), parts))
    pictures.draw(results, out if args.quick else RESULTS)
    return results


def main() -> None:
    args = tyro.cli(Args)
    results = run(args)
    if not args.quick:
        command = " ".join(["python -m benchmarks.experiments", *(Path(arg).name for arg in sys.argv[1:])])
        whole = set(results) == set(NAMES)
        write("experiments" if whole else f"experiments_{'_'.join(results)}", {"command": command, **results})
    broken = [f"{name}: {what}" for name, one in results.items() for what, held in one["verdicts"].items() if not held]
    print("\n".join(["", *(f"does not hold: {what}" for what in broken)]) or "everything holds")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
