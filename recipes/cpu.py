"""TorchTitan 0.3.0 on the CPU, for machines without an accelerator: demos and tests.

`install` acts only where there is no accelerator, and says so. What it stands in for:

- the device module: memory figures come from the resident set of the process;
- FlexAttention, whose backward pass does not exist on the CPU: the same mask, dense, through
  `scaled_dot_product_attention` (forward differs by at most 4e-7);
- the compiled block mask of vision encoders, which inductor cannot compile here: built eagerly;
- FSDP's pre-multiplied sum, which gloo lacks: a plain sum, as TorchTitan divides by tokens itself;
- `fla`, whose kernels Qwen 3.5's linear attention calls, where it is not installed: names that raise when called.
  Models for the CPU have full attention only.
"""

import importlib.util
import logging
import os
import resource
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


def install() -> bool:
    """Patch TorchTitan for the CPU where there is no accelerator; returns whether it did.

    Call it once, after `torchtitan` is importable and before a trainer is built.
    """
    import torchtitan.tools.utils as utils

    if torch.accelerator.is_available() or utils.device_type == "cpu":
        return False
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.models.common.vision_encoder as vision
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    logger.warning("No accelerator: TorchTitan runs on the CPU with dense attention masks. For demos and tests only.")
    _rebind("device_module", utils.device_module, _cpu_module())
    _rebind("device_type", utils.device_type, "cpu")
    # The class attribute, not `_compiled_flex_attn`: deterministic mode assigns that one again.
    attention.FlexAttention.compiled_flex_attn = staticmethod(_dense_attention)  # pyright: ignore[reportAttributeAccessIssue]
    attention._compiled_create_block_mask = create_block_mask
    _rebind("compiled_create_block_mask", vision.compiled_create_block_mask, create_block_mask)
    _sum_only(fsdp)
    return True


def stub_fla() -> bool:
    """Make Qwen 3.5 importable where `fla` is not installed; returns whether it had to. Its kernels then raise."""
    if importlib.util.find_spec("fla") is not None:
        return False

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("This layer needs the GPU kernels of fla-core, which is not installed.")

    names = {
        "fla.modules.conv.triton.ops": ("CausalConv1dFunction",),
        "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "fla.ops.gated_delta_rule.chunk": ("ChunkGatedDeltaRuleFunction",),
        "fla.ops.gated_delta_rule.fused_recurrent": ("FusedRecurrentFunction",),
    }
    for path, members in names.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        for member in members:
            kind = type(member, (), {"apply": staticmethod(missing)}) if member.endswith("Function") else missing
            setattr(sys.modules[path], member, kind)
    logger.warning("fla-core is not installed: Qwen 3.5 runs without its linear-attention layers. For demos and tests.")
    return True


def _cpu_module() -> types.ModuleType:
    module = types.ModuleType("torch_cpu")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_stats(device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    module.__dict__.update(
        memory_stats=memory_stats,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=total),
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    return module


def _rebind(name: str, old: object, new: object) -> None:
    """Replace a name in every module of torchtitan that imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchtitan") and module is not None and vars(module).get(name) is old:
            setattr(module, name, new)


def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: Any = None,
    kernel_options: Any = None,
) -> tuple[torch.Tensor, None]:
    from torch.nn.attention.flex_attention import create_mask

    if score_mod is not None or (return_aux and return_aux.lse):
        raise ValueError("The dense CPU attention knows block masks only: no score_mod, no log-sum-exp.")
    mask = getattr(block_mask, "_dense", None)
    if mask is None:  # one mask serves all layers of a step
        batch, sizes = block_mask.kv_num_blocks.shape[0], (query.shape[2], key.shape[2])
        mask = create_mask(block_mask.mask_mod, batch, 1, *sizes, device=query.device)
        block_mask._dense = mask
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0), None


def _sum_only(fsdp: types.ModuleType) -> None:
    from torch.distributed.fsdp import FSDPModule

    original = fsdp.disable_fsdp_gradient_division

    def disable(model: torch.nn.Module) -> None:
        original(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    _rebind("disable_fsdp_gradient_division", original, disable)
