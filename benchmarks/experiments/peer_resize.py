"""A rank of DatologyAI's `zephon` 0.2.0, run by resize.py in an environment of its own: `python peer_resize.py JSON`.

Its lanes (`canonical_replicas`) are fixed, every rank takes one sequence of each of its lanes a step, and all ranks
save together through a shared folder. Two sources, mixed, encoded and packed by it, as `benchmarks/peers` does.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import hashlib
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from datology import FastTokens

import zephon


def main() -> None:
    work = SimpleNamespace(**json.loads(sys.argv[1]))
    sources = [zephon.Dataset.from_path(name, f"{work.corpus}/{name}") for name in work.weights]
    mixture = zephon.StaticMixtureWorkSource(sources, work.weights, exhausted_policy="repeat", chunk_size=16)
    pipeline = zephon.Pipeline(mixture)
    tokens: Any = FastTokens(SimpleNamespace(tokenizer=f"{work.corpus}/tokenizer", eos=work.eos))
    pipeline.tokenize(field="text", add_attention_mask=False, special_tokens="eos", tokenizer=tokens)
    pipeline.pack_flat(work.seq_len + 1, algorithm="wrap").batch(1)
    pipeline.options(
        runner="inline", world_size=work.world, global_rank=work.rank, canonical_replicas=work.lanes,
        aggregate_dir=work.shared, run_id=work.run,
    )  # fmt: skip
    step = 0
    if work.resume:
        state = pickle.loads(Path(work.resume).read_bytes())
        step = state["step"]
        pipeline.restore(state["pipeline"])
    batches = iter(pipeline)
    with Path(work.ledger).open("w") as ledger:
        while step < work.steps:
            step += 1
            rows = [row for _ in range(work.lanes // work.world) for row in rows_of(next(batches))]
            ledger.write(json.dumps({"step": step, "rows": rows}) + "\n")
            if step == work.save_at:
                state = {"step": step, "pipeline": pipeline.checkpoint()}  # all ranks get the same
                if work.rank == 0:
                    Path(work.save).write_bytes(pickle.dumps(state))


def rows_of(batch: Any) -> list[str]:
    """Digests of the sequences of a batch."""
    ids = np.asarray(batch.to_training(return_labels=True)["input_ids"], np.int32)
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in ids]


if __name__ == "__main__":
    main()
