"""A run on a Ray cluster: learners and the syncer's shards as actors, fragments in the object store.

    python -m recipes.diloco.ray_driver RUN [--address HOST:PORT]      # RUN/run.json says what to run

The learners and the syncer are those of every other driver; Ray carries, starts again and tries again.

*A learner* is an actor. What it says is one stream of objects in the order in which it said it; they belong to this
process, so they outlive it. Ray starts a dead one again, and it says hello.

*The syncer's state machine* runs here. It never looks into a body, so bodies stay objects: a fragment goes from the
node of its learner to the node of a shard and from there to the learners. Only welcomes and snapshots are put together
in this process.

*A shard* is an actor that merges the fragments dealt to it. It keeps nothing: parameters and momentum of a fragment are
an object that goes in, and a new one comes out. When one dies, Ray starts it again and tries the merge again on the
same objects, to the same bits; until then, some 1.5 s here, nothing is merged, and learners train on. Where its node is
gone it takes as long as Ray takes to notice: 15 s and more, unless `health_check_period_ms` and its like say less.

A second copy of every new version is brought to this node, so that any other node may be lost, with its learners and
shards. This process and Ray's head may not: then the run goes on from its last snapshot. Ray is made for one fast
network; over wide-area links use `processes`. The run's folder must be on a file system that all nodes share.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import ray
import tyro
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from recipes.diloco.keep import Keeper, now
from recipes.diloco.messages import Describe, Description, Hello, Message, Part
from recipes.diloco.outer import GlobalModel
from recipes.diloco.ray_actors import LearnerActor, Ref, ShardedModel, join, split, start_shards
from recipes.diloco.run import Run
from recipes.diloco.syncer import Out, Syncer
from recipes.diloco.tape import TapeWriter

_AGAIN = 1.0  # seconds until a learner whose stream has ended is asked to speak again
_LOOK = 0.2  # longest wait for the next object, in seconds


@dataclass
class Line:
    """This end of what a learner says and hears in one life."""

    life: int
    stream: Any
    body: Ref = None
    part: tuple[Part, Ref, Ref] | None = None
    """A part on its way to its shard: head, word that it is there, body. What comes after it waits: the tape needs the
    order."""
    told: int = 0


class Driver:
    """Runs a run on the cluster that this process is connected to.

    Args:
        run: the run; its folder is new but for `run.json`.
        cpus: logical CPUs that Ray sets aside for each learner.
        gpus: GPUs for each learner.
    """

    def __init__(self, run: Run, cpus: float = 1.0, gpus: float = 0.0) -> None:
        self.run, self.syncer = run, None
        learner = ray.remote(LearnerActor)
        at_once = {"max_concurrency": 4, "max_restarts": -1, "max_task_retries": 0}
        self.learners: dict[int, Any] = {
            number: learner.options(num_cpus=cpus, num_gpus=gpus, **at_once).remote(run, number)
            for number in range(run.settings.learners)
        }
        self.shards = start_shards(len(self.learners))
        self._tape = TapeWriter(run.folder / "tape.jsonl")
        self._keeper = Keeper(run, self._tape, lambda model: cast(GlobalModel, ShardedModel(model, self.shards)))
        self._lives: Counter[int] = Counter()
        self._lines: dict[int, Line] = {}
        self._again: dict[int, float] = dict.fromkeys(self.learners, 0.0)
        self._calls: dict[Ref, tuple[int, int]] = {}
        self._early: list[Hello] = []

    syncer: Syncer | None

    def serve(self) -> None:
        """Serve until the run is done.

        Raises:
            RayError: the run cannot go on: a fragment is lost, or a learner's code failed before it began.
        """
        ray.get([shard.__ray_ready__.remote() for shard in self.shards])  # learners would train on without merges
        try:
            while self.syncer is None or not self.syncer.done:
                self._look()
            self._keeper.finish(self.syncer)
        finally:
            self._tape.close()

    def _look(self) -> None:
        for learner, when in sorted(self._again.items()):
            if time.monotonic() >= when and not (self.syncer and self.syncer.stopped):
                self._start(learner)
        self._wait()
        if self.syncer:
            if (due := self.syncer.deadline) is not None and due <= now():
                self._tell(self.syncer.tick(now()))
            self._tell(self._keeper.snapshot(self.syncer))

    def _start(self, learner: int) -> None:
        del self._again[learner]
        self._lives[learner] += 1
        life = self._lives[learner]
        speak = self.learners[learner].speak.options(num_returns="streaming")
        self._lines[learner] = Line(life, speak.remote(life))

    def _wait(self) -> None:
        """Take what comes next, from whomever."""
        lines = [(learner, line.part[1] if line.part else line.stream) for learner, line in self._lines.items()]
        due = self.syncer.deadline if self.syncer else None
        wait = _LOOK if due is None else min(_LOOK, max(0.0, (due - now()) / 1e6))
        things = [*(thing for _, thing in lines), *self._calls]
        if not things:
            time.sleep(wait)
            return
        ray.wait(things, num_returns=1, timeout=wait, fetch_local=False)
        for one in ray.wait(things, num_returns=len(things), timeout=0, fetch_local=False)[0]:
            learner = next((learner for learner, thing in lines if thing is one), None)
            if learner is None:
                self._called(one)
            elif learner in self._lines:
                self._listen(learner, self._lines[learner])

    def _called(self, call: Ref) -> None:
        """A learner that lives but could not be told something, say as the object is lost, starts afresh."""
        learner, life = self._calls.pop(call)
        try:
            ray.get(call)
        except ActorDiedError:
            pass  # its stream says so too
        except RayError:
            if self._lives[learner] == life:
                ray.kill(self.learners[learner], no_restart=False)

    def _listen(self, learner: int, line: Line) -> None:
        """Take a learner's next object: a body, the head that belongs to it, or word that a part is at its shard."""
        try:
            if line.part:
                (head, at_shard, body), line.part = line.part, None
                ray.get(at_shard)
                self._take(learner, replace(head, body=body))
            elif line.body is None:
                line.body = next(line.stream)
            else:
                body, line.body = line.body, None
                head: Any = ray.get(
                    next(line.stream, body)
                )  # a stream that fails ends in its error, in place of a body
                if isinstance(head, Part):
                    shard = self.shards[head.fragment % len(self.shards)]
                    line.part = (head, *shard.hold.options(num_returns=2).remote(body))
                else:
                    self._take(learner, join(head, ray.get(body)))
        except (StopIteration, RayError, ValueError) as error:  # a ValueError: it broke the protocol
            self._ended(learner, error)

    def _ended(self, learner: int, error: Exception) -> None:
        """A life is over; the next begins once Ray has the actor up again.

        Raises:
            RayTaskError: the learner's code failed before the run began: that is a mistake, which would come again.
        """
        if isinstance(error, RayTaskError) and self.syncer is None:
            raise error
        if not isinstance(error, StopIteration):
            print(f"learner {learner}: {str(error).strip().splitlines()[-1]}", flush=True)
            # Its code or its objects failed: let it begin with nothing. One that is down, Ray has begun to start again.
            if not isinstance(error, ActorDiedError | ActorUnavailableError):
                ray.kill(self.learners[learner], no_restart=False)
        del self._lines[learner]
        self._early = [one for one in self._early if one.learner != learner]
        self._again[learner] = time.monotonic() + _AGAIN
        if self.syncer:
            self._tell(self.syncer.gone(learner, now()))
        elif self._early:
            self._tell([(self._early[0].learner, Describe())])

    def _take(self, learner: int, message: Message) -> None:
        if isinstance(message, Description):
            self._begin(message)
        elif self.syncer:
            self._tell(self.syncer.receive(learner, message, now()))
        elif isinstance(message, Hello):
            self._early.append(message)
            if len(self._early) == 1:
                self._tell([(learner, Describe())])

    def _begin(self, said: Description) -> None:
        if self.syncer:
            return
        self.syncer = self._keeper.begin(said)
        for hello in self._early:
            self._tell(self.syncer.receive(hello.learner, hello, now()))

    def _tell(self, out: Out) -> None:
        for learner, message in out:
            if line := self._lines.get(learner):
                head, body = split(message)
                call = self.learners[learner].hear.remote(line.life, line.told, head, body)
                line.told += 1
                self._calls[call] = (learner, line.life)


@dataclass
class Args:
    """Run what RUN/run.json says on a Ray cluster."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder, which all nodes can reach."""
    address: str | None = None
    """Head of a cluster that is up, or "auto" for this machine's; else one of this machine alone is started."""
    cpus: float = 1.0
    """Logical CPUs that Ray sets aside for each learner."""
    gpus: float = 0.0
    """GPUs for each learner."""


def main() -> None:
    """Do what the command line says."""
    args = tyro.cli(Args, description=__doc__)
    run = Run.load(args.run.resolve())
    local = (
        {}
        if args.address
        else {"num_cpus": run.settings.learners * max(1, round(args.cpus)), "include_dashboard": False}
    )
    ray.init(address=args.address, log_to_driver=True, **local)
    try:
        Driver(run, args.cpus, args.gpus).serve()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
