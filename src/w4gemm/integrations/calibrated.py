"""Rounding that looks at what a model reads, to measure what a calibrated checkpoint costs a model.

GPTQ: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023
(arXiv:2210.17323), without act-order. AWQ: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration", 2024 (arXiv:2306.00978), with factors of x for each layer, and without its search of
ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from w4gemm.checkpoints.dense import linear_layers
from w4gemm.checkpoints.model_experts import are_experts
from w4gemm.core.formats import SCALE_OF, WeightFormat
from w4gemm.weights.quantize import quantize

Round = Callable[[torch.Tensor, torch.Tensor, WeightFormat], torch.Tensor]
"""Returns the rounded numbers of a weight (n, k), from it, the sum of x.T @ x over the tokens, and a format."""
_DAMPING = 0.01
"""What GPTQ adds to the Hessian's diagonal, as a part of its mean (the paper's section 3.3)."""
_STEPS = 20
"""Exponents from 0 to 1 that AWQ tries."""


def check(model: Any, formats: Sequence[WeightFormat], method: str) -> None:
    """Raise ValueError if :func:`round_layers` cannot round a model by one of :data:`METHODS` to the formats."""
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), nn.ModuleList):
        raise ValueError(f"--method: {method} wants a decoder with layers in model.layers, got {type(model).__name__}")
    mixtures = (n for n, m in model.named_modules() if are_experts(m))
    if experts := next(mixtures, None):
        raise ValueError(f"--method: {method} rounds linear layers alone, got a model with {experts}")
    for format in formats:
        plain = format.scale in SCALE_OF.values() and format.zero != "float"
        if method == "gptq" and not (format.element_rule.counts and plain):
            expected = "integers with one scale for each group, and integer zero points or none"
            raise ValueError(f"--format: gptq rounds to {expected}, got {format}; awq takes it")


@torch.no_grad()
def round_layers(
    model: Any, parts: Sequence[torch.Tensor], format: WeightFormat, method: str, progress: Callable[[], None]
) -> list[nn.Linear]:
    """Round the linear layers of a decoder in place, layer by layer, each on what the rounded layers before it make of
    windows of token ids; return them.

    Args:
        method: one of :data:`METHODS`.
        progress: called after each of ``model.model.layers``.
    """
    rounded = METHODS[method]
    hidden, options = _inputs(model, parts)
    layers: list[nn.Linear] = []
    for block, own_options in zip(model.model.layers, options, strict=True):
        inside, hessians, hooks = linear_layers(block), {}, []
        for name, layer in inside.items():
            hessians[name] = torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device)

            def add(layer: nn.Module, args: tuple[torch.Tensor], sums: torch.Tensor = hessians[name]) -> None:
                x = args[0].flatten(0, -2).float()
                sums.addmm_(x.T, x)

            hooks.append(layer.register_forward_pre_hook(add))
        for x, own in zip(hidden, own_options, strict=True):
            own(block, x)
        for hook in hooks:
            hook.remove()
        for name, layer in inside.items():
            numbers = rounded(layer.weight.data.float(), hessians[name], format)
            layer.weight.data = numbers.to(layer.weight.dtype)
        layers += inside.values()
        hidden = [own(block, x) for x, own in zip(hidden, own_options, strict=True)]
        progress()
    return layers


class _Rest(NamedTuple):
    """The arguments of a block but its first, ``hidden_states``."""

    args: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block makes of ``hidden``; some return more than that, in a tuple."""
        made = block(hidden, *self.args, **self.named)
        return made[0] if isinstance(made, tuple) else made


def _inputs(model: Any, parts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[list[_Rest]]]:
    """Return what the first block reads for each window, and each block's other arguments."""
    hidden: list[torch.Tensor] = []
    options: list[list[_Rest]] = [[] for _ in model.model.layers]

    def keep(i: int, args: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        first = args[0] if args else named.pop("hidden_states")
        if i == 0:
            hidden.append(first)
        options[i].append(_Rest(args[1:], named))

    hooks = [
        block.register_forward_pre_hook(lambda _, args, named, i=i: keep(i, args, dict(named)), with_kwargs=True)
        for i, block in enumerate(model.model.layers)
    ]
    for ids in parts:
        model.model(ids.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return hidden, options


def gptq(weight: torch.Tensor, hessian: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return the numbers of a weight (n, k) rounded to integers of ``format``: columns in turn, each one's error spread
    over those after it as the Hessian (k, k) of the inputs asks. A group's scale is that of the nearest rounding of
    what its numbers have become by then.
    """
    w, k = weight.clone(), weight.shape[1]
    unused = hessian.diagonal() == 0
    hessian = hessian + torch.diag(unused + _DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    length, largest = format.group_length(k), format.element_rule.largest_code
    for start in range(0, k, length):
        stop = min(start + length, k)
        block = w[:, start:stop].clone()
        errors = torch.empty_like(block)
        parts = quantize(block, format).parts()
        scales = parts.scales.float()[:, 0]
        zeros = largest // 2 + 1 if parts.zeros is None else parts.zeros.float()[:, 0]
        for i in range(stop - start):
            row = factor[start + i, start + i : stop]
            codes = (block[:, i] / scales.where(scales != 0, 1) + zeros).round().clamp(0, largest)
            w[:, start + i] = (codes - zeros) * scales
            errors[:, i] = (block[:, i] - w[:, start + i]) / row[0]
            block[:, i:] -= errors[:, i, None] * row
        w[:, stop:] -= errors @ factor[start:stop, stop:]
    return w


def awq(weight: torch.Tensor, hessian: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return the numbers of a weight (n, k) whose columns are rounded times factors s, and divided by them again: s is
    a power of the size of x in the column, its root mean square, whose exponent makes the error of x @ w.T least.
    """
    size = hessian.diagonal().sqrt().clamp(min=1e-4)
    least, best = math.inf, weight
    for step in range(_STEPS):
        factors = size ** (step / _STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        numbers = quantize(weight * factors, format).dequantize(torch.float32) / factors
        error = weight - numbers
        loss = float(((error @ hessian) * error).sum())
        if loss < least:
            least, best = loss, numbers
    return best


METHODS: dict[str, Round] = {"gptq": gptq, "awq": awq}
"""Ways of rounding, by name."""
