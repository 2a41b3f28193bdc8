"""TorchTitan's own vision-language models, trained on the CPU on mixed streams over real process groups."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from test_titan import HERE, copy_step, torchrun

from recipes.demo.corpus import build
from recipes.demo.pictures import MARKS, build_pairs
from zephon.ledger import compare_ledgers, read_ledger

HEAD = 'seed = 7\nlanes = {lanes}\n[tokenizer]\npath = "tokenizer"\n'
TEXT = '[[sources]]\nname = "docs"\npaths = ["docs/*.jsonl"]\nweight = {weight}\n'
PAIRS = (
    '[[sources]]\nname = "pairs"\npaths = ["{folder}/*.tar"]\nmodality = "image_text"\npreset = "{preset}"\n'
    "min_pixels = 4096\nmax_pixels = 16384\n"
)
TAIL = '[mix]\npiece = "sequence"\n[packing]\nalgorithm = "best_fit"\n[run]\ncache = "cache"\n'

PACKER = """
from zephon.pack import Bin

class OneSample:
    def __init__(self, room, bins):
        self.room, self.open = room, []
    def offer(self, sample, start, end):
        one = Bin(self.room)
        assert one.reach(sample, start, end) == end
        one.add(sample, start, end)
        return end, one.leave()
    def flush(self):
        return None
    def restore(self, bins):
        pass
"""


TURNS = """
from zephon.pack import Bin

class Turns:
    \"\"\"A sequence with images and one without, in turns.\"\"\"
    def __init__(self, room, bins):
        self.bins, self.done, self.turn, self.room = [Bin(room), Bin(room)], [[], []], 0, room
    @property
    def open(self):
        return [plan for plans in self.done for plan in plans] + [one.segments for one in self.bins if one.segments]
    def offer(self, sample, start, end):
        kind = 0 if sample.atoms else 1
        taken = self.bins[kind].reach(sample, start, end)
        if taken > start:
            self.bins[kind].add(sample, start, taken)
        if taken < end or self.bins[kind].full:
            self.done[kind].append(self.bins[kind].leave())
            self.bins[kind] = Bin(self.room)
        if not self.done[self.turn]:
            return taken, None
        self.turn = 1 - self.turn
        return taken, self.done[1 - self.turn].pop(0)
    def flush(self):
        return None
    def restore(self, bins):
        assert not bins
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, pictures, a tokenizer and recipes; a seed checkpoint of Qwen's micro model, and 6 steps of 2 ranks."""
    folder = tmp_path_factory.mktemp("titan-images")
    build(folder, 0.3, marks=MARKS)
    build_pairs(folder / "pairs", 60)
    build_pairs(folder / "one", 400, shards=1)
    qwen, glimmer = (PAIRS.format(folder="pairs", preset=preset) for preset in ("qwen3_5", "glimmer"))
    text = TEXT.format(weight=0.5)
    recipes = {
        "recipe": HEAD.format(lanes=4) + text + qwen + "weight = 0.5\n" + TAIL,
        "glimmer": HEAD.format(lanes=4) + text + glimmer + "weight = 0.5\n" + TAIL,
        "turns": HEAD.replace("lanes = {lanes}\n", "")
        + text
        + "epochs = 20\n"
        + qwen
        + "epochs = 20\nweight = 0.5\n"
        + TAIL.replace("[mix]", '[mix]\non_end = "stop"').replace("best_fit", "turns:Turns"),
        **{
            name: HEAD.replace("lanes = {lanes}\n", "") + one + TAIL.replace("[mix]", '[mix]\non_end = "renormalise"')
            for name, one in (("finite", qwen), ("finite-glimmer", glimmer), ("finite-text", text))
        },
        "alone": HEAD.format(lanes=1).replace('"tokenizer"\n', '"tokenizer"\nbos = false\n')
        + PAIRS.format(folder="one", preset="qwen3_5")
        + '[shuffle]\nwindow = 0\n[packing]\nalgorithm = "one_sample:OneSample"\n[run]\ncache = "cache"\n',
    }
    for name, recipe in recipes.items():
        (folder / f"{name}.toml").write_text(recipe)
    (folder / "one_sample.py").write_text(PACKER)
    (folder / "turns.py").write_text(TURNS)
    (folder / "two").mkdir()
    done = job("qwen", folder / "two", 2)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


