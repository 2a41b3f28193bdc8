"""Images and text together: placeholders that stay whole, marks that fit, and the same arrays on every rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_worlds import PAD

from cases.makers import (
    UNIT,
    colour,
    corpus,
    delivered,
    exactly,
    images,
    law,
    lines,
    near,
    pairs,
    ranks,
    recipe,
    records,
    samples_of,
    seen,
    source,
    tar,
    tile,
    write,
)
from zephon import Stream

WHOLE = '[packing]\nalgorithm = "best_fit"\n'


def marked(folder: Path, rows: list[tuple[str, list[str]]], **more: Any) -> str:
    """A source of JSONL with texts, whose marks say where images go, and their paths."""
    lines(folder / "docs.jsonl", [json.dumps({"text": text, "images": paths}).encode() for text, paths in rows])
    return images("docs.jsonl", layout="marker", image="images", **more)


# --- VLM-1 ---------------------------------------------------------------------------------------------------------

SIDES = {0: 4 * UNIT, 1: 10 * UNIT, 2: 20 * UNIT, 3: UNIT}
"""Sides of pictures: 16, 100, 400 and 1 tokens."""

PART = st.one_of(st.sampled_from([f"img/{n}.png" for n in SIDES]), st.integers(1, 250))
ROW = st.lists(PART, min_size=1, max_size=4).filter(lambda parts: any(isinstance(one, str) for one in parts))


@law(15)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5),
    over=st.sampled_from(["split", "shrink", "drop"]),
    packing=st.sampled_from(["concat", "best_fit"]),
    whole=st.booleans(),
)
def test_images_are_whole_or_absent_at_every_length(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str | int]], over: str, packing: str, whole: bool
) -> None:
    """A length limit cut through the placeholders of an image while its pixels stayed: the model stopped.

    https://github.com/hiyouga/LlamaFactory/issues/5964, https://github.com/huggingface/trl/pull/5904
    """
    folder = tmp_path_factory.mktemp("cut")
    for n, side in SIDES.items():
        write(folder / f"img/{n}.png", tile(n, "PNG", side, side))
    made = [("<image> end", ["img/3.png"])]
    for parts in rows:
        text = "".join("<image>" if isinstance(one, str) else exactly("", one) for one in parts)
        made.append((text + " end", [one for one in parts if isinstance(one, str)]))
    keys = {"over_budget": over, "keep_whole": whole}
    path = recipe(folder, marked(folder, made, **keys), seq_len=256, more=f'[packing]\nalgorithm = "{packing}"\n')
    found, loader = records(path)
    shown = 0
    for record in found:
        patches = int(record["grid_thw"].prod(axis=1).sum())
        assert int((record["input"] == PAD).sum()) == patches // 4
        assert len(record["pixel_values"]) == patches
        assert not np.isin(record["labels"], [PAD, PAD - 1, PAD + 1]).any()
        shown += sum(record["pixel_values"][at].any() for at in _firsts(record))  # null images are black
    there, dropped = sum(len(paths) for _, paths in made), loader.stats().dropped["s"]["over budget"]
    assert shown < there if dropped else shown == there
    assert over == "drop" or not dropped


def _firsts(record: Any) -> list[int]:
    """The first patch of each image."""
    sizes = record["grid_thw"].prod(axis=1)
    return (np.cumsum(sizes) - sizes).tolist()


def test_an_image_that_no_sequence_holds_is_scaled_or_counted(tmp_path: Path) -> None:
    """400 tokens do not fit into 256: by default the picture is made smaller, and that is counted.

    https://github.com/hiyouga/LlamaFactory/issues/5964
    """
    write(tmp_path / "img/2.png", tile(2, "PNG", SIDES[2], SIDES[2]))
    write(tmp_path / "img/3.png", tile(3, "PNG"))
    rows = [("<image> large", ["img/2.png"]), ("<image> small", ["img/3.png"])]
    found, about = seen(recipe(tmp_path, marked(tmp_path, rows), more=WHOLE, seq_len=256))
    assert {one.text.strip(): near(one.pictures[0], colour(2 + (one.text.strip() == "small")), 1) for one in found} == {
        "large": True, "small": True,
    }  # fmt: skip
    assert (about.counts["s"]["shrunk to fit"], about.counts["s"]["over budget"]) == (1, 0)
    found, about = seen(recipe(tmp_path, marked(tmp_path, rows, over_budget="drop"), more=WHOLE, seq_len=256))
    assert [one.text.strip() for one in found] == ["small"]
    assert about.counts["s"]["over budget"] == 1


# --- VLM-2 ---------------------------------------------------------------------------------------------------------

A, B = "img/0.jpg", "img/1.jpg"
ROWS = [
    ("<image> ok", [A]),
    ("no mark", [A]),
    ("<image> no image", []),
    ("<image><image><image> three marks", [A]),
    ("<image> one of two", [A, B]),
    ("<image> and <image> ok", [A, B]),
    ("write `<image>` in HTML", []),
    ("<image> gone", ["img/none.jpg"]),
    ("<image> outside", ["../secret.jpg"]),
    ("<image> outside", ["/etc/hostname"]),
    ("<image> net", ["https://example.org/x.jpg"]),
    ("<IMAGE> case", [A]),
]
SAYS = {
    1: "its text has 0 times '<image>', but there are 1 images", 2: "list of images is empty",
    3: "its text has 3 times '<image>', but there are 1 images",
    4: "its text has 1 times '<image>', but there are 2 images", 6: "list of images is empty",
    7: "img/none.jpg: No such file", 8: "../secret.jpg leads out of", 9: "/etc/hostname leads out of",
    10: "not fetched from the net", 11: "its text has 0 times",
}  # fmt: skip


def test_marks_and_images_that_do_not_fit_are_bad_rows_with_both_numbers(tmp_path: Path) -> None:
    """A text had no placeholder for its image, or more of them than images; training stopped in the model.

    https://github.com/hiyouga/LlamaFactory/issues/5329
    """
    for n in range(2):
        write(tmp_path / f"img/{n}.jpg", tile(n))
    write(tmp_path.parent / "secret.jpg", tile(7))
    found, about = seen(recipe(tmp_path, marked(tmp_path, ROWS), more=WHOLE, seq_len=256))
    assert sorted((one.text, len(one.pictures)) for one in found) == [(" and  ok", 2), (" ok", 1)]
    reasons = {int(skip.place.split("row ")[1].split(",")[0]): skip.reason for skip in about.skipped}
    assert reasons.keys() == SAYS.keys()
    assert all(SAYS[i] in reason for i, reason in reasons.items())


@pytest.mark.parametrize("spelled", ["<image>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
def test_marks_in_ordinary_text_are_text(tmp_path: Path, spelled: str) -> None:
    """The words "<image>" in a source of text became a placeholder without an image.

    https://github.com/sgl-project/sglang/issues/3819
    """
    text = f"write `{spelled}` in HTML"
    lines(tmp_path / "x.jsonl", [json.dumps({"text": text}).encode()])
    assert delivered(recipe(tmp_path, source("x.jsonl"))).texts == [text]
    tar(tmp_path / "p.tar", [("a.jpg", tile(1)), ("a.txt", text.encode())])  # in a mixed stream, and as a caption
    mixed = recipe(tmp_path, source("x.jsonl", name="t"), images("p.tar"), seq_len=256, more=WHOLE)
    found, _ = records(mixed)
    texts = sorted((one.text, len(one.pictures)) for record in found for one in samples_of(record))
    assert texts == [(text, 0), (text, 1)]
    assert sum(int((record["input"] == PAD).sum()) for record in found) == 1


# --- VLM-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("weight", [1, 30])
def test_every_rank_has_an_image_at_every_step(tmp_path: Path, packing: str, weight: int) -> None:
    """One rank got only text and another images: vision parameters were gathered on some ranks only, and the job hung.

    Here each sequence without an image ends in a null image, so a collective of the vision tower always has all ranks.

    https://github.com/modelscope/ms-swift/issues/4918, https://github.com/hiyouga/LlamaFactory/issues/5616,
    https://github.com/QwenLM/Qwen3-VL/issues/126
    """
    corpus(tmp_path / "text", 2, 30)
    tar(tmp_path / "pairs.tar", pairs(20))
    path = recipe(tmp_path, source("text/*.jsonl", name="t", weight=weight), images("pairs.tar"), lanes=4, size=4,
                  seq_len=64, more=f'[packing]\nalgorithm = "{packing}"\n')  # fmt: skip
    without = 0
    with Stream.open(path) as stream:
        loaders = ranks(stream, 4)
        for _ in range(50):
            batches = [next(loader) for loader in loaders]
            assert len({tuple(sorted((name, array.dtype.str) for name, array in one.items())) for one in batches}) == 1
            assert all(len(batch["grid_thw"]) >= 1 for batch in batches)
            for batch in batches:
                assert (batch["labels"][batch["input"] == PAD] == -100).all()
                assert (batch["labels"] != -100).any()
                if not batch["pixel_values"].any():  # the null image: one token, black
                    without += 1
                    assert batch["grid_thw"].tolist() == [[1, 2, 2]]
                    assert int((batch["input"] == PAD).sum()) == 1
    assert without > 0 if weight == 30 else without < 200
