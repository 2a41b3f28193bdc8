"""What is compared: every side, the file that runs it, its environment, how much it does, and its best settings.

Each file says why its settings are the best that were found. Amounts are such that a run takes 5 to 15 seconds on two
cores: a side that is 50 times slower does a small part of the work.
"""

from typing import Any, NamedTuple

MILLION = 1_000_000


class Side(NamedTuple):
    """One way to do the work. `amount` and `warm` count tokens or images."""

    file: str
    venv: str
    amount: int
    warm: int
    options: dict[str, Any]


BASE, YARDSTICK = "ours, 1 lane", "prototype"


def text(short: bool) -> dict[str, Side]:
    """Sides on documents: long ones (T) or short ones (S)."""
    sides: dict[str, Side] = {}

    def add(name: str, file: str, venv: str, amounts: tuple[float, float], warm: float, **options: Any) -> None:
        sides[name] = Side(file, venv, int(amounts[short] * MILLION), int(warm * MILLION), options)

    rows = 4096 if short else 256  # encoded at once; fewer by a slow tokenizer, so that batches come evenly
    fast, slow = {"fast": True, "rows": rows}, {"fast": False, "rows": rows // 4}
    add(YARDSTICK, "prototype", "prototype", (150, 120), 8, **fast)
    one: dict[str, Any] = {"format": "jsonl", "runner": "inline"}
    add(BASE, "ours", "", (150, 50), 8, **one)
    add("ours, 1 lane, parquet", "ours", "", (150, 50), 8, **one | {"format": "parquet"})
    add("ours, 64 lanes", "ours", "", (120, 40), 8, **one, lanes=64)
    add("ours, 64 lanes, parquet", "ours", "", (120, 40), 8, **one | {"format": "parquet"}, lanes=64)
    add("ours, 256 lanes", "ours", "", (80, 40), 12, **one, lanes=256)
    add("ours, 1 lane, threads", "ours", "", (150, 50), 8, **one | {"runner": "threads"})
    add("ours, 1 lane, one source", "ours", "", (150, 50), 8, **one, sources=1)

    for more, tokens in (("", slow), (" + fastokens", fast)):
        stock = not more
        warm = 1 if stock or short else 6
        for workers in (0, 2):
            both = {**tokens, "workers": workers}
            add(f"titan, {workers} workers{more}", "titan", "titan", (4, 3) if stock else (20, 9), warm, **both)
        for runner, run in ZEPHON.items():
            both = {**tokens, "run": run}
            add(f"zephon 0.2.0, {runner}{more}", "datology", "zephon", (5, 4) if stock else (40, 8), warm + 1, **both)
        for workers in (0, 2):
            both = {**tokens, "workers": workers}
            add(f"grain, {workers} workers{more}", "google_grain", "grain", (5, 4) if stock else (80, 50), warm, **both)
        hf = "datasets streaming"
        add(f"{hf}{more}", "hf_streaming", "datasets", (6, 5) if stock else (120, 80), warm, **tokens)
        add(f"mosaic streaming{more}", "mosaic", "mosaic", (6, 2.5) if stock else (60, 4), warm, **tokens)
        add(f"litdata{more}", "lit", "litdata", (6, 5) if stock else (120, 25), warm, **tokens)
        add(f"energon{more}", "energon", "energon", (6, 2.5) if stock else (50, 3), warm, **tokens)
    return sides


ZEPHON: dict[str, dict[str, Any]] = {
    "inline": {"runner": "inline"},
    "threads": {"runner": "threads", "max_workers": 2},
    "threads and process": {"runner": "threads", "mtp_mode": True},
}


def images() -> dict[str, Side]:
    """Sides on captioned images (V)."""
    sides: dict[str, Side] = {}
    tar: dict[str, Any] = {"format": "tar", "runner": "inline"}
    sides[YARDSTICK] = Side("prototype_images", "", 1500, 200, {})
    sides[BASE] = Side("ours", "", 1500, 640, tar)
    sides["ours, 64 lanes"] = Side("ours", "", 1500, 1100, {**tar, "lanes": 64})
    sides["ours, threads 2"] = Side("ours", "", 1500, 640, tar | {"runner": "threads", "workers": 2})
    sides["ours, parquet"] = Side("ours", "", 1500, 640, tar | {"format": "parquet"})
    sides["ours, float32"] = Side("ours", "", 800, 640, {**tar, "pixels": "float32"})
    for workers in (0, 2):
        more = {"workers": workers}
        sides[f"titan, {workers} workers"] = Side("titan_images", "titan", 500, 100, more)
        sides[f"webdataset, {workers} workers"] = Side("web", "webdataset", 500, 100, more)
        sides[f"energon, {workers} workers"] = Side("energon", "energon", 500, 100, more)
        sides[f"webdataset, our images, {workers} workers"] = Side("web", "", 1200, 200, {**more, "our_images": True})
    sides["titan packed, 0 workers"] = Side("titan_images", "titan", 0, 0, {"packing": 100})
    for runner, run in ZEPHON_IMAGES.items():
        sides[f"zephon 0.2.0, {runner}"] = Side("datology_images", "zephon-images", 500, 150, {"run": run})
    return sides


ZEPHON_IMAGES: dict[str, dict[str, Any]] = {
    "inline": {"runner": "inline"},
    "inline and process": {"runner": "inline", "mtp_mode": True},
    "threads": {"runner": "threads", "max_workers": 2},
}
