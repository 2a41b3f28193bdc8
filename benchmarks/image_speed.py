"""Captioned photographs to batches, beside TorchTitan's own loader and webdataset, alternating in one run.

    python -m benchmarks.image_speed FOLDER_OF_TARS --tokenizer FOLDER [--rounds 3]

All read the same WebDataset tars, in a process each, with the page cache warm: 256² to 512² pixels an image, patches of
16, 2 by 2 to a token, sequences of 2,048, batches of 8; webdataset with TorchTitan's text and collator. Figures are of
`images` images behind the first batch, ours behind 10 global steps, when open bins are full. TorchTitan's packer gives
only sequences without any padding and keeps all else until the data ends, so with packing it makes one pass over half
of the tars, of which its figures are. Imports and the tokenizer are timed apart; OMP_NUM_THREADS=1.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import tyro

from benchmarks.report import about, write
from zephon import Stream
from zephon.command.rehearse import process_tree

SEQ_LEN, BATCH, MIN_PIXELS, MAX_PIXELS, WARM_STEPS = 2048, 8, 256**2, 512**2, 10
MEASURED, BASE = "measured", "ours inline"

MARKS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>", "pad_token": "<|endoftext|>",
}  # fmt: skip

IMAGES: dict[str, Any] = {
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip
"""For TorchTitan's functions."""


@dataclass
class Args:
    tars: Annotated[Path, tyro.conf.Positional]
    tokenizer: Path
    rounds: int = 3
    images: int = 800
    limit_s: float = 300.0
    one: str = ""  # internal: run this side and print its figures
    folder: Path = Path()  # internal: for files that live as long as the run


class Run(NamedTuple):
    """A loader at work: its batches, what one of them holds, what to do last, and batches before figures count."""

    batches: Iterator[Any]
    look: Callable[[Any], dict[str, int]]
    finish: Callable[[], dict[str, Any]]
    warm: int = 1
    whole: bool = False


class Clock:
    """Seconds of wall clock and of CPU, of this process and its children, from lap to lap."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def lap(self, name: str) -> None:
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.row |= {f"{name}_s": round(wall - self._wall, 4), f"{name}_cpu_s": round(cpu - self._cpu, 3)}
        self._wall, self._cpu = wall, cpu


def cpu_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    ticks = 0
    for pid in process_tree(os.getpid()):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Memory of a process, what it shares counted in parts; without libraries, which other programs may share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1e3 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def ours(args: Args, clock: Clock, lanes: int = 1, **options: Any) -> Run:
    from modalities import image_text
    from modalities.tokenizer import TextTokenizer
    from zephon.recipe import TokenizerSpec

    clock.lap("imports")
    tokenizer = TextTokenizer(TokenizerSpec(args.tokenizer))
    image_text.TextTokenizer = lambda _: tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    clock.lap("tokenizer")
    stream = Stream.open(recipe(args, lanes, **options))
    loader = stream.loader(local_batch_size=BATCH)

    def look(batch: Any) -> dict[str, int]:
        counts = batch["grid_thw"].prod(axis=1)
        real = counts[counts > 4]  # the null image of a sequence without one has 4 patches
        pixels, most = batch["pixel_values"], len(counts) * int(counts.max())
        held = {"images": len(real), "patches": int(real.sum()), "pixel_bytes": pixels.nbytes, "slots": len(pixels)}
        return held | {"device_slots": most}  # padded as models take it

    def finish() -> dict[str, Any]:
        while not loader.between_steps:
            next(loader)
        started = time.perf_counter()
        state = loader.state_dict()
        took = time.perf_counter() - started
        sizes = [len(raw) for key, raw in state.items() if key != "header"]
        stats = loader.stats()
        time.sleep(2)  # until threads have done what was begun
        started = time.perf_counter()
        resumed = stream.loader(local_batch_size=BATCH)
        resumed.load_state_dict(state)
        next(resumed)
        return {
            "restore_s": round(time.perf_counter() - started, 4),
            "state_ms": round(took * 1e3, 3),
            "token_fill": round(stats.positions / (stats.positions + stats.padding), 4),
            "state_bytes": statistics.median(sizes),
            "state_bytes_largest": max(sizes),
        }

    return Run(loader, look, finish, warm=WARM_STEPS * stream.batch.global_batch_size // BATCH + 3)  # 3: of threads


def recipe(args: Args, lanes: int = 1, runner: str = "inline", workers: int = 1, pixels: str = "uint8") -> Path:
    (path := args.folder / "recipe.toml").write_text(f"""seed = 7
