"""Errors that users see. Bad values raise ``ValueError`` or ``TypeError``; what no kernel can run raises this one."""

from __future__ import annotations

import torch


class UnsupportedError(RuntimeError):
    """No kernel can run the problem here. The message lists every kernel with its reason."""


class FormatError(ValueError):
    """A file or tensor is not what its format says: truncated, mislabelled, or of another layout."""


def kind_of(value: object) -> str:
    """Return what came instead, for a message: dtype and shape of a tensor, else the type's name."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
