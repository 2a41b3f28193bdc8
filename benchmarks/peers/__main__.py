"""Data loaders side by side, alternating in one session, each run in a process of its own.

python -m benchmarks.peers [--text FOLDER --tokenizer FOLDER] [--images FOLDER] [--rounds 3]

FOLDER of text holds `jsonl/` (objects with a field "text") and `parquet/`; of images `wds/` (WebDataset tars) and
`parquet/` (columns jpg and txt). README.md beside this file says what is measured and how.
"""

import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.peers import venvs
from benchmarks.peers.common import MEASURED, Work, memory_mb, shared_files
from benchmarks.peers.sides import BASE, YARDSTICK, Side, images, text
from benchmarks.report import write
from recipes.demo.corpus import build

HERE = Path(__file__).parent


@dataclass
class Args:
    """Compare data loaders."""

    text: Path | None = None
    """Folder with jsonl/ and parquet/; left out, a corpus and a tokenizer are made from this machine's texts."""
    tokenizer: Path | None = None
    """Folder with tokenizer.json and tokenizer_config.json."""
    images: Path | None = None
    """Folder with wds/ and parquet/; left out, images are not compared."""
    works: str = "TSV"
    """T: long documents, S: short ones, V: captioned images."""
    rounds: int = 3
    only: str = ""
    """Regular expression that names of sides must match."""
    scale: float = 1.0
    """Multiplies what every side does behind its warm-up."""
    limit_s: float = 120.0
    """Of one run."""
    keep: bool = False
    """Keep environments and converted data under .bench/peers for the next time."""


def own_corpus(args: Args) -> tuple[Path, Path]:
    """Folders of a corpus and a tokenizer from this machine's texts."""
    folder = venvs.ROOT / "data" / "own"
    if not (folder / "jsonl").exists():
        print("making a corpus:", build(folder / "made", 60.0, vocab=32_000), flush=True)
        config = folder / "made" / "tokenizer" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": None}))
        (folder / "jsonl").mkdir()
        for file in sorted(folder.glob("made/*/*.jsonl")):
            file.rename(folder / "jsonl" / f"{file.parent.name}-{file.name}")
    return args.text or folder, args.tokenizer or folder / "made" / "tokenizer"


def convert(venv: str, kind: str, source: str) -> str:
    """Run convert.py in an environment, unless its output is there; where it is."""
    out = venvs.ROOT / "data" / kind / hashlib.sha256(source.encode()).hexdigest()[:8]
    if not (out / ".done").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        print(f"writing {kind} to {out.relative_to(venvs.ROOT)}", flush=True)
        command = [venvs.python_of(venv), HERE / "convert.py", kind, source, out]
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment(out.parent))
        (out / ".done").touch()
    return str(out)


def environment(folder: Path) -> dict[str, str]:
    """Of every process: nothing of the caller's Python, no network, one OpenMP thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}


def in_process(work: Work, side: Side, limit_s: float) -> dict[str, Any]:
    """One side in a fresh process; what it says, and the most memory that it took with its workers."""
    command = [venvs.python_of(side.venv), HERE / f"{side.file}.py", json.dumps(asdict(work))]
    data, peak, started = b"", 0.0, time.monotonic()
    errors = Path(work.folder, "errors")
    with errors.open("w") as file:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, start_new_session=True, cwd=work.folder,
            env=environment(Path(work.folder)),
        )  # fmt: skip
    assert child.stdout is not None
    late, shared = False, set[Path]()
    while not (row := re.search(rb"^\{.*\}$", data, re.MULTILINE)) and not late:
        if select.select([child.stdout], [], [], 0.25)[0]:
            if not (more := os.read(child.stdout.fileno(), 1 << 16)):
                break
            data += more
            shared |= shared_files(child.pid)
        elif MEASURED.encode() not in data:
            peak = max(peak, memory_mb(child.pid))
        late = time.monotonic() - started > limit_s
    shared |= shared_files(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0 if row else 0.5)  # it may end well
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with all that it left running
    code = child.wait()
    for file in shared:
        file.unlink(missing_ok=True)
    child.stdout.close()
    if not row:
        said = [line for line in errors.read_text().strip().splitlines() if line.strip()][-3:]
        how = f"nothing after {limit_s:.0f} s" if late else f"exit code {code}"
        return {"failed": f"{how}: {' | '.join(said)[-600:]}"}
    return json.loads(row[0]) | {"peak_mb": round(peak, 1), "run_s": round(time.monotonic() - started, 1)}


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the runs of a side that did not fail."""
    good = [row for row in rows if "failed" not in row]
    return {name: round(statistics.median(row[name] for row in good), 12) for name in (good or [{}])[0]}


def show(letter: str, found: dict[str, dict[str, float]], failed: dict[str, str]) -> None:
    """A line a side; in brackets, how many times as much as ours with one lane."""
    base = found.get(BASE, {})
    unit, more, per = ("images/s", 1.0, "CPU ms/image") if letter == "V" else ("Mtok/s", 1e-6, "CPU s/Mtok")
    cost = 1e3 if letter == "V" else 1e6
    print(f"\n{letter:40}{unit:>16}{per:>18}{'first s':>9}{'peak MB':>9}{'imports s':>11}{'tokenizer s':>13}")
    for side, row in found.items():
        cells = ""
        for name, factor, width in (("per_s", more, 16), ("cpu_s_per_unit", cost, 18)):
            ratio = f" ({row[name] / base[name]:.2f})" if base else ""
            cells += f"{f'{row[name] * factor:.3g}{ratio}':>{width}}"
        cells += f"{row['first_batch_s']:9.2f}{row['peak_mb']:9.0f}{row['imports_s']:11.1f}{row['tokenizer_s']:13.1f}"
        print(f"{side:40}{cells}")
    for side, why in failed.items():
        print(f"{side:40}FAILED {why}")


