"""Token ids, grids and pixels beside `transformers`' own Qwen2-VL processor."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from modalities.geometry import expand
from modalities.presets import PRESETS
from recipes.demo.corpus import train_tokenizer
from recipes.demo.pictures import MARKS, build_pairs
from zephon import Stream
from zephon.types import Measured, Ref, Sample, Segment

RECIPE = """
lanes = 1
[batch]
seq_len = 512
global_batch_size = 1
[tokenizer]
path = "tokenizer"
bos = false
eos = false
[[sources]]
name = "pairs"
paths = ["pairs/*.tar"]
modality = "image_text"
preset = "qwen2_vl"
[shuffle]
window = 0
[packing]
algorithm = "best_fit"
[run]
cache = "cache"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    build_pairs(path / "pairs", 40, shards=1)
    train_tokenizer(
        ["The top left of a picture of grace hopper, 87 percent of it, mirrored."], path / "tokenizer", 400, MARKS
    )
    (path / "recipe.toml").write_text(RECIPE)
    return path


def test_a_sample_is_what_the_processor_makes_of_it(folder: Path) -> None:
    preset = PRESETS["qwen2_vl"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer" / "tokenizer.json"))
    pixels = {"shortest_edge": preset.geometry.min_pixels, "longest_edge": preset.geometry.max_pixels}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=pixels), tokenizer, Qwen2VLVideoProcessor(), chat_template=""
    )
    with Stream.open(folder / "recipe.toml") as stream:
        source = stream.sources[0]
        rows = source.reader.read(np.arange(40))
        measured = source.modality.measure(rows)
        for i, (row, payload) in enumerate(zip(rows, measured.payloads, strict=True)):
            image = Image.open(io.BytesIO(row["jpg"].read()))  # type: ignore[attr-defined]
            text = f"<|vision_start|><|image_pad|><|vision_end|>{row['txt']}"
            theirs = processor(text=[text], images=[image], return_tensors="pt")
            assert theirs["input_ids"][0].tolist() == payload.ids.tolist()
            batch = source.modality.materialise([[whole(measured, i)]])
            assert theirs["image_grid_thw"].tolist() == batch["grid_thw"].tolist()
            ours = expand(torch.from_numpy(batch["pixel_values"]), preset.geometry, preset.mean, preset.std)
            levels = (ours - theirs["pixel_values"]).abs().mean() * 255 * min(preset.std)
            assert levels < 2
            shown = [token for token, trained in zip(payload.ids, payload.trained, strict=True) if trained]
            assert tokenizer.decode(shown) == row["txt"]


def whole(measured: Measured, i: int) -> Segment:
    """All positions of sample `i`."""
    sample = Sample(Ref(0, 0, 0, i, 0), measured.positions[i], measured.payloads[i], atoms=measured.atoms[i])
    return Segment(sample, 0, measured.positions[i])
