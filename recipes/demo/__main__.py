"""Train, kill, resume on other numbers of ranks, and compare what `train_step` received.

    python -m recipes.demo

Everything lands in `demo/`: corpus, tokenizer, checkpoints, ledgers, logs, and `loss.png`. The exit code is 1 if any
digest of Zephon's differs.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from recipes.demo.corpus import build
from recipes.demo.jobs import Jobs, Losses, Row, check, console, count, show, verdict
from recipes.demo.picture import draw

JOBS = Jobs(Path("demo"), steps=40, save=20)
OURS, STOCK = ("recipes.titan_text", "micro"), ("recipes.demo.stock", "stock")


def main() -> None:
    """Run the whole demonstration."""
    root = JOBS.fresh()
    with console.status("building a corpus and a tokenizer from this machine's Python"):
        counts = build(root)
        shutil.copy(Path(__file__).parent / "recipe.toml", root / "recipe.toml")
    console.print(
        f"Corpus: {counts['docs']} documents of prose, {counts['code']} of code, two sources mixed 0.7 / 0.3."
    )
    ours = JOBS.elastic(OURS)
    stock = _stock()
    show({"Zephon": ours, "TorchTitan's own loader": stock})
    file = root / "loss.png"
    draw(_curves(ours), _curves(stock), JOBS.save, file)
    console.print(f"Loss curves: {file}. On the CPU attention is a dense mask, the rest is TorchTitan's own trainer.")
    check(ours)


def _stock() -> list[Row]:
    """(c) TorchTitan's own loader: refused after a change of ranks, or silently started again."""
    JOBS.train("stock", 2, STOCK, seed=True, say="(c) TorchTitan's own loader, 2 ranks")
    whole = _rows_of("stock")
    rows = [Row("(c) uninterrupted", "2", "", "", JOBS.losses("stock"))]
    for ranks in (1, 4):
        name = f"stock-on-{ranks}"
        JOBS.copy_checkpoint("stock", name)
        log = JOBS.train(name, ranks, STOCK, must_work=False, say=f"(c) stock loader resumed on {count(ranks)}")
        rows.append(Row("(c) resumed", f"2 → {ranks}", "refused", _refusal(log)))
        shutil.rmtree(JOBS.root / name)
        JOBS.copy_checkpoint("stock", name)
        without = ("--checkpoint.exclude_from_loading", "dataloader")
        JOBS.train(name, ranks, STOCK, *without, say="(c) the same, its data state left out")
        resumed = _rows_of(name)
        differing = [step for step in sorted(resumed) if resumed[step] != whole.get(step)]
        row = Row("(c) data state left out", f"2 → {ranks}", *verdict(len(resumed), min(differing, default=None)))
        row.losses, row.against = JOBS.losses(name), JOBS.losses("stock")
        rows.append(row)
    return rows


def _rows_of(name: str) -> dict[int, str]:
    """For the stock loader, one digest a step over its rows in any order: a mere change of places does not count."""
    rows: dict[int, list[str]] = {}
    for file in (JOBS.root / name / "rows").glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            rows.setdefault(line["step"], []).extend(line["rows"])
    return {step: hashlib.sha256("".join(sorted(mine)).encode()).hexdigest() for step, mine in rows.items()}


def _refusal(log: str) -> str:
    """What TorchTitan says when it refuses to go on."""
    for known in ("dataloader resharding is not supported yet", "Missing key in checkpoint state_dict: dataloader"):
        if known in log:
            return known
    return "for another reason; see its log"


def _curves(rows: list[Row]) -> list[tuple[str, Losses]]:
    return [(f"{row.name}, {row.ranks} ranks", row.losses) for row in rows if row.losses]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
