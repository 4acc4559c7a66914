"""Errors that users see. Bad values raise ``ValueError`` or ``TypeError``; what no kernel can run raises this one."""

from __future__ import annotations

import numbers

import torch

LARGEST_SIZE = 2**31 - 1
"""Largest size: kernels count rows and columns in 32 bits."""


class UnsupportedError(RuntimeError):
    """No kernel can run the problem here. The message lists every kernel with its reason."""


class FormatError(ValueError):
    """A file or tensor is not what its format says: truncated, mislabelled, or of another layout."""


def require_int(name: str, value: object, least: int = 1, most: int = LARGEST_SIZE) -> None:
    """Raise TypeError or ValueError unless ``value`` is an int of least .. most."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: wanted an int from {least} on, got {value!r:.40}")
    if int(value) < least:
        raise ValueError(f"{name}: wanted an int from {least} on, got {value!r:.40}")
    if int(value) > most:
        raise ValueError(f"{name}: wanted an int of at most {most}, got {value!r:.40}")


def require_dense(name: str, t: torch.Tensor) -> None:
    """Raise TypeError for a sparse or MKL-DNN tensor."""
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got one of layout {t.layout}")


def device_named(name: str, device: object) -> torch.device:
    """Return a device as it is, or from its string.

    Raises:
        TypeError, ValueError: for anything else, naming the argument.
    """
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"{name}: wanted a torch.device or its string, such as 'cuda:0', got {kind_of(device)}")
    try:
        return torch.device(device)
    except (RuntimeError, UnicodeError) as e:
        raise ValueError(f"{name}: wanted a torch.device or its string, such as 'cuda:0', got {device!r:.40}") from e


def kind_of(value: object) -> str:
    """Return what came instead, for a message: dtype and shape of a tensor, else the type's name."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
