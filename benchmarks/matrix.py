"""Does execution ever change data? Every packer and end, with every runner, isolated and not, on real text.

    python -m benchmarks.matrix RECIPE [--megabytes 100] [--seed 1]

For each packer and `on_end` a reference runs inline on one rank; a stream that repeats takes as many steps as the
finite one has, so that the text is read about once. Then every runner, isolated and not, must give the same lanes step
by step, end at the same step, and save the same bytes half-way. Each goes on once more from the half-way state of an
earlier run with another number of ranks; on fresh loaders, but isolated ones are sent back in place, as their processes
take longer to start than all else. Which ranks, micro-batches and states meet is drawn from `--seed`. Exit code 1 at
any difference.
"""

import glob
import itertools
import logging
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.report import about, write
from zephon import Loader, Recipe, Stream, ZephonError
from zephon.digest import lane_digest
from zephon.formats.compressed import codec_of
from zephon.formats.sources import find_files
from zephon.ledger import Steps, compare_ledgers, ledger_line
from zephon.recipe import RunSpec

PACKERS = ("concat", "best_fit")
ENDS = ("renormalise", "stop", "repeat")  # in this order: the first says how many steps the last takes
RUNNERS = [("inline", 1), *itertools.product(("threads", "process"), (1, 2, 3, 4))]
VARIANTS = [(*runner, isolate) for isolate in (False, True) for runner in RUNNERS]
RANKS, FEW_RANKS = (1, 2, 4), (1, 2)
"""Few where every rank decides the whole stream, or has processes of its own."""

CUTS = (1, 2, 4)
"""Micro-batches that a rank's share of a step is cut into."""


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    megabytes: float = 100
    """How much of the recipe's text is read: the first rows of every file."""
    seed: int = 1
    """Which states are resumed where; decides no data."""


class Saved(NamedTuple):
    """A half-way state, and who saved it."""

    name: str
    ranks: int
    state: dict[str, bytes]


@dataclass
class World:
    """One packer and one end: what the reference gave, and the states that later runs go on from."""

    packer: str
    on_end: str
    recipe: Recipe
    lanes: Steps = field(default_factory=dict)
    half: int = 0
    saved: list[Saved] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.packer} {self.on_end}"

    @property
    def limit(self) -> int:
        """Where a run stops at the latest: a finite stream that goes on after its end is caught at one step more."""
        return len(self.lanes) + (self.on_end != "repeat")


def main() -> None:
    args = tyro.cli(Args)
    logging.basicConfig(level=logging.ERROR)  # every finite run would tell the rows that its last batch drops
    logging.getLogger("zephon.run.runners").setLevel(logging.WARNING)  # but a worker that dies is news
    base = Recipe.load(args.recipe)
    if base.batch is None or base.lanes % max(RANKS):
        raise SystemExit(f"The recipe needs a [batch], and lanes that are a multiple of {max(RANKS)}.")
    work = Path(tempfile.mkdtemp(prefix="zephon-matrix-"))
    started = time.perf_counter()
    try:
        facts, rows = whole_matrix(limited(base, args.megabytes * 1e6, work), random.Random(args.seed))
    finally:
        shutil.rmtree(work)
    bad = [row for row in rows if row["differs"]]
    show(rows, time.perf_counter() - started)
    facts["steps_compared"] = sum(row["steps"] + row["resumed_steps"] for row in rows)
    facts |= {"runs": len(rows), "wall_s": round(time.perf_counter() - started, 1), "cpu_s": cpu_seconds()}
    write("matrix", {**facts, "bad": bad, "rows": rows})
    raise SystemExit(1 if bad else 0)


def limited(base: Recipe, most: float, work: Path) -> Recipe:
    """The recipe over the first rows of every file, about `most` bytes in all, and with a cache of its own."""
    files = [find_files(spec, base.path.parent) for spec in base.sources]
    part = most / sum(path.stat().st_size for mine in files for path in mine.values())
    if part < 1 and any(codec_of(str(path)) for mine in files for path in mine.values()):
        raise SystemExit("Only plain files can be cut: use --megabytes for all of the text, or another recipe.")
    sources = list(base.sources)
    for number, mine in enumerate(files if part < 1 else []):
        for name, path in mine.items():
            copy = work / str(number) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file:
                copy.write_bytes(file.read(int(path.stat().st_size * part)) + file.readline())
        paths = tuple(glob.escape(str(work / str(number) / name)) for name in mine)
        sources[number] = replace(sources[number], paths=paths)
    return replace(base, sources=tuple(sources), run=RunSpec(cache=work / "cache"))


