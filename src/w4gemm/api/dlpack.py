"""Tensors of other frameworks, which :class:`w4gemm.MixedGemm` takes, as tensors of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def torch_tensor(name: str, value: Any) -> Any:
    """Return a torch tensor that shares the memory of ``value``; a number or None as it is.

    Raises:
        TypeError, ValueError: for what torch cannot import; the message begins with ``name``, the argument.
    """
    if value is None or isinstance(value, (torch.Tensor, int, float)):
        return value
    if name == "out" and getattr(getattr(value, "flags", None), "writeable", True) is False:  # DLPack may not tell
        raise ValueError("out: wanted memory that may be written, got a read-only array")
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        missing = " without __dlpack_device__" if hasattr(value, "__dlpack__") else ""
        raise TypeError(f"{name}: wanted a tensor of torch or one with __dlpack__, got {type(value).__name__}{missing}")
    strides = _strides(value)
    if any(stride < 0 for stride in strides):  # torch would end the process
        raise ValueError(f"{name}: wanted no negative strides, got {tuple(strides)}; numpy.ascontiguousarray copies it")
    try:
        return torch.from_dlpack(value)
    except Exception as e:  # whatever the other framework raises
        kind = type(value).__name__
        raise ValueError(f"{name}: wanted what torch.from_dlpack takes, got {kind} that it refuses: {e}") from e


def _strides(value: Any) -> Sequence[int]:
    """Return the strides that an array says it has; none if it says nothing."""
    strides = getattr(value, "strides", None)
    if not isinstance(strides, (tuple, list)):
        strides = (getattr(value, "__array_interface__", None) or {}).get("strides")
    return strides or ()
