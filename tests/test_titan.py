"""TorchTitan's real trainer on real process groups (gloo) of 1, 2 and 4 ranks, with its own checkpointer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import documents, write_jsonl, write_recipe
from tokenizers import Tokenizer
from worlds import tokenizer_folder

from zephon import Recipe, Stream
from zephon.command.rehearse import process_tree
from zephon.digest import lane_digest
from zephon.ledger import compare_ledgers, ledger_line, read_ledger
from zephon.run.skips import read_skips

STEPS, SAVE = 6, 3
HERE = Path(__file__).parent


def launch(ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    return [*command, "--rdzv-endpoint=localhost:0"]


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [*launch(ranks), *command],
        capture_output=True, text=True, check=False, env=environment, timeout=300, cwd=HERE.parent,
    )  # fmt: skip


def job(folder: Path, *extra: str) -> list[str]:
    """The command of a training job, for torchrun."""
    return [
        "-m", "torchtitan.train", "--module", "recipes.titan_text", "--config", "micro",
        "--dump_folder", str(folder), "--dataloader.recipe", str(folder.parent / "recipe.toml"),
        "--hf_assets_path", str(tokenizer_folder("both")), "--training.seq_len", "32",
        "--training.global_batch_size", "8", "--training.steps", str(STEPS), "--checkpoint.interval", str(SAVE), *extra,
    ]  # fmt: skip


def train(folder: Path, ranks: int, *extra: str, works: bool = True) -> str:
    done = torchrun(ranks, *job(folder, *extra))
    assert (done.returncode == 0) == works, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def losses(folder: Path) -> dict[int, float]:
    return {
        line["step"]: line["loss"]
        for line in map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
        if "loss" in line
    }


def copy_step(source: Path, target: Path, step: int) -> Path:
    shutil.copytree(source / "checkpoint" / f"step-{step}", target / "checkpoint" / f"step-{step}")
    return target


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed checkpoint, and a run of 2 ranks that saved at step 3 and went on to step 6."""
    folder = tmp_path_factory.mktemp("titan")
    write_recipe(folder)
    write_jsonl(folder / "few" / "one.jsonl", documents(22, 1000))
    train(folder / "seed", 1, "--checkpoint.create_seed_checkpoint")
    train(copy_step(folder / "seed", folder / "two", 0), 2)
    return folder


def plain_ledger(folder: Path) -> dict[int, dict[str, str]]:
    """What the loader alone gives, without any trainer."""
    with Stream.open(folder / "recipe.toml") as stream:
        loader = stream.loader()
        lines = [
            ledger_line(step, {lane: lane_digest(mine) for lane, mine in loader.step_records().items()}, whole=True)
            for step in range(1, STEPS + 1)
        ]
    return {line["step"]: line["lanes"] for line in lines}


def test_train_step_receives_what_the_loader_gives(jobs: Path) -> None:
    assert sorted(file.name for file in (jobs / "two" / "ledger").iterdir()) == [
        "rank_00000_of_00002.jsonl",
        "rank_00001_of_00002.jsonl",
    ]
    assert read_ledger(jobs / "two" / "ledger") == plain_ledger(jobs)
    logged = json.loads((jobs / "two" / "loss.jsonl").read_text().splitlines()[-1])
    assert logged["data/share/a"] + logged["data/share/b"] == pytest.approx(1)
    assert logged["data/padding"] == 0
    assert logged["data/rows_ahead"] > 0


@pytest.mark.parametrize(("ranks", "local"), [(1, 4), (4, 2)])
def test_resumed_on_another_number_of_ranks_with_other_micro_batches(jobs: Path, ranks: int, local: int) -> None:
    folder = copy_step(jobs / "two", jobs / f"on-{ranks}", SAVE)
    train(folder, ranks, "--training.local_batch_size", str(local))
    whole, resumed = read_ledger(jobs / "two" / "ledger"), read_ledger(folder / "ledger")
    assert sorted(resumed) == [4, 5, 6]
    assert compare_ledgers(whole, resumed).step is None
    expected, found = losses(jobs / "two"), losses(folder)
    assert found.keys() == {4, 5, 6}
    assert max(abs(expected[step] - found[step]) for step in found) < 1e-5


@pytest.mark.slow
def test_isolated_loaders_with_worker_processes_train_the_same(jobs: Path) -> None:
    text = (jobs / "recipe.toml").read_text().replace('paths = ["', f'paths = ["{jobs}/')
    (jobs / "apart").mkdir()
    (jobs / "apart" / "recipe.toml").write_text(text.replace("[run]", '[run]\nrunner = "process"\nisolate = true'))
    folder = copy_step(jobs / "two", jobs / "apart" / "run", SAVE)
    train(folder, 2)
    result = compare_ledgers(read_ledger(jobs / "two" / "ledger"), read_ledger(folder / "ledger"))
    assert (result.compared, result.step) == (3, None)
    assert (folder / "checkpoint" / f"step-{STEPS}" / ".metadata").exists()


