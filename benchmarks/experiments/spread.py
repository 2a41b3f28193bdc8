"""How far apart runs are that should be alike, with intervals."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REPLICATES = 2000


def largest(table: Array, weights: Array, chosen: Any, counts: Array) -> float:
    """Largest difference between runs, the mean over seeds.

    Args:
        table: sums of a score [seeds, runs, windows].
        weights: what they are sums over [windows].
        chosen: seeds to take, with repetitions.
        counts: how often each window is taken [windows].
    """
    means = table[chosen] @ counts / (weights @ counts)
    return float(np.mean(means.max(axis=1) - means.min(axis=1)))


def spread(tables: dict[str, Array], weights: Array, least: float) -> dict[str, list[float]]:
    """Largest differences by what is compared, each [estimate, low, high] with the ends of its 95 % interval.

    Intervals are percentiles of a bootstrap over initial seeds and windows of the held-out sets, the same for all that
    is compared. "ours less floor" and "stock by ours" are their difference and ratio; where ours is under `least`, the
    ratio is to that.
    """
    seeds, windows = len(tables["ours"]), len(weights)
    generator = np.random.default_rng(7)
    draws = [(np.arange(seeds), np.ones(windows))]
    for _ in range(REPLICATES):
        counts = np.bincount(generator.integers(windows, size=windows), minlength=windows).astype(float)
        draws.append((generator.integers(seeds, size=seeds), counts))
    rows: dict[str, list[float]] = {}
    for chosen, counts in draws:
        values = {kind: largest(table, weights, chosen, counts) for kind, table in tables.items()}
        values["ours less floor"] = values["ours"] - values["floor"]
        values["stock by ours"] = values["stock"] / max(values["ours"], least)
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    return {name: [one[0], *np.percentile(one[1:], [2.5, 97.5]).tolist()] for name, one in rows.items()}
