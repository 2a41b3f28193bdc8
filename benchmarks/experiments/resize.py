"""1. A run on 16 ranks, continued on 8, 32 and 64: is every global batch that of the run that was never stopped?

Loader ranks are processes of their own, for text and for mixed images and text; TorchTitan trains with real process
groups on as many ranks as the machine bears, from one seed checkpoint. Beside it TorchTitan's own loader, which
refuses, and what happens when its state is left out; and DatologyAI's `zephon` 0.2.0, which has lanes too.

Decided before anything was measured: with ours every step must be there and equal, at every number of ranks.
"""

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpus import IMAGES, TEXT
from benchmarks.elastic import Args, run_ranks
from benchmarks.experiments import data, jobs
from benchmarks.peers import venvs
from zephon.digest import step_digest
from zephon.ledger import read_ledger

Digests = dict[int, str]
"""SHA-256 of every global batch, by step."""

REFUSALS = ("dataloader resharding is not supported yet", "Missing key in checkpoint state_dict: dataloader")
"""What TorchTitan says with its own loader when there are fewer ranks than before, and when there are more."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    lanes: int
    ranks: int
    to: tuple[int, ...]
    save_at: int
    steps: int
    titan_ranks: int
    titan_to: tuple[int, ...]
    titan_save_at: int
    titan_steps: int
    megabytes: float
    pictures: int
    titan_kinds: tuple[str, ...] = ("text", "images")
    seq_len: int = 256


QUICK = Sizes(4, 2, (1, 4), 6, 9, 2, (1,), 4, 8, 0.5, 64, ("images",))
FULL = Sizes(64, 16, (8, 32, 64), 150, 200, 4, (1, 2, 8), 30, 40, 8.0, 960)
TITAN = {"text": (TEXT, 128, 16, 2), "images": (IMAGES, 256, 8, 1)}
"""Of training jobs: recipe, sequence length, global batch, and a local batch that suits every number of ranks."""


def measure(out: Path, sizes: Sizes, peers: bool) -> dict[str, Any]:
    """Run everything that is not there yet; returns a row a run, and the verdicts."""
    corpus = data.wide(out / "corpus", sizes.megabytes, sizes.pictures)
    rows: list[dict[str, Any]] = []
    for kind, template in (("text", TEXT), ("images", IMAGES)):
        recipe = data.recipe(corpus, template, sizes.lanes, sizes.seq_len, sizes.lanes)
        rows += jobs.once(out / "results" / f"loaders-{kind}.json", partial(loaders, out, sizes, recipe, kind))["rows"]
    for kind in sizes.titan_kinds:
        rows += jobs.once(out / "results" / f"titan-{kind}.json", partial(titan, out, sizes, corpus, kind))["rows"]
    rows += jobs.once(out / "results" / "stock.json", partial(stock, out, sizes, corpus))["rows"]
    if peers:
        rows += jobs.once(out / "results" / "zephon020.json", partial(datology, out, sizes, corpus))["rows"]
    return {"verdicts": verdicts(rows), "rows": rows}


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What was decided beforehand; nothing holds of runs that are not there."""
    ours = [row for row in rows if row["loader"] == "ours"]
    refusals = [row["refused"] for row in rows if "refused" in row]
    return {
        "every batch of ours is equal": bool(ours) and all(r["equal"] == r["compared"] == r["expected"] for r in ours),
        "the stock loader refuses": bool(refusals) and all(refusals),
    }


def row(loader: str, kind: str, ranks: str, whole: Digests, found: Digests, expected: int) -> dict[str, Any]:
    """How the batches of a resumed run compare with those of the uninterrupted one."""
    both = sorted(whole.keys() & found.keys())
    differing = [step for step in both if whole[step] != found[step]]
    return {
        "loader": loader, "kind": kind, "ranks": ranks, "expected": expected, "compared": len(both),
        "equal": len(both) - len(differing), "first difference": min(differing, default=None),
        "last": found.get(max(both, default=0)),
    }  # fmt: skip


def digests(ledger: Path, lanes: int) -> Digests:
    """SHA-256 of every global batch of which a ledger holds all lanes."""
    return {
        step: step_digest({int(lane): bytes.fromhex(one) for lane, one in found.items()})
        for step, found in read_ledger(ledger).items() if len(found) == lanes
    }  # fmt: skip


