"""How the syncer of a run on disk begins, is snapshotted and ends, whoever carries its messages."""

import time
from collections.abc import Callable
from pathlib import Path

from recipes.diloco.fragments import Tensor, make_plan
from recipes.diloco.lanes import Lanes, divide
from recipes.diloco.learner import unpack
from recipes.diloco.messages import Description
from recipes.diloco.outer import GlobalModel
from recipes.diloco.run import Run
from recipes.diloco.snapshot import Cut
from recipes.diloco.syncer import Out, Syncer
from recipes.diloco.tape import TapeWriter


def now() -> int:
    """Microseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1000


class Keeper:
    """Keeps a run's syncer in the run's folder.

    Args:
        run: the run.
        tape: its event tape.
        place: gives the global model its place; here where left out.
    """

    def __init__(
        self, run: Run, tape: TapeWriter, place: Callable[[GlobalModel], GlobalModel] = lambda model: model
    ) -> None:
        self._run, self._tape, self._place, self._snapped, self._header = run, tape, place, 0, ""

    def begin(self, said: Description) -> Syncer:
        """The syncer, from what the first learner says that it trains, or from a snapshot.

        Raises:
            RestoreError: the snapshot is of another run than this could go on from.
        """
        self._header = said.header
        run, settings = self._run, self._run.settings
        plan = make_plan((Tensor(name, shape) for name, shape in said.tensors), settings.fragments, settings.every)
        if run.restore:
            cut = Cut.load(Path(run.restore), plan, said.header)
            model, lanes, optimizer = cut.restore(settings)
            self._snapped = cut.round
        else:
            lanes = Lanes(said.lanes, divide([one.lane for one in said.lanes], range(settings.learners)))
            model, optimizer = GlobalModel(settings, plan, unpack(plan, said.body)), b""
        return Syncer(settings, self._place(model), lanes, self._tape, self._snapped, optimizer)

    def snapshot(self, syncer: Syncer) -> Out:
        """Start a snapshot when one is due, and write one that is whole."""
        out: Out = []
        every, done = self._run.snapshot_every, syncer.snapshots.done
        if every and not syncer.stopped and syncer.round >= self._snapped + every:
            self._snapped = syncer.round
            out = syncer.snapshot()
        if done:
            done.save(self._run.folder / "snapshot.cut", self._header)
            syncer.snapshots.done = None
        return out

    def finish(self, syncer: Syncer) -> None:
        """Write the end of the run."""
        model = syncer.model
        end = Cut(syncer.round, syncer.plan, model.values, model.momentum, model.clocks, syncer.lanes.at)
        end.save(self._run.folder / "final.cut", self._header)
        self._tape.close()
