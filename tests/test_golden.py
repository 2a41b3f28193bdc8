"""The same order on every machine and in every version: a changed golden without a new version fails here."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("golden_update", HERE / "update.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.loads((HERE / "order.json").read_text()), json.loads(json.dumps(module.values()))


@pytest.mark.parametrize("what", ["keys", "permutations", "streams"])
def test_golden(pair: tuple[dict[str, Any], dict[str, Any]], what: str) -> None:
    kept, now = pair
    assert kept[what] == now[what], (
        "The order or the state format changed. If that is meant: raise ORDER_VERSION or FORMAT_VERSION, run "
        "tests/golden/update.py, and say so in CHANGELOG.md."
    )


def test_golden_belongs_to_this_version(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    kept, now = pair
    assert {key: kept[key] for key in ("order_version", "format_version")} == {
        key: now[key] for key in ("order_version", "format_version")
    }
    changes = (HERE.parent.parent / "CHANGELOG.md").read_text()
    assert f"order version {now['order_version']}" in changes
    assert f"state format {now['format_version']}" in changes
