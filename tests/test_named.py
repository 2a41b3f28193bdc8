"""`zephon check --code` says which code a recipe has run, and runs none of it."""

import json
from pathlib import Path

import pytest
from small import write_recipe

from zephon import RecipeError, Stream
from zephon.command.cli import main

SOURCES = """
[[sources]]
name = "a"
paths = ["a/*.jsonl"]
filter = "stranger:wants"
map = "json:loads"
[[sources]]
name = "b"
paths = ["b/*.jsonl"]
map = "nowhere.at.all:f"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_recipe(tmp_path, sources=SOURCES, tail='[packing]\nalgorithm = "stranger:Packer"')
    (tmp_path / "stranger.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    return path


def test_all_code_is_named_and_none_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(recipe), "--code", "--json"])
    assert ended.value.code == 0
    found = {one["for"]: (one["code"], one["from"]) for one in map(json.loads, capsys.readouterr().out.splitlines())}
    own = str(recipe.with_name("stranger.py"))
    assert found["filter of 'a'"] == ("stranger:wants", own)
    assert found["packing"] == ("stranger:Packer", own)
    assert found["map of 'a'"] == ("json:loads", json.__file__)
    assert found["map of 'b'"][1] == "not found (nowhere is neither beside the recipe nor installed)"
    assert found["modality 'text' of 'a'"][0] == "modalities.text:Text"
    assert len(found) == 6
    assert not recipe.with_name("ran").exists()


def test_the_table_comes_before_anything_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(recipe)])
    assert ended.value.code == 2  # there is no such function in it
    assert "stranger:wants" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os", "must be 'module:name'"),
        ("os:", "must be 'module:name'"),
        ("os:system('x')", "must be 'module:name'"),
        ("../stranger:f", "must be 'module:name'"),
        ("stranger:wants", "cannot be used: AttributeError"),
    ],
)
def test_only_names_are_run(recipe: Path, name: str, says: str) -> None:
    recipe.write_text(recipe.read_text().replace("stranger:wants", name))
    with pytest.raises(RecipeError, match=says.replace("(", r"\(")):
        Stream.open(recipe)
