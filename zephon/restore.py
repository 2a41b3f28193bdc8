"""Whether a run may go on from a checkpoint: the header that was saved against the header of the stream that is open.

A difference means other data, so it is refused, field by field. A few have a meaning all the same, and may be allowed
by name; what was allowed stays in the header as the history of the run.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from zephon.errors import RestoreError, UsageError, nearest

logger = logging.getLogger(__name__)

HISTORY = "history"
"""Key of the header that holds what was allowed, in order; absent where nothing was."""


class Permission(NamedTuple):
    """A difference that a run may go on with.

    Attributes:
        fields: pattern of the fields that may differ.
        meaning: what going on means then.
    """

    fields: str
    meaning: str


PERMISSIONS = {
    "weights": Permission(
        r"mix\.weights\..*",
        "every source goes on where it is, in the new shares; what the old shares still owed is forgotten",
    ),
    "global_batch_size": Permission(
        r"global_batch_size",
        "every lane goes on where it is, and gives a step its share of the new batch",
    ),
    "records": Permission(
        r"records(\[\d+\])?",
        "the same sequences, with other arrays beside them; digests cover all arrays, and so change",
    ),
    "code": Permission(
        r"order\.sources\[.*\]\.(filter|map)\.sha256|packing\.sha256",
        "a file with a function or class of the recipe has changed, and you say that it does the same",
    ),
    "codecs": Permission(
        r"order\.sources\[.*\]\.options\.(codecs\..*|tokenizer\.library)",
        "other versions of libraries that decode images or tokenise; you say that they give the same",
    ),
}
"""What may be allowed, by name."""


class Restored(NamedTuple):
    """What a header says to the stream that goes on from it.

    Attributes:
        step: the step after which it was saved.
        history: what was allowed so far, now included.
        allowed: what had to be allowed now.
    """

    step: int
    history: list[dict[str, Any]]
    allowed: frozenset[str]


def compare_headers(saved: bytes, running: Mapping[str, Any], allow: Iterable[str] = ()) -> Restored:
    """Check that a checkpoint belongs to this stream.

    Args:
        saved: the header of the checkpoint.
        running: the header of the stream that wants to go on; its step and history do not matter.
        allow: names of `PERMISSIONS`. One that is not needed does nothing: a job may be started again as it was.

    Raises:
        RestoreError: lists every field that differs and is not allowed, both values side by side.
        UsageError: there is no such permission.
    """
    allow = check_allowed(allow)
    try:
        old = json.loads(saved)
        step, history = old["step"], list(old.get(HISTORY, []))
        steps = [*(change["step"] for change in history), step]
        if any(type(one) is not int or one < 0 for one in steps) or steps != sorted(steps):
            raise ValueError(f"steps {steps}")
        if type(size := old["global_batch_size"]) is not int or size < 1 or batch_sizes(history, size, step) < step:
            raise ValueError("a batch of no sequences")
        differing = differences(old, running)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RestoreError(
            "The loader's header in this checkpoint cannot be read; it is damaged or foreign. Resume from another one."
        ) from error
    could = {key: name for key in differing for name, one in PERMISSIONS.items() if re.fullmatch(one.fields, key)}
    more = ""
    if running.get("mix", {}).get("on_end", "repeat") != "repeat" and could.pop("global_batch_size", None):
        more = " The global batch size of a finite stream cannot change: it says which rank gets what."
    refused = {key: values for key, values in differing.items() if could.get(key) not in allow}
    if refused:
        helps = refused.keys() <= could.keys()  # where one field cannot be allowed, allowing the others is in vain
        hints = {key: f"   (--allow {could[key]})" if helps else "" for key in refused}
        table = "\n".join(f"  {key}: {before} -> {now}{hints[key]}" for key, (before, now) in refused.items())
        for name in sorted({could[key] for key in refused} if helps else ()):
            more += f"\n--allow {name}: {PERMISSIONS[name].meaning}."
        raise RestoreError(
            f"The checkpoint at step {step} was written by another stream (checkpoint -> this run):\n{table}\n"
            f"Going on would silently change the data. Put the old values back, or start a new run.{more}"
        )
    if differing:
        granted = sorted({could[key] for key in differing})
        history.append({"step": step, "allowed": granted, "fields": {key: [*both] for key, both in differing.items()}})
        for name in granted:
            logger.warning("Going on from step %d with other %s: %s.", step, name, PERMISSIONS[name].meaning)
    return Restored(step, history, frozenset(could[key] for key in differing))


def check_allowed(allow: Iterable[str]) -> frozenset[str]:
    """Permissions, if all of these are some."""
    names = frozenset(allow)
    for name in sorted(names - PERMISSIONS.keys()):
        known = "\n".join(f"  {one}: {permission.meaning}" for one, permission in PERMISSIONS.items())
        raise UsageError(f"{name!r} cannot be allowed.{nearest(name, PERMISSIONS)} What can be:\n{known}")
    return names


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Fields of two headers that differ, by dotted name, as JSON; the step and the history set apart."""
    before, now = ({**_flatten({**one, "step": 0, HISTORY: 0})} for one in (old, new))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return {key: (before.get(key, "(absent)"), now.get(key, "(absent)")) for key in keys}


def batch_sizes(history: Sequence[Mapping[str, Any]], size: int, step: int) -> int:
    """Sequences of all global batches up to a step, which had other sizes where that was allowed."""
    total = done = 0
    for change in history:
        if "global_batch_size" in change["fields"]:
            total += (change["step"] - done) * int(change["fields"]["global_batch_size"][0])
            done = change["step"]
    return total + (step - done) * size


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names of all leaves; list entries are numbered, or named where they have a name."""
    if isinstance(value, Mapping):
        mapping = cast(Mapping[str, Any], value)
        items = [(f"{prefix}.{key}" if prefix else key, item) for key, item in mapping.items()]
    elif isinstance(value, list):
        entries = cast(list[Any], value)
        names = [
            cast(Any, one["name"] if isinstance(one, dict) and "name" in one else i) for i, one in enumerate(entries)
        ]
        items = [(f"{prefix}[{name}]", one) for name, one in zip(names, entries, strict=True)]
    else:
        return {prefix: json.dumps(value)}
    return {name: leaf for key, item in items for name, leaf in _flatten(item, key).items()}