lanes = {lanes}
batch = {{seq_len = {SEQ_LEN}, global_batch_size = {max(BATCH, lanes)}}}
tokenizer = {{path = "{args.tokenizer}"}}
packing = {{algorithm = "best_fit"}}
run = {{runner = "{runner}", workers = {workers}, cache = "{args.folder}/cache"}}
[[sources]]
name = "pairs"
paths = ["{args.tars}/*.tar"]
modality = "image_text"
preset = "qwen3_5"
pixels = "{pixels}"
min_pixels = {MIN_PIXELS}
max_pixels = {MAX_PIXELS}
""")
    return path


def look_padded(batch: Any) -> dict[str, int]:
    """At a batch of TorchTitan's collator; every sample has one image, and its positions count from 0."""
    pixels, counts = batch[0]["pixel_values"], batch[0]["grid_thw"].prod(dim=1)
    images, slots = len(counts), pixels.shape[0] * pixels.shape[1]
    positions = int(batch[0]["positions"].count_nonzero()) + images
    held = {"images": images, "patches": int(counts.sum()), "pixel_bytes": pixels.nbytes, "slots": slots}
    return held | {"device_slots": slots, "positions": positions}


def titan(args: Args, clock: Clock, packing: int = 0, workers: int = 0) -> Run:
    from datasets import load_dataset
    from torchtitan.components.tokenizer import MultiModalTokenizer
    from torchtitan.hf_datasets.multimodal.mm_datasets import MM_DATASETS, MMDataLoader

    clock.lap("imports")
    tokenizer = MultiModalTokenizer(MultiModalTokenizer.Config(**MARKS), tokenizer_path=str(args.tokenizer))
    clock.lap("tokenizer")

    def load(path: str) -> Any:
        files = sorted(map(str, Path(path).glob("*.tar")))
        files = files[: len(files) // 2] if packing else files
        return load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)

    MM_DATASETS["pairs"] = replace(MM_DATASETS["cc12m"], path=str(args.tars), loader=load)
    config = MMDataLoader.Config(
        dataset="pairs", infinite=not packing, packing_buffer_size=packing, num_workers=workers,
        max_images_per_batch=128, build_mrope_positions=True, **IMAGES,
    )  # fmt: skip
    shape: Any = {"dp_world_size": 1, "dp_rank": 0, "seq_len": SEQ_LEN, "local_batch_size": BATCH}
    loader = MMDataLoader(config, tokenizer=tokenizer, **shape)
    if packing:
        finish = watch_packer(args.folder / f"packer{os.getpid()}", loader)  # before workers start
        return Run(iter(loader), look_padded, finish, whole=True)

    def finish() -> dict[str, Any]:
        started = time.perf_counter()
        length = sum(len(raw) for raw in loader.state_dict().values() if isinstance(raw, bytes))
        return {"state_ms": round((time.perf_counter() - started) * 1e3, 3), "state_bytes": length}

    return Run(iter(loader), look_padded, finish)


def watch_packer(notes: Path, loader: Any) -> Callable[[], dict[str, Any]]:
    """Note what each worker's packer gave before the data ended; its state then is pickled at the end."""
    from torchtitan.hf_datasets.multimodal.utils.packing import MMSamplePacker

    formed, held = list[int](), dict[int, Any]()
    merge, flush = MMSamplePacker._merge_samples, MMSamplePacker.flush

    def merged(samples: list[Any]) -> dict[str, Any]:
        formed.append(len(samples))
        return merge(samples)

    def flushed(self: MMSamplePacker) -> None:
        held.update(self._sample_buffer)
        note = {"samples": self._next_id, "sequences": len(formed), "waiting": len(held), "mb": memory_mb(os.getpid())}
        with notes.open("a") as file:
            file.write(json.dumps(note) + "\n")
        flush(self)

    MMSamplePacker._merge_samples, MMSamplePacker.flush = staticmethod(merged), flushed  # pyright: ignore

    def finish() -> dict[str, Any]:
        told = [json.loads(line) for line in notes.read_text().splitlines()]
        row = {f"packer_{name}": sum(one[name] for one in told) for name in told[0]}
        if held:  # without workers
            loader.dataset.packer._sample_buffer = held
            started, size = time.perf_counter(), Counter[str]()
            sink: Any = SimpleNamespace(write=lambda data: size.update(state_bytes=memoryview(data).nbytes))
            pickle.Pickler(sink).dump(loader.dataset.state_dict())
            row |= {**size, "state_ms": round((time.perf_counter() - started) * 1e3, 1)}
        return row

    return finish


