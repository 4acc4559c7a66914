"""Layers of experts in one launch for tests: random weights, emulated launches, launches on a GPU, a reference."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from conformance.cases import random_weight
from emulator.ptx import Program, parse, ptx_of
from emulator.races import RaceChecker
from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.api.expert_layer import ByIds, ByLogits, Experts, LayerKey, expert_layer
from w4gemm.core import activation
from w4gemm.core.problem import Device
from w4gemm.jit import compiled
from w4gemm.kernels.expert_layer.spec import EPOCHS_AT, ExpertLayer
from w4gemm.kernels.helpers.experts import ExpertChoice
from w4gemm.packing.codecs import weight_operand

CTAS = 3


class Layer(NamedTuple):
    """Weights of a layer, and what is compiled for it."""

    spec: ExpertLayer
    gate_up: QuantizedWeight
    down: QuantizedWeight
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None

    @property
    def products(self) -> tuple[Experts, Experts]:
        return (
            Experts(self.gate_up, self.gate_up_bias, self.gate_up_scale),
            Experts(self.down, self.down_bias, self.down_scale),
        )

    def to(self, device: str) -> Layer:
        return Layer(self.spec, *(None if t is None else t.to(device) for t in self[1:]))


@functools.cache
def program_of(spec: ExpertLayer | ExpertChoice) -> Program:
    return parse(ptx_of(spec.unit()))


def spec_of(tokens: int, **changes: Any) -> ExpertLayer:
    """The kernel of a small layer, with changes; also ``format`` and ``dtype`` of its weight."""
    format = WeightFormat.parse(changes.pop("format", "int4_g128"))
    spec = ExpertLayer(
        weight=weight_operand(format, changes.pop("dtype", torch.bfloat16)),
        activation="silu_mul",
        experts=5,
        features=192,
        width=160,
        top_k=2,
        tokens=tokens,
        ids=torch.int64,
        mapped=False,
        gate_up_bias=False,
        down_bias=False,
        gate_up_scale=False,
        down_scale=False,
        choice=None,
        split=False,
        ctas=CTAS,
        warps=4,
    )
    return replace(spec, **{"step_blocks": 1 + spec.two_blocks} | changes)


@functools.cache
def layer_of(spec: ExpertLayer, format: str = "int4_g128") -> Layer:
    """A layer of random weights for a kernel, whatever it chooses by."""

    def weights(n: int, k: int) -> QuantizedWeight:
        each = (random_weight(WeightFormat.parse(format), n, k, seed) for seed in range(spec.experts))
        return QuantizedWeight.stack(each, spec.experts, "mma16")

    def drawn(has: bool, *shape: int) -> torch.Tensor | None:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) if has else None

    biases = (drawn(spec.gate_up_bias, spec.experts, spec.rows_up), drawn(spec.down_bias, spec.experts, spec.features))
    return Layer(
        spec,
        weights(spec.rows_up, spec.features),
        weights(spec.features, spec.width),
        *(None if bias is None else bias.to(dtype_of(spec)) for bias in biases),
        drawn(spec.gate_up_scale, spec.experts),
        drawn(spec.down_scale, spec.experts),
    )


def dtype_of(spec: ExpertLayer) -> torch.dtype:
    return torch.float16 if spec.kind == "f16" else torch.bfloat16


def fresh_flags() -> torch.Tensor:
    return torch.zeros(2 * EPOCHS_AT, dtype=torch.int32)


def emulated(
    layer: Layer,
    x: torch.Tensor,
    choices: ByIds | ByLogits,
    expert_map: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    **order: Any,
) -> torch.Tensor:
    """The result of an emulated launch. order: which CTAs run at once, as :class:`RaceChecker` takes it."""
    spec = layer.spec
    out = torch.full_like(x, torch.nan)
    hidden = torch.full((spec.scratch_bytes // 4,), -1, dtype=torch.int32) if hidden is None else hidden  # NaN
    operands = _operands(layer, x, choices, expert_map, hidden, fresh_flags() if flags is None else flags, out)
    launch = RaceChecker(program_of(spec), spec.ctas, [hidden], **order)
    launch.run(*(t for t in operands if t is not None))
    return out


def _operands(
    layer: Layer, x: torch.Tensor, choices: ByIds | ByLogits, expert_map: torch.Tensor | None, *others: torch.Tensor
) -> list[torch.Tensor | None]:
    """What a launch takes. others: the scratch memory, the flags, the result."""
    weights, by_ids, by_logits = (layer.gate_up, layer.down), (None, None), (None, None)
    if isinstance(choices, ByIds):
        by_ids = tuple(t.flatten() for t in choices)
    else:
        by_logits = choices.logits, choices.bias
    return [
        *(x, *by_ids, *by_logits, expert_map),
        *(w.tensors[0].flatten() for w in weights),
        *(layer.gate_up_bias, layer.down_bias, layer.gate_up_scale, layer.down_scale),
        *(w.tensors[1] if layer.spec.weight.channels else None for w in weights),
        *others,
    ]


def launched_as_it_is(
    layer: Layer, x: torch.Tensor, choices: ByIds, flags: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """The result of a launch of ``layer.spec`` on the GPU of all tensors, whatever its number of multiprocessors."""
    out = torch.full_like(x, torch.nan)
    compiled(layer.spec.unit())(*_operands(layer, x, choices, None, hidden, flags, out))
    return out


def forms_on(device: torch.device, layer: Layer, x: torch.Tensor, choices: ByIds | ByLogits) -> set[ExpertLayer]:
    """The kernels that :func:`launched` takes for calls like this of 1 to ``layer.spec.tokens`` tokens."""
    key = LayerKey.of(x, choices, *layer.products, layer.spec.activation)._replace(
        mapped=layer.spec.mapped, in_order=layer.spec.in_order
    )
    each = (key._replace(tokens=m).parameters() for m in range(1, layer.spec.tokens + 1))
    return {ExpertLayer.form(Device.of(device), *parameters) for parameters in each}


def launched(
    layer: Layer, x: torch.Tensor, choices: ByIds | ByLogits, expert_map: torch.Tensor | None = None
) -> torch.Tensor:
    """The result of a launch on the GPU of the layer and of all tensors."""
    return expert_layer(x, choices, *layer.products, layer.spec.activation, expert_map, in_order=layer.spec.in_order)


class Sums(NamedTuple):
    """What a layer of experts is to give."""

    value: torch.Tensor
    """float64 (tokens, features)."""
    size: torch.Tensor
    """float64 (tokens,): the largest sum of the terms' magnitudes."""


