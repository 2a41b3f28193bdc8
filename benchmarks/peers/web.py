"""webdataset 1.0.2 on its tars, with TorchTitan's functions for samples and batches, or with our image function.

Settings: shards in order, samples mapped one by one, batches made where samples are, so that workers send whole
batches. Our image function gives uint8 pixels, patches once an image; the collator is then TorchTitan's but for the
pixels.
"""

from dataclasses import replace
from typing import Any

from common import MAX_PIXELS, MIN_PIXELS, Clock, Run, Work, look_images, main
from titan_images import collator_of, sample_of, tokenizer_of


def web(work: Work, clock: Clock) -> Run:
    from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
    from webdataset.compat import WebDataset, WebLoader

    kind = with_our_images(MultiModalCollator) if work.options.get("our_images") else MultiModalCollator
    clock.lap("imports")
    tokenizer = tokenizer_of(work)
    clock.lap("tokenizer")
    sample = sample_of(tokenizer)
    opened: Any = WebDataset(work.files("tar"), shardshuffle=False).repeat()
    samples = opened.map(lambda row: sample(row["jpg"], row["txt"].decode()))
    batches = samples.batched(work.batch, collation_fn=collator_of(work, tokenizer, kind))
    return Run(iter(WebLoader(batches, batch_size=None, num_workers=work.options.get("workers", 0))), look_images)


def with_our_images(collator: Any) -> Any:
    """A collator of padded uint8 patches, once an image; TorchTitan's sample function takes our pixels."""
    import torch
    from torchtitan.hf_datasets.multimodal import mm_datasets

    from modalities.geometry import patchify
    from modalities.headers import read_header
    from modalities.images import load
    from modalities.media import Bytes
    from modalities.presets import PRESETS

    geometry = replace(PRESETS["qwen3_5"].geometry, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)

    def process(image: bytes, **_: Any) -> Any:
        return torch.from_numpy(load(image, geometry.target(*read_header(Bytes(image)).shown())))[None]

    class Collator(collator):
        def collate_images(self, all_images: list[Any]) -> Any:
            sizes = [tuple(image.shape[1:3]) for image in all_images]
            counts = [geometry.patches(*size) for size in sizes]
            out = torch.zeros(len(sizes), max(counts), 3 * geometry.patch_size**2, dtype=torch.uint8)
            for padded, count, image in zip(out, counts, all_images, strict=True):
                patchify(image[0].numpy(), geometry, padded[:count].numpy())
            return out, torch.tensor([geometry.grid(*size) for size in sizes])

    mm_datasets.process_image = process
    return Collator


if __name__ == "__main__":
    main(web)