def loaders(out: Path, sizes: Sizes, recipe: Path, kind: str) -> dict[str, Any]:
    """Ranks of our loader without a trainer, each a process."""
    work = out / "runs" / f"loaders-{kind}"
    shutil.rmtree(work, ignore_errors=True)
    args = Args(recipe, wave=max(4, 2 * (os.cpu_count() or 1)))
    run_ranks(args, sizes.ranks, sizes.steps, work / "whole")
    whole = digests(work / "whole", sizes.lanes)
    run_ranks(args, sizes.ranks, sizes.save_at, work / "first", "--save", str(work / "state"))
    rows = [row("ours", kind, f"{sizes.ranks}", whole, digests(work / "first", sizes.lanes), sizes.save_at)]
    for world in sizes.to:
        run_ranks(args, world, sizes.steps, work / str(world), "--resume", str(work / "state"))
        found = digests(work / str(world), sizes.lanes)
        rows.append(row("ours", kind, f"{sizes.ranks} → {world}", whole, found, sizes.steps - sizes.save_at))
    return {"rows": rows, "digests": whole}


def titan(out: Path, sizes: Sizes, corpus: Path, kind: str) -> dict[str, Any]:
    """Ranks of TorchTitan with our loader."""
    template, seq_len, batch, _ = TITAN[kind]
    options = [*shape(sizes, kind), "--dataloader.recipe", data.recipe(corpus, template, 8, seq_len, batch)]
    saved = first(out, sizes, corpus, kind, f"titan-{kind}", options)
    whole = digests(saved.parents[1] / "ledger", 8)
    rows: list[dict[str, Any]] = []
    for ranks in sizes.titan_to:
        folder = jobs.start_from(saved, out / "runs" / f"titan-{kind}-on-{ranks}")
        jobs.train(folder, corpus, ranks, kind, *options)
        found = digests(folder / "ledger", 8)
        now = row("ours", f"{kind}, TorchTitan", f"{sizes.titan_ranks} → {ranks}", whole, found, rest(sizes))
        rows.append(now | {"loss gap": loss_gap(saved.parents[1], folder)})
    return {"rows": rows, "digests": whole}


def first(out: Path, sizes: Sizes, corpus: Path, config: str, name: str, options: list[object]) -> Path:
    """The uninterrupted run from a seed checkpoint; returns the checkpoint that it saved on the way."""
    seed = out / "runs" / f"{name}-seed"
    shutil.rmtree(seed, ignore_errors=True)
    jobs.train(seed, corpus, 1, config, *options, "--checkpoint.create_seed_checkpoint", "--debug.seed", 1)
    folder = jobs.start_from(seed / "checkpoint" / "step-0", out / "runs" / name)
    jobs.train(folder, corpus, sizes.titan_ranks, config, *options, "--checkpoint.interval", sizes.titan_save_at)
    return folder / "checkpoint" / f"step-{sizes.titan_save_at}"


def shape(sizes: Sizes, kind: str) -> list[object]:
    _, seq_len, batch, local = TITAN[kind]
    values = {"steps": sizes.titan_steps, "seq_len": seq_len, "global_batch_size": batch, "local_batch_size": local}
    return [part for name, value in values.items() for part in (f"--training.{name}", value)]


def rest(sizes: Sizes) -> int:
    return sizes.titan_steps - sizes.titan_save_at


def loss_gap(whole: Path, resumed: Path) -> float:
    """Largest difference of the training loss of a step."""
    a, b = ({line["step"]: line["loss"] for line in jobs.lines(one / "loss.jsonl")} for one in (whole, resumed))
    return max(abs(a[step] - b[step]) for step in a.keys() & b.keys())