def job(name: str, folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return torchrun(ranks, str(HERE / "titan_image_job.py"), name, str(folder))


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_resumed_on_another_number_of_ranks(jobs: Path) -> None:
    folder = copy_step(jobs / "two", jobs / "on-1", 3)
    done = job("qwen", folder, 1)
    assert done.returncode == 0, done.stderr[-5000:]
    result = compare_ledgers(read_ledger(jobs / "two" / "ledger"), read_ledger(folder / "ledger"))
    assert (result.compared, result.step) == (3, None)
    assert losses(folder) == pytest.approx(losses(jobs / "two")[3:], abs=1e-5)


@pytest.mark.slow
def test_glimmer_trains(jobs: Path) -> None:
    done = job("glimmer", jobs / "glimmer", 2)
    assert done.returncode == 0, done.stderr[-5000:]
    found = losses(jobs / "glimmer")
    assert len(found) == 6
    assert found[-1] < found[0]


@pytest.mark.slow
def test_validation(jobs: Path) -> None:
    means: list[float] = []
    for ranks in (1, 2):
        folder = copy_step(jobs / "two", jobs / f"validated-on-{ranks}", 3)
        done = job("validate", folder, ranks)
        assert done.returncode == 0, done.stderr[-5000:]
        lines = map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
        means += [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert means[0] == pytest.approx(means[1], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        ("geometry", 1, r"glimmer\.toml cuts images into patches of 14 pixels"),
        ("validate_glimmer", 1, r"finite-glimmer\.toml cuts images into patches of 14 pixels"),
        pytest.param("validate_text", 1, r"finite-text\.toml: no source has modality", marks=pytest.mark.slow),
        pytest.param("context", 2, "Context Parallel is not yet supported for Qwen3.5", marks=pytest.mark.slow),
    ],
)
def test_what_the_model_cannot_take_is_refused(jobs: Path, name: str, ranks: int, says: str) -> None:
    done = job(name, jobs / name, ranks)
    assert done.returncode
    assert re.search(says, done.stderr + done.stdout)
    assert not (jobs / name / "loss.jsonl").exists()


@pytest.mark.slow
def test_fifty_steps_in_which_a_rank_has_no_image(jobs: Path) -> None:
    """TorchTitan's collectives do not match when one rank's micro-batch has no image; ours all have one."""
    done = job("uneven", jobs / "uneven", 2)
    assert done.returncode == 0, done.stderr[-5000:]
    first, second = ((jobs / "uneven" / f"images_{rank}.jsonl").read_text().splitlines() for rank in (0, 1))
    assert len(first) == len(second) == 50
    assert all(sum(json.loads(line)) for line in first)
    assert not any(sum(json.loads(line)) for line in second)


@pytest.mark.slow
def test_the_same_losses_as_with_torchtitans_own_loader(jobs: Path) -> None:
    """200 steps on the same samples, one a sequence, in the order of the files: tokens, masks and pixels are alike."""
    found: list[list[float]] = []
    assert job("seed", jobs / "seed", 1).returncode == 0
    for name in ("ours", "stock"):
        done = job(name, copy_step(jobs / "seed", jobs / name, 0), 1)
        assert done.returncode == 0, done.stderr[-5000:]
        found.append(losses(jobs / name))
    assert len(found[0]) == len(found[1]) == 200
    gap = max(abs(a - b) for a, b in zip(*found, strict=True))
    print(f"largest difference of a loss in 200 steps: {gap:.1e}; from {found[0][0]:.3f} to {found[0][-1]:.3f}")
    assert gap < 1e-4
