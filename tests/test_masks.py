"""TorchTitan's own masks, made from our positions, with its own attention: documents do not see each other."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from small import write_recipe

from recipes.titan_text import micro
from zephon import Stream


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_no_document_sees_another(tmp_path: Path, packing: str) -> None:
    """Other tokens in one document change its own logits, from there on, and nobody else's."""
    path = write_recipe(tmp_path, lanes=1, size=2, seq_len=512, tail=f'[packing]\nalgorithm = "{packing}"\n')
    with Stream.open(path) as stream:
        batch = next(stream.loader())
    tokens, positions = (torch.from_numpy(batch[name].astype(np.int64)) for name in ("input", "positions"))
    torch.manual_seed(0)
    model = micro().model_spec.model.build()  # type: ignore[union-attr]
    model.init_states()
    starts = [*torch.nonzero(positions[0] == 0).flatten().tolist(), 512]
    documents = [(a, b) for a, b in itertools.pairwise(starts) if b - a > 4]
    assert len(documents) >= 2
    masks = model.get_attention_masks(positions=positions)
    with torch.no_grad():
        before = model(tokens, positions=positions, attention_masks=masks)
        for start, end in documents:
            changed = tokens.clone()
            changed[0, start + 2] = (changed[0, start + 2] + 1) % 200
            after = model(changed, positions=positions, attention_masks=masks)
            moved = (after - before).abs().amax(dim=-1) > 1e-6
            assert moved[0, start + 2 : end].all()
            assert not moved[0, : start + 2].any()
            assert not moved[0, end:].any()
            assert not moved[1].any()
