"""DatologyAI's `zephon` 0.2.0: Parquet, tokenize, pack_flat(wrap), batch, to_training, which makes the labels.

Settings: Parquet, which is cheaper than JSONL; no attention mask, since packed sequences have none; chunks of its own
size; two threads on two cores, since 4 to 16 cost up to 1.7 times as much. `tokenize` calls what it is given once for
up to 64 documents, so fastokens is given as an object that encodes such a batch flat.
"""

import itertools
from collections.abc import Callable
from typing import Any

from common import Clock, Run, Work, main
from prototype import encoder

import zephon


class FastTokens:
    """Called as a tokenizer of transformers is; loaded where it is first used."""

    name_or_path = pad_token = bos_token_id = None

    def __init__(self, work: Work) -> None:
        self._work = work
        self._encode: Callable[[list[str]], Any] | None = None
        self.eos_token_id = self.pad_token_id = work.eos

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_encode": None}  # a process loads its own

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[Any]]:
        if self._encode is None:
            self._encode = encoder(self._work.tokenizer, True)
        ids, offsets = self._encode(texts)
        return {"input_ids": [ids[start:end] for start, end in itertools.pairwise(offsets.tolist())]}


def text(work: Work, clock: Clock) -> Run:
    run = work.options["run"]
    clock.lap("imports")
    tokens: dict[str, Any] = {"tokenizer_id": work.tokenizer}  # loaded by the first batch
    if work.options["fast"]:
        tokens = {"tokenizer": FastTokens(work)}
        if not run.get("mtp_mode"):
            tokens["tokenizer"](["load it now"])
    clock.lap("tokenizer")
    dataset = zephon.Dataset.from_path("docs", work.data["parquet"])
    source = zephon.StaticMixtureWorkSource([dataset], {"docs": 1.0}, exhausted_policy="repeat")
    pipeline = zephon.Pipeline(source)
    pipeline.tokenize(field="text", add_attention_mask=False, special_tokens="eos", **tokens)
    pipeline.pack_flat(work.seq_len + 1, algorithm="wrap").batch(work.batch).options(**run)
    batches = (batch.to_training(return_labels=True) for batch in pipeline)
    return Run(batches, lambda batch: {"tokens": len(batch["input_ids"]) * len(batch["input_ids"][0])})


if __name__ == "__main__":
    main(text)
