"""Golden vectors of everything that decides order: run this after a deliberate change, and say so in CHANGELOG.

    python tests/golden/update.py

It refuses to change a digest unless ORDER_VERSION (in zephon/order.py) was raised.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from small import write_recipe  # noqa: E402

from zephon import Stream  # noqa: E402
from zephon.digest import lane_digest, step_digest  # noqa: E402
from zephon.keyed import make_key, permute  # noqa: E402
from zephon.order import ORDER_VERSION  # noqa: E402
from zephon.state import FORMAT_VERSION  # noqa: E402

RECIPES: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "sequence pieces": {"extra": "", "tail": '[mix]\npiece = "sequence"', "seq_len": 16},
    "samples": {"tail": '[mix]\nunit = "samples"'},
    "more lanes than chunks": {
        "lanes": 16,
        "size": 16,
        "sources": '[[sources]]\nname = "b"\npaths = ["b/*.jsonl"]\nchunk_rows = 10\n',
    },
}


def values() -> dict[str, Any]:
    """What this code gives."""
    keys = [make_key("rows", 7, "web", 3, 11), make_key("chunks", 0, "\u6f22", 2**40)]
    streams: dict[str, Any] = {}
    for name, options in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder, Stream.open(write_recipe(Path(folder), **options)) as stream:
            loader = stream.loader()
            digests = [
                step_digest({lane: lane_digest(mine) for lane, mine in loader.step_records().items()}) for _ in range(8)
            ]
            state = {lane: raw[16:-4].hex() for lane, raw in loader.state_dict().items() if lane == "lane_00001"}
        streams[name] = {"digests": digests, "state": state}
    return {
        "order_version": ORDER_VERSION,
        "format_version": FORMAT_VERSION,
        "keys": [[int(word) for word in key] for key in keys],
        "permutations": {
            str(n): permute(n, keys[0], np.arange(min(n, 12))).tolist() for n in (1, 2, 3, 64, 65, 1000, 2**20, 2**40)
        },
        "streams": streams,
    }


if __name__ == "__main__":
    file = HERE / "order.json"
    old, new = (json.loads(file.read_text()) if file.exists() else {}), values()
    versions = ("order_version", "format_version")
    if old and old != new and all(old[version] == new[version] for version in versions):
        sys.exit(
            "The order or the state changed, but neither ORDER_VERSION nor FORMAT_VERSION did. Raise the one meant."
        )
    file.write_text(json.dumps(new, indent=1) + "\n")
    print(f"wrote {file}")