def sides(args: Args, letter: str) -> dict[str, Side]:
    """What is compared on a work, by name."""
    every = images() if letter == "V" else text(letter == "S")
    return {name: side for name, side in every.items() if re.search(args.only, name)}


def compare(args: Args, letter: str, data: dict[str, str], tokenizer: Path, eos: int) -> dict[str, Any]:
    """All rounds of one work."""
    chosen = sides(args, letter)
    rounds = {name: list[dict[str, Any]]() for name in chosen}
    folder = venvs.ROOT / "data" / letter
    folder.mkdir(parents=True, exist_ok=True)
    for path in {path for place in data.values() for path in Path(place).iterdir() if path.is_file()}:
        path.read_bytes()  # into the page cache
    unit = "images" if letter == "V" else "tokens"
    for number in range(args.rounds):
        for name, side in chosen.items():
            amount = int(side.amount * args.scale)
            work = Work(data, str(tokenizer), eos, str(folder), amount, side.warm, unit, options=side.options)
            row = in_process(work, side, args.limit_s)
            rounds[name].append(row)
            told = row.get("failed") or f"{row['per_s']:,.0f} {unit}/s, CPU {row['cpu_s_per_unit'] * 1e6:.4g} µs each"
            print(f"{letter} round {number + 1}, {name}: {told}", flush=True)
    found = {name: middle for name, rows in rounds.items() if (middle := medians(rows))}
    failed = {name: row["failed"] for name, rows in rounds.items() for row in rows if "failed" in row}
    show(letter, found, failed)
    ratios = {
        name: {
            f"{what} to {other}": round(row[what] / found[other][what], 3)
            for what in ("per_s", "cpu_s_per_unit") for other in (BASE, YARDSTICK) if other in found
        } for name, row in found.items()
    }  # fmt: skip
    return {"medians": found, "ratios": ratios, "failed": failed, "rounds": rounds}


def main() -> None:
    args = tyro.cli(Args)
    venvs.ROOT.mkdir(parents=True, exist_ok=True)
    try:
        measure(args)
    finally:
        if not args.keep:
            shutil.rmtree(venvs.ROOT)


def measure(args: Args) -> None:
    """Make what is missing, compare, write down."""
    venvs.build("prototype")
    corpus, tokenizer = own_corpus(args) if args.text is None or args.tokenizer is None else (args.text, args.tokenizer)
    corpus, tokenizer = corpus.resolve(), tokenizer.resolve()
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    if config.get("bos_token"):
        raise SystemExit("The tokenizer adds BOS, which not all sides do: set bos_token to null in its config.")
    eos_token = config["eos_token"]
    added = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    eos = next(one["id"] for one in added if one["content"] == eos_token)

    works: dict[str, dict[str, str]] = {}
    jsonl = str(corpus / "jsonl")
    own = corpus / "parquet"
    if set(args.works) & set("TS"):
        parquet = str(own) if own.is_dir() else convert("prototype", "parquet", jsonl)
        works["T"] = {"jsonl": jsonl, "parquet": parquet}
    if "S" in args.works:
        short = Path(convert("prototype", "short", jsonl))
        works["S"] = {"jsonl": str(short / "jsonl"), "parquet": str(short / "parquet")}
    if "V" in args.works and args.images is None:
        print("images are not compared: --images is not given", flush=True)
    elif "V" in args.works:
        folder = args.images.resolve()
        works["V"] = {"tar": str(folder / "wds"), "parquet": str(folder / "parquet")}

    needed = {side.venv for letter in works for side in sides(args, letter).values()}
    unusable: dict[str, str] = {}
    for name in sorted(needed - {""}):
        try:
            venvs.build(name)
            if name.startswith("zephon"):
                venvs.check_zephon(name)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            unusable[name] = str(getattr(error, "stderr", "") or error)[-600:]
            print(f"the environment of {name} cannot be made: {unusable[name]}", flush=True)
    for letter, formats in works.items():
        kinds = {"energon": "energon"} | ({} if letter == "V" else {"mosaic": "mds", "litdata": "litdata"})
        source = formats["tar" if letter == "V" else "jsonl"]
        for venv, kind in kinds.items():
            if venv in needed and venv not in unusable:
                formats[kind] = convert(venv, kind, source)

    results = {letter: compare(args, letter, works[letter], tokenizer, eos) for letter in args.works if letter in works}
    data = {letter: {kind: about(Path(path)) for kind, path in works[letter].items()} for letter in results}
    pins = {name: venvs.requirements(name) for name in sorted(needed - {""})}
    command = " ".join(["python -m benchmarks.peers", *(Path(arg).name for arg in sys.argv[1:])])
    theme = "_".join(["peers", *results, *["some"] * bool(args.only)])
    write(theme, {"command": command, "data": data, "pins": pins, "unusable": unusable, **results})


def about(folder: Path) -> dict[str, int]:
    """How much a folder holds."""
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != ".done"]
    return {"files": len(sizes), "bytes": sum(sizes)}


if __name__ == "__main__":
    main()
