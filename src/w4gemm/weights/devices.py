"""The devices that a weight may be put on."""

from __future__ import annotations

import torch

from w4gemm.core.errors import device_named, require_gpu


def device_here(name: str, device: object) -> torch.device:
    """Return a device of this machine, or meta, from itself or from its string.

    Raises:
        TypeError, ValueError: for what is no device, or is not there; the message begins with ``name``, the argument.
    """
    device = device_named(name, device)
    require_gpu(name, device)
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, ImportError) as e:  # PyTorch's, of builds without such devices
            reason = str(e).splitlines()[0].partition(". ")[0]
            raise ValueError(f"{name}: {device} is not there: {reason}") from e
    return device
