"""A few steps of TorchTitan's trainer on the CPU, in this process.

python examples/titan_cpu.py

A job starts one process a rank: `torchrun -m torchtitan.train --module recipes.titan_text --config micro ...`.
"""

import json
import logging
import os
import socket
import warnings
from dataclasses import replace

from _data import sample_recipe

warnings.simplefilter("ignore")  # TorchTitan's own
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
# What torchrun would set.
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

import torch.distributed as dist  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402

from recipes.titan_text import micro  # noqa: E402
from zephon.titan import DataLoader  # noqa: E402

logging.disable(logging.WARNING)
recipe = sample_recipe()
out = recipe.parent / "out"
config = micro()
config.dataloader = DataLoader.Config(recipe=str(recipe))
config.hf_assets_path = str(recipe.parent / "tokenizer")
config.dump_folder = str(out)
config.checkpoint = replace(config.checkpoint, enable=False)
config.training = TrainingConfig(
    local_batch_size=2,  # 4 micro-batches a step: any number that divides 8 gives the same data
    global_batch_size=8,
    seq_len=256,
    steps=6,
    mixed_precision_param="float32",
    disable_cuda_graphs=True,
)

trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
    dist.destroy_process_group()

for line in (out / "loss.jsonl").read_text().splitlines():
    step = json.loads(line)
    print(f"step {step['step']}  loss {step['loss']:.4f}")
