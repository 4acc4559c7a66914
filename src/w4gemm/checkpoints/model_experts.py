"""Experts of a model of transformers: which of its parameters they are (:func:`products_of`), their weights one by one
(:class:`DenseProduct`), and the activation between both products (:func:`activation_of`).

A model's code says the activation by a method, not by a name. So the method is called with numbers, and its result held
against every activation, with the constants that the module has. A model whose formula is none of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from w4gemm.checkpoints.base import Checkpoint, Module
from w4gemm.checkpoints.experts import DOWN, GATE_UP, UP, fused_in
from w4gemm.checkpoints.hugging_face import outline
from w4gemm.core.activation import ACTIVATIONS, canonical, parse
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat

_LLAMA_4 = "Llama4TextExperts"
"""transformers' class of Llama 4's experts, which are not of its interface: their matrices are (k, n), all gates before
all ups, and rows come multiplied by the router's weights (:mod:`w4gemm.integrations.transformers.llama4`)."""
_PRODUCTS = 2
"""Products of a layer's experts with gates."""
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
"""Attributes of experts in transformers, by the constant of :mod:`w4gemm.core.activation`."""
_PLAIN = tuple(name for name, formula in ACTIVATIONS.items() if not formula.gated)
_SAMPLES = 4096
_ROUNDED = 1e-4
"""Most that float32 may round off: the tail of a gelu, up to 1.5e-7, is multiplied by ups of up to 300."""


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
        return Module(n, k, format or default, self.has_bias, experts, fused_in(self.name))

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

    def parameter(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the parameter of all experts' weights (experts, n, k), the inverse of :meth:`weights`."""
        rows = self.parameter_of_biases(weights)
        return rows.transpose(1, 2).contiguous() if self.transposed else rows

    def parameter_of_biases(self, biases: torch.Tensor) -> torch.Tensor:
        """Return the parameter of biases, the inverse of :meth:`biases`."""
        return torch.cat((biases[:, ::2], biases[:, 1::2]), 1) if self.concatenated else biases

    def _in_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows.chunk(2), 1).flatten(0, 1) if self.concatenated else rows


def dense_products(model: nn.Module) -> dict[str, DenseProduct]:
    """Return the products of a model's experts, by the names of their parameters: of experts that w4gemm computes."""
    products = {}
    for owner, experts in model.named_modules():
        leaves = products_of(experts)
        if leaves is None or not _has_known_activation(experts):
            continue
        for leaf in leaves:
            name, shape = f"{owner}.{leaf}", tuple(experts.get_parameter(leaf).shape)
            concatenated = leaf == GATE_UP and is_concatenated(experts)
            products[name] = DenseProduct(name, shape, is_transposed(experts), concatenated, has_bias(experts))
    return products


def dense_experts(model: nn.Module) -> dict[str, dict[str, DenseProduct]]:
    """Return :func:`dense_products` by the name of their module and the last part of their own. None of a model that is
    split over processes, because nothing would round its parts."""
    if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
        return {}
    experts: dict[str, dict[str, DenseProduct]] = {}
    for name, product in dense_products(model).items():
        owner, _, leaf = name.rpartition(".")
        experts.setdefault(owner, {})[leaf] = product
    return experts


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


def products_of(experts: nn.Module | None) -> tuple[str, str] | None:
    """Return the names of the parameters of both products, the first of gates and ups or of ups alone, of experts of
    transformers' interface and of Llama 4. w4gemm computes them, if it has their activation; None for other modules."""
    names = GATE_UP if getattr(experts, "has_gate", True) else UP, DOWN
    products = [getattr(experts, name, None) for name in names]
    if not all(isinstance(p, torch.Tensor) and p.dim() == 3 for p in products):
        return None
    known = hasattr(experts, "_apply_gate") or of_llama_4(experts)
    return names if known and not getattr(experts, "has_post_expert_norm", False) else None


def are_experts(module: nn.Module) -> bool:
    """True for a module with the matrices of several experts, also of a kind that w4gemm does not compute."""
    own = module._parameters
    return DOWN in own or (
        "Experts" in type(module).__name__ and any(p is not None and p.dim() == 3 for p in own.values())
    )


