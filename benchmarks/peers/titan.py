"""TorchTitan 0.3.0's own loader for text, as it ships: encodes document by document, packs Python lists.

Settings: streaming, as its own C4 is, from Parquet (a data set on disk and JSONL came to the same); the state of
workers taken at every batch, as it ships, since a trainer that saves needs it.
"""

from typing import Any

from common import Clock, Run, Work, main


def titan(work: Work, clock: Clock) -> Run:
    from datasets import disable_progress_bars, load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    disable_progress_bars()
    clock.lap("imports")
    tokenizer = HuggingFaceTokenizer(tokenizer_path=work.tokenizer)
    if work.options["fast"]:
        import fastokens

        fast = fastokens.Tokenizer.from_file(f"{work.tokenizer}/tokenizer.json")
        tokenizer.encode = lambda text, **_: [*fast.encode(text).ids, work.eos]  # what its own gives
    clock.lap("tokenizer")
    files = work.files("parquet")
    DATASETS["bench"] = DatasetConfig(
        path="bench",
        loader=lambda _: load_dataset("parquet", data_files=files, split="train", streaming=True),
        sample_processor=lambda row: row["text"],
    )
    config: Any = HuggingFaceTextDataLoader.Config(dataset="bench", num_workers=work.options["workers"])
    shape: Any = {"dp_world_size": 1, "dp_rank": 0, "seq_len": work.seq_len, "local_batch_size": work.batch}
    loader = HuggingFaceTextDataLoader(config, tokenizer=tokenizer, **shape)
    return Run(iter(loader), lambda batch: {"tokens": batch[1].numel()})


if __name__ == "__main__":
    main(titan)
