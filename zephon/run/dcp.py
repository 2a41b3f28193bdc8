"""The loader's header in a distributed checkpoint of PyTorch's, read before anything else of it is."""

# pyright: reportMissingTypeStubs=false

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

from zephon.errors import RestoreError
from zephon.state import HEADER

KEY = "dataloader"
"""TorchTitan's name for the loader in a checkpoint."""


def read_header(checkpoint: str) -> bytes:
    """The loader's header from a distributed checkpoint, without loading anything else or talking to other ranks.

    Raises:
        RestoreError: the checkpoint has no loader state, or another loader's.
    """
    reader = FileSystemReader(checkpoint)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        steps = sorted(one.parent.name for one in Path(checkpoint).parent.glob("*/.metadata"))
        raise RestoreError(
            f"{checkpoint} is no checkpoint that can be read ({error!r}). Beside it lie {steps or 'none'}: choose "
            "one with checkpoint.load_step, or remove what is damaged."
        ) from error
    keys = [key for key in saved if key.startswith(f"{KEY}.")]
    key = f"{KEY}.{HEADER}"
    if key not in keys:
        found = (
            f"the state of another loader ({', '.join(sorted(keys)[:3])})" if keys else "no loader state, only a model"
        )
        raise RestoreError(
            f"{checkpoint} holds {found}; the data cannot go on from there. To start the data anew on purpose, load "
            "the model alone: point checkpoint.initial_load_path at it and use an empty checkpoint folder."
        )
    state: dict[str, Any] = {key: b""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process, as it should
        load(state, storage_reader=reader, no_dist=True)
    return state[key]
