"""Experts of a dense model of transformers: which of its parameters they are, and their weights one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from w4gemm.checkpoints.base import Checkpoint, Module
from w4gemm.checkpoints.experts import GATE_UP
from w4gemm.checkpoints.gates import activation_of, products_of
from w4gemm.checkpoints.hugging_face import outline
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat

_PRODUCTS = 2
"""Products of a layer's experts with gates."""


@dataclass(frozen=True)
class DenseProduct:
    """One product of a layer's experts, as a parameter of all of them."""

    name: str
    shape: tuple[int, ...]
    """(experts, n, k), or (experts, k, n) if ``transposed``."""
    transposed: bool
    concatenated: bool
    """True if all gates come before all ups; they are to be in pairs."""
    has_bias: bool

    def module(self, format: WeightFormat | None, default: WeightFormat) -> Module:
        experts, n, k = self.sizes
        pairs = self.name.endswith(GATE_UP)
        fused = ("gate_proj", "up_proj") if pairs else ()
        return Module(n, k, format or default, self.has_bias, experts, fused, interleaved=pairs)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of experts, n and k."""
        experts, a, b = self.shape
        return (experts, b, a) if self.transposed else (experts, a, b)

    def weights(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each expert's weight (n, k), gates and ups in pairs."""
        for weight in parameter:
            yield self._in_pairs(weight.T if self.transposed else weight)

    def biases(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the biases (experts, n), gates and ups in pairs."""
        return torch.stack([self._in_pairs(bias) for bias in parameter])

    def _in_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows.chunk(2), 1).flatten(0, 1) if self.concatenated else rows


def dense_products(model: nn.Module) -> dict[str, DenseProduct]:
    """Return the products of a model's experts, by the names of their parameters: of experts that w4gemm computes."""
    products = {}
    for owner, experts in model.named_modules():
        leaves = products_of(experts)
        if leaves is None or not _has_known_activation(experts):
            continue
        transposed, has_bias = (bool(getattr(experts, name, False)) for name in ("is_transposed", "has_bias"))
        concatenated = bool(getattr(experts, "is_concatenated", True))
        for leaf in leaves:
            name, shape = f"{owner}.{leaf}", tuple(experts.get_parameter(leaf).shape)
            products[name] = DenseProduct(name, shape, transposed, concatenated and leaf == GATE_UP, has_bias)
    return products


def packed_experts(checkpoint: Checkpoint) -> set[str]:
    """Return the names of experts that a folder holds in one fp8 tensor each, and whose rows the model's code takes in
    the order in which their reader packs them: without biases, all gates before all ups."""
    modules, path = checkpoint.modules, checkpoint.path
    stacked = {name: m for name, m in modules.items() if m.shared and m.experts and name in checkpoint.tensors}
    if not stacked:
        return set()
    try:
        products = dense_products(outline(path))
    except FormatError:  # no model of transformers'
        return set()
    fitting = {
        name
        for name, m in stacked.items()
        if (product := products.get(name)) is not None
        and product.sizes == (m.experts, m.n, m.k)
        and not m.bias
        and product.concatenated == name.endswith(GATE_UP)
    }
    owners = [name.rpartition(".")[0] for name in fitting]
    return {name for name in fitting if owners.count(name.rpartition(".")[0]) == _PRODUCTS}


def _has_known_activation(experts: nn.Module) -> bool:
    try:
        activation_of(experts)
    except ValueError:
        return False
    return True
