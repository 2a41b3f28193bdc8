"""How good is the model that decoupled learners train? One factor at a time, on real text and the same tokens.

    python -m benchmarks.diloco RECIPE [--seeds 3] [--what learners merge wire failures]

A micro transformer (146 k parameters) on the virtual clock of `recipes.diloco.simulate`: real messages, real merging,
real data; only time is virtual, so that 8 learners need one core. The base is 4 learners, RDA, bf16, H = 24, tau = 2.
The loss is that of the global model on 64 sequences of lanes that no run trains on, after the same tokens.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import write
from recipes.diloco import micro
from recipes.diloco.faults import schedule
from recipes.diloco.fragments import make_plan
from recipes.diloco.settings import Settings
from recipes.diloco.simulate import Network, Simulation
from zephon import Recipe, Stream
from zephon.recipe import BatchSpec

SECOND = 1_000_000
SEQ_LEN, HELD_OUT = 64, 64
STEP = {"latency": 20_000, "rate": 50_000_000}


class Bench:
    """Runs over one stream.

    Args:
        recipe: its sources; lanes and batch are ours: 8 lanes to train on, of one sequence of 64 positions.
        tokens: positions that every run trains on.
    """

    def __init__(self, recipe: Path, tokens: int) -> None:
        loaded = replace(Recipe.load(recipe), batch=None, lanes=16)
        self.stream = Stream(replace(loaded, batch=BatchSpec(SEQ_LEN, 16)))
        self.tokens, self.vocabulary = tokens, 2048
        held = self.stream.loader(lanes=range(8, 16))
        batches = [next(held) for _ in range(HELD_OUT // 8)]
        self._test = [(one["input"].astype(np.int64), one["labels"].astype(np.int64)) for one in batches]

    def island(self, seed: int, steps: int, lr: float) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        model = micro.Micro(self.vocabulary, 32, 1, 1, SEQ_LEN)
        made = micro.TorchIsland(model, self.stream, micro.schedule(lr, steps // 10 + 1, steps))
        lanes = {lane: state for lane, state in made.first_lanes().items() if lane < 8}
        made.first_lanes = lambda: lanes  # type: ignore[method-assign]
        return made

    def loss(self, island: Any) -> float:
        with torch.no_grad():
            return statistics.fmean(float(island.loss(*batch)) for batch in self._test)

    def synchronous(self, seed: int, lr: float = 3e-3) -> float:
        """One model, all 8 lanes a step."""
        steps = self.tokens // (8 * SEQ_LEN)
        island = self.island(seed, steps, lr)
        island.own(island.first_lanes())
        for clock in range(steps):
            island.step(clock)
        return self.loss(island)

    def decoupled(self, seed: int, changed: Settings, failures: int = 0, lr: float = 3e-3) -> dict[str, Any]:
        """The same tokens among learners: each has 8/M lanes, so M learners make as many steps as one."""
        rounds = self.tokens // (8 * SEQ_LEN)
        changed = replace(changed, rounds=rounds)
        faults = schedule(seed, changed.learners, rounds * SECOND, failures)
        sim = Simulation(
            changed, lambda learner: self.island(seed, rounds, lr),
            step_time=lambda learner, count: SECOND + (learner * 7919 + count * 104_729) % 50_000,
            network=Network(**STEP), faults=faults,
        ).run()  # fmt: skip
        island = self.island(seed, rounds, lr)
        for fragment, value in enumerate(sim.syncer.model.values):
            island.write(sim.plan, fragment, value)
        steps = [event for event in sim.tape if event["event"] == "step"]
        up = sum(size for (_, way, kind), size in sim.bytes.items() if way == "up" and kind in ("Part", "Report"))
        return {
            "loss": self.loss(island),
            "tokens": sum(event["tokens"] for event in steps),
            "merged_by": statistics.fmean(len(one["learners"]) for one in sim.tape if one["event"] == "merge"),
            "up_bytes_a_step": up / len(steps),
        }


BASE = Settings(learners=4, every=24, fragments=8, overlap=2)

FACTORS: dict[str, dict[str, tuple[Settings, int]]] = {
    "learners": {f"M = {m}": (replace(BASE, learners=m), 0) for m in (1, 2, 4, 8)},
    "merge": {
        f"{merge}, M = {m}": (replace(BASE, merge=merge, learners=m), 0) for m in (4, 8) for merge in ("rda", "average")
    },
    "wire": {up: (replace(BASE, up=up), 0) for up in ("bf16", "int4")},
    "failures": {f"{count} faults": (BASE, count) for count in (0, 12)},
    "outer": {
        f"lr {lr}, momentum {momentum}": (replace(BASE, outer_lr=lr, outer_momentum=momentum), 0)
        for lr, momentum in ((0.7, 0.9), (0.4, 0.9), (0.7, 0.0), (1.0, 0.0))
    },
}
"""One factor at a time, from BASE; how many faults a run has."""


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval (Student's t)."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), t * spread / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--what", nargs="+", choices=sorted(FACTORS), default=sorted(FACTORS))
    asked = parser.parse_args()
    bench = Bench(asked.recipe, asked.tokens)
    seeds = range(asked.seeds)
    reference = [bench.synchronous(seed) for seed in seeds]
    mean, half = interval(reference)
    print(f"synchronous: {mean:.4f} ± {half:.4f}", flush=True)
    plan = make_plan(bench.island(0, 1, 1e-3).tensors, BASE.fragments, BASE.every)
    known: dict[str, list[dict[str, Any]]] = {}
    for what in asked.what:
        rows: dict[str, Any] = {}
        for name, (changed, failures) in FACTORS[what].items():
            key, began = json.dumps([asdict(changed), failures]), time.perf_counter()
            if key not in known:
                known[key] = [bench.decoupled(seed, changed, failures) for seed in seeds]
            runs = known[key]
            mean, half = interval([one["loss"] for one in runs])
            against = interval([one["loss"] / base - 1 for one, base in zip(runs, reference, strict=True)])
            rows[name] = {"runs": runs, "loss": mean, "half": half, "against_synchronous": against}
            took = time.perf_counter() - began
            print(
                f"{what}: {name}: {mean:.4f} ± {half:.4f}; {against[0]:+.2%} ± {against[1]:.2%} of synchronous; "
                f"{runs[0]['merged_by']:.2f} learners a merge; {took:.0f} s",
                flush=True,
            )
        about = {"parameters": plan.total, "tokens": asked.tokens, "seeds": asked.seeds, "synchronous": reference}
        write(f"diloco_{what}", {**about, "base": asdict(BASE), "rows": rows})


if __name__ == "__main__":
    main()
