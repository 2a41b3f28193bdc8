"""The ledger of a training rank: digests of what the trainer received, hashed beside training."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from zephon.digest import lane_digest
from zephon.ledger import LedgerWriter
from zephon.types import Batch, Record
from zephon.worker import Worker


class Ledger:
    """Digests of every lane of a rank, step by step, in a file.

    Hashing delays training by 7 ms a Mtoken, so a thread does it. A step that was being hashed when a run was killed is
    run again after its resume.

    Args:
        worker: splits micro-batches into records.
        lanes: those of this rank, ascending.
        file: where the lines go.

    Raises:
        UsageError: the file is there and is no ledger.
    """

    def __init__(self, worker: Worker, lanes: Sequence[int], file: Path) -> None:
        self._worker, self._lanes = worker, lanes
        self._records: list[Record] = []
        self._writer = LedgerWriter(file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zephon-ledger")
        self._writing: Future[None] | None = None

    def begin(self, header: bytes) -> None:
        """A run goes on from the state with this header: lines of a history that it has left do not count."""
        self._writer.begin(header)

    def add(self, batch: Batch) -> None:
        """Take note of a micro-batch, which must not change from now on."""
        self._records.extend(self._worker.records(batch))

    def write(self, step: int) -> None:
        """Have a complete step hashed; waits for the one before, so that at most one is on its way."""
        records, self._records = self._records, []
        self.flush()
        self._writing = self._thread.submit(self._hash, step, records)

    def flush(self) -> None:
        """Return when all steps are written."""
        if self._writing:
            self._writing.result()

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()
        self._writer.close()

    def _hash(self, step: int, records: list[Record]) -> None:
        share = len(records) // len(self._lanes)
        parts = [records[i * share : (i + 1) * share] for i in range(len(self._lanes))]
        self._writer.write(step, {lane: lane_digest(part) for lane, part in zip(self._lanes, parts, strict=True)})