def web(args: Args, clock: Clock, our_images: bool = False, workers: int = 0) -> Run:
    """The tars read by webdataset; text, tokens and padding by TorchTitan's functions."""
    from torchtitan.components.tokenizer import MultiModalTokenizer
    from torchtitan.hf_datasets.multimodal import mm_datasets
    from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
    from webdataset.compat import WebDataset, WebLoader

    collator = with_our_images(MultiModalCollator, mm_datasets) if our_images else MultiModalCollator
    clock.lap("imports")
    tokenizer = MultiModalTokenizer(MultiModalTokenizer.Config(**MARKS), tokenizer_path=str(args.tokenizer))
    clock.lap("tokenizer")
    more: Any = IMAGES | {"max_patches": 4096, "max_patches_per_side": 512}
    more["resize_fn"] = mm_datasets.resize_to_pixel_budget

    def sample(row: dict[str, bytes]) -> Any:
        pair = {"txt": row["txt"].decode(), "jpg": row["jpg"]}
        return mm_datasets._process_cc12_wd_sample(pair, tokenizer, **more)

    collate = collator(
        batch_size=BATCH, seq_len=SEQ_LEN, max_images_per_batch=128, tokenizer=tokenizer, build_mrope_positions=True,
        patch_size=16, temporal_patch_size=2, spatial_merge_size=2,
    )  # fmt: skip
    opened: Any = WebDataset(sorted(map(str, args.tars.glob("*.tar"))), shardshuffle=False).repeat()
    rows = opened.map(sample).batched(BATCH, collation_fn=collate)
    return Run(iter(WebLoader(rows, batch_size=None, num_workers=workers)), look_padded, dict)


def with_our_images(collator: Any, mm_datasets: Any) -> Any:
    """A collator of padded uint8 patches, once an image; TorchTitan's sample function takes our pixels."""
    import torch

    from modalities.images import PRESETS, load, patchify, read_size
    from modalities.media import Bytes

    geometry = replace(PRESETS["qwen3_5"], min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)

    def process(image: bytes, **_: Any) -> Any:
        return torch.from_numpy(load(image, geometry.target(*read_size(Bytes(image)))))[None]

    class Collator(collator):
        def collate_images(self, all_images: list[Any]) -> Any:
            sizes = [tuple(image.shape[1:3]) for image in all_images]
            counts = [geometry.patches(*size) for size in sizes]
            out = torch.zeros(len(sizes), max(counts), 3 * geometry.patch_size**2, dtype=torch.uint8)
            for padded, count, image in zip(out, counts, all_images, strict=True):
                patchify(image[0].numpy(), geometry, padded[:count].numpy())
            return out, torch.tensor([geometry.grid(*size) for size in sizes])

    mm_datasets.process_image = process
    return Collator


SIDES: dict[str, tuple[Callable[..., Run], dict[str, Any]]] = {
    BASE: (ours, {}),
    "ours float32": (ours, {"pixels": "float32"}),
    "ours threads 2": (ours, {"runner": "threads", "workers": 2}),
    "ours 64 lanes": (ours, {"lanes": 64}),
}
for _workers, _more in ((0, ""), (2, ", 2 workers")):
    SIDES[f"titan{_more}"] = titan, {"workers": _workers}
    SIDES[f"titan packed{_more}"] = titan, {"workers": _workers, "packing": 100}
    SIDES[f"webdataset{_more}"] = web, {"workers": _workers}
    SIDES[f"webdataset, our images{_more}"] = web, {"workers": _workers, "our_images": True}


