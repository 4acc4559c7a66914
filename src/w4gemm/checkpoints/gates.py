"""The activation between both products of a model's experts: :func:`activation_of`.

A model's code says it by a method, not by a name. So the method is called with numbers, and its result held against
every activation, with the constants that the module has. A model whose formula is none of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from w4gemm.checkpoints.experts import DOWN, GATE_UP, UP
from w4gemm.core.activation import ACTIVATIONS, canonical, parse

_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
"""Attributes of experts in transformers, by the constant of :mod:`w4gemm.core.activation`."""
_PLAIN = tuple(name for name, formula in ACTIVATIONS.items() if not formula.gated)
_SAMPLES = 4096
_ROUNDED = 1e-4
"""Most that float32 may round off: the tail of a gelu, up to 1.5e-7, is multiplied by ups of up to 300."""


def products_of(experts: nn.Module | None) -> tuple[str, str] | None:
    """Return the names of the parameters of both products, the first of gates and ups or of ups alone, of experts of
    transformers' interface. w4gemm computes them, if it has their activation; None for other modules."""
    names = GATE_UP if getattr(experts, "has_gate", True) else UP, DOWN
    products = [getattr(experts, name, None) for name in names]
    if not all(isinstance(p, torch.Tensor) and p.dim() == 3 for p in products):
        return None
    if not hasattr(experts, "_apply_gate") or getattr(experts, "has_post_expert_norm", False):
        return None
    return names


def activation_of(experts: nn.Module) -> str:
    """Return the activation of a module of experts that transformers decorates with ``use_experts_implementation``.

    Raises:
        ValueError: if it is none of w4gemm's, or has another limit than the model's config says.
    """
    with torch.no_grad(), torch.device("cpu"):  # while transformers makes models on the meta device
        both, gated = _samples(), bool(getattr(experts, "has_gate", True))
        gate, up = both[0::2], both[1::2]
        rows = torch.cat((gate, up)) if getattr(experts, "is_concatenated", True) else both
        expected = experts._apply_gate(rows[None])[0] if gated else experts.act_fn(both)  # type: ignore[operator]
        for candidate in _candidates(experts) if gated else _PLAIN:
            result = parse(candidate).apply(both)
            if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=_ROUNDED):
                _check_limit(experts, candidate)
                return candidate
    known = ", ".join(name for name, formula in ACTIVATIONS.items() if formula.gated == gated)
    raise ValueError(f"its {type(experts).__name__} compute another activation than {known}")


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
