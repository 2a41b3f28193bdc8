"""Zephon of this repository: mixing, shuffling, packing and state are always on, as they are by default."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import MAX_PIXELS, MIN_PIXELS, Clock, Run, Work, look_text, main


def source(name: str, weight: float, **keys: Any) -> str:
    """A source of a recipe; JSON's strings, numbers and lists are TOML's too."""
    lines = (f"{key} = {json.dumps(value)}" for key, value in {"name": name, "weight": weight, **keys}.items())
    return "\n".join(["[[sources]]", *lines])


def recipe(work: Work, sources: list[str], packing: str) -> Path:
    """A recipe of these sources. The first global batch of many lanes is as large as their number."""
    options = work.options
    lanes = options.get("lanes", 1)
    path = Path(work.folder, f"recipe-{options['runner']}-{lanes}.toml")
    path.write_text("\n".join([f"""seed = 7
lanes = {lanes}
batch = {{seq_len = {work.seq_len}, global_batch_size = {max(work.batch, lanes)}}}
tokenizer = {{path = "{work.tokenizer}"}}
packing = {{algorithm = "{packing}"}}
run = {{runner = "{options["runner"]}", workers = {options.get("workers", 1)}, cache = "{work.folder}/cache"}}
""", *sources]))  # fmt: skip
    return path


def ours(work: Work, clock: Clock) -> Run:
    from modalities.tokenizer import TextTokenizer
    from zephon import Stream
    from zephon.modality import find_modality
    from zephon.recipe import TokenizerSpec

    images = work.unit == "images"
    find_modality("image_text" if images else "text")
    clock.lap("imports")
    tokenizer = TextTokenizer(TokenizerSpec(Path(work.tokenizer)))
    TextTokenizer.of = staticmethod(lambda *_: tokenizer)  # load it once
    clock.lap("tokenizer")
    files = work.files(work.options["format"])
    if images:
        keys = {"preset": "qwen3_5", "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
        keys["pixels"] = work.options.get("pixels", "uint8")
        path = recipe(work, [source("pairs", 1, paths=files, modality="image_text", **keys)], "best_fit")
    elif work.options.get("sources", 2) == 1:
        path = recipe(work, [source("a", 1, paths=files)], "concat")
    else:
        half = len(files) // 2
        both = [source("a", 0.7, paths=files[:half]), source("b", 0.3, paths=files[half:])]
        path = recipe(work, both, "concat")
    stream = Stream.open(path)
    loader = stream.loader(local_batch_size=work.batch)

    def look_images(batch: Any) -> dict[str, int]:
        counts = batch["grid_thw"].prod(axis=1)
        real = counts[counts > 4]  # the null image of a sequence without one has 4 patches
        pixels, labels = batch["pixel_values"], batch["labels"]
        return {"images": len(real), "patches": int(real.sum()), "pixel_bytes": pixels.nbytes, "slots": len(pixels),
                "sequences": len(labels)}  # fmt: skip

    def finish() -> dict[str, Any]:
        while not loader.between_steps:
            next(loader)
        started = time.perf_counter()
        state = loader.state_dict()
        row: dict[str, Any] = {"state_ms": round((time.perf_counter() - started) * 1e3, 3)}
        sizes = [len(raw) for key, raw in state.items() if key != "header"]
        row |= {"state_bytes": statistics.median(sizes), "state_bytes_largest": max(sizes)}
        stats = loader.stats()
        time.sleep(1)  # until threads have done what was begun
        started = time.perf_counter()
        resumed = stream.loader(local_batch_size=work.batch)
        resumed.load_state_dict(state)
        next(resumed)
        row["restore_s"] = round(time.perf_counter() - started, 4)
        return row | {"token_fill": round(stats.positions / (stats.positions + stats.padding), 4)}

    return Run(loader, look_images if images else look_text, finish)


if __name__ == "__main__":
    main(ours)
