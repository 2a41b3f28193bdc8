"""An environment for every peer, from pinned requirements, under `.bench/peers`; torch is lent, not installed again."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / ".bench" / "peers"

SHARES = ("titan", "webdataset", "zephon-images", "mosaic", "litdata", "energon")
"""Those that need torch or what it needs: our site-packages stand at the end of their path, as a plain line of a .pth
file, so that .pth files in it are not read and our editable `zephon` cannot be imported."""


def python_of(name: str) -> Path:
    """The interpreter of a peer; our own for ""."""
    return ROOT / name / "bin" / "python" if name else Path(sys.executable)


def requirements(name: str) -> list[str]:
    """What a peer's environment holds, pinned; `zephon-images` holds what `zephon` does."""
    lines = (HERE / "requirements" / f"{name.removesuffix('-images')}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def build(name: str) -> None:
    """Make the environment of a peer, unless it is there.

    Raises:
        CalledProcessError: pip could not install it.
    """
    pins = requirements(name)
    stamp = ROOT / name / hashlib.sha256("\n".join(pins).encode()).hexdigest()[:16]
    if stamp.exists():
        return
    print(f"environment of {name}: {', '.join(pins[:3])}, …", flush=True)
    run = [sys.executable, "-m"]
    subprocess.run([*run, "venv", "--clear", "--without-pip", ROOT / name], check=True)
    pip = ["pip", "--python", str(python_of(name)), "install", "--quiet", "--no-deps", *pins]
    subprocess.run([*run, *pip], check=True, capture_output=True, text=True)
    if name in SHARES:
        site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        (ROOT / name / site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    stamp.touch()


def check_zephon(name: str) -> None:
    """Make sure that this environment's `zephon` is DatologyAI's.

    Raises:
        RuntimeError: it is ours.
    """
    code = "import zephon; print(zephon.__version__, zephon.__file__)"
    found = subprocess.run([python_of(name), "-I", "-c", code], check=True, capture_output=True, text=True).stdout
    if not found.startswith("0.2.0 ") or str(ROOT / name) not in found:
        raise RuntimeError(f"the environment {name} imports another zephon: {found}")
