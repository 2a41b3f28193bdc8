"""The shape that the project promises: who imports what, and that the core stays small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"zephon", "modalities", "recipes"}

ALLOWED = {
    "zephon": {"zephon"},
    "modalities": {"modalities", "zephon"},
    "recipes": {"recipes", "modalities", "zephon"},
}
"""Packages of ours that each package may import."""

OUTSIDE = {
    "zephon/command/cli.py": {"numpy", "rich", "tyro"},
    "zephon/command/explain.py": {"numpy", "rich"},
    "zephon/command/options.py": {"rich"},
    "zephon/command/rehearse.py": {"rich"},
    "zephon/formats/jsonl.py": {"numpy", "orjson"},
    "zephon/formats/parquet.py": {"numpy", "pyarrow"},
    "zephon/formats/tar.py": {"numpy", "orjson"},
    "zephon/run/dcp.py": {"torch"},
    "zephon/run/peers.py": {"torch"},
    "zephon/run/stop.py": {"torch"},
    "zephon/titan.py": {"numpy", "torch", "torchtitan", "tyro"},
}
"""What a file of the core may import beyond the standard library and numpy."""

MAX_CORE, MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 3900, 400, 60, 8
MAX_PARTS = {"zephon/command": 1050, "zephon/formats": 2410, "zephon/run": 1470}
"""Lines of the parts beside what decides data: the command line, the readers, how the work is done. `titan.py`, which
only dresses loaders for TorchTitan, counts as a file."""

LONGER: dict[str, str] = {}
"""Functions over the limit, with the reason."""


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            yield node.module or ""


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_go_one_way(package: str) -> None:
    for path in files(package):
        ours = {name.split(".")[0] for name in imports(path)} & (PACKAGES | {"tests", "benchmarks", "examples"})
        assert ours <= ALLOWED[package], f"{path} imports {ours - ALLOWED[package]}"


def test_the_core_needs_the_standard_library_and_numpy() -> None:
    for path in files("zephon"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - PACKAGES
        allowed = OUTSIDE.get(str(path.relative_to(ROOT)), {"numpy"})
        assert outside <= allowed, f"{path} imports {outside - allowed}"


def test_there_are_no_import_cycles_in_the_core() -> None:
    graph = {
        module(path): {name for name in imports_at_run_time(path) if name.startswith("zephon.")}
        for path in files("zephon")
    }
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(graph), f"cycle among {sorted(set(graph) - done)}"


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_at_run_time(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
            yield node.module or ""


def test_the_core_stays_small() -> None:
    parts: dict[str, int] = {}
    for path in files("zephon"):
        part = str(path.parent.relative_to(ROOT))
        if path.name != "titan.py":
            parts[part] = parts.get(part, 0) + len(path.read_text().splitlines())
    assert parts.pop("zephon") <= MAX_CORE  # what decides data
    assert parts.keys() == MAX_PARTS.keys()
    assert all(parts[part] <= most for part, most in MAX_PARTS.items()), parts
    for package in PACKAGES:
        for path in files(package):
            assert len(path.read_text().splitlines()) <= MAX_FILE, path


def test_functions_stay_small() -> None:
    for package in PACKAGES:
        for path in files(package):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    name = f"{path.relative_to(ROOT)}:{node.name}"
                    length = (node.end_lineno or 0) - node.lineno + 1
                    assert length <= MAX_FUNCTION or name in LONGER, f"{name} has {length} lines"
                    if name.endswith(("cli.py:run", "cli.py:digest", "cpu.py:_dense_attention")):
                        continue  # the parameters of commands are options; the last is FlexAttention's signature
                    parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                    assert len(parameters) <= MAX_PARAMETERS, f"{name} has {len(parameters)} parameters"


def test_importing_the_core_needs_no_torch_and_runs_nothing() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'torchtitan', 'transformers'): sys.modules[name] = None\n"
        "import threading, zephon, modalities.text, modalities.chat, zephon.command.cli\n"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("folder", ["zephon", "modalities", "recipes", "tests", "examples", "benchmarks"])
def test_every_folder_says_what_lives_there(folder: str) -> None:
    assert len((ROOT / folder / "README.md").read_text()) > 200


def test_no_to_dos_without_a_name() -> None:
    for package in PACKAGES:
        for path in files(package):
            for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
                assert word not in path.read_text(), f"{path} holds a {word}"
