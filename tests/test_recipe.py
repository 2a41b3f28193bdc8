"""The recipe is strict: whatever cannot hold is refused, with the key, what is allowed and the nearest right name."""

from decimal import Decimal
from pathlib import Path

import pytest
from small import write_recipe

from zephon import Recipe, RecipeError

GOOD = """
seed = 7
lanes = 4
[batch]
seq_len = 32
global_batch_size = 8
[tokenizer]
path = "tok"
[[sources]]
name = "web"
paths = ["web/*.jsonl"]
weight = 0.7
[mix]
unit = "tokens"
[shuffle]
window = 256
[packing]
algorithm = "concat"
[run]
runner = "inline"
workers = 1
"""


def load(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text)
    return Recipe.load(path)


def test_a_good_recipe_reads_field_for_field(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert (recipe.seed, recipe.lanes, recipe.window, recipe.packing.algorithm) == (7, 4, 256, "concat")
    assert recipe.batch is not None
    assert (recipe.batch.seq_len, recipe.batch.global_batch_size) == (32, 8)
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.path == tmp_path / "tok"
    assert recipe.sources[0].weight == Decimal("0.7")
    assert recipe.sources[0].modality == "text"


def test_defaults_are_sensible(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'lanes = 2\n[[sources]]\nname = "a"\npaths = "a.jsonl"\n')
    assert (recipe.seed, recipe.window, recipe.mix.piece, recipe.mix.unit, recipe.run.runner) == (
        0,
        256,
        "document",
        "tokens",
        "inline",
    )
    assert recipe.sources[0].weight == 1
    assert recipe.batch is None
    assert recipe.tokenizer is None


def test_a_byte_order_mark_and_crlf_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert Recipe.load(path).lanes == 4


def test_weights_are_exact_decimals(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD.replace("0.7", "0.1000000000000000000000000001"))
    assert recipe.sources[0].weight == Decimal("0.1000000000000000000000000001")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seed = 7", "sed = 7", "sed is not a known key; the recipe takes seed, .*lanes, .* Did you mean 'seed'"),
        ("seed = 7", "seed = -1", "seed must be from 0 to"),
        ("seed = 7", "seed = true", "seed must be a whole number, it is True"),
        ("seed = 7", "seed = 1.5", "seed must be a whole number"),
        ("lanes = 4", "lane = 4", "lanes is missing. Is 'lane' meant"),
        ("lanes = 4", "lanes = 0", "lanes must be from 1 to 65536"),
        (
            "lanes = 4",
            "lanes = 3",
            "global_batch_size = 8 is not a multiple of lanes = 3.*Sizes near it that work are 6 or 9",
        ),
        ("seq_len = 32", "seqlen = 32", r"\[batch\] seq_len is missing. Is 'seqlen' meant"),
        ("seq_len = 32", "seq_len = 0", r"\[batch\] seq_len must be from 1"),
        ("seq_len = 32", 'seq_len = "32"', r"\[batch\] seq_len must be a whole number, it is '32'"),
        ("global_batch_size = 8", "global_batch_size = 2", "Sizes near it that work are 4"),
        ('path = "tok"', 'path = "tok"\nbso = true', r"\[tokenizer\] bso is not a known key.*Did you mean 'bos'"),
        ('path = "tok"', 'path = "tok"\neos = 1', r"\[tokenizer\] eos must be true or false"),
        ('name = "web"', "name = 3", "name must be a string"),
        ('name = "web"', 'name = ""', r"name is empty\. Give it a value\."),
        ('name = "web"', 'name = "web"\nfilter = ""', "filter is empty. Give it a value, or leave it out"),
        ('name = "web"', 'name = "web"\nmap = ""', "map is empty"),
        ('paths = ["web/*.jsonl"]', 'paths = ["~nobody-has-this-name/x"]', "home"),
        ('path = "tok"', 'path = ""', "path is empty"),
        ("workers = 1", 'memory = ""', "memory is empty. Give it a value, or leave it out"),
        ("workers = 1", 'cache = ""', "cache is empty"),
        ('paths = ["web/*.jsonl"]', "paths = []", "paths must be a list of path patterns"),
        ('paths = ["web/*.jsonl"]', "paths = [1]", "paths must be a list of path patterns"),
        ("weight = 0.7", "weight = 0", "weight must be from 1e-30 to 1e30"),
        ("weight = 0.7", "weight = -0.5", "weight must be from 1e-30 to 1e30"),
        ("weight = 0.7", "weight = 1e999999999", "weight must be from 1e-30 to 1e30"),
        ("weight = 0.7", "weight = 1e-99999999", "weight must be from 1e-30 to 1e30"),
        ("weight = 0.7", "weight = 1e9999999999999999999999", "weight must be|is not valid TOML"),
        (
            "global_batch_size = 8",
            "global_batch_size = 2147483647",
            "Sizes near it that work are 2147483644 or 2147483648",
        ),
        ("lanes = 4", "lanes = " + "4" * 5000, "is not valid TOML|lanes must be"),
        ("lanes = 4", "lanes = " + "[" * 20000, "is not valid TOML"),
        ('path = "tok"', 'path = "~nobody-has-this-name/x"', "home"),
        ('name = "web"', 'name = "a\\u0000b"', "holds a NUL character"),
        ("weight = 0.7", "weight = nan", "weight must be from 1e-30 to 1e30 .*, it is NaN"),
        ("weight = 0.7", "weight = inf", "weight must be from 1e-30 to 1e30"),
        ("weight = 0.7", 'weight = "much"', "weight must be a number"),
        ("weight = 0.7", "weight = true", "weight must be a number"),
        ("weight = 0.7", "chunk_rows = 0", "chunk_rows must be from 1"),
        (
            'unit = "tokens"',
            'unit = "token"',
            r"\[mix\] unit must be one of 'tokens', 'samples'.*Did you mean 'tokens'",
        ),
        ('unit = "tokens"', 'unit = "samples"\npiece = "sequence"', "piece = 'sequence' cuts them"),
        ('unit = "tokens"', 'on_end = "stop"', r"lanes = 4, but \[mix\] on_end = 'stop' makes the stream finite"),
        ('unit = "tokens"', 'on_end = "stpo"', r"\[mix\] on_end must be one of 'repeat'.*Did you mean 'stop'"),
        ("weight = 0.7", "epochs = 2", r"epochs = 2, but \[mix\] on_end = 'repeat' draws every source for ever"),
        ("window = 256", "windows = 256", r"\[shuffle\] windows is not a known key.*Did you mean 'window'"),
        ("window = 256", "window = -1", r"\[shuffle\] window must be from 0"),
        ('algorithm = "concat"', 'algorithm = "cocat"', "Did you mean 'concat'"),
        ('runner = "inline"', 'runner = "inlin"', "Did you mean 'inline'"),
        ("workers = 1", "workers = 2", "the inline runner works in the loader's own thread"),
        ("workers = 1", "worker = 1", r"\[run\] worker is not a known key.*Did you mean 'workers'"),
        ("[mix]", "[mixx]", "mixx is not a known key.*Did you mean 'mix'"),
        ("[[sources]]", "[sources]", r"sources must be one or more \[\[sources\]\] tables"),
        ("[batch]", "[batch", "is not valid TOML"),
    ],
)
def test_what_cannot_hold_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?s)recipe\.toml.*{says}"):
        load(tmp_path, GOOD.replace(old, new, 1))


