"""Bad rows planted among good ones: does the skip list hold exactly those, on any ranks and through resumes?

    python -m benchmarks.bad_rows [--rows 100000] [--bad 1000] [--ranks 1 4 16]

Short documents in four files, with bad rows of twenty kinds at keyed places. Every run reads on until each lane has
come to the end of its first epoch, is stopped twice on the way and goes on from its state with another number of ranks.
Its digests must be those of the first run, its list must hold each planted row and no other, and the states must count
what the lists hold.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import about, write
from recipes.demo.corpus import build
from zephon import Stream
from zephon.digest import lane_digest, step_digest
from zephon.keyed import make_key, permute
from zephon.run.skips import SkipWriter, read_skips
from zephon.transform import BAD_ROW

import numpy as np  # isort: skip

KINDS = (
    b'{"text": "cut', b'{"text": "bad \xff"}', b"[1, 2]", b"null", b'"text"', b"true", b'{"a": 1} {"b": 2}', b"3.5",
    b"{",
    b'{"text": "x"} trailing', b"{text: 1}", b"[" * 3000, b'{"n": ' + b"9" * 5000 + b"}", b'{"text": 3}',
    b'{"text": null}', b'{"txt": "x"}', b'{"text": ["a"]}', b'{"text": {"a": 1}}', b'{"text": true}', b'{"text" "x"}',
)  # fmt: skip
LANES, FILES = 16, 4


@dataclass
class Args:
    rows: int = 100_000
    bad: int = 1_000
    ranks: tuple[int, ...] = (1, 4, 16)


def main() -> None:
    args = tyro.cli(Args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "corpus", 8.0)
        planted = plant(folder, args)
        rows, first = list[dict[str, Any]](), list[str]()
        with Stream.open(recipe(folder)) as stream:
            for ranks in args.ranks:
                row, digests = one_run(stream, folder / f"{ranks}", ranks, planted)
                first = first or digests
                row["first difference"] = next((i + 1 for i, pair in enumerate(zip(first, digests, strict=True))
                                                if pair[0] != pair[1]), None)  # fmt: skip
                rows.append(row)
                print(row)
            write("bad_rows", {**about(stream), "kinds": len(KINDS), "runs": rows})
    if any(row["missing"] or row["extra"] or row["first difference"] or row["counted"] < args.bad for row in rows):
        sys.exit("A list, a count or a batch is not what it should be.")


def plant(folder: Path, args: Args) -> set[str]:
    """Write the files; returns the places of the bad rows, as a list names them."""
    texts: list[str] = []
    for path in sorted((folder / "corpus").glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            text = json.loads(line)["text"]
            texts += [text[at : at + 200] for at in range(0, len(text), 200)]
    places = set(permute(args.rows, make_key("planted", 1), np.arange(args.bad)).tolist())
    found, per_file = set[str](), args.rows // FILES
    for number in range(FILES):
        path, at = folder / f"{number}.jsonl", 0
        with path.open("wb") as file:
            for row in range(per_file):
                place = number * per_file + row
                good = json.dumps({"text": texts[place % len(texts)]}).encode()
                line = KINDS[place % len(KINDS)] if place in places else good
                if place in places:
                    found.add(f"{path}, row {row}, byte {at}")
                file.write(line + b"\n")
                at += len(line) + 1
    return found


def recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"seed = 5\nlanes = {LANES}\n[batch]\nseq_len = 1024\nglobal_batch_size = 64\n[tokenizer]\n"
        'path = "corpus/tokenizer"\n[[sources]]\nname = "short"\npaths = ["?.jsonl"]\non_error = "skip"\nmax_bad = 0.05'
        '\n[run]\ncache = "cache"\n'
    )
    return path


def one_run(stream: Stream, folder: Path, ranks: int, planted: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Three parts on three numbers of ranks, with a file of skips a rank, until all lanes are in their second epoch."""
    started, digests, state = time.perf_counter(), list[str](), dict[str, bytes]()
    steps = 10 + 4 * sum(source.catalogue.bytes for source in stream.sources) // (3 * 1024 * 64)
    for part, (world, end) in enumerate(
        zip((ranks, LANES // ranks, ranks), (steps // 3, steps // 2, steps), strict=True)
    ):
        loaders = [stream.loader(rank, world) for rank in range(world)]
        writers = [SkipWriter(folder / f"{part}_{rank}.jsonl") for rank in range(world)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        while loaders[0].step < end:
            records = [loader.step_records() for loader in loaders]
            digests.append(step_digest({lane: lane_digest(mine) for one in records for lane, mine in one.items()}))
            for loader, writer in zip(loaders, writers, strict=True):
                writer.write(loader.take_skipped())
        state = {key: raw for loader in loaders for key, raw in loader.state_dict().items()}
        counted = sum(loader.stats().dropped["short"][BAD_ROW] for loader in loaders)
        for writer in writers:
            writer.close()
    # The byte of a fault lies within its row: its row says which it is.
    rows = {place.rsplit(",", 1)[0] for place in planted}
    listed = {skip.place.rsplit(",", 1)[0] for skip in read_skips(folder)}
    lines = sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
    row = {"ranks": f"{ranks}, {LANES // ranks}, {ranks}", "steps": steps, "planted": len(rows), "listed": len(listed)}
    row |= {"missing": len(rows - listed), "extra": len(listed - rows), "counted": counted, "lines": lines}
    return {**row, "counts agree": counted == lines, "s": round(time.perf_counter() - started, 1)}, digests


if __name__ == "__main__":
    main()