def reference(layer: Layer, x: torch.Tensor, choices: ByIds) -> Sums:
    """The sums over experts in float64, of activated rows that are rounded to x's dtype; tensors on the CPU."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    sizes, formula = torch.zeros_like(out), activation.parse(layer.spec.activation)
    for t in range(len(x)):
        for e, weight in zip(choices.expert_ids[t].tolist(), choices.expert_weights[t].tolist(), strict=True):
            if not 0 <= e < layer.spec.experts:
                continue
            y = _product(layer, "gate_up", e, x[t].double())
            y = formula.apply(y[None])[0].to(x.dtype).double()
            d = weight * _product(layer, "down", e, y)
            out[t] += d
            sizes[t] += d.abs()
    roundings = 2 if layer.spec.in_order else 1  # of weights and of rows of down, too
    return Sums(out, roundings * sizes.amax(1))


def _product(layer: Layer, name: str, expert: int, y: torch.Tensor) -> torch.Tensor:
    w, bias, scale = (getattr(layer, name + end) for end in ("", "_bias", "_scale"))
    d = _dense(w, expert) @ y
    d = d if scale is None else d * scale[expert]
    return d if bias is None else d + bias[expert].double()


@functools.lru_cache(maxsize=1024)
def _dense(w: QuantizedWeight, expert: int) -> torch.Tensor:
    return w.expert(expert).dequantize(torch.float64)


def faults(out: torch.Tensor, sums: Sums) -> str:
    """Say what is wrong in a result; the empty string if nothing is. NaN must be where the reference has it."""
    facts, out = torch.finfo(out.dtype), out.double()
    if not torch.equal(out.isnan(), sums.value.isnan()):
        return "NaN in other places"
    subnormal = facts.smallest_normal * facts.eps  # of float16 results half of one is a part of the smallest sums
    difference = ((out - sums.value).nan_to_num(0.0).abs() - subnormal / 2).clamp(min=0)
    error = difference.amax(1) / sums.size.nan_to_num(1.0).clamp(min=1e-9)
    return "" if (error < 0.01).all() else f"errors {error.tolist()}"


def inputs(spec: ExpertLayer, m: int, seed: int = 0) -> tuple[torch.Tensor, ByIds]:
    """Random x, and different experts for each token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, spec.features, generator=g).to(dtype_of(spec))
    ids = torch.stack([torch.randperm(spec.experts, generator=g)[: spec.top_k] for _ in range(m)])
    return x, ByIds(ids.to(spec.ids), torch.rand(m, spec.top_k, generator=g))
