"""The command line. Exit codes: 0 good; 1 a comparison differed or a run failed; 2 bad usage, recipe or topology."""

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zephon.digest import lane_digest, step_digest
from zephon.errors import RecipeError, UsageError, ZephonError
from zephon.ledger import LedgerWriter, compare_ledgers, ledger_line, read_ledger
from zephon.loader import Loader, admissible_worlds, check_topology
from zephon.recipe import Recipe
from zephon.rehearse import Report, rehearse
from zephon.state import HEADER
from zephon.stream import Stream

RecipePath = Annotated[Path, tyro.conf.Positional]

_err = Console(stderr=True)


@dataclass(frozen=True)
class Given:
    """What TorchTitan would say in training, for recipes that leave it out."""

    seq_len: int | None = None
    """Positions of a sequence, for a recipe without [batch]."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks, for a recipe without [batch]."""
    tokenizer: Path | None = None
    """Tokenizer folder, for a recipe without [tokenizer]."""

    def open(self, path: Path) -> Stream:
        """Open a recipe, with a progress bar where files must be indexed."""
        recipe = Recipe.load(path)
        if (self.seq_len is None) != (self.global_batch_size is None):
            raise UsageError("--seq-len and --global-batch-size go together; one of them is missing.")
        if self.seq_len is not None and self.global_batch_size is not None:
            recipe = recipe.with_batch(self.seq_len, self.global_batch_size, "the command line")
        if recipe.batch is None:
            raise RecipeError(f"{path} has no [batch]; give --seq-len and --global-batch-size as TorchTitan would.")
        if self.tokenizer:
            recipe = recipe.with_tokenizer(self.tokenizer, "the command line")
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bars:
            task = bars.add_task("indexing", total=None, visible=False)

            def show(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total, visible=True)

            return Stream(recipe, show)


