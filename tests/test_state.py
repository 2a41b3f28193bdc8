"""State bytes: whatever a lane can hold survives encoding, small and without loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import RestoreError
from zephon.state import LaneState, Position, Range, SourceState, encode_header, tag_of
from zephon.types import Ref

NUMBER = st.integers(0, 2**40)
REF = st.builds(Ref, st.integers(0, 20), NUMBER, NUMBER, st.integers(0, 1023), st.integers(0, 9))
RANGE = st.builds(lambda ref, start, length: Range(ref, start, start + length), REF, NUMBER, NUMBER)
SOURCE = st.builds(
    SourceState,
    st.builds(Position, NUMBER, NUMBER, NUMBER),
    NUMBER,
    st.integers(-(2**60), 2**60),
    NUMBER,
    st.lists(NUMBER, max_size=4).map(tuple),
)
STATE = st.builds(
    LaneState,
    st.lists(SOURCE, min_size=21, max_size=22).map(tuple),
    st.none() | RANGE,
    st.lists(st.lists(RANGE, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)
HEADER = encode_header({"step": 1})
TAG = tag_of(HEADER)


@given(STATE)
def test_encoding_is_exact(state: LaneState) -> None:
    assert LaneState.decode("lane_00003", state.encode("lane_00003", TAG), HEADER) == state


@given(STATE, st.data())
def test_damage_and_exchange_are_always_seen(state: LaneState, data: st.DataObject) -> None:
    raw = state.encode("lane_00003", TAG)
    with pytest.raises(RestoreError, match="another lane's"):
        LaneState.decode("lane_00004", raw, HEADER)
    with pytest.raises(RestoreError, match="mixes two saves"):
        LaneState.decode("lane_00003", raw, HEADER + b" ")
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RestoreError, match="cut, damaged"):
        LaneState.decode("lane_00003", bytes(flipped), HEADER)
    for wrong in (raw[: data.draw(st.integers(0, len(raw) - 1))], raw + b"\0"):
        with pytest.raises(RestoreError, match="cut, damaged"):
            LaneState.decode("lane_00003", wrong, HEADER)


@given(STATE, STATE)
def test_equal_bytes_mean_equal_states(a: LaneState, b: LaneState) -> None:
    assert (a.encode("x", TAG) == b.encode("x", TAG)) == (a == b)


def test_two_sources_take_few_bytes() -> None:
    source = SourceState(Position(300, 200, 0), 0, -(2**50), 10**9, (3, 0, 1))
    state = LaneState((source, source), Range(Ref(1, 2, 5000, 60, 0), 2048, 9000))
    assert len(state.encode("lane_00000", TAG)) <= 84


def test_headers_are_canonical() -> None:
    assert encode_header({"b": 1, "a": [1, {"d": 2, "c": "\u00e9"}]}) == b'{"a":[1,{"c":"\\u00e9","d":2}],"b":1}'
