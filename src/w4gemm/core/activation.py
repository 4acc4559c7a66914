"""The activations of the epilogue, by name, with their formulas in PyTorch.

- ``relu``, ``silu``, ``gelu`` (with erf) and ``gelu_tanh`` (``approximate="tanh"``): as in torch.nn.functional.
- ``relu2`` (Nemotron): ``relu(y)**2``.
- ``silu_mul`` (SwiGLU): ``silu(min(gate, limit)) * clamp(up, -limit, limit)``; no limit unless one is given, as in
  DeepSeek-V4's ``silu_mul(limit=10)``.
- ``gelu_mul`` and ``gelu_tanh_mul`` (GeGLU; Gemma): ``gelu(gate) * up``.
- ``swiglu_oai`` (gpt-oss): ``g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + beta)`` with ``g = min(gate,
  limit)``; alpha 1.702, beta 1, limit 7.
- ``situ_mul`` (Kimi-K3): ``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``; beta 4,
  linear_beta 25.

Those from ``silu_mul`` on are gated: even rows of the weight are gates, odd rows ups
(:meth:`w4gemm.QuantizedWeight.interleave`), and each pair makes one column of the result. Other constants are given in
parentheses: ``"swiglu_oai(limit=10)"``, ``"silu_mul(limit=none)"``. Constants are part of the compiled kernel.

A new activation is a line of ``ACTIVATIONS``, a name in ``function_names.py``, with its constants, and a line of
``_ACTIVATIONS`` in ``kernels/device/activation.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, silu

from w4gemm.core.function_names import ACTIVATION_NAMES, CONSTANTS, activation_parts


class Formula(NamedTuple):
    """The formula of an activation in PyTorch."""

    apply: Callable[..., torch.Tensor]
    """Function of y or, if ``gated``, of gate and up; and of the constants by name."""
    gated: bool = False
    """True if even features are gates and odd ones ups, and each pair makes one column of d."""


def _silu_mul(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return silu(_at_most(gate, limit)) * _within(up, limit)


def _swiglu_oai(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float | None, limit: float | None
) -> torch.Tensor:
    """Return g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + beta) with g = min(gate, limit)."""
    gate = _at_most(gate, limit)
    return gate * torch.sigmoid(alpha * gate) * (_within(up, limit) + (beta or 0))


def _situ_mul(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """Return beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)."""
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def _at_most(t: torch.Tensor, limit: float | None) -> torch.Tensor:
    return t if limit is None else t.clamp(max=limit)


def _within(t: torch.Tensor, limit: float | None) -> torch.Tensor:
    return t if limit is None else t.clamp(-limit, limit)


ACTIVATIONS: Mapping[str, Formula] = {
    "relu": Formula(torch.relu),
    "relu2": Formula(lambda y: torch.relu(y).square()),  # Nemotron
    "gelu": Formula(gelu),
    "gelu_tanh": Formula(functools.partial(gelu, approximate="tanh")),
    "silu": Formula(silu),
    "silu_mul": Formula(_silu_mul, True),  # SwiGLU; DeepSeek-V4 with limit=10
    "gelu_mul": Formula(lambda gate, up: gelu(gate) * up, True),
    "gelu_tanh_mul": Formula(lambda gate, up: gelu(gate, approximate="tanh") * up, True),  # GeGLU: Gemma
    "swiglu_oai": Formula(_swiglu_oai, True),  # gpt-oss
    "situ_mul": Formula(_situ_mul, True),  # Kimi-K3
}
"""Formulas by name."""


class Activation(NamedTuple):
    """An activation with all its constants."""

    name: str
    constants: tuple[tuple[str, float | None], ...] = ()

    @property
    def formula(self) -> Formula:
        return ACTIVATIONS[self.name]

    def apply(self, y: torch.Tensor) -> torch.Tensor:
        """Return the activation of y (..., n) in y's dtype: (..., n), or (..., n / 2) if it is gated."""
        apply, gated, *_ = ACTIVATIONS[self.name]
        return apply(*((y[..., 0::2], y[..., 1::2]) if gated else (y,)), **dict(self.constants))

    def __str__(self) -> str:
        named = [f"{name}={_text(value)}" for name, value in self.constants if value != CONSTANTS[self.name][name]]
        return f"{self.name}({','.join(named)})" if named else self.name


_by_text = {name: Activation(name, tuple(CONSTANTS.get(name, {}).items())) for name in ACTIVATION_NAMES}
"""Parsed activations. Plain names are there from the start, because torch.compile of PyTorch 2.8 cannot trace
:func:`activation_parts`. This is no functools.cache, because torch.compile warns of one."""


def require_pairs(name: str, activation: str | None, n: int) -> None:
    """Raise ValueError, naming the argument ``name``, unless n rows are pairs of a gate and an up, if ``activation`` is
    gated."""
    if n % 2 and is_gated(activation):
        raise ValueError(f"{name}: {activation} wants an even n, pairs of gate and up rows, got n {n}")


def parse(text: str) -> Activation:
    """Return the activation that a text such as ``"silu_mul(limit=10)"`` names.

    Raises:
        ValueError: for an unknown name or constant, or a constant that is no number above 0.
    """
    activation = _by_text.get(text) if isinstance(text, str) else None
    if activation is None:
        name, constants = activation_parts(text)
        activation = Activation(name, tuple(constants.items()))
        if not torch.compiler.is_compiling():
            _by_text[text] = activation
    return activation


def _text(value: float | None) -> str:
    return "none" if value is None else repr(value).removesuffix(".0")


def canonical(activation: str | None) -> str | None:
    """Return the one text of an activation, which names only constants that differ from the usual ones; None for None.

    Raises:
        ValueError: if ``activation`` is no activation.
    """
    return None if activation is None else str(parse(activation))


def is_gated(activation: str | None) -> bool:
    """True if two neighbouring output features, gate and up, make one column of the result."""
    return activation is not None and parse(activation).formula.gated
