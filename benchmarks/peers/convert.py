"""Make what some sides read from a folder of JSONL: Parquet, short documents, and formats of peers that read no other.

    python convert.py parquet|short|mds|litdata|energon FOLDER_OF_JSONL OUT

No part of any figure. Runs in the environment of the peer whose format it writes; `energon` also takes a folder of
tars.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MEAN = 195
"""Characters of a short document: about 60 tokens."""


def documents(file: str) -> Iterator[dict[str, str]]:
    """The texts of one file."""
    with Path(file).open(encoding="utf-8") as lines:
        for line in lines:
            yield {"text": json.loads(line)["text"]}


def shortened(file: str) -> Iterator[dict[str, str]]:
    """The same texts cut at line ends into documents of lengths as real short ones have: many tiny, few long."""
    draw = random.Random(Path(file).name)
    for document in documents(file):
        held, wanted = "", draw.expovariate(1 / MEAN)
        for line in document["text"].splitlines(keepends=True):
            held += line
            if len(held) >= wanted:
                if held.strip():
                    yield {"text": held.strip("\n")}
                held, wanted = "", draw.expovariate(1 / MEAN)
        if held.strip():
            yield {"text": held.strip("\n")}


def write(kind: str, file: str, out: Path) -> None:
    """One shard of Parquet, in groups of about 1 MiB of short documents; of short ones the same as JSONL too."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    rows = list((shortened if kind == "short" else documents)(file))
    name = Path(file).stem
    target = out / "parquet" if kind == "short" else out
    target.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": [row["text"] for row in rows]})
    write_table(table, target / f"{name}.parquet", row_group_size=4000 if kind == "short" else 1000, compression="zstd")
    if kind == "short":
        (out / "jsonl").mkdir(exist_ok=True)
        with (out / "jsonl" / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def prepare(folder: Path, out: Path) -> None:
    """One file of JSONL, or tars of captioned images, with Energon's index beside it."""
    command = [Path(sys.executable).parent / "energon", "prepare", "--non-interactive", "--no-progress"]
    if tars := sorted(folder.glob("*.tar")):
        for tar in tars:
            shutil.copy(tar, out)
        command += ["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
        command += ["--field-map", '{"image": "jpg", "caption": "txt"}', out]
    else:
        with (out / "docs.jsonl").open("wb") as whole:
            for file in sorted(folder.glob("*.jsonl")):
                whole.write(file.read_bytes())
        command += [out / "docs.jsonl"]
    subprocess.run(command, check=True)


def main() -> None:
    kind, folder, out = sys.argv[1:]
    files = sorted(map(str, Path(folder).glob("*.jsonl")))
    if kind == "mds":
        from streaming import MDSWriter

        with MDSWriter(out=out, columns={"text": "str"}) as writer:  # not compressed: cheapest to read
            for file in files:
                for document in documents(file):
                    writer.write(document)
    elif kind == "litdata":
        from litdata import optimize

        optimize(documents, files, out, num_workers=1, chunk_bytes="64MB", start_method="fork")
    elif kind == "energon":
        prepare(Path(folder), Path(out))
    else:
        for file in files:
            write(kind, file, Path(out))


if __name__ == "__main__":
    main()
