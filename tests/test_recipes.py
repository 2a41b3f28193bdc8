"""Every configuration of ours can be made."""

import pytest

from recipes import titan_image_text, titan_text
from zephon.titan import Trainer


@pytest.mark.parametrize("name", ["micro", "debug", "llama3_1b", "llama3_8b"])
def test_text(name: str) -> None:
    made = getattr(titan_text, name)()
    assert isinstance(made, Trainer.Config)
    assert not made.checkpoint.last_save_model_only


@pytest.mark.parametrize("name", ["qwen_micro", "glimmer_micro", "qwen3_5_4b", "glimmer_30b"])
def test_image_text(name: str) -> None:
    made = getattr(titan_image_text, name)()
    assert isinstance(made, titan_image_text.ImageTextTrainer.Config)
    assert made.model_spec.model.vision_encoder is not None
    assert made.training.global_batch_size % 8 == 0
