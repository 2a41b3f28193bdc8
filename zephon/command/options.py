"""Options that several commands share."""

import contextlib
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from zephon.command.saved import read_state, write_state
from zephon.errors import DataError, RecipeError, UsageError
from zephon.loader import Loader, check_topology
from zephon.recipe import Recipe
from zephon.restore import check_allowed
from zephon.run.lines import make_folder
from zephon.run.skips import SkipWriter
from zephon.stream import Stream

err = Console(stderr=True)
"""Where everything goes that is no result."""


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
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
            task = bars.add_task("indexing", total=None, visible=False)

            def show(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total, visible=True)

            return Stream(recipe, show)


@dataclass(frozen=True)
class Saving:
    """Where and when to keep the state of the loaders."""

    save: Path | None = None
    """Folder for states; all ranks may share it. A state is a folder step-N in it."""
    save_at: int | None = None
    """Step after which to save; the last one that the run comes to where left out."""
    resume: Path | None = None
    """Folder with a state to go on from: the latest complete one."""
    allow: tuple[str, ...] = ()
    """Differences to go on with: weights, global_batch_size, records, code, codecs. `--allow` with any other word says
    what each means."""

    def begin(self, loaders: Sequence[Loader], steps: int | None) -> int:
        """Check the options, take up a state, and say after which step that is."""
        if self.save_at is not None and self.save is None:
            raise UsageError("--save-at needs --save, the folder to save to.")
        check_allowed(self.allow)
        if self.resume:
            state = read_state(self.resume)
            for loader in loaders:
                loader.load_state_dict(state, self.allow)
        first = loaders[0].step + 1
        if steps is not None and steps < first:
            raise UsageError(f"--steps {steps} is the last step, but the next one is {first}: nothing would be done.")
        if self.save_at is not None and not first <= self.save_at <= (steps or self.save_at):
            raise UsageError(f"--save-at {self.save_at} is no step of this run, which goes from {first} to {steps}.")
        if self.save:
            make_folder(self.save)
        return first - 1

    def after(self, loaders: Sequence[Loader]) -> None:
        """Save if this is the step for it."""
        if self.save and loaders[0].step == self.save_at:
            write_state(loaders, self.save)

    def end(self, loaders: Sequence[Loader], begun: int) -> None:
        """Save the last step of a run that began after step `begun`, unless another was asked for.

        Raises:
            DataError: the run ended before there was anything to save.
        """
        last = loaders[0].step
        if not self.save or (self.save_at is not None and self.save_at <= last):
            return
        if self.save_at is not None:
            raise DataError(
                f"--save-at {self.save_at} was not reached: the run ended after step {last}, and nothing was saved to "
                f"{self.save}. Name a step up to {last}, or leave --save-at out for the last one."
            )
        if last == begun:
            raise DataError(f"The run ended before step {begun + 1}: there is no state of it to save to {self.save}.")
        write_state(loaders, self.save)


@contextlib.contextmanager
def skip_list(path: Path | None, loaders: Sequence[Loader]) -> Generator[Callable[[], None]]:
    """What notes the bad rows of loaders so far, in a list where there is a path; at the end, and after an error that
    says that the list names them, the rest is noted."""
    writer = SkipWriter(path)

    def note() -> None:
        writer.write(one for loader in loaders for one in loader.take_skipped())

    try:
        yield note
    finally:
        note()
        writer.close()


def check_steps(stream: Stream, steps: int | None) -> None:
    """Refuse a run without an end, or without a step."""
    if steps is None and not stream.recipe.finite:
        raise UsageError("The stream repeats for ever ([mix] on_end = 'repeat'): say where to stop with --steps N.")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps must be at least 1, it is {steps}.")


def check_ranks(stream: Stream, dp: int) -> None:
    """Refuse a number of data-parallel ranks that cannot share the stream."""
    lanes = None if stream.recipe.finite else stream.recipe.lanes
    check_topology(lanes=lanes, global_batch=stream.batch.global_batch_size, world=dp, local_batch=None)


@contextlib.contextmanager
def between_steps() -> Generator[list[int]]:
    """Have Ctrl-C wait until a step is noted whole: the state that is saved must not be ahead of the ledger.

    Yields what is empty until it comes. A second one ends the command at once.
    """
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        err.print("Stopping after this step. Ctrl-C again ends at once, and loses what was to come of it.")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
