"""An island of several ranks: rank 0 talks to the syncer; the others do whatever it is told to do, at the same time."""

from typing import Any, Protocol

from recipes.diloco.fragments import Plan, Vector
from recipes.diloco.learner import Island

_END = "end"


class Peers(Protocol):
    """How rank 0 tells the others."""

    def share(self, what: Any) -> Any:
        """Rank 0's `what`, on every rank."""
        ...


class Leader:
    """Rank 0's view of an island all of whose methods are collective: every call is made on all ranks.

    Args:
        island: this rank's part.
        peers: the channel to the others.
    """

    def __init__(self, island: Island, peers: Peers) -> None:
        self._island, self._peers = island, peers
        self.tensors, self.header = island.tensors, island.header

    @property
    def book(self) -> Any:
        """The book of all ranks' lanes, which rank 0 keeps."""
        return self._island.book

    @book.setter
    def book(self, book: Any) -> None:
        self._island.book = book

    def first_lanes(self) -> dict[int, bytes]:
        return self._island.first_lanes()

    def read(self, plan: Plan) -> list[Vector]:
        return self._all("read", plan)

    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        self._all("write", plan, fragment, value)

    def own(self, lanes: dict[int, bytes]) -> None:
        self._all("own", lanes)

    def lanes(self) -> dict[int, bytes]:
        return self._all("lanes")

    def step(self, clock: int) -> int:
        return self._all("step", clock)

    def optimizer(self) -> bytes:
        return self._all("optimizer")

    def load_optimizer(self, state: bytes) -> None:
        self._all("load_optimizer", state)

    def end(self) -> None:
        """Let the others go."""
        self._peers.share((_END, ()))

    def _all(self, name: str, *args: Any) -> Any:
        self._peers.share((name, args))
        return getattr(self._island, name)(*args)


def follow(island: Any) -> None:
    """Do what rank 0 does, until it lets go. `island` is a `Peers` too."""
    while True:
        name, args = island.share(None)
        if name == _END:
            return
        getattr(island, name)(*args)


def lead_out(island: Island) -> None:
    """Let the other ranks go, where there are any."""
    if isinstance(island, Leader):
        island.end()
