"""Common parts of all producers' formats: the codes of weights, and folders beside the numbers that they give."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from w4gemm.checkpoints import open_checkpoint

GROUP = 32
Weights = dict[str, torch.Tensor]
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Weights as w4gemm and as the oracle dequantizes them."""


class Codes(NamedTuple):
    """Codes (n, k) of weights in groups of 32, scales bf16 and zero points (n, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(cls, w: torch.Tensor, bits: int = 4) -> Codes:
        largest = 2**bits - 1
        groups = w.view(len(w), -1, GROUP)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / largest).clamp(min=1e-6).bfloat16()
        zeros = (-low / scales.float()).round().clamp(0, largest)
        codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, largest)
        return cls(codes.view(w.shape).to(torch.uint8), scales, zeros.to(torch.uint8))


def in_words(codes: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 (rows, columns / 8); nibble i of a word is its number order[i]."""
    eights = codes.view(len(codes), -1, 8)[..., list(order)].long()
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def folder_pairs(
    folder: Path, config: dict[str, Any], stored: Weights, expected: Weights, metadata: dict[str, str] | None = None
) -> Pairs:
    """Write a folder with these tensors, and give each module beside ``wanted``."""
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.modules.keys() == expected.keys()
    return ((checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())
