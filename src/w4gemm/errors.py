"""Errors that users see. Bad values raise ``ValueError`` or ``TypeError``; what no kernel can run raises this one."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """No kernel can run the problem here. The message lists every kernel with its reason."""


class FormatError(ValueError):
    """A file or tensor is not what its format says: truncated, mislabelled, or of another layout."""
