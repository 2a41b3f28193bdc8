"""Does memory stay flat while millions of rows go by, in every format?

    python -m benchmarks.flat [--rows 2000000] [--formats jsonl gz zst bz2 xz tar parquet]

Each format is a process of its own that reads the same short documents, shuffled, in 8 lanes, until every row has been
drawn about once. Its private memory (without libraries and what files map) is read twenty times on the way, after
a collection of garbage; `growth` compares the peak of the last three quarters with that of the second eighth.
"""

import bz2
import gc
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.memory import used
from benchmarks.report import write
from recipes.demo.corpus import train_tokenizer
from zephon import Stream

WORDS = [f"word{i:x}" for i in range(0, 4000, 37)]
SHARDS, LOOKS = 4, 40
RECIPE = """lanes = 8
[batch]
seq_len = 2048
global_batch_size = 64
[tokenizer]
path = "tokenizer"
[[sources]]
name = "rows"
paths = ["{format}/*"]
{text}
[run]
cache = "cache"
"""


@dataclass
class Args:
    rows: int = 2_000_000
    formats: tuple[str, ...] = ("jsonl", "gz", "zst", "bz2", "xz", "tar", "parquet")
    at_once: int = 1
    """Formats at the same time, on a machine with cores to spare."""
    one: tuple[str, str] | None = None
    """Internal: read one format in a folder, and print the figures."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        print(json.dumps(read(*args.one, args.rows)))
        return
    with tempfile.TemporaryDirectory(prefix="zephon-flat-") as folder, ThreadPoolExecutor(args.at_once) as pool:
        train_tokenizer(list(texts(2_000)), Path(folder) / "tokenizer", vocab=512)
        rows = list(pool.map(lambda format: apart(folder, format, args.rows), args.formats))
    write("flat", {"rows": args.rows, "formats": rows})
    if bad := [row["format"] for row in rows if row["growth"] > 1.05]:
        sys.exit(f"Memory grew by more than 5 % with {', '.join(bad)}.")


def apart(folder: str, format: str, count: int) -> dict[str, Any]:
    make(Path(folder), format, count)
    command = [sys.executable, "-m", "benchmarks.flat", "--one", folder, format, "--rows", str(count)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    row = json.loads(out.splitlines()[-1])
    print({key: value for key, value in row.items() if key != "mib"}, flush=True)
    return row


def texts(count: int, start: int = 0) -> Iterator[str]:
    for i in range(start, start + count):
        # Digit by digit: fastokens keeps words that it has seen, up to 200 MB of them, and new ones would fill that.
        yield " ".join(["doc", *str(i), *(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(8 + i * 13 % 40))])


def make(folder: Path, format: str, count: int) -> None:
    """Write `SHARDS` files of one format."""
    at = folder / format
    at.mkdir()
    for shard in range(SHARDS):
        some = texts(count // SHARDS, shard * (count // SHARDS))
        if format == "tar":
            write_tar(at / f"{shard}.tar", some)
        elif format == "parquet":
            pq.write_table(pa.table({"text": list(some)}), at / f"{shard}.parquet", row_group_size=10_000)
        else:
            ending = ".jsonl" if format == "jsonl" else f".jsonl.{format}"
            with (at / f"{shard}{ending}").open("wb") as file:
                write_lines(file.write, some, COMPRESS[format])


def zstd(raw: bytes) -> bytes:
    from backports import zstd

    return zstd.compress(raw)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "gz": lambda raw: gzip.compress(raw, 1),
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def write_lines(write: Callable[[bytes], int], some: Iterator[str], compress: Callable[[bytes], bytes]) -> None:
    """In members of 1,000 rows, which can be read in place."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in some]
    for start in range(0, len(lines), 1000):
        write(compress(b"".join(lines[start : start + 1000])))


def write_tar(path: Path, some: Iterator[str]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as file:
        for number, text in enumerate(some):
            member = tarfile.TarInfo(f"{number:09d}.txt")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
            file.members.clear()  # type: ignore[attr-defined]  # it keeps them all


def read(folder: str, format: str, count: int) -> dict[str, Any]:
    """Draw about `count` rows, and look at memory on the way."""
    recipe = Path(folder) / f"{format}.toml"
    recipe.write_text(RECIPE.format(format=format, text='text = "txt"' if format == "tar" else ""))
    looks: list[float] = []
    with Stream.open(recipe) as stream:
        loader, first = stream.loader(), np.arange(1000)
        per_row = sum(stream.worker.measure(0, first, first * 0).positions) / 1000
        steps = max(LOOKS, int(count * per_row / (64 * 2048)))
        for step in range(1, steps + 1):
            next(loader)
            if step * LOOKS // steps > len(looks):
                gc.collect()
                looks.append(used() / 2**20)
    early = max(looks[LOOKS // 8 : LOOKS // 4])
    late = max(looks[LOOKS // 4 :])
    mib = [round(one, 1) for one in looks]
    return {"format": format, "steps": steps, "rows": count, "growth": round(late / early, 4), "mib": mib}


if __name__ == "__main__":
    main()
