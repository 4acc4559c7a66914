"""A weight's format and activations in words, such as ``int4_g128 fp8``, as files and state dicts keep them."""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat


def in_words(format: WeightFormat, activations: str | None) -> str:
    """Return the format's string, with the activations behind it if there are any."""
    return f"{format} {activations}" if activations else str(format)


def of_words(words: str) -> tuple[WeightFormat, str | None]:
    """Return the format and the activations that :func:`in_words` put into words.

    Raises:
        ValueError: if the first word is no format's string.
    """
    name, _, activations = words.partition(" ")
    return WeightFormat.parse(name), activations or None


def mean_the_same(words: str, others: str) -> bool:
    """True if both name one format and the same activations, maybe a codebook before and after it got a name."""
    try:
        return words == others or of_words(words) == of_words(others)
    except ValueError:
        return False


def as_tensor(words: str) -> torch.Tensor:
    """Return the words' bytes, uint8: a tensor, so that any file of tensors can hold them."""
    return torch.tensor(list(words.encode()), dtype=torch.uint8, device="cpu")


def of_tensor(state: torch.Tensor) -> str:
    """Return the words of a tensor that :func:`as_tensor` made.

    Raises:
        ValueError: if ``state`` is no tensor of bytes (n,).
    """
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise ValueError(f"wanted the words of a format, torch.uint8 (n), got {state.dtype} {tuple(state.shape)}")
    return bytes(state.tolist()).decode(errors="replace")