@pytest.mark.slow
def test_only_one_of_the_tensor_parallel_peers_writes(jobs: Path) -> None:
    folder = copy_step(jobs / "two", jobs / "tensor", SAVE)
    train(folder, 2, "--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    assert [file.name for file in (folder / "ledger").iterdir()] == ["rank_00000_of_00001.jsonl"]
    assert compare_ledgers(read_ledger(jobs / "two" / "ledger"), read_ledger(folder / "ledger")).step is None


def test_context_parallel_peers_get_the_same_batches(jobs: Path) -> None:
    (jobs / "long.toml").write_text((jobs / "recipe.toml").read_text().replace("seq_len = 32", "seq_len = 256"))
    folder = copy_step(jobs / "seed", jobs / "context", 0)
    done = torchrun(2, str(HERE / "titan_job.py"), "context_parallel", str(folder))
    assert done.returncode == 0, done.stderr[-5000:]
    first, second = ((folder / f"peer_{rank}").read_text().splitlines() for rank in (0, 1))
    assert len(first) == 3 * 4
    assert first == second
    with Stream.open(jobs / "long.toml") as stream:
        records = list(stream.loader().step_records().values())
    assert read_ledger(folder / "ledger")[1] == {f"{i:05d}": lane_digest(one).hex() for i, one in enumerate(records)}


def test_validation_has_a_recipe_of_its_own(jobs: Path) -> None:
    folder = copy_step(jobs / "two", jobs / "validated", SAVE)
    done = torchrun(2, str(HERE / "titan_job.py"), "validate", str(folder))
    assert done.returncode == 0, done.stderr[-5000:]
    values = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    seen = [line["validation_loss"] for line in values if "validation_loss" in line]
    assert len(seen) == 2
    assert seen[0] != seen[1]
    assert compare_ledgers(read_ledger(jobs / "two" / "ledger"), read_ledger(folder / "ledger")).step is None


@pytest.mark.parametrize("sent", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_signal_to_one_rank_saves_and_ends_all(jobs: Path, sent: signal.Signals) -> None:
    """Slurm announces the end of a job: the run saves at the next step boundary and exits with 0."""
    folder = copy_step(jobs / "two", jobs / sent.name, SAVE)
    extra = ["--training.steps", "100000", "--checkpoint.interval", "100000"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([*launch(2), *job(folder, *extra)], stdout=log, stderr=log, cwd=HERE.parent)
        deadline = time.monotonic() + 120
        while not (folder / "ledger").exists() or max(read_ledger(folder / "ledger"), default=0) < SAVE + 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks = [
            pid for pid in process_tree(process.pid) if "torchtitan.train" in command_of(pid) and pid != process.pid
        ]
        os.kill(ranks[1], sent)  # to one rank alone
        assert process.wait(timeout=120) == 0, (folder / "log.txt").read_text()[-3000:]
    last = max(read_ledger(folder / "ledger"))
    assert (folder / "checkpoint" / f"step-{last}" / ".metadata").exists()
    resumed = jobs / f"{sent.name}-resumed"
    shutil.copytree(folder / "checkpoint" / f"step-{last}", resumed / "checkpoint" / f"step-{last}")
    train(resumed, 1, "--training.steps", str(last + 2))
    assert sorted(read_ledger(resumed / "ledger")) == [last + 1, last + 2]
    with Stream.open(jobs / "recipe.toml") as stream:
        loader = stream.loader()
        for _ in range(last):
            loader.step_records()
        expected = {f"{lane:05d}": lane_digest(mine).hex() for lane, mine in loader.step_records().items()}
    assert read_ledger(resumed / "ledger")[last + 1] == expected


def test_a_stop_signal_while_a_run_loads_leaves_the_checkpoint_alone(jobs: Path) -> None:
    """It would be written over in place, and a kill meanwhile would leave none."""
    folder = copy_step(jobs / "two", jobs / "stopped", SAVE)
    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").rglob("*")}
    done = torchrun(1, str(HERE / "titan_job.py"), "stopped", str(folder))
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"Stopped by a signal after step {SAVE}" in done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").rglob("*")} == before


def test_a_finite_stream_that_ends_is_saved_and_can_be_gone_on_from(jobs: Path) -> None:
    folder = copy_step(jobs / "seed", jobs / "finite", 0)
    ledgers: list[list[str]] = []
    for _ in range(2):  # the second goes on behind the last step, and finds no more
        done = torchrun(2, str(HERE / "titan_job.py"), "finite", str(folder))
        assert done.returncode == 0, done.stderr[-5000:]
        last = max(read_ledger(folder / "ledger"))
        assert last > SAVE
        assert {path.name for path in (folder / "checkpoint").iterdir()} == {"step-0", f"step-{last}"}
        ledgers.append([path.read_text() for path in sorted((folder / "ledger").iterdir())])
    assert ledgers[0] == ledgers[1]


def test_validations_see_the_same_on_any_ranks_list_bad_rows_and_leave_no_process(jobs: Path) -> None:
    write_jsonl(jobs / "bad" / "one.jsonl", documents(50, 1000))
    with (jobs / "bad" / "one.jsonl").open("a") as file:
        file.write("no JSON\n" * 5)
    means: list[list[float]] = []
    for ranks in (1, 2):
        folder = copy_step(jobs / "seed", jobs / f"bad-on-{ranks}", 0)
        done = torchrun(ranks, str(HERE / "titan_job.py"), "validate_bad", str(folder))
        assert done.returncode == 0, done.stderr[-5000:]
        values = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
        means.append([line["validation_loss"] for line in values if "validation_loss" in line])
        counted = {int(number) for number in re.findall(r'"children": (\d+)', done.stdout)}
        assert len(counted) == 1, counted
        skips = read_skips(folder / "skipped_in_validation")
        assert skips
        assert all("line" in one.place or "row" in one.place for one in skips)
    assert len(means[0]) == 3
    assert means[0] == pytest.approx([means[0][0]] * 3)
    assert means[1] == pytest.approx(means[0], rel=1e-6)


def test_a_validation_lists_every_bad_row_and_says_so_where_there_is_nothing_to_validate_on(tmp_path: Path) -> None:
    from zephon.errors import DataError
    from zephon.titan import DataLoader

    source = '[[sources]]\nname = "a"\npaths = ["v.jsonl"]\non_error = "skip"\nmax_bad = 5000\n'
    path = write_recipe(tmp_path, lanes=1, sources=source, tail='[mix]\non_end = "renormalise"\n')
    rows = [json.dumps({"text": text}) for text in documents(100)]
    listed = str(tmp_path / "skipped.jsonl")

    def validation(infinite: bool) -> DataLoader:
        config = DataLoader.Config(recipe=str(path), infinite=infinite, skip_list=listed)
        return DataLoader(config, dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=32, local_batch_size=4)

    (tmp_path / "v.jsonl").write_text("".join(f"{row}\n" + "no JSON\n" * 25 for row in rows))
    assert len(list(validation(infinite=False))) > 10
    assert len(read_skips(Path(listed))) == 2500  # a loader that nobody asks keeps 1,000
    path = path.rename(tmp_path / "short.toml")
    (tmp_path / "v.jsonl").write_text(rows[30])
    with pytest.raises(DataError, match=r"short\.toml fills no batch of 8 .*validator\.steps = -1 pads the last one"):
        list(validation(infinite=True))
    assert len(list(validation(infinite=False))) == 2


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_ranks_that_do_not_divide_the_lanes_are_refused(jobs: Path) -> None:
    text = (jobs / "recipe.toml").read_text()
    odd = jobs / "odd" / "recipe.toml"
    odd.parent.mkdir()
    odd.write_text(text.replace("lanes = 4", "lanes = 1").replace('paths = ["', f'paths = ["{jobs}/'))
    log = train(odd.parent / "run", 2, works=False)
    assert "2 data-parallel ranks cannot share 1 lanes evenly" in log
    assert not (odd.parent / "run" / "checkpoint").exists()


@pytest.mark.slow
def test_validation_over_all_documents_gives_the_same_loss_on_any_ranks(jobs: Path) -> None:
    seen: list[list[float]] = []
    for ranks in (1, 4):
        folder = copy_step(jobs / "two", jobs / f"all-on-{ranks}", SAVE)
        done = torchrun(ranks, str(HERE / "titan_job.py"), "validate_all", str(folder))
        assert done.returncode == 0, done.stderr[-5000:]
        values = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
        seen.append([line["validation_loss"] for line in values if "validation_loss" in line])
    assert len(seen[0]) == 2
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], rel=1e-6)


@pytest.mark.slow
def test_validation_of_1003_documents_sees_each_once_on_any_ranks(jobs: Path) -> None:
    """No multiple of anything: the last step is padded on some ranks, and empty but for padding on others."""
    folder = jobs / "many"
    texts = [text[:24] for text in documents(1003)]  # whole in a sequence
    write_jsonl(folder / "all" / "one.jsonl", texts)
    text = (jobs / "recipe.toml").read_text()
    head, tokenizer = text[: text.index("[batch]")].replace("lanes = 4\n", ""), text[text.index("[tokenizer]") :]
    tokenizer = tokenizer[: tokenizer.index("[[sources]]")]
    rest = '[[sources]]\nname = "all"\npaths = ["all/*.jsonl"]\n[mix]\non_end = "renormalise"\n'
    rest += '[packing]\nalgorithm = "best_fit"\n[records]\ndocument_ids = true\n'
    (folder / "all.toml").write_text(head + tokenizer + rest)
    with Stream(Recipe.load(folder / "all.toml").with_batch(32, 8, "the test")) as stream:
        tokens = Tokenizer.from_file(str(tokenizer_folder("both") / "tokenizer.json"))
        for world in (1, 2, 4, 8):
            seen: list[str] = []
            for rank in range(world):
                for batch in stream.loader(rank, world, pad_last=True):
                    for ids, numbers in zip(batch["input"], batch["document_ids"], strict=True):
                        seen += [tokens.decode(ids[numbers == one].tolist()) for one in range(numbers.max() + 1)]
            assert sorted(seen) == sorted(texts)
    plain = (folder / "all.toml").read_text().replace("[records]\ndocument_ids = true\n", "")  # no model takes them
    (folder / "all.toml").write_text(plain)
    (folder / "eight.toml").write_text(text.replace("lanes = 4", "lanes = 8").replace('paths = ["', 'paths = ["../'))
    means: list[float] = []
    for world in (1, 2, 4, 8):
        run = copy_step(jobs / "seed", folder / f"on-{world}", 0)
        done = torchrun(world, str(HERE / "titan_job.py"), "validate_many", str(run))
        assert done.returncode == 0, done.stderr[-5000:]
        values = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
        means += [line["validation_loss"] for line in values if "validation_loss" in line]
    print(f"mean losses: {means}, largest relative difference {max(means) / min(means) - 1:.1e}")
    assert means == pytest.approx([means[0]] * 4, rel=1e-6)


def test_every_start_up_refusal(jobs: Path) -> None:
    """All in one process: what is wrong is said before the model is built or anything is loaded."""
    done = torchrun(1, str(HERE / "titan_job.py"), "refusals", str(jobs))
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    refused = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = {
        "lanes do not divide the global batch": "global_batch_size = 10 is not a multiple of lanes = 4",
        "local batch does not divide a share": "which a local batch of 3 does not divide",
        "global batch unset": "batches would silently change with the number of ranks",
        "recipe and trainer disagree on seq_len": "seq_len = 32, global_batch_size = 8, but TorchTitan says 64 and 8",
        "recipe and trainer disagree on the tokenizer": "another vocabulary",
        "recipe not set": "dataloader.recipe is not set",
        "TorchTitan's own trainer": "This trainer is TorchTitan's own",
        "no such recipe": "Cannot read the recipe",
        "another loader's config": r"^dataloader is of .*BaseDataLoader.*numbers of ranks\. Use .*DataLoader\.Config",
        "TorchTitan's validator": r"^validator is of .*torchtitan.*Use zephon\.titan\.Validator\.Config",
        "a validator's loader": r"^validator\.dataloader is of .*BaseDataLoader.*Use zephon\.titan\.DataLoader\.Config",
        "vocabulary too small": "the model has 2048 embeddings",
        "records that the model does not take": r"\['document_ids'\], which this model's forward does not take",
        "validation without end": "Set validator.steps to a number",
        "validation recipe not set": "--validator.dataloader.recipe my.toml",
        "validation that ranks cannot share": "which a local batch of 2 does not divide",
        "no such step": r"step-5 is no checkpoint that can be read .*Beside it lie \['step-3'\]",
        "checkpoint that is damaged": "step-3 is no checkpoint that can be read",
        "checkpoint of another recipe": r"order\.seed: 7 -> 8",
        "checkpoint without loader state": "no loader state, only a model",
        "checkpoint of another loader": "the state of another loader",
        "loader left out of loading": "the data silently starts again",
        "state of another step": "holds the loader's state of step 3",
    }
    found = {line["case"]: line["error"] for line in refused}
    assert found.keys() == expected.keys()
    for case, says in expected.items():
        assert re.search(says, found.get(case, "(did not refuse)")), f"{case}: {found.get(case)}"
