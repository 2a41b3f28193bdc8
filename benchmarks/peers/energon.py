"""Megatron-Energon 7.4.1: text from its indexed JSONL, captioned images from its indexed tars.

Text: its packing groups whole samples and keeps nothing from one group to the next, so it cannot cut documents at the
end of a sequence; it gives documents, and encoding and packing are as in the prototype. Images: TorchTitan's functions
for samples and batches. Settings: no shuffle buffer; no worker on text, two or none on images.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from common import Clock, Run, Work, look_images, look_text, main
from megatron.energon import (
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.task_encoder.base import TaskEncoder
from prototype import encoder, pack


def loader(path: str, work: Work, tasks: Any, batch: int | None) -> Any:
    """Its loader of a prepared folder or file."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=work.options.get("workers", 0))
    dataset = get_train_dataset(
        path, worker_config=config, batch_size=batch, shuffle_buffer_size=None, max_samples_per_sequence=None,
        task_encoder=tasks,
    )  # fmt: skip
    return get_savable_loader(dataset)


@stateless
def cook(sample: dict[str, Any]) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Texts(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Documents as they are."""

    cookers = [Cooker(cook)]  # noqa: RUF012
    decoder = None


def run(work: Work, clock: Clock) -> Run:
    if work.unit == "images":
        return images(work, clock)
    import numpy as np  # noqa: F401

    clock.lap("imports")
    encode = encoder(work.tokenizer, work.options["fast"])
    clock.lap("tokenizer")
    samples = iter(loader(f"{work.data['energon']}/docs.jsonl", work, Texts(), None))

    def documents() -> Iterator[list[str]]:
        while True:
            yield [sample.text for sample in itertools.islice(samples, work.options["rows"])]

    return Run(pack(map(encode, documents()), work), look_text)


def images(work: Work, clock: Clock) -> Run:
    from titan_images import collator_of, sample_of, tokenizer_of

    clock.lap("imports")
    tokenizer = tokenizer_of(work)
    clock.lap("tokenizer")
    sample, collate = sample_of(tokenizer), collator_of(work, tokenizer)

    class Pairs(TaskEncoder[Any, Any, Any, Any]):
        decoder = None

        @stateless
        def encode_sample(self, one: CaptioningSample) -> Any:
            return sample(one.image, one.caption.decode())

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            return collate(samples)

    return Run(iter(loader(work.data["energon"], work, Pairs(), work.batch)), look_images)


if __name__ == "__main__":
    main(run)
