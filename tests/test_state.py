"""State bytes: whatever a lane can hold survives encoding, small and without loss."""

from hypothesis import given
from hypothesis import strategies as st

from zephon.state import LaneState, Position, Range, SourceState, encode_header, tag_of
from zephon.types import Ref

NUMBER = st.integers(0, 2**40)
REF = st.builds(Ref, st.integers(0, 20), NUMBER, NUMBER, st.integers(0, 1023), st.integers(0, 9))
RANGE = st.builds(Range, REF, NUMBER, NUMBER)
SOURCE = st.builds(
    SourceState,
    st.builds(Position, NUMBER, NUMBER, NUMBER, NUMBER),
    st.integers(-(2**60), 2**60),
    NUMBER,
    st.lists(NUMBER, max_size=4).map(tuple),
)
STATE = st.builds(
    LaneState,
    st.lists(SOURCE, min_size=1, max_size=5).map(tuple),
    st.none() | RANGE,
    st.lists(RANGE, max_size=5).map(tuple),
)
TAG = tag_of(encode_header({"step": 1}))


@given(STATE)
def test_encoding_is_exact(state: LaneState) -> None:
    assert LaneState.decode(state.encode(TAG)) == state


@given(STATE, STATE)
def test_equal_bytes_mean_equal_states(a: LaneState, b: LaneState) -> None:
    assert (a.encode(TAG) == b.encode(TAG)) == (a == b)


def test_two_sources_take_few_bytes() -> None:
    source = SourceState(Position(300, 200, 0, 0), -(2**50), 10**9, (3, 0, 1))
    state = LaneState((source, source), Range(Ref(1, 2, 5000, 60, 0), 2048, 9000))
    assert len(state.encode(TAG)) <= 80


def test_headers_are_canonical() -> None:
    assert encode_header({"b": 1, "a": [1, {"d": 2, "c": "\u00e9"}]}) == b'{"a":[1,{"c":"\\u00e9","d":2}],"b":1}'
