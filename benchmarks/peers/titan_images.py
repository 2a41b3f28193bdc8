"""TorchTitan 0.3.0's own multimodal loader on tars; its functions for a sample and a batch also serve others.

Settings: as it ships; normalised float32 pixels, since it has no others, and M-RoPE positions as Qwen needs them. With
packing it gives only sequences that are full to the last position and keeps all else until the data ends, so that
figure is of one pass over half of the tars.
"""

import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import MARKS, MAX_PIXELS, MIN_PIXELS, Clock, Run, Work, look_images, main, memory_mb

IMAGES: dict[str, Any] = {
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip


def tokenizer_of(work: Work) -> Any:
    """The multimodal tokenizer of TorchTitan."""
    from torchtitan.components.tokenizer import MultiModalTokenizer

    return MultiModalTokenizer(MultiModalTokenizer.Config(**MARKS), tokenizer_path=work.tokenizer)


def sample_of(tokenizer: Any) -> Callable[[bytes, str], Any]:
    """TorchTitan's function from an image and its caption to a sample."""
    from torchtitan.hf_datasets.multimodal import mm_datasets

    more = IMAGES | {"max_patches": 4096, "max_patches_per_side": 512, "resize_fn": mm_datasets.resize_to_pixel_budget}
    process: Any = mm_datasets._process_cc12_wd_sample
    return lambda image, caption: process({"txt": caption, "jpg": image}, tokenizer, **more)


def collator_of(work: Work, tokenizer: Any, kind: Any = None) -> Any:
    """TorchTitan's function from samples to a batch."""
    from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator

    return (kind or MultiModalCollator)(
        batch_size=work.batch, seq_len=work.seq_len, max_images_per_batch=128, tokenizer=tokenizer,
        build_mrope_positions=True, patch_size=16, temporal_patch_size=2, spatial_merge_size=2,
    )  # fmt: skip


def titan(work: Work, clock: Clock) -> Run:
    from datasets import load_dataset
    from torchtitan.hf_datasets.multimodal.mm_datasets import MM_DATASETS, MMDataLoader

    packing, workers = work.options.get("packing", 0), work.options.get("workers", 0)
    clock.lap("imports")
    tokenizer = tokenizer_of(work)
    clock.lap("tokenizer")

    def load(_: str) -> Any:
        files = work.files("tar")
        files = files[: len(files) // 2] if packing else files
        return load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)

    MM_DATASETS["pairs"] = replace(MM_DATASETS["cc12m"], path="pairs", loader=load)
    config = MMDataLoader.Config(
        dataset="pairs", infinite=not packing, packing_buffer_size=packing, num_workers=workers,
        max_images_per_batch=128, build_mrope_positions=True, **IMAGES,
    )  # fmt: skip
    shape: Any = {"dp_world_size": 1, "dp_rank": 0, "seq_len": work.seq_len, "local_batch_size": work.batch}
    loader = MMDataLoader(config, tokenizer=tokenizer, **shape)
    if packing:
        finish = watch_packer(Path(work.folder, f"packer{os.getpid()}"), loader)  # before workers start
        return Run(iter(loader), look_images, finish, whole=True)

    def finish() -> dict[str, Any]:
        started = time.perf_counter()
        length = sum(len(raw) for raw in loader.state_dict().values() if isinstance(raw, bytes))
        return {"state_ms": round((time.perf_counter() - started) * 1e3, 3), "state_bytes": length}

    return Run(iter(loader), look_images, finish)


def watch_packer(notes: Path, loader: Any) -> Callable[[], dict[str, Any]]:
    """Note what each worker's packer gave before the data ended; its state then is pickled at the end."""
    from torchtitan.hf_datasets.multimodal.utils.packing import MMSamplePacker

    formed, held = list[int](), dict[int, Any]()
    merge, flush = MMSamplePacker._merge_samples, MMSamplePacker.flush

    def merged(samples: list[Any]) -> dict[str, Any]:
        formed.append(len(samples))
        return merge(samples)

    def flushed(self: Any) -> None:
        held.update(self._sample_buffer)
        note = {"samples": self._next_id, "sequences": len(formed), "waiting": len(held), "mb": memory_mb(os.getpid())}
        with notes.open("a") as file:
            file.write(json.dumps(note) + "\n")
        flush(self)

    MMSamplePacker._merge_samples, MMSamplePacker.flush = staticmethod(merged), flushed

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


if __name__ == "__main__":
    main(titan)
