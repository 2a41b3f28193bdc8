"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from zephon.command.saved import read_state, write_state
from zephon.errors import RecipeError, UsageError
from zephon.loader import Loader
from zephon.recipe import Recipe
from zephon.restore import check_allowed
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
    """Step after which to save; the last one where left out."""
    resume: Path | None = None
    """Folder with a state to go on from: the latest complete one."""
    allow: tuple[str, ...] = ()
    """Differences to go on with: weights, global_batch_size, records, code, codecs. `--allow` with any other word says
    what each means."""

    def begin(self, loaders: list[Loader], steps: int | None) -> None:
        """Check the options, and take up a state."""
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

    def after(self, loaders: list[Loader], steps: int | None) -> None:
        """Save if this is the step for it."""
        if self.save and loaders[0].step == (self.save_at or steps):
            write_state(loaders, self.save)
