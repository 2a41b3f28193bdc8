"""The command line. Exit codes: 0 good; 1 a comparison differed or a run failed; 2 bad usage, recipe or topology."""

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from zephon.command.explain import explain as plan_of
from zephon.command.explain import show
from zephon.command.named import named_code
from zephon.command.options import Given, Saving, between_steps, check_ranks, check_steps, err, skip_list
from zephon.command.rehearse import rehearse, show_report
from zephon.digest import lane_digest
from zephon.errors import UsageError, ZephonError
from zephon.ledger import LedgerWriter, compare_ledgers, ledger_line, read_ledger
from zephon.recipe import Recipe, divisors
from zephon.run.lines import make_folder, naming
from zephon.run.skips import read_skips
from zephon.state import HEADER
from zephon.stream import Stream

RecipePath = Annotated[Path, tyro.conf.Positional]


def check(
    recipe: RecipePath,
    /,
    dp: int | None = None,
    code: bool = False,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Validate a recipe: everything that can be known without reading all of the data.

    Says which code the recipe runs, then indexes the files, loads the tokenizer, measures the first rows of every
    source; prints rows, chunks and target share of every source and every number of data-parallel ranks that works.

    Args:
        recipe: The recipe (TOML).
        dp: Also check that this many data-parallel ranks can run it.
        code: Only say which code the recipe would have run, and run none of it. Functions and classes that a recipe
            names can do all that you can: read a stranger's before anything else.
        json: Print one JSON object a line, and nothing else, on standard output.
    """
    _show_code(named_code(Recipe.load(recipe)), json)
    if code:
        return 0
    with given.open(recipe) as stream:
        lanes, size = stream.parts, stream.batch.global_batch_size
        if dp is not None:
            check_ranks(stream, dp)
        weights = [spec.weight for spec in stream.recipe.sources]
        rows: list[dict[str, Any]] = []
        for source, weight, known in zip(stream.sources, weights, stream.lane_sources, strict=True):
            chunks = source.catalogue.chunks
            rows.append(
                {
                    "source": source.name,
                    "shards": len(source.catalogue.shards),
                    "rows": source.catalogue.rows,
                    "bytes": source.catalogue.bytes,
                    "chunks": chunks.count,
                    "chunk_rows": chunks.rows_per_chunk,
                    "share": float(weight / sum(weights)),
                    "walked_by_every_lane": known.order.walks_all,
                }
            )
        finite = stream.recipe.finite  # which has no lanes: ranks share the sequences of a step
        worlds = [
            {"dp": world, **({} if finite else {"lanes_per_rank": lanes // world}), "sequences_per_rank": size // world}
            for world in divisors(lanes)
        ]
        if json:
            for row in rows:
                _print_json(row)
            batch = {"global_batch_size": size, "seq_len": stream.batch.seq_len, "ranks": worlds}
            _print_json(batch if finite else {"lanes": lanes, **batch})
        else:
            _show_check(rows, worlds, stream)
    return 0


def _show_code(named: list[dict[str, str]], json: bool) -> None:
    table = Table("for", "code", "from", title="Code that this recipe runs")
    for one in named:
        table.add_row(*map(escape, one.values()))
        if json:
            _print_json(one)
    if not json:
        Console().print(table)


def _show_check(rows: list[dict[str, Any]], worlds: list[dict[str, Any]], stream: Stream) -> None:
    out = Console()
    table = Table(
        "source", "share", "shards", "rows", "MB", "chunks", "rows a chunk", title=escape(str(stream.recipe.path))
    )
    for row in rows:
        sizes = (f"{row['bytes'] / 1e6:,.1f}", f"{row['chunks']:,}", f"{row['chunk_rows']:,}")
        table.add_row(escape(row["source"]), f"{row['share']:.2%}", str(row["shards"]), f"{row['rows']:,}", *sizes)
    out.print(table)
    for row in rows:
        if row["walked_by_every_lane"]:
            out.print(
                f"[yellow]Source {escape(repr(row['source']))} has {row['chunks']} chunks for "
                f"{stream.recipe.lanes} lanes: every lane walks all of it by itself, so lanes may hold the "
                "same row at the same time. Smaller chunk_rows or fewer lanes avoid it.[/]"
            )
    names = {
        "dp": "data-parallel ranks", "lanes_per_rank": "lanes a rank", "sequences_per_rank": "sequences a rank and step"
    }  # fmt: skip
    table = Table(*(names[key] for key in worlds[0]), title="Ranks that work")
    for world in worlds:
        table.add_row(*map(str, world.values()))
    out.print(table)
    out.print("[green]The recipe holds.[/]")


def explain(
    recipe: RecipePath,
    /,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Draw the plan of a stream: sources, stages, runners, and what each costs, measured on the data itself.

    Estimates tokens from a sample of rows, and runs three million tokens through every stage.

    Args:
        recipe: The recipe (TOML).
        json: Print one JSON object on standard output.
    """
    with given.open(recipe) as stream:
        plan = plan_of(stream)
        _print_json(asdict(plan)) if json else show(stream, plan, Console())
    return 0


def run(
    recipe: RecipePath,
    /,
    dp: int = 1,
    rank: int = 0,
    steps: int | None = None,
    ledger: Path | None = None,
    skipped: Path | None = None,
    saving: Annotated[Saving, tyro.conf.OmitArgPrefixes] = Saving(),
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Iterate as one training rank would, and measure.

    At the end: tokens/s, CPU seconds per million tokens (all processes; imports, tokenizer load and indexing apart),
    peak PSS, time to the first batch, realised shares, padding and drops. Ctrl-C ends the run and still reports.

    Args:
        recipe: The recipe (TOML).
        dp: Number of data-parallel ranks.
        rank: Which of them this is.
        steps: Last global step; without it the run goes on until Ctrl-C.
        ledger: Append the digests of this rank's lanes to this file.
        skipped: Append the bad rows that are left out to this file.
        json: Print one JSON object, and nothing else, on standard output.
    """
    with given.open(recipe) as stream:
        loader = stream.loader(rank, dp)
        begun = saving.begin([loader], steps)
        writer = LedgerWriter(ledger) if ledger else None
        if writer:
            writer.begin(loader.state_dict()[HEADER])
        with skip_list(skipped, [loader]) as note_skips:

            def after(records: dict[int, Any]) -> None:
                if writer:
                    writer.write(loader.step, {lane: lane_digest(mine) for lane, mine in records.items()})
                note_skips()
                saving.after([loader])

            report = rehearse(stream, loader, steps, after)
        if writer:
            writer.close()
        try:
            saving.end([loader], begun)
        finally:
            _print_json(asdict(report)) if json else show_report(report)
    return 0


def digest(
    recipe: RecipePath,
    /,
    steps: int | None = None,
    dp: int = 1,
    lanes: bool = False,
    skipped: Path | None = None,
    saving: Annotated[Saving, tyro.conf.OmitArgPrefixes] = Saving(),
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Print the SHA-256 of every global batch, with the loaders of all ranks in one process.

    The lines are the same for every number of ranks, and after every resume. With --lanes they make a ledger that
    `zephon verify` compares. Ctrl-C ends behind a step, which --save keeps; exit code 130.

    Args:
        recipe: The recipe (TOML).
        steps: Last step, also after a resume; only a finite stream can do without.
        dp: Number of data-parallel ranks.
        lanes: Also print the digest of every lane.
        skipped: Append the bad rows that are left out to this file.
        json: Changes nothing: the output is one JSON object a line in any case.
    """
    del json
    with given.open(recipe) as stream:
        check_steps(stream, steps)
        check_ranks(stream, dp)
        loaders = [stream.loader(rank, dp) for rank in range(dp)]
        begun = saving.begin(loaders, steps)
        with skip_list(skipped, loaders) as note, between_steps() as stopped, contextlib.suppress(StopIteration):
            while not stopped and (steps is None or loaders[0].step < steps):
                parts = [loader.step_records() for loader in loaders]
                note()
                of_lanes = {lane: lane_digest(mine) for part in parts for lane, mine in part.items()}
                line = ledger_line(loaders[0].step, of_lanes, whole=True)
                _print_json(line if lanes else {"step": line["step"], "sha256": line["sha256"]})
                saving.after(loaders)
        saving.end(loaders, begun)
    return 130 if stopped else 0


def export(
    recipe: RecipePath,
    /,
    out: Path,
    steps: int | None = None,
    skipped: Path | None = None,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Write every global batch as a NumPy file, from which anyone can recompute its digest.

    `step-000001.npz` holds the keys LLLLL.RRR.name: lane, record within the lane's share of the step, array.

    Args:
        recipe: The recipe (TOML).
        out: Folder for the files; it must hold none of another export.
        steps: Last step; only a finite stream can do without.
        skipped: Append the bad rows that are left out to this file.
        json: Print one JSON object a file on standard output.
    """
    with given.open(recipe) as stream:
        check_steps(stream, steps)
        loader = stream.loader()
        make_folder(out)
        if any(out.glob("step-*.npz")):
            raise UsageError(
                f"{out} holds step-*.npz files already: those of two exports would lie there as one. Nothing was "
                "written; name another folder, or remove them."
            )
        with skip_list(skipped, [loader]) as note, between_steps() as stopped, contextlib.suppress(StopIteration):
            while not stopped and (steps is None or loader.step < steps):
                arrays: dict[str, Any] = {
                    f"{lane:05d}.{number:03d}.{name}": array
                    for lane, mine in loader.step_records().items()
                    for number, record in enumerate(mine)
                    for name, array in record.items()
                }
                note()
                file = out / f"step-{loader.step:06d}.npz"
                with naming(file):
                    np.savez(file, **arrays)
                _print_json({"step": loader.step, "file": str(file)}) if json else _print(file)
    return 130 if stopped else 0


def verify(
    a: Annotated[Path, tyro.conf.Positional], b: Annotated[Path, tyro.conf.Positional], /, json: bool = False
) -> int:
    """Compare two ledgers: files, or folders with one file a rank.

    Says how many steps both hold, and the first step and lanes that differ; exit code 1 if any does.

    Args:
        a: A ledger.
        b: Another.
        json: Print one JSON object on standard output.
    """
    result = compare_ledgers(read_ledger(a), read_ledger(b))
    if not result.compared:
        raise UsageError(f"{a} and {b} have no step in common; nothing was compared.")
    if json:
        _print_json(asdict(result))
    elif result.step is not None:
        lacking = "which one of them lacks" if result.lacking else "whose digests differ"
        _print(f"Step {result.step} is the first that is not the same: lanes {', '.join(result.lanes)}, {lacking}.")
    elif result.incomplete:
        _print(f"{result.incomplete} of {result.compared} steps lack lanes in both; the others are equal.")
    else:
        _print(f"{result.compared} steps compared, all equal ({result.only} steps are in one of them only).")
    return int(result.step is not None or result.incomplete > 0)


def skipped(path: Annotated[Path, tyro.conf.Positional], /, json: bool = False) -> int:
    """Show the bad rows that a run has left out: from a skip list, or a folder with one file a rank.

    A row counts once, however often a lane came to it.

    Args:
        path: A skip list (DUMP_FOLDER/skipped of a training run, or of --skipped).
        json: Print one JSON object a row on standard output.
    """
    rows = read_skips(path)
    if json:
        for row in rows:
            _print_json(row._asdict())
        return 0
    table = Table("source", "place", "reason", "first in step", title=f"{len(rows)} bad rows", show_lines=False)
    for row in rows:
        table.add_row(escape(row.source), escape(row.place), escape(row.reason), str(row.step))
    Console().print(table)
    return 0


def _print_json(value: Any) -> None:
    _print(json.dumps(value))


def _print(text: object) -> None:
    with naming("standard output"):
        print(text, flush=True)


_COMMANDS: dict[str, Callable[..., Any]] = {
    "check": check,
    "explain": explain,
    "run": run,
    "digest": digest,
    "export": export,
    "verify": verify,
    "skipped": skipped,
}


def main(args: list[str] | None = None) -> None:
    """Entry point of the `zephon` command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=err, show_path=False)])
    out: Any = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # names that the terminal's encoding does not know
    if (sys.argv[1:] if args is None else args) == ["--version"]:
        _print(f"zephon {version('zephon-lanes')}")
        sys.exit(0)
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            _COMMANDS,
            prog="zephon",
            args=args,
            description=f"Data loading for LLM pre-training: look, rehearse, prove. Version {version('zephon-lanes')}.",
        )
    except UsageError as error:
        code = _complain(f"error: {error}", 2)
    except ZephonError as error:
        code = _complain(f"failed: {error}", 1)
    except KeyboardInterrupt:
        code = _complain("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        code = 1
    except OSError as error:
        code = _complain(f"failed: {error}", 1)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    err.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    return code