def test_two_sources_may_not_share_a_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Two sources are named 'web'"):
        load(tmp_path, GOOD + '[[sources]]\nname = "web"\npaths = ["x.jsonl"]\n')


def test_no_sources_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sources is missing"):
        load(tmp_path, "lanes = 1\n")


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Cannot read the recipe .*nothing.toml: No such file"):
        Recipe.load(tmp_path / "nothing.toml")


def test_batch_of_recipe_and_trainer_must_agree(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.with_batch(32, 8, "TorchTitan") == recipe
    with pytest.raises(RecipeError, match="says seq_len = 32, global_batch_size = 8, but TorchTitan says 64 and 8"):
        recipe.with_batch(64, 8, "TorchTitan")


def test_batch_may_come_from_the_trainer_alone(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'lanes = 4\n[[sources]]\nname = "a"\npaths = "a.jsonl"\n')
    given = recipe.with_batch(16, 8, "TorchTitan")
    assert given.batch is not None
    assert given.batch.global_batch_size == 8
    with pytest.raises(RecipeError, match="not a multiple of lanes = 4"):
        recipe.with_batch(16, 6, "TorchTitan")


def test_tokenizer_of_recipe_and_trainer_must_agree(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.with_tokenizer(tmp_path / "tok", "TorchTitan") == recipe
    assert recipe.with_tokenizer(tmp_path / "tok" / "tokenizer.json", "TorchTitan") == recipe
    with pytest.raises(RecipeError, match="vocabulary"):
        recipe.with_tokenizer(tmp_path / "other", "TorchTitan")


def test_the_run_section_is_no_part_of_the_header(tmp_path: Path) -> None:
    import zephon

    path = write_recipe(tmp_path)
    with zephon.Stream.open(path) as stream:
        header = stream.header(0)
    path.write_text(path.read_text().replace('cache = "cache"', 'cache = "elsewhere"\nworkers = 1'))
    with zephon.Stream.open(path) as stream:
        assert stream.header(0) == header
    assert "run" not in header
    assert str(tmp_path) not in str(header)