def run_one(args: Args) -> None:
    """Print that the figures are taken, so that memory is no longer watched, then all figures."""
    clock, seen = Clock(), Counter[str]()
    maker, options = SIDES[args.one]
    run = maker(args, clock, **options)
    clock.row["base_mb"] = round(sum(map(memory_mb, process_tree(os.getpid()))), 1)
    batch = next(run.batches)
    clock.lap("first_batch")
    for _ in range(run.warm - 1):
        batch = next(run.batches)
    clock.lap("warm")
    if run.whole:
        seen.update(batches=1, **run.look(batch))
    for batch in run.batches:
        seen.update(batches=1, **run.look(batch))
        if seen["images"] >= args.images and not run.whole:
            break
    clock.lap("steady")
    print(MEASURED, flush=True)
    wall, cpu = (clock.row[f"steady{kind}"] + run.whole * clock.row[f"first_batch{kind}"] for kind in ("_s", "_cpu_s"))
    row: dict[str, Any] = {**clock.row, **seen, "images_per_s": round(seen["images"] / wall, 2)}
    row["cpu_ms_per_image"] = round(cpu / seen["images"] * 1e3, 3)
    row["patch_fill"] = round(seen["patches"] / seen["slots"], 4)
    row["patch_fill_on_device"] = round(seen["patches"] / seen["device_slots"], 4)
    row["token_fill"] = round(seen["positions"] / (seen["batches"] * BATCH * SEQ_LEN), 4)
    print(json.dumps(row | run.finish()), flush=True)


def in_process(args: Args, side: str) -> dict[str, Any]:
    """One side in a fresh process; what it says, and the most memory that it took with its workers."""
    command = [sys.executable, "-m", "benchmarks.image_speed", str(args.tars), "--one", side, "--tokenizer"]
    command += [str(args.tokenizer), "--images", str(args.images), "--folder", str(args.folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(args.folder / "hf"), "HF_HUB_OFFLINE": "1"}
    data, peak, end = b"", 0.0, time.monotonic() + args.limit_s
    with (args.folder / "errors").open("w") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, start_new_session=True)
        assert child.stdout is not None
        while True:
            if select.select([child.stdout], [], [], 0.25)[0]:
                if not (more := os.read(child.stdout.fileno(), 1 << 16)):
                    break
                data += more
            if MEASURED.encode() not in data:
                peak = max(peak, sum(map(memory_mb, process_tree(child.pid))))
            if time.monotonic() > end:
                os.killpg(child.pid, signal.SIGKILL)
    if code := child.wait():
        said = (args.folder / "errors").read_text().strip().splitlines()[-1:]
        return {"failed": f"exit code {code} after {time.monotonic() - end + args.limit_s:.0f} s: {said}"}
    return json.loads(data.splitlines()[-1]) | {"peak_mb": round(peak, 1)}


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    good = [row for row in rows if "failed" not in row]
    return {name: round(statistics.median(row[name] for row in good), 4) for name in (good or [{}])[0]}


def show(found: dict[str, dict[str, float]]) -> None:
    """A line a side; in brackets, how many times as much as ours inline."""
    print(f"{'':34}{'images/s':>15}{'CPU ms/image':>16}{'first s':>9}{'peak MB':>14}{'tokens':>9}{'patches':>9}  state")
    for side, row in found.items():
        speed, cost, memory = (
            f"{row[name]:.{digits}f} ({row[name] / found[BASE][name]:.2f})"
            for name, digits in (("images_per_s", 0), ("cpu_ms_per_image", 2), ("peak_mb", 0))
        )
        state = f"{row['state_bytes']:,.0f} B, {row['state_ms']:.1f} ms" if "state_bytes" in row else "-"
        state += f", restore {row['restore_s']:.2f} s" if "restore_s" in row else ""
        fill = f"{row['token_fill']:9.1%}{row['patch_fill']:9.1%}"
        print(f"{side:34}{speed:>15}{cost:>16}{row['first_batch_s']:9.2f}{memory:>14}{fill}  {state}")


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        run_one(args)
        return
    args.tars, args.tokenizer = args.tars.resolve(), args.tokenizer.resolve()
    rounds = {side: list[dict[str, Any]]() for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for tar in args.tars.glob("*.tar"):
            tar.read_bytes()  # into the page cache
        print("warm-up, and index:", in_process(args, BASE), flush=True)
        for number in range(args.rounds):
            for side, rows in rounds.items():
                rows.append(in_process(args, side))
                print(number + 1, side, rows[-1], flush=True)
        found = {side: middle for side, rows in rounds.items() if (middle := medians(rows))}
        show(found)
        with Stream.open(recipe(args)) as stream:
            write("image_speed", {**about(stream), "images": args.images, "medians": found, "rounds": rounds})


if __name__ == "__main__":
    main()
