"""The activation between both products of a model's experts: :func:`activation_of`.

A model's code says it by a method, not by a name. So the method is called with numbers, and its result held against
every gated activation, with the constants that the module has. A model whose formula is none of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from w4gemm.checkpoints.experts import DOWN, GATE_UP
from w4gemm.core.activation import ACTIVATIONS, canonical, parse

_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
"""Attributes of experts in transformers, by the constant of :mod:`w4gemm.core.activation`."""
_SAMPLES = 4096
_ROUNDED = 1e-4
"""Most that float32 may round off: the tail of a gelu, up to 1.5e-7, is multiplied by ups of up to 300."""


def is_gated(experts: nn.Module | None) -> bool:
    """True for experts of transformers' interface that multiply gates and ups: w4gemm computes them, if it has their
    activation."""
    products = [getattr(experts, name, None) for name in (GATE_UP, DOWN)]
    return (
        all(isinstance(p, torch.Tensor) and p.dim() == 3 for p in products)
        and hasattr(experts, "_apply_gate")
        and not getattr(experts, "has_post_expert_norm", False)
    )


def activation_of(experts: nn.Module) -> str:
    """Return the activation of a module of experts that transformers decorates with ``use_experts_implementation``.

    Raises:
        ValueError: if it is none of w4gemm's, or has another limit than the model's config says.
    """
    with torch.no_grad(), torch.device("cpu"):  # while transformers makes models on the meta device
        both = _samples()
        gate, up = both[0::2], both[1::2]
        rows = torch.cat((gate, up)) if getattr(experts, "is_concatenated", True) else both
        expected = experts._apply_gate(rows[None])[0]  # type: ignore[operator]
        for candidate in _candidates(experts):
            result = parse(candidate).apply(both)
            if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=_ROUNDED):
                _check_limit(experts, candidate)
                return candidate
    known = ", ".join(name for name, formula in ACTIVATIONS.items() if formula.gated)
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
