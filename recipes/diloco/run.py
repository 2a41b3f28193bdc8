"""A run on disk: what its processes must agree on, and where they leave what they did.

RUN/run.json        settings, island, options
RUN/port            where the syncer listens
RUN/tape.jsonl      the event tape
RUN/books/          one file a learner: every lane step that it began, with its digest
RUN/snapshot.cut    the last whole snapshot
RUN/final.cut       the end of the run
RUN/traffic.json    bytes on the wire, by learner, direction and kind of message
RUN/log/            what each process said
"""

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.diloco.learner import Island
from recipes.diloco.settings import Settings
from recipes.diloco.tape import Take, refuse_used
from zephon.run.lines import LineWriter, make_folder, read_lines


@dataclass(frozen=True)
class Run:
    """What is to be run.

    Attributes:
        folder: where it lives.
        settings: of the algorithm.
        island: what trains, as "module:function"; called with the learner's number and the options.
        options: keyword arguments for it.
        snapshot_every: rounds between two snapshots; 0 for none.
        restore: a snapshot to go on from; none for a run that begins afresh.
        ranks: processes of a learner; more than one are started by torchrun, and the island must be one of them.
        pace: least seconds of a step: stands for an accelerator where many learners share few cores.
    """

    folder: Path
    settings: Settings = field(default_factory=Settings)
    island: str = "recipes.diloco.micro:make"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    snapshot_every: int = 0
    restore: str = ""
    ranks: int = 1
    pace: float = 0.0

    def save(self) -> None:
        """Write `run.json` into the folder of a new run.

        Raises:
            UsageError: it holds what another run has left.
        """
        refuse_used(self.folder)
        make_folder(self.folder)
        (self.folder / "run.json").write_text(json.dumps(asdict(self) | {"folder": ""}, indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> "Run":
        """Read `run.json`."""
        said = json.loads((folder / "run.json").read_text())
        return Run(**said | {"folder": folder, "settings": Settings(**said["settings"])})

    def make_island(self, learner: int) -> Island:
        """A fresh island for a learner."""
        module, _, name = self.island.partition(":")
        return getattr(importlib.import_module(module), name)(learner, **self.options)

    def over(self) -> bool:
        """Whether the run has ended."""
        return (self.folder / "final.cut").exists()

    def book(self, learner: int) -> Path:
        """The book of a learner."""
        return self.folder / "books" / f"learner_{learner:03d}.jsonl"

    def takes(self) -> Iterator[Take]:
        """Every lane step that any learner began."""
        for file in sorted((self.folder / "books").glob("*.jsonl")):
            yield from read_book(file, int(file.stem.removeprefix("learner_")))


class BookWriter:
    """Writes down lane steps, on disk, as far as this process goes, on return; goes on with what is there."""

    def __init__(self, file: Path) -> None:
        self._lines = LineWriter(file, "book of a learner", b'{"takes": ', _parse)

    def write(self, takes: Iterable[tuple[int, int, str]]) -> None:
        """Lanes, their steps from 1 on, and the digests of their records."""
        self._lines.write([{"takes": list(takes)}])


def read_book(file: Path, learner: int) -> Iterator[Take]:
    """The entries of a book; a last line that a killed learner left half written is left out."""
    for takes in read_lines(file, _parse) if file.exists() else ():
        yield from (Take(learner, lane, step, digest) for lane, step, digest in takes)


def _parse(line: bytes) -> list[tuple[int, int, str]]:
    try:
        return [(int(lane), int(step), str(digest)) for lane, step, digest in json.loads(line)["takes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("is no line of a learner's book") from error