def stock(out: Path, sizes: Sizes, corpus: Path) -> dict[str, Any]:
    """TorchTitan's own loader: refused, and then with its state left out."""
    options = shape(sizes, "text")
    saved = first(out, sizes, corpus, "stock", "stock", options)
    whole = {int(step): one for step, one in jobs.rows(saved.parents[1]).items()}
    seen = row_set(saved.parents[1], until=sizes.titan_save_at)
    rows: list[dict[str, Any]] = []
    for ranks in sizes.titan_to:
        change, name = f"{sizes.titan_ranks} → {ranks}", f"stock-on-{ranks}"
        try:
            jobs.train(jobs.start_from(saved, out / "runs" / name), corpus, ranks, "stock", *options)
            said = ""
        except jobs.JobFailedError:
            log = (out / "runs" / name / "log.txt").read_text(errors="replace")
            said = next((known for known in REFUSALS if known in log), "")
        rows.append({"loader": "stock", "kind": "text, TorchTitan", "ranks": change, "refused": said})
        folder = jobs.start_from(saved, out / "runs" / name)
        jobs.train(folder, corpus, ranks, "stock", *options, "--checkpoint.exclude_from_loading", "dataloader")
        found = {int(step): one for step, one in jobs.rows(folder).items()}
        again = row_set(folder)
        now = row("stock", "text, TorchTitan, state left out", change, whole, found, rest(sizes))
        rows.append(now | {"share of rows seen before": len(again & seen) / len(again)})
    return {"rows": rows}


def row_set(folder: Path, until: int | None = None) -> set[str]:
    """Digests of all rows that a run of the stock loader trained on, up to a step."""
    found = [line for file in (folder / "rows").glob("*.jsonl") for line in jobs.lines(file)]
    return {row for line in found if until is None or line["step"] <= until for row in line["rows"]}


def datology(out: Path, sizes: Sizes, corpus: Path) -> dict[str, Any]:
    """Ranks of DatologyAI's `zephon` 0.2.0, each a process; batches compared as sets of rows, which it promises."""
    venvs.build("zephon")
    venvs.check_zephon("zephon")
    work = out / "runs" / "zephon020"
    shutil.rmtree(work, ignore_errors=True)
    state = str(work / "state")
    added = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    eos = next(one["id"] for one in added if one["content"] == "<|end_of_text|>")
    base = {"corpus": str(corpus), "weights": data.WEIGHTS, "eos": eos, "seq_len": sizes.seq_len, "lanes": sizes.lanes}

    def run(name: str, world: int, steps: int, wave: int, **more: Any) -> tuple[Digests, Digests]:
        folder = work / name
        (folder / "shared").mkdir(parents=True)
        asked = {**base, "world": world, "steps": steps, "shared": str(folder / "shared"), "run": name}
        asked |= {"resume": "", "save": "", "save_at": 0, **more}
        every = [{**asked, "rank": rank, "ledger": str(folder / f"{rank:05d}.jsonl")} for rank in range(world)]
        for at in range(0, world, wave):
            peer_processes(every[at : at + wave], folder)
        return peer_digests(folder)

    wave = max(4, 2 * (os.cpu_count() or 1))
    whole = run("whole", sizes.ranks, sizes.steps, sizes.ranks, save=state, save_at=sizes.save_at)
    rows: list[dict[str, Any]] = []
    for world in sizes.to:
        found = run(str(world), world, sizes.steps, wave, resume=state)
        change, expected = f"{sizes.ranks} → {world}", sizes.steps - sizes.save_at
        rows.append(row("zephon 0.2.0", "text, rows in any order", change, whole[0], found[0], expected))
        rows.append(row("zephon 0.2.0", "text, rows in their order", change, whole[1], found[1], expected))
    return {"rows": rows}


def peer_processes(every: list[dict[str, Any]], folder: Path) -> None:
    """Run ranks side by side to their end.

    Raises:
        JobFailedError: one did not end well.
    """
    python, script = venvs.python_of("zephon"), Path(__file__).with_name("peer_resize.py")
    environment = jobs.environment(PYTHONPATH=str(jobs.REPOSITORY / "benchmarks" / "peers"))
    with (folder / "log.txt").open("ab") as log:
        processes = [
            subprocess.Popen([python, script, json.dumps(one)], stdout=log, stderr=log, env=environment, cwd=folder)
            for one in every
        ]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise jobs.JobFailedError(f"ranks ended with {codes}:\n{(folder / 'log.txt').read_text()[-3000:]}")


def peer_digests(folder: Path) -> tuple[Digests, Digests]:
    """Of every global batch, over its rows in sorted order and in the order of ranks and of what each took."""
    found: dict[int, list[str]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in jobs.lines(file):
            found.setdefault(line["step"], []).extend(line["rows"])

    def digest(rows: list[str]) -> str:
        return hashlib.sha256("".join(rows).encode()).hexdigest()

    return {step: digest(sorted(rows)) for step, rows in found.items()}, {step: digest(r) for step, r in found.items()}
