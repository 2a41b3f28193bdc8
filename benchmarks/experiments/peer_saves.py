"""State of one peer at several steps, run by saves.py in that peer's environment: `python peer_saves.py JSON`.

Each function makes a loader, fresh or from a state, and says how its state is taken. Peers that pack keep their packing
in the state; MosaicML, LitData and Energon give documents (8 a step), since the packing that they would need is not
theirs. What comes first after a restore is compared with what the loader itself gives next.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import itertools
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

EOS = "<|end_of_text|>"


class Peer(NamedTuple):
    """A loader at work and how its state is taken."""

    batches: Iterator[Any]
    save: Callable[[], Any]


Make = Callable[[Any], Peer]
"""From a state, or None, to a loader."""


def stock(work: Any) -> Make:
    from datasets import disable_progress_bars, load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    disable_progress_bars()
    tokenizer = HuggingFaceTokenizer(tokenizer_path=work.tokenizer)
    files = parquet(work)
    DATASETS["here"] = DatasetConfig(
        path="here", loader=lambda _: load_dataset("parquet", data_files=files, split="train", streaming=True),
        sample_processor=lambda row: row["text"],
    )  # fmt: skip
    shape: Any = {"dp_world_size": 1, "dp_rank": 0, "seq_len": work.seq_len, "local_batch_size": work.batch}

    def make(state: Any) -> Peer:
        loader = HuggingFaceTextDataLoader(
            HuggingFaceTextDataLoader.Config(dataset="here"), tokenizer=tokenizer, **shape
        )
        return of_titan(loader, state)

    return make


def of_titan(loader: Any, state: Any) -> Peer:
    if state is not None:
        loader.load_state_dict(state)
    return Peer(iter(loader), loader.state_dict)


def stock_images(work: Any) -> Make:
    from dataclasses import replace

    from common import MARKS
    from datasets import load_dataset
    from torchtitan.components.tokenizer import MultiModalTokenizer
    from torchtitan.hf_datasets.multimodal.mm_datasets import MM_DATASETS, MMDataLoader

    tokenizer = MultiModalTokenizer(MultiModalTokenizer.Config(**MARKS), tokenizer_path=work.tokenizer)
    files = sorted(map(str, Path(work.tar).glob("*.tar")))

    def load(_: str) -> Any:
        return load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)

    MM_DATASETS["pairs"] = replace(MM_DATASETS["cc12m"], path="pairs", loader=load)
    config = MMDataLoader.Config(
        dataset="pairs", max_images_per_batch=128, build_mrope_positions=True,
        patch_size=16, temporal_patch_size=2, spatial_merge_size=2, min_pixels=4096, max_pixels=36864,
        image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    shape: Any = {"dp_world_size": 1, "dp_rank": 0, "seq_len": work.seq_len, "local_batch_size": work.batch}
    return lambda state: of_titan(MMDataLoader(config, tokenizer=tokenizer, **shape), state)


def zephon_020(work: Any) -> Make:
    from datology import FastTokens

    import zephon

    tokens: Any = FastTokens(SimpleNamespace(tokenizer=work.tokenizer, eos=eos_of(work)))
    tokens(["load it now"])

    def make(state: Any) -> Peer:
        dataset = zephon.Dataset.from_path("docs", work.data)
        source = zephon.StaticMixtureWorkSource([dataset], {"docs": 1.0}, exhausted_policy="repeat", chunk_size=16)
        pipeline = zephon.Pipeline(source)
        pipeline.tokenize(field="text", add_attention_mask=False, special_tokens="eos", tokenizer=tokens)
        pipeline.pack_flat(work.seq_len + 1, algorithm="wrap").batch(work.batch).options(runner="inline")
        if state is not None:
            pipeline.restore(state)
        return Peer((batch.to_training(return_labels=True) for batch in pipeline), pipeline.checkpoint)

    return make


def google_grain(work: Any) -> Make:
    import google_grain as side
    import grain
    from grain.experimental import ConcatThenSplitIterDataset

    options = {"fast": True, "workers": 0, "rows": 64}
    encode = side.Encode(SimpleNamespace(tokenizer=work.tokenizer, eos=eos_of(work), options=options))
    encode.map(["load it now"])

    def make(state: Any) -> Peer:
        groups = grain.MapDataset.source(side.Blocks(parquet(work), 64)).repeat()
        rows = groups.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)).map(encode)
        packed = ConcatThenSplitIterDataset(rows, length_struct=dict.fromkeys(side.NAMES, work.seq_len))
        batches = iter(packed.batch(work.batch))
        if state is not None:
            batches.set_state(state)
        return Peer(batches, batches.get_state)

    return make


def hf_datasets(work: Any) -> Make:
    import datasets
    from common import Work
    from prototype import encoder, pack

    datasets.disable_progress_bars()
    encode = encoder(work.tokenizer, True)
    single = Work({}, work.tokenizer, eos_of(work), "", 0, 0, seq_len=work.seq_len, batch=1)

    def sequences(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = list(pack([encode(rows["text"])], single))
        return {name: [row for one in found for row in one[name]] for name in found[0]}

    def make(state: Any) -> Peer:
        rows = datasets.load_dataset("parquet", data_files=parquet(work), split="train", streaming=True)
        mapped = rows.repeat(None).map(sequences, batched=True, batch_size=64, remove_columns=rows.column_names)
        batches = mapped.batch(work.batch)
        if state is not None:
            batches.load_state_dict(state)
        return Peer(iter(batches), batches.state_dict)

    return make


def mosaic(work: Any) -> Make:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    def make(state: Any) -> Peer:
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=work.data, shuffle=False, batch_size=work.batch)
        taken = 0
        if state is not None:
            dataset.load_state_dict(state)

        def batches() -> Iterator[Any]:
            nonlocal taken
            while True:
                rows, taken = iter(dataset), 0  # what is told counts from the start of an epoch
                while batch := list(itertools.islice(rows, work.batch)):
                    taken += len(batch)
                    yield [row["text"] for row in batch]

        return Peer(batches(), lambda: dataset.state_dict(taken, from_beginning=state is None))

    return make


def litdata(work: Any) -> Make:
    from litdata import StreamingDataLoader, StreamingDataset

    def make(state: Any) -> Peer:
        dataset = StreamingDataset(work.data, shuffle=False)
        loader = StreamingDataLoader(dataset, batch_size=work.batch, num_workers=0)
        if state is not None:
            loader.load_state_dict(state)
        return Peer(itertools.chain.from_iterable(iter(loader) for _ in itertools.count()), loader.state_dict)

    return make


def energon(work: Any) -> Make:
    import energon as side

    def make(state: Any) -> Peer:
        options = SimpleNamespace(options={"workers": 0})
        loader = side.loader(f"{work.data}/docs.jsonl", options, side.Texts(), work.batch)
        if state is not None:
            loader.restore_state_rank(state)
        return Peer((batch.text for batch in loader), loader.save_state_rank)

    return make


PEERS: dict[str, Callable[[Any], Make]] = {
    "stock": stock, "stock, images": stock_images,
    "zephon 0.2.0": zephon_020, "grain": google_grain, "datasets": hf_datasets, "mosaic": mosaic, "litdata": litdata,
    "energon": energon,
}  # fmt: skip


def parquet(work: Any) -> list[str]:
    return sorted(map(str, Path(work.data).glob("*.parquet")))


def eos_of(work: Any) -> int:
    added = json.loads(Path(work.tokenizer, "tokenizer.json").read_text())["added_tokens"]
    return next(one["id"] for one in added if one["content"] == EOS)


def plain(batch: Any) -> str:
    """What two batches that are alike have in common."""
    if isinstance(batch, dict):
        return str({name: plain(value) for name, value in sorted(batch.items())})
    if isinstance(batch, (list, tuple)):
        return str([plain(one) for one in batch])
    return str(batch.tolist()) if hasattr(batch, "tolist") else str(batch)


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    work = SimpleNamespace(**json.loads(sys.argv[1]))
    make = PEERS[work.peer](work)
    next(make(None).batches)  # imports and caches
    fresh = statistics.median(clocked(lambda: next(make(None).batches))[0] for _ in range(work.repeats))
    peer, done = make(None), 0
    for step in work.steps:
        while done < step:
            batch = next(peer.batches)
            done += 1
        save, state = clocked(peer.save)
        raw = pickle.dumps(state)
        wall, first = clocked(lambda: next(make(pickle.loads(raw)).batches))  # noqa: B023
        batch = next(peer.batches)
        done += 1
        row = {"step": step, "state_bytes": len(raw), "save_ms": 1e3 * save, "fresh_s": fresh, "restore_s": wall}
        print(json.dumps(row | {"exact": plain(first) == plain(batch)}), flush=True)


if __name__ == "__main__":
    main()