def check(
    recipe: RecipePath,
    /,
    dp: int | None = None,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Validate a recipe: everything that can be known before a run.

    Indexes the files, loads the tokenizer, measures the first rows of every source; prints rows, chunks and target
    share of every source and every number of data-parallel ranks that works.

    Args:
        recipe: The recipe (TOML).
        dp: Also check that this many data-parallel ranks can run it.
        json: Print one JSON object a line, and nothing else, on standard output.
    """
    with given.open(recipe) as stream:
        lanes, size = stream.recipe.lanes, stream.batch.global_batch_size
        if dp is not None:
            check_topology(lanes=lanes, global_batch=size, world=dp, local_batch=None)
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
                    "walked_by_every_lane": known.order.shared,
                }
            )
        worlds = [
            {"dp": world, "lanes_per_rank": lanes // world, "sequences_per_rank": size // world}
            for world in admissible_worlds(lanes)
        ]
        if json:
            for row in rows:
                _print_json(row)
            _print_json({"lanes": lanes, "global_batch_size": size, "seq_len": stream.batch.seq_len, "ranks": worlds})
        else:
            _show_check(rows, worlds, stream)
    return 0


def _show_check(rows: list[dict[str, Any]], worlds: list[dict[str, Any]], stream: Stream) -> None:
    out = Console()
    table = Table("source", "share", "shards", "rows", "MB", "chunks", "rows a chunk", title=str(stream.recipe.path))
    for row in rows:
        cells = row["source"], f"{row['share']:.2%}", row["shards"], f"{row['rows']:,}", f"{row['bytes'] / 1e6:,.1f}"
        table.add_row(*map(str, cells), f"{row['chunks']:,}", f"{row['chunk_rows']:,}")
    out.print(table)
    for row in rows:
        if row["walked_by_every_lane"]:
            out.print(
                f"[yellow]Source {row['source']!r} has {row['chunks']} chunks for {stream.recipe.lanes} lanes: every "
                "lane walks all of it by itself, so lanes may hold the same row at the same time. Smaller chunk_rows "
                "or fewer lanes avoid it.[/]"
            )
    table = Table("data-parallel ranks", "lanes a rank", "sequences a rank and step", title="Ranks that work")
    for world in worlds:
        table.add_row(*map(str, world.values()))
    out.print(table)
    out.print("[green]The recipe holds.[/]")


def run(
    recipe: RecipePath,
    /,
    dp: int = 1,
    rank: int = 0,
    steps: int | None = None,
    ledger: Path | None = None,
    save: Path | None = None,
    save_at: int | None = None,
    resume: Path | None = None,
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
        save: Folder for the state; ranks may share it.
        save_at: Step after which to save; the last one where left out.
        resume: Folder with a state to go on from.
        json: Print one JSON object, and nothing else, on standard output.
    """
    with given.open(recipe) as stream:
        loader = stream.loader(rank, dp)
        _resume([loader], resume)
        writer = LedgerWriter(ledger) if ledger else None

        def after(records: dict[int, Any]) -> None:
            if writer:
                writer.write(loader.step, {lane: lane_digest(mine) for lane, mine in records.items()})
            if save and loader.step == (save_at or steps):
                _save([loader], save)

        report = rehearse(stream, loader, steps, after, _err)
        if writer:
            writer.close()
    _print_json(report.as_json()) if json else _show_report(report)
    return 0


def _show_report(report: Report) -> None:
    table = Table(show_header=False, title=f"{report.steps} steps, {report.tokens:,} tokens")
    table.add_row("tokens/s", f"{report.tokens_per_s:,.0f}")
    table.add_row("CPU s per Mtoken", f"{report.cpu_s_per_mtoken:.4f}")
    table.add_row("peak PSS, MB", f"{report.peak_pss_mb:,.0f}")
    table.add_row("start-up, s", f"{report.startup_s:.2f}")
    table.add_row("first batch, s", f"{report.first_batch_s:.3f}")
    for name, share in report.shares.items():
        table.add_row(f"share of {name}", f"{share:.3%} (target {report.targets[name]:.3%})")
    table.add_row("padding", f"{report.padding:,} positions")
    for name, counts in report.dropped.items():
        table.add_row(f"noted in {name}", ", ".join(f"{number} {what}" for what, number in counts.items()))
    Console().print(table)


def digest(
    recipe: RecipePath,
    /,
    steps: int,
    dp: int = 1,
    lanes: bool = False,
    save: Path | None = None,
    save_at: int | None = None,
    resume: Path | None = None,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Print the SHA-256 of every global batch, with the loaders of all ranks in one process.

    The lines are the same for every number of ranks, and after every resume. With --lanes they make a ledger that
    `zephon verify` compares.

    Args:
        recipe: The recipe (TOML).
        steps: Last step, also after a resume.
        dp: Number of data-parallel ranks.
        lanes: Also print the digest of every lane.
        save: Folder for the state.
        save_at: Step after which to save; the last one where left out.
        resume: Folder with a state to go on from.
        json: Accepted for symmetry; the output is one JSON object a line in any case.
    """
    del json
    with given.open(recipe) as stream:
        check_topology(
            lanes=stream.recipe.lanes, global_batch=stream.batch.global_batch_size, world=dp, local_batch=None
        )
        loaders = [stream.loader(rank, dp) for rank in range(dp)]
        _resume(loaders, resume)
        for step in range(loaders[0].step + 1, steps + 1):
            of_lanes = {lane: lane_digest(mine) for loader in loaders for lane, mine in loader.step_records().items()}
            _print_json(
                ledger_line(step, of_lanes, whole=True) if lanes else {"step": step, "sha256": step_digest(of_lanes)}
            )
            if save and step == (save_at or steps):
                _save(loaders, save)
    return 0


def export(
    recipe: RecipePath,
    /,
    steps: int,
    out: Path,
    given: Annotated[Given, tyro.conf.OmitArgPrefixes] = Given(),
    json: bool = False,
) -> int:
    """Write every global batch as a NumPy file, from which anyone can recompute its digest.

    `step-000001.npz` holds the keys LLLLL.RRR.name: lane, record within the lane's share of the step, array.

    Args:
        recipe: The recipe (TOML).
        steps: Last step.
        out: Folder for the files.
        json: Print one JSON object a file on standard output.
    """
    with given.open(recipe) as stream:
        loader = stream.loader()
        out.mkdir(parents=True, exist_ok=True)
        for step in range(1, steps + 1):
            arrays: dict[str, Any] = {
                f"{lane:05d}.{number:03d}.{name}": array
                for lane, records in loader.step_records().items()
                for number, record in enumerate(records)
                for name, array in record.items()
            }
            file = out / f"step-{step:06d}.npz"
            np.savez(file, **arrays)
            _print_json({"step": step, "file": str(file)}) if json else print(file)
    return 0


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
        _print_json(
            {"compared": result.compared, "only_in_one": result.only, "step": result.step, "lanes": result.lanes}
        )
    elif result.step is None:
        print(f"{result.compared} steps compared, all equal ({result.only} steps are in one of them only).")
    else:
        print(f"Step {result.step} is the first that differs, in lanes {', '.join(result.lanes)}.")
    return int(result.step is not None)


def _resume(loaders: list[Loader], folder: Path | None) -> None:
    if folder is None:
        return
    if not (folder / HEADER).is_file():
        raise UsageError(f"{folder} holds no saved state: there is no file {HEADER!r} in it.")
    state = {file.name: file.read_bytes() for file in folder.iterdir() if "." not in file.name and file.is_file()}
    for loader in loaders:
        loader.load_state_dict(state)


def _save(loaders: list[Loader], folder: Path) -> None:
    """One file a key; ranks may write into the same folder at once, since what they share is the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        for key, raw in loader.state_dict().items():
            private = folder / f"{key}.{os.getpid()}.tmp"
            private.write_bytes(raw)
            private.replace(folder / key)


def _print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


_COMMANDS: dict[str, Callable[..., Any]] = {
    "check": check,
    "run": run,
    "digest": digest,
    "export": export,
    "verify": verify,
}


def main(args: list[str] | None = None) -> None:
    """Entry point of the `zephon` command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=_err, show_path=False)])
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            _COMMANDS,
            prog="zephon",
            args=args,
            description="Data loading for LLM and VLM pre-training: look, rehearse, prove.",
        )
    except UsageError as error:
        _err.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        code = 2
    except ZephonError as error:
        _err.print(f"[red]failed:[/] {error}", highlight=False, soft_wrap=True)
        code = 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
