"""DistributedDataParallel of a quantized model: call :func:`leave_out_packed` once, before it wraps the model.

    w4gemm.integrations.data_parallel.leave_out_packed(model)
    model = torch.nn.parallel.DistributedDataParallel(model)

DistributedDataParallel sends the first process's buffers to all others when it is made and, while training, before
every forward pass. Packed weights are buffers too, and never change.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from w4gemm.api.packed_module import PackedModule
from w4gemm.core.errors import require_module

_Model = TypeVar("_Model", bound=nn.Module)


def leave_out_packed(model: _Model) -> _Model:
    """Let DistributedDataParallel send no packed weights of ``model``, and return the model. Every process must have
    loaded the same weights.

    Args:
        model: the module that DistributedDataParallel will wrap, adapters included, because weights are left out by
            their names in it.

    Raises:
        TypeError, ValueError: for what is no module, or has no quantized layers.
    """
    require_module(model)
    names = {
        f"{owner}.{buffer}" if owner else buffer
        for owner, module in model.named_modules()
        if isinstance(module, PackedModule)
        for buffer in module._buffers
    }
    if not names:
        raise ValueError(f"model: wanted one with quantized layers, got {type(model).__name__} without")
    ignored = names | set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model
