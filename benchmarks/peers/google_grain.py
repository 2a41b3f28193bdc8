"""Grain 0.2.18: blocks of rows of Parquet, their documents encoded at once, packed by its ConcatThenSplit.

Settings: elements of many documents with places computed beside the ids, and a source of blocks, since its own Parquet
reader gives row by row: with one element a document, short ones cost ten times as much. One process is best with
fastokens; two worker processes can be faster in wall clock with the stock tokenizer.
"""

from collections.abc import Callable
from typing import Any

import grain
import numpy as np
from common import Clock, Run, Work, main
from grain.experimental import ConcatThenSplitIterDataset
from prototype import encoder
from pyarrow.parquet import ParquetFile

NAMES = ("input", "labels", "positions")


class Blocks:
    """The texts of some files in blocks of `rows`, by number; a block lies in one row group."""

    def __init__(self, files: list[str], rows: int) -> None:
        self._places = [
            (file, group, start, start + rows)
            for file, metadata in ((file, ParquetFile(file).metadata) for file in files)
            for group in range(metadata.num_row_groups)
            for start in range(0, metadata.row_group(group).num_rows, rows)
        ]
        self._held: tuple[tuple[str, int], list[str]] = ("", 0), []

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> list[str]:
        file, group, start, end = self._places[number]
        if self._held[0] != (file, group):
            texts = ParquetFile(file).read_row_group(group, columns=["text"]).column(0).to_pylist()
            self._held = (file, group), texts
        return self._held[1][start:end]


class Encode(grain.transforms.Map):
    """Texts to one element: the ids of all, their labels, which end in EOS, and places in the document."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._encode: Callable[[list[str]], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_encode": None}  # a worker loads its own

    def map(self, element: list[str]) -> dict[str, Any]:
        """All that the packing concatenates and splits."""
        if self._encode is None:
            self._encode = encoder(self._work.tokenizer, self._work.options["fast"])
        ids, offsets = self._encode(element)
        labels, positions = np.append(ids[1:], np.int32(0)), np.arange(len(ids), dtype=np.int32)
        labels[offsets[1:] - 1] = self._work.eos
        positions -= np.repeat(offsets[:-1].astype(np.int32), np.diff(offsets))
        return dict(zip(NAMES, (ids, labels, positions), strict=True))


def run(work: Work, clock: Clock) -> Run:
    clock.lap("imports")
    encode, workers = Encode(work), work.options["workers"]
    if not workers:
        encode.map(["load it now"])
    clock.lap("tokenizer")
    groups = grain.MapDataset.source(Blocks(work.files("parquet"), work.options["rows"])).repeat()
    rows = groups.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)).map(encode)
    batches = ConcatThenSplitIterDataset(rows, length_struct=dict.fromkeys(NAMES, work.seq_len)).batch(work.batch)
    if workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return Run(iter(batches), lambda batch: {"tokens": batch["input"].size})


if __name__ == "__main__":
    main(run)