def whole_matrix(base: Recipe, chance: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was read, and a row for every combination."""
    facts: dict[str, Any] = {"steps": {}}
    rows: list[dict[str, Any]] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console()) as bars:
        bar = bars.add_task("", total=len(PACKERS) * len(ENDS) * len(VARIANTS))
        for packer, on_end in itertools.product(PACKERS, ENDS):
            world = World(packer, on_end, ending(base, packer, on_end))
            bars.update(bar, description=f"{world.name}, the reference")
            facts |= refer(world, facts["steps"].get(f"{packer} renormalise") if on_end == "repeat" else None)
            facts["steps"][world.name] = len(world.lanes)
            for variant in VARIANTS:
                bars.update(bar, description=f"{world.name}, {name_of(variant)}")
                row = one_row(world, variant, chance)
                rows.append(row)
                bars.advance(bar)
                if row["differs"]:
                    bars.console.print(f"[red]{world.name}, {row['variant']}: {escape(row['differs'])}[/]")
            spent = sum(row["s"] for row in rows[-len(VARIANTS) :])
            bars.console.print(f"{world.name}: {len(world.lanes)} steps, {len(VARIANTS)} variants, {spent:.0f} s")
    return facts, rows


def ending(base: Recipe, packer: str, on_end: str) -> Recipe:
    """The recipe with another packer and another end."""
    finite = on_end != "repeat"
    sources = tuple(replace(one, epochs=(one.epochs or 1) if finite else None) for one in base.sources)
    mix, packing = replace(base.mix, on_end=on_end), replace(base.packing, algorithm=packer)
    return replace(base, lanes=1 if finite else base.lanes, sources=sources, mix=mix, packing=packing)


def refer(world: World, steps: int | None) -> dict[str, Any]:
    """Run the reference; returns what was read."""
    with Stream(world.recipe) as stream:
        world.lanes, _ = deliver([stream.loader()], steps)
        world.half = len(world.lanes) // 2
        if not world.half:
            raise SystemExit(f"{world.name}: the text is too short for two steps. Use more of it, or smaller batches.")
        again = stream.loader()
        deliver([again], world.half)
        world.saved.append(Saved("the reference", 1, again.state_dict()))
        return about(stream)


def one_row(world: World, variant: tuple[str, int, bool], chance: random.Random) -> dict[str, Any]:
    """Run one variant whole, and once more from a state that another one saved on another number of ranks."""
    runner, workers, isolate = variant
    donor = chance.choice(world.saved)
    choices = FEW_RANKS if isolate or world.recipe.finite else RANKS
    ranks = chance.choice([one for one in choices if one != donor.ranks])
    row: dict[str, Any] = {
        "packer": world.packer, "on_end": world.on_end, "variant": name_of(variant), "ranks": ranks,
        "state_of": donor.name, "state_of_ranks": donor.ranks, "steps": 0, "resumed_steps": 0,
    }  # fmt: skip
    run = replace(world.recipe.run, runner=runner, workers=workers, isolate=isolate)
    started = time.perf_counter()
    try:
        with Stream(replace(world.recipe, run=run)) as stream:

            def fleet() -> list[Loader]:
                share = stream.batch.global_batch_size // ranks
                local = share // chance.choice([cuts for cuts in CUTS if share % cuts == 0])
                return [stream.loader(rank, ranks, local) for rank in range(ranks)]

            row["differs"] = differences(world, fleet, donor, row)
    except (ZephonError, RuntimeError) as error:  # the latter for what a child process could not say as ours
        row["differs"] = f"failed: {error}"
    row["s"] = round(time.perf_counter() - started, 2)
    return row


def differences(world: World, fleet: Callable[[], list[Loader]], donor: Saved, row: dict[str, Any]) -> str | None:
    """What is not as in the reference, if anything."""
    loaders = fleet()
    found, state = deliver(loaders, world.limit, world.half)
    row["steps"] = len(found)
    if differs := unlike(world.lanes, found) or unlike_state(world.saved[0].state, state):
        return differs
    world.saved.append(Saved(row["variant"], row["ranks"], state))
    loaders = loaders if row["variant"].endswith("isolated") else fleet()
    for loader in loaders:
        loader.load_state_dict(donor.state)
    found, _ = deliver(loaders, world.limit)
    row["resumed_steps"] = len(found)
    differs = unlike({step: lanes for step, lanes in world.lanes.items() if step > world.half}, found)
    return differs and f"resumed: {differs}"


def deliver(loaders: list[Loader], until: int | None, save_at: int | None = None) -> tuple[Steps, dict[str, bytes]]:
    """The lanes of every step to the end, or to step `until`, and the state after step `save_at`."""
    found: Steps = {}
    state: dict[str, bytes] = {}
    while until is None or loaders[0].step < until:
        parts = [records_of(loader) for loader in loaders]
        if all(part is None for part in parts):
            break
        lanes = {lane: lane_digest(mine) for part in parts if part for lane, mine in part.items()}
        found[loaders[0].step] = ledger_line(loaders[0].step, lanes, whole=True)["lanes"]
        if loaders[0].step == save_at:
            state = {key: raw for loader in loaders for key, raw in loader.state_dict().items()}
    return found, state


def records_of(loader: Loader) -> dict[int, Any] | None:
    """A rank's records of the next step; None at its end, so that a rank that ends before others lacks lanes."""
    try:
        return loader.step_records()
    except StopIteration:
        return None


def unlike(expected: Steps, found: Steps) -> str | None:
    """The first step and lane in which two runs differ; a step that only one of them has differs, too."""
    result = compare_ledgers(expected, found)
    if result.step is not None:
        others = f" and {len(result.lanes) - 1} others" if len(result.lanes) > 1 else ""
        return f"step {result.step}, lane {result.lanes[0]}{others}"
    if result.only:
        step = min(expected.keys() ^ found.keys())
        return f"step {step} is {'missing' if step in expected else 'one too many'}"
    return None


def unlike_state(expected: dict[str, bytes], found: dict[str, bytes]) -> str | None:
    """The first key in which two states differ."""
    keys = [key for key in sorted(expected.keys() | found.keys()) if expected.get(key) != found.get(key)]
    return f"the half-way state, {keys[0]}" if keys else None


def name_of(variant: tuple[str, int, bool]) -> str:
    runner, workers, isolate = variant
    return f"{runner} {workers}{' isolated' if isolate else ''}"


def cpu_seconds() -> float:
    """CPU time of this process and all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(one.ru_utime + one.ru_stime for one in used), 1)


def show(rows: list[dict[str, Any]], seconds: float) -> None:
    """A row a variant, a column for each packer and end."""
    worlds = list(dict.fromkeys((row["packer"], row["on_end"]) for row in rows))
    table = Table("variant", *(f"{packer}\n{on_end}" for packer, on_end in worlds))
    cells = {(row["variant"], row["packer"], row["on_end"]): cell(row) for row in rows}
    for variant in map(name_of, VARIANTS):
        table.add_row(variant, *(cells[variant, *world] for world in worlds))
    bad = sum(bool(row["differs"]) for row in rows)
    table.caption = (
        "Steps that are equal, and a→b: those from half-way on, saved on a ranks and resumed on b.\n"
        f"{len(rows)} combinations, {bad} with a difference, {seconds:.0f} s on {os.cpu_count()} cores"
    )
    Console(width=max(120, Console().width)).print(table)


def cell(row: dict[str, Any]) -> str:
    if row["differs"]:
        return f"[red]{escape(row['differs'])}[/]"
    return f"{row['steps']}, {row['state_of_ranks']}→{row['ranks']} {row['resumed_steps']}"


if __name__ == "__main__":
    main()
