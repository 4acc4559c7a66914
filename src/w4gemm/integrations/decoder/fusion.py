"""A captured step in fewer kernels than the model's own code launches: :func:`fused`.

A decoder layer of Llama launches about 45 kernels for one token, 38 of them small: each takes a microsecond or two in a
graph, together more than the products with quantized weights. While :func:`fused` lasts, the model's modules compute

- q, k and v in one product, or those of equal format, gate and up in another: their weights lie one below the other
  in memory;
- gate and up's activation in one kernel, a norm in one, what is added behind o and down in their epilogues;
- rotation, cache and attention of the new token in one kernel (``kernels/helpers/step_attention``).

Nothing of it outlasts the step but where the weights lie. Modules are known by the names of their children. Whether all
this computes the model is not taken on trust: ``step.py`` compares the logits of a first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from w4gemm.api.nn import W4Linear
from w4gemm.api.ops import linear
from w4gemm.api.step import gate_halves, rms_norm
from w4gemm.choice import PlanKey
from w4gemm.core.activation import ACTIVATIONS, parse
from w4gemm.core.autocast import without_autocast
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import Device
from w4gemm.integrations.decoder.attention import NotFusable, Patches, StepPlace, fuse_attention
from w4gemm.integrations.decoder.requirements import GATE_UP, LAYER, QKV, norm_eps
from w4gemm.kernels.helpers.base import Helper
from w4gemm.kernels.helpers.rows import GateHalves, RmsNorm
from w4gemm.kernels.helpers.step_attention import StepAttention
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Joint:
    """The product of a few layers that take the same x."""

    layers: Sequence[W4Linear]
    weight: QuantizedWeight
    bias: torch.Tensor | None
    x: torch.Tensor | None = None
    results: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> Joint | None:
        """Return the joint product and move the layers' weights to its memory: they become rows of one weight, with the
        same bits. None if the layers have no joint product."""
        plain = [m for m in layers if type(m) is W4Linear and m.pre_quant_scale is None and m.activation is None]
        biases = [layer.bias for layer in plain if layer.bias is not None]
        if len(plain) < len(layers) or len(biases) not in (0, len(layers)):
            return None
        try:
            weight = joined([layer.weight for layer in plain])
        except ValueError:
            return None
        for layer, w in zip(plain, parts(weight, [layer.weight.n for layer in plain]), strict=True):
            features = layer.in_features, layer.out_features
            layer.weight = w
            layer.in_features, layer.out_features = features
        return cls(plain, weight, torch.cat([b.detach() for b in biases]) if biases else None)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, batch_invariant=self.layers[0].batch_invariant)

    def result(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward of one of the layers: all of them are computed when the first is called."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self.x:
                self.x, self.results = x, self.product(x).split([layer.weight.n for layer in self.layers], -1)
            return self.results[index]

        return forward


@dataclass
class Fusion:
    """The joint products of a model, kept from step to step."""

    attentions: list[Joint] = field(default_factory=list)
    mlps: dict[nn.Module, tuple[Joint, str]] = field(default_factory=dict)
    norms: tuple[nn.Module, ...] = ()
    last: tuple[W4Linear, ...] = ()
    """Layers that add a residual."""

    @classmethod
    def of(cls, model: nn.Module) -> Fusion:
        fusion = cls()
        norms, last = [], []
        for module in model.modules():
            last += last_products(module)
            children = dict(module.named_children())
            if children.keys() >= set(QKV):
                fusion.attentions += _joints_of_equal_format([children[name] for name in QKV])
            activation = _activation(module) if children.keys() >= {*GATE_UP, "down_proj"} else None
            if activation and (joint := Joint.of([children[name] for name in GATE_UP])) is not None:
                fusion.mlps[module] = joint, activation
            if is_rms_norm(module):
                norms.append(module)
        fusion.norms, fusion.last = tuple(norms), tuple(last)
        return fusion

    @property
    def joints(self) -> list[Joint]:
        return [*self.attentions, *(joint for joint, _ in self.mlps.values())]

    def plan_keys(self, m: int, dtype: torch.dtype) -> list[PlanKey]:
        """Keys of the plans of m tokens that a model's own layers do not have."""
        weights = [(j.weight, Epilogue(bias=j.bias is not None)) for j in self.joints]
        for layer in self.last:
            weights.append((layer.weight, Epilogue(bias=layer.bias is not None, residual=True)))
        return [PlanKey.of_layer(w, m, dtype, epilogue) for w, epilogue in weights]

    def helpers(self, model: PreTrainedModel, batch: int, length: int) -> list[Helper | None]:
        """The small kernels of a step, for caches of ``length`` tokens."""
        device, dtype, config = Device.of(model.device), model.dtype, model.config.get_text_config(decoder=True)
        helpers: list[Helper | None] = [RmsNorm.of(device, dtype, len(n.get_parameter("weight"))) for n in self.norms]
        helpers += [GateHalves.of(device, dtype, activation) for _, activation in self.mlps.values()]
        heads, kv_heads = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
        if heads and kv_heads:
            dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            splits = StepAttention.splits_for(batch * kv_heads, length, device.sms)
            sinks = any(hasattr(m, "sinks") for m in model.modules())
            helpers.append(StepAttention.of(device, dtype, dim, heads // kv_heads, splits, sinks))
        return helpers


@contextlib.contextmanager
def fused(model: PreTrainedModel, fusion: Fusion, place: StepPlace | None) -> Iterator[None]:
    """Let a step of the model run in fewer kernels. place: where its attention writes the new token; None for the
    model's own attention and cache.

    Raises:
        NotFusable: while the step runs, where it does something that is not fused.
    """
    patches = Patches()
    with patches.stack:
        for norm in fusion.norms:
            patches.set(norm, "forward", _fast_norm(norm))
        for joint in fusion.attentions:
            for i, layer in enumerate(joint.layers):
                patches.set(layer, "forward", joint.result(i))
            patches.stack.callback(_forget, joint)
        for mlp, (joint, activation) in fusion.mlps.items():
            patches.set(mlp, "forward", _gated(mlp, joint, activation))
        for layer in model.modules():
            _fuse_residuals(patches, layer)
        if place is not None:
            fuse_attention(patches, model, place)
        yield


def _joints_of_equal_format(layers: Sequence[nn.Module]) -> list[Joint]:
    """Joint products of those that are in one format: files of mixed types may have v in more bits than q and k."""
    formats = [getattr(layer, "format", None) for layer in layers]
    groups = [[m for m, own in zip(layers, formats, strict=True) if own == format] for format in dict.fromkeys(formats)]
    joints = [Joint.of(group) for group in groups if len(group) > 1]
    return [joint for joint in joints if joint is not None]


def _forget(joint: Joint) -> None:
    joint.x, joint.results = None, ()


def _fast_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, eps = norm.get_parameter("weight"), norm_eps(norm)
    assert eps is not None
    return lambda x: rms_norm(x, weight, eps)


@torch.no_grad()
def is_rms_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if "RMSNorm" not in type(module).__name__ or weight is None or weight.dim() != 1:
        return False
    if not isinstance(norm_eps(module), float):
        return False
    x = torch.linspace(-3, 3, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    own, fast = module(x), _fast_norm(module)(x)
    return bool((own - fast).abs().max() <= 0.02 * own.abs().max())


def _activation(mlp: nn.Module) -> str | None:
    """The gated activation that an MLP's ``act_fn`` makes, if it is one of ours."""
    act = getattr(mlp, "act_fn", None)
    if not callable(act):
        return None
    both = torch.linspace(-6, 6, 64, dtype=torch.float32, device="cpu")
    gated = act(both[0::2]) * both[1::2]
    for name, formula in ACTIVATIONS.items():
        if formula.gated and torch.allclose(parse(name).apply(both), gated, rtol=1e-5, atol=1e-6):
            return name
    return None


def _gated(mlp: nn.Module, joint: Joint, activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    down = mlp.get_submodule("down_proj")

    def forward(x: torch.Tensor) -> torch.Tensor:
        both = joint.product(x)
        return down(gate_halves(both.view(-1, both.shape[-1]), activation).view(*x.shape[:-1], -1))

    return forward


# --- what is added behind a layer's attention and its MLP ------------------------------------------------------------


def last_products(layer: nn.Module) -> list[W4Linear]:
    """The o_proj and down_proj of a layer of a model, those in whose epilogues what it adds can be added."""
    if {name for name, _ in layer.named_children()} != set(LAYER):
        return []
    products = getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None)
    return [m for m in products if _takes_residual(m)]


def _fuse_residuals(patches: Patches, layer: nn.Module) -> None:
    """Add what a layer adds behind o_proj and down_proj in their epilogues, where these are quantized layers. Behind
    experts it is added as before."""
    if not (last := last_products(layer)):
        return
    attention, mlp, *norms = (layer.get_submodule(name) for name in LAYER)
    residuals: dict[nn.Module, torch.Tensor] = {}
    for product in last:
        patches.set(product, "forward", _with_residual(product, residuals))

    def added(x: torch.Tensor, norm: nn.Module, block: nn.Module, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        product = getattr(block, name, None)
        if product in last:
            residuals[product] = x
        y = block(norm(x), *args, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        if residuals:
            raise NotFusable("a layer did not add what was to be added")
        return y if product in last else x + y

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden_states = added(hidden_states, norms[0], attention, "o_proj", *args, **kwargs)
        return added(hidden_states, norms[1], mlp, "down_proj")

    patches.set(layer, "forward", forward)


def _takes_residual(layer: object) -> TypeGuard[W4Linear]:
    return type(layer) is W4Linear and layer.pre_quant_scale is None and layer.activation is None


def _with_residual(layer: W4Linear, residuals: dict[nn.Module, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if layer not in residuals:
            raise NotFusable("a layer is called twice")
        residual = residuals.pop(layer)
        return linear(x, layer.weight, layer.bias, residual=residual, batch_invariant=layer.batch_invariant)

    return forward


@without_autocast
def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight whose rows are those of ``weights``, one below the other, bit for bit.

    Raises:
        ValueError: if they differ in anything but n, have experts, or their layout pads n.
    """
    first = weights[0]
    facts = [(w.format, w.k, w.layout, w.device, w.activations) for w in weights]
    perms = [w.perm for w in weights]
    equal = all(p is perms[0] or (p is not None and perms[0] is not None and torch.equal(p, perms[0])) for p in perms)
    if any(w.experts for w in weights) or len(set(facts)) > 1 or not equal:
        raise ValueError(f"weights: wanted the same format, k, layout, device, activations and perm, got {weights}")
    if any(w.packed.has_room for w in weights):
        raise ValueError(f"weights: wanted n without padding in the layout {first.layout}, got {weights}")
    tensors = tuple(torch.cat(ts) for ts in zip(*(w.tensors for w in weights), strict=True))
    return replace(first, n=sum(w.n for w in weights), tensors=tensors)


def parts(w: QuantizedWeight, sizes: Sequence[int]) -> list[QuantizedWeight]:
    """Return the weights of the first ``sizes[0]`` rows of w, of the next ``sizes[1]``, and so on, which share w's
    memory. ``sizes`` are the n of weights that :func:`joined` put together."""
    weights, start = [], 0
    for size in sizes:
        cut = [len(t) * start // w.n for t in w.tensors], [len(t) * (start + size) // w.n for t in w.tensors]
        tensors = tuple(t[a:b] for t, a, b in zip(w.tensors, *cut, strict=True))
        weights.append(replace(w, n=size, tensors=tensors))
        start += size
    return weights
