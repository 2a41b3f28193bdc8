"""What a resume reads: lane states, the header, the recipe, skip lists."""

import copy
import json
from pathlib import Path
from typing import Any

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import LossError, equal, refused
from zephon.errors import RecipeError, RestoreError, UsageError
from zephon.recipe import Recipe
from zephon.restore import batch_sizes, compare_headers
from zephon.run.skips import read_skips
from zephon.state import LaneState, Position, Range, SourceState, _checksum, encode_header, tag_of  # pyright: ignore[reportPrivateUsage]
from zephon.types import Ref

RUNNING: dict[str, Any] = {
    "format": 2, "step": 0, "lanes": 4, "global_batch_size": 8, "seq_len": 32,
    "order": {"version": 1, "seed": 7, "sources": [{"name": "a", "catalogue": {"rows": 3}, "options": {}}]},
    "mix": {"weights": {"a": "0.7"}, "sources": ["a"]}, "packing": {"algorithm": "concat"},
}  # fmt: skip
HEADER = encode_header({**RUNNING, "step": 5})
STATE = LaneState(
    (SourceState(Position(3, 2, 0), 17, -5, 1234, (0, 1)), SourceState(Position(), 0, 5, 0, ())),
    Range(Ref(0, 1, 2, 3, 0), 4, 99),
    ((Range(Ref(1, 0, 2, 300, 1), 0, 9),), (Range(Ref(0, 1, 2, 3, 0), 0, 4), Range(Ref(0, 1, 2, 4, 0), 1, 2))),
)
RECIPE = b"""seed = 7
lanes = 4
[batch]
seq_len = 32
global_batch_size = 8
[tokenizer]
path = "tok"
bos = true
[[sources]]
name = "a"
paths = ["a/*.jsonl"]
weight = 0.7
on_error = "skip"
max_bad = 0.01
[[sources]]
name = "b"
paths = "b.jsonl"
chunk_rows = 3
filter = "m:f"
[mix]
unit = "tokens"
[shuffle]
window = 16
[packing]
algorithm = "best_fit"
budgets = { patches = 5 }
[records]
document_ids = true
[run]
memory = "512MiB"
cache = "~/c"
"""
_VALUES = (
    b"inf", b"nan", b"-1", b"0", b"1e400", b"1e-400", b"99999999999999999999", b"[]", b"{}", b'""', b'"\\u0000"',
    b"true",
    b"1979-05-27T07:32:00Z", b"[[[[1]]]]", b'"~nobody/x"', b"0x7fffffffffffffff", b"'''\n'''", b"{a.b.c = 1}",
    b'"a:b"', b"0.1", b"1e-999999999999", b"0x" + b"f" * 5000,
)  # fmt: skip


def lane_state(data: bytes, folder: Path) -> str:
    """A state that is signed as a right one, but for its numbers; what is taken is what would be written."""
    feed = Feed(data)
    body = feed.edit(STATE.encode("lane_00000", tag_of(HEADER))[16:-4]) if not feed.chance(3) else feed.rest()
    signed = tag_of(HEADER) + body
    raw = signed + _checksum("lane_00000", signed) if not feed.chance(5) else feed.edit(signed + bytes(4))
    try:
        state = LaneState.decode("lane_00000", raw, HEADER)
    except RestoreError as error:
        equal("the name of the lane in a refusal", "lane_00000" in str(error), True)
        return "refused"
    equal("the state, written again", state.encode("lane_00000", tag_of(HEADER)), raw)
    return f"{len(state.sources)} sources, {len(state.waiting)} waiting"


def header(data: bytes, folder: Path) -> str:
    """A header that is damaged as text, or that holds other values."""
    feed = Feed(data)
    saved = {**copy.deepcopy(RUNNING), "step": 5}
    odd: tuple[Any, ...] = (
        None, -1, 0, 1.5, float("inf"), float("nan"), "x", "5", True, [], {}, [[]], {"name": {}},
        [{"name": []}], 10**400,
        [{"fields": {"global_batch_size": ["8", "9"]}, "step": 1}], [1], [{"fields": 3}], {"step": {}}, "\ud800",
    )  # fmt: skip
    for _ in range(feed.number(2)):
        place: Any = saved
        while isinstance(place, dict) and place and not feed.chance(3):
            where = sorted(place)[feed.number(len(place) - 1)]
            if not isinstance(place[where], dict):
                break
            place = place[where]
        if isinstance(place, dict):
            place[feed.pick([*sorted(place), "history", "step", "odd"])] = copy.deepcopy(feed.pick(odd))
    raw = json.dumps(saved).encode()
    if feed.chance(4):
        raw = b'{"step": 5, "x": ' + b"[" * feed.number(3000) + b"]" * feed.number(3000) + b"}"
    raw = feed.edit(raw, 2) if feed.chance(3) else raw
    allow = feed.pick(((), ("weights",), ("global_batch_size", "records", "code", "codecs", "weights")))
    try:
        restored = compare_headers(raw, RUNNING, allow)
        total = batch_sizes(restored.history, 8, restored.step)
    except RestoreError as error:
        equal("'checkpoint' in a refusal", "checkpoint" in str(error), True)
        return "refused"
    if type(restored.step) is not int or restored.step < 0 or total < 0:
        raise LossError(f"step {restored.step!r} and {total!r} sequences were believed")
    return "taken"


def recipe(data: bytes, folder: Path) -> str:
    """A recipe with edits, or with other values."""
    feed, path = Feed(data), folder / "recipe.toml"
    lines = RECIPE.splitlines()
    for _ in range(feed.number(3)):
        at = feed.number(len(lines) - 1)
        key = lines[at].partition(b"=")[0]
        lines[at] = feed.pick(
            (key + b"= " + feed.pick(_VALUES), lines[at] + b"\n" + lines[at], b"", b"odd = 1", b"[odd]")
        )
    path.write_bytes(feed.edit(b"\n".join(lines), 2))
    try:
        found = Recipe.load(path)
    except RecipeError as error:
        return refused(error, path)
    equal("a recipe read again", repr(Recipe.load(path)), repr(found))
    return "taken"


def skips(data: bytes, folder: Path) -> str:
    """A skip list with odd lines."""
    feed, path, good = Feed(data), folder / "skips.jsonl", 0
    parts = list[bytes]()
    for i in range(feed.number(5)):
        one: dict[str, Any] = {"source": "a", "place": f"f, row {i}", "reason": "r", "step": i, "lane": 0}
        if feed.chance(3):
            one[feed.pick([*one, "more"])] = feed.pick((None, 1, "1", [], {}, 1.5, True, "\ud800"))
        elif feed.chance(6):
            del one[feed.pick(list(one))]
        else:
            good += 1
        parts.append(
            json.dumps(one).encode() if not feed.chance(8) else feed.pick((b"[" * 3000, b"null", b"{}", b"\xff", b"[]"))
        )
    raw = feed.edit(b"\n".join([*parts, b""]), 2 if feed.chance(3) else 0)
    path.write_bytes(raw)
    try:
        found = read_skips(path)
    except UsageError as error:
        equal("the line in a refusal", "line" in str(error), True)
        return refused(error, path)
    for skip in found:
        kinds = [type(value) for value in skip]
        equal("the kinds of a line", kinds, [str, str, str, int, int])
    lines = {line for line in raw[: raw.rfind(b"\n") + 1].splitlines() if line.strip()}
    if len(found) > len(lines):
        raise LossError(f"{len(found)} rows from {len(lines)} lines")
    return f"{len(found)} rows"