def has_known_layout(experts: nn.Module | None) -> bool:
    """True if it is known how the parameters of experts lie."""
    return hasattr(experts, "is_transposed") or of_llama_4(experts)


def is_transposed(experts: nn.Module) -> bool:
    """True if the matrices of experts are (k, n)."""
    return bool(getattr(experts, "is_transposed", of_llama_4(experts)))


def is_concatenated(experts: nn.Module) -> bool:
    """True if all gates of an expert come before all ups, False if they are in pairs."""
    return bool(getattr(experts, "is_concatenated", True))


def has_bias(experts: nn.Module) -> bool:
    """True if both products of experts have a bias."""
    return bool(getattr(experts, "has_bias", False))


def of_llama_4(experts: nn.Module | None) -> bool:
    """True for Llama 4's experts, whose mixture multiplies rows by the router's weights before their expert."""
    return type(experts).__name__ == _LLAMA_4


# --- the activation -------------------------------------------------------------------------------------------------


def _has_known_activation(experts: nn.Module) -> bool:
    try:
        activation_of(experts)
    except ValueError:
        return False
    return True


def activation_of(experts: nn.Module) -> str:
    """Return the activation of a module of experts that transformers decorates with ``use_experts_implementation``.

    Raises:
        ValueError: if it is none of w4gemm's, or has another limit than the model's config says.
    """
    with torch.no_grad(), torch.device("cpu"):  # while transformers makes models on the meta device
        both, gated = _samples(), bool(getattr(experts, "has_gate", True))
        gate, up = both[0::2], both[1::2]
        rows = torch.cat((gate, up)) if is_concatenated(experts) else both
        expected = _activated(experts, rows) if gated else experts.act_fn(both)  # type: ignore[operator]
        for candidate in _candidates(experts) if gated else _PLAIN:
            result = parse(candidate).apply(both)
            if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=_ROUNDED):
                _check_limit(experts, candidate)
                return candidate
    known = ", ".join(name for name, formula in ACTIVATIONS.items() if formula.gated == gated)
    raise ValueError(f"its {type(experts).__name__} compute another activation than {known}")


def _activated(experts: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return what experts with gates make of the first product's result."""
    if of_llama_4(experts):
        gate, up = rows.chunk(2)
        return up * experts.act_fn(gate)  # type: ignore[operator]
    return experts._apply_gate(rows[None])[0]  # type: ignore[operator]


def _check_limit(experts: nn.Module, activation: str) -> None:
    """Raise ValueError if the config's ``swiglu_limit`` is not the activation's: transformers 5.17 takes 7 for every
    gpt-oss."""
    stated = getattr(getattr(experts, "config", None), "swiglu_limit", None)
    limit = dict(parse(activation).constants).get("limit")
    if isinstance(stated, (int, float)) and 0 < stated < math.inf and stated != limit:
        raise ValueError(
            f"its config says swiglu_limit {stated}, but {type(experts).__name__} of this transformers compute "
            f"{activation}; a newer transformers may obey"
        )


def _samples() -> torch.Tensor:
    """float32: gates and ups in pairs, of magnitudes from 0.1 to 300."""
    g, sizes = torch.Generator().manual_seed(0), torch.logspace(-1, 2.5, _SAMPLES, dtype=torch.float32)
    pairs = 2 * torch.rand(_SAMPLES, 2, generator=g, dtype=torch.float32) - 1
    return (sizes[:, None] * pairs).flatten()


def _candidates(experts: nn.Module) -> Iterator[str]:
    for name, formula in ACTIVATIONS.items():
        if formula.gated:
            yield name
    limits, alphas = (_numbers(experts, names) for names in (_LIMITS, _ALPHAS))
    for limit in limits:
        yield str(canonical(f"silu_mul(limit={limit!r})"))
        for alpha in alphas:
            yield str(canonical(f"swiglu_oai(limit={limit!r},alpha={alpha!r})"))


def _numbers(experts: nn.Module, names: tuple[str, ...]) -> set[float]:
    numbers = (getattr(experts, name, None) for name in names)
    return {float(number) for number in numbers if isinstance(number, (int, float)) and 0 < number < math.inf}
