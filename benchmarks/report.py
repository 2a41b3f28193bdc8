"""What every benchmark shares: results as JSON with everything needed to judge them."""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    packages = ("numpy", "tokenizers", "fastokens", "orjson", "torch", "torchtitan")
    return {
        "processor": next(
            (line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), platform.machine()
        ),
        "cores": sum(line.startswith("processor") for line in cpuinfo),
        "memory_gb": round(int(meminfo[0].split()[1]) / 1e6, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        **_device(),
    }


def _device() -> dict[str, str]:
    import torch

    return {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def write(theme: str, data: dict[str, Any]) -> Path:
    """Write `results/THEME_DATE.json` and say where."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    now = datetime.now(UTC)
    report = {
        "theme": theme,
        "when": now.isoformat(timespec="seconds"),
        "commit": commit,
        "command": " ".join(
            ["python -m benchmarks." + Path(sys.argv[0]).stem, *(Path(arg).name for arg in sys.argv[1:])]
        ),
        "machine": machine(),
        **data,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{theme}_{now:%Y-%m-%d}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {file}")
    return file


def about(stream: Any) -> dict[str, Any]:
    """What was read: recipe and catalogue."""
    return {
        "lanes": stream.recipe.lanes,
        "global_batch_size": stream.batch.global_batch_size,
        "seq_len": stream.batch.seq_len,
        "sources": {one.name: {"rows": one.catalogue.rows, "bytes": one.catalogue.bytes} for one in stream.sources},
    }
