"""The yardstick: Arrow reads Parquet, fastokens encodes many documents at once, numpy packs them. No framework.

`encode` and `pack` also serve the peers that have no batch encoding or no packing of their own.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from common import Clock, Run, Work, look_text, main


def encoder(folder: str, fast: bool) -> Callable[[list[str]], tuple[Any, Any]]:
    """A function from documents to all their ids, one behind the other, and where each begins."""
    import numpy as np

    if fast:
        import fastokens

        flat = fastokens.Tokenizer.from_file(f"{folder}/tokenizer.json").encode_batch_flat
        return lambda texts: _arrays(*flat(texts, split_special_tokens=True))
    from tokenizers import Tokenizer

    stock = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def encode(texts: list[str]) -> tuple[Any, Any]:
        found = stock.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.asarray(one.ids, np.int32) for one in found]
        return np.concatenate(ids), np.cumsum([0, *map(len, ids)])

    return encode


def _arrays(ids: bytes, offsets: bytes) -> tuple[Any, Any]:
    import numpy as np

    return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


def documents(dataset: Iterable[dict[str, Any]], rows: int) -> Iterator[list[str]]:
    """Texts of a data set that gives rows one by one, so many at a time, for ever."""
    while True:
        waiting = iter(dataset)
        while texts := [row["text"] for row in itertools.islice(waiting, rows)]:
            yield texts


def pack(encoded: Iterable[tuple[Any, Any]], work: Work) -> Iterator[dict[str, Any]]:
    """Batches of full sequences: a document's labels are its ids from the second on, then EOS; positions restart."""
    import numpy as np

    names, size, held = ("input", "labels", "positions"), work.batch * work.seq_len, 0
    parts: list[Any] = []
    for ids, offsets in encoded:
        labels, starts = np.empty_like(ids), np.zeros(len(ids), np.int32)
        labels[:-1] = ids[1:]
        lengths = np.diff(offsets)
        labels[offsets[1:][lengths > 0] - 1] = work.eos
        starts[offsets[:-1][lengths > 0]] = 1
        parts.append((ids, labels, starts))
        held += len(ids)
        if held < size:
            continue
        whole = [np.concatenate(part) for part in zip(*parts, strict=True)]
        full = held - held % size
        parts, held = [tuple(one[full:] for one in whole)], held - full
        ids, labels, starts = (one[:full].reshape(-1, work.seq_len) for one in whole)
        at = np.arange(work.seq_len, dtype=np.int32)
        positions = at - np.maximum.accumulate(at * starts, axis=1)
        for i in range(0, len(ids), work.batch):
            yield dict(zip(names, (one[i : i + work.batch] for one in (ids, labels, positions)), strict=True))


def prototype(work: Work, clock: Clock) -> Run:
    import numpy as np  # noqa: F401
    from pyarrow.parquet import ParquetFile

    clock.lap("imports")
    encode = encoder(work.tokenizer, work.options["fast"])
    clock.lap("tokenizer")

    def documents() -> Iterator[list[str]]:
        while True:
            for file in work.files("parquet"):
                for table in ParquetFile(file).iter_batches(work.options["rows"], columns=["text"]):
                    yield table.column(0).to_pylist()

    return Run(pack(map(encode, documents()), work), look_text)


if __name__ == "__main__":
    main(prototype)
