"""DatologyAI's `zephon` 0.2.0 on Parquet, which it reads in place of tars, with TorchTitan's image function.

It has no image operator and makes no batches of images, so TorchTitan's collator makes them from its records. Settings:
chunks of 256 rows, since its own size is ten times these data; two threads on two cores. Worker processes cost 1.4
times what threads do and took 23 s to the first batch.
"""

from common import Clock, Run, Work, look_images, main
from titan_images import collator_of, sample_of, tokenizer_of

import zephon


def images(work: Work, clock: Clock) -> Run:
    from torchtitan.hf_datasets.multimodal import mm_datasets  # noqa: F401  # loads torch

    clock.lap("imports")
    tokenizer = tokenizer_of(work)
    clock.lap("tokenizer")
    sample, collate = sample_of(tokenizer), collator_of(work, tokenizer)
    dataset = zephon.Dataset.from_path("pairs", work.data["parquet"])
    source = zephon.StaticMixtureWorkSource([dataset], {"pairs": 1.0}, exhausted_policy="repeat", chunk_size=256)
    pipeline = zephon.Pipeline(source)
    pipeline.map_transform(lambda row: sample(bytes(row["jpg"]), row["txt"]))
    pipeline.batch(work.batch).options(**work.options["run"])
    batches = (collate([record.payload for record in batch.records]) for batch in pipeline)
    return Run(batches, look_images)


if __name__ == "__main__":
    main(images)
