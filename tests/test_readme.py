"""What the README shows, runs."""

import re
from pathlib import Path

import pytest
from small import write_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"<!-- run by tests/test_readme.py -->\n```python\n(.*?)```", README, re.DOTALL)
    assert block
    write_recipe(tmp_path, lanes=8)
    monkeypatch.chdir(tmp_path)
    exec(compile(block[1], "README.md", "exec"), {})
    assert "(4, 32)" in capsys.readouterr().out
    assert len(block[1].strip().splitlines()) <= 12


def test_the_recipe_of_the_readme_is_read(tmp_path: Path) -> None:
    from zephon import Recipe

    block = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert block
    (tmp_path / "recipe.toml").write_text(block[1])
    assert [source.name for source in Recipe.load(tmp_path / "recipe.toml").sources] == ["web", "code"]


def test_shipped_recipes_are_read() -> None:
    from zephon import Recipe

    shipped = sorted((ROOT / "recipes").rglob("*.toml"))
    assert shipped
    for path in shipped:
        assert Recipe.load(path).lanes >= 1


def test_every_link_leads_somewhere() -> None:
    for path in ROOT.glob("**/README.md"):
        if ".venv" not in path.parts:
            for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
                assert (path.parent / target).exists(), f"{path}: {target}"
