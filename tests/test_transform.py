"""Filters and maps: the user's functions, named in the recipe, run in workers, keyed by the row."""

from pathlib import Path

import pytest
from small import documents, write_jsonl, write_recipe

from zephon import DataError, Loader, RecipeError, RestoreError, Stream
from zephon.digest import lane_digest, step_digest
from zephon.keyed import Draw, make_key

FUNCTIONS = '''
def keep_even(row):
    return int(row["text"].split()[0][3:]) % 2 == 0

def shout(row):
    return {**row, "text": row["text"].upper()}

def several(row, draw):
    """None, one or two rows, by chance that the row names."""
    return [{"text": row["text"] + f" {draw.integer(1000)} {draw.uniform():.6f}"}] * draw.integer(3) or None

def leaves(row):
    import sys
    sys.exit(0)

def thirsty(row):
    raise MemoryError

def later(row):
    yield row

async def much_later(row):
    return row

def a_word(row):
    return "text"

def numbered(row):
    return {1: "text"}

def nested(row):
    return [row, [row]]

def fails(row):
    return {"text": row["text"]} if "doc7 " not in row["text"] + " " else 1 / 0
'''


def recipe(folder: Path, keys: str, module: str = "my_functions") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(FUNCTIONS)
    sources = f'[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\n{keys}\n'
    return write_recipe(folder, sources=sources)


def step(loaders: list[Loader]) -> str:
    return step_digest({lane: lane_digest(mine) for one in loaders for lane, mine in one.step_records().items()})


def text_of(stream: Stream, steps: int = 20) -> str:
    loader = stream.loader()
    parts = [record["input"] for _ in range(steps) for records in loader.step_records().values() for record in records]
    return bytes(int(one) if one < 256 else 32 for part in parts for one in part).decode("utf-8", "replace")


def test_a_filter_drops_and_counts(tmp_path: Path) -> None:
    with Stream.open(recipe(tmp_path, 'filter = "my_functions:keep_even"')) as stream:
        loader = stream.loader()
        for _ in range(40):
            loader.step_records()
        assert loader.stats().dropped["a"]["filtered"] > 50
        seen = {int(word[3:]) for word in text_of(stream).split() if word.startswith("doc") and word[3:].isdigit()}
        assert sum(number % 2 == 0 for number in seen) > 20
        assert sum(number % 2 for number in seen) <= 5  # numbers that a sequence cuts


def test_a_map_takes_the_place_of_the_row(tmp_path: Path) -> None:
    with Stream.open(recipe(tmp_path, 'map = "my_functions:shout"')) as stream:
        assert text_of(stream).isupper()


@pytest.mark.parametrize("run", ["", 'runner = "threads"\nworkers = 2', 'runner = "process"', "isolate = true"])
def test_several_samples_a_row_by_chance_are_the_same_on_any_ranks_and_after_a_resume(tmp_path: Path, run: str) -> None:
    path = recipe(tmp_path, 'map = "my_functions:several"')
    with Stream.open(path) as stream:
        loader = stream.loader()
        expected = [step([loader]) for _ in range(8)]
    path.write_text(path.read_text().replace("[run]", f"[run]\n{run}"))
    with Stream.open(path) as stream:
        two = [stream.loader(rank, 2) for rank in range(2)]
        assert [step(two) for _ in range(4)] == expected[:4]
        state = {key: raw for loader in two for key, raw in loader.state_dict().items()}
        four = [stream.loader(rank, 4) for rank in range(4)]
        for loader in four:
            loader.load_state_dict(state)
        assert [step(four) for _ in range(4)] == expected[4:]


def test_an_error_in_a_function_names_it_and_the_row(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)Source 'a': .*one\.jsonl, line 8, .*map 'my_functions:fails' raised.*ZeroDivision"
    ):
        Stream.open(recipe(tmp_path, 'map = "my_functions:fails"'))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "leaves",
            "map 'my_functions:leaves' raised an error.*SystemExit: 0",
        ),  # else a run that ends as if it were done
        ("a_word", "a map gives a dict with names as keys, a list of such, or None; not 'text'"),
        ("numbered", r"or None; not \{1: 'text'\}"),
        ("nested", r"or None; not \[\{'text': 'doc"),
    ],
)
def test_what_a_function_does_with_a_row_is_said_of_the_row(tmp_path: Path, name: str, says: str) -> None:
    path = recipe(tmp_path, f'map = "my_functions:{name}"')
    with pytest.raises(DataError, match=rf"(?s)Source 'a': .*one\.jsonl, line .*{says}"):
        Stream.open(path)


def test_want_of_memory_is_no_fault_of_a_row(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        Stream.open(recipe(tmp_path, 'map = "my_functions:thirsty"\non_error = "skip"'))


@pytest.mark.parametrize("kind", ["filter", "map"])
@pytest.mark.parametrize("name", ["later", "much_later"])
def test_functions_that_would_only_run_later_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    """A filter would keep every row, as what it answers is true."""
    with pytest.raises(RecipeError, match=f"{kind} = 'my_functions:{name}' is a generator or a coroutine"):
        Stream.open(recipe(tmp_path, f'{kind} = "my_functions:{name}"'))


def test_a_module_that_exits_is_named(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'map = "leaving:f"')
    (tmp_path / "leaving.py").write_text("raise SystemExit")
    with pytest.raises(RecipeError, match=r"map = 'leaving:f' cannot be used: SystemExit"):
        Stream.open(path)


def test_a_filter_that_leaves_nothing_is_an_error_not_a_hang(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'filter = "my_functions:keep_even"')
    write_jsonl(tmp_path / "a" / "one.jsonl", [text for i, text in enumerate(documents(100)) if i % 2])
    write_jsonl(tmp_path / "a" / "two.jsonl", ["doc1 x"])
    with Stream.open(path) as stream, pytest.raises(DataError, match="no usable sample in .* draws: .* filtered"):
        stream.loader().step_records()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_functions", "must be 'module:name'"),
        ("my_functions:nothing", "has no attribute 'nothing'"),
        ("no_such_module_here:f", "No module named"),
        ("my_functions:1", "must be 'module:name'"),
        ("my_functions:__doc__", "no function that can be called"),
    ],
)
def test_functions_that_are_not_there(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Stream.open(recipe(tmp_path, f'map = "{name}"'))


def test_a_changed_function_is_another_stream(tmp_path: Path) -> None:
    with Stream.open(recipe(tmp_path / "one", 'map = "changing:shout"', "changing")) as stream:
        header = stream.header(0)
        state = stream.loader().state_dict()
        assert len(header["order"]["sources"][0]["map"]["sha256"]) == 64
    path = recipe(tmp_path / "one", 'map = "my_functions:shout"')
    with Stream.open(path) as stream, pytest.raises(RestoreError, match=r"order\.sources\[a\]\.map\.name"):
        stream.loader().load_state_dict(state)


def test_draws_are_keyed_and_even() -> None:
    same = [Draw(make_key("user", 1, "a", i)).integer(6) for i in range(6000)]
    assert same == [Draw(make_key("user", 1, "a", i)).integer(6) for i in range(6000)]
    assert all(900 < same.count(face) < 1100 for face in range(6))
    draw = Draw(make_key("user", 2))
    numbers = [draw.uniform() for _ in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 1000
    assert 0.45 < sum(numbers) / 1000 < 0.55
    assert Draw(make_key("user", 3)).integer(1) == 0
