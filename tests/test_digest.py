"""Digests: the bytes that are hashed, written out; the same whatever layout an array has in memory."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zephon.digest import lane_digest, step_digest

TYPES = st.sampled_from(["<i4", ">i4", "|u1", "<f4", ">i2", "<i8", "|b1", "<c16", "<U3"])
ARRAYS = TYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))
RECORDS = st.lists(st.dictionaries(st.sampled_from(["input", "labels", "größe", ""]), ARRAYS), max_size=3)


def spelt_out(records: list[dict[str, Any]]) -> bytes:
    def word(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    raw = b""
    for record in records:
        for name in sorted(record):
            array = np.atleast_1d(record[name])
            array = array.astype(array.dtype.newbyteorder("<"))
            for text in (name.encode(), array.dtype.str.encode()):
                raw += word(len(text)) + text
            raw += word(array.ndim) + b"".join(map(word, array.shape)) + array.tobytes()
    return hashlib.sha256(raw).digest()


@given(RECORDS)
def test_every_array_is_hashed_with_its_name_type_and_shape(records: list[dict[str, Any]]) -> None:
    assert lane_digest(records) == spelt_out(records)


@given(ARRAYS)
def test_layout_in_memory_and_byte_order_change_nothing(array: Any) -> None:
    other = [
        np.asfortranarray(array),
        array.astype(array.dtype.newbyteorder(">")),
        np.stack([array, array], -1)[..., 1],
    ]
    assert {lane_digest([{"a": one}]) for one in other} == {lane_digest([{"a": array}])}


def test_what_differs_in_type_shape_name_or_order_differs() -> None:
    same = [np.zeros(4, np.int32), np.zeros(4, np.uint32), np.zeros((2, 2), np.int32), np.zeros(16, np.uint8)]
    found = [lane_digest([{"a": one}]) for one in same] + [lane_digest([{"b": same[0]}]), lane_digest([])]
    found += [lane_digest([{"a": same[0]}, {"b": same[1]}]), lane_digest([{"a": same[0], "b": same[1]}, {}])]
    assert len(set(found)) == len(found) - 1  # where a record ends is not hashed, all its arrays are
    a, b = found[:2]
    assert step_digest({1: b, 0: a}) == hashlib.sha256(a + b).hexdigest() != step_digest({0: b, 1: a})


def test_python_objects_are_refused() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="'a' holds Python objects"):
            lane_digest([{"a": np.array([None, "x"], object)}])
