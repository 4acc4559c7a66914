"""Places of a checkpoint's 4-bit modules in a model without numbers: :func:`reserve`, then :meth:`AwaitedLinear.fill`.

A layer keeps its identity from one to the other. Hooks that a framework puts on it in between, such as those of tensor
parallelism, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints import Checkpoint, Module
from w4gemm.checkpoints.dense import linear_layers
from w4gemm.checkpoints.experts import DOWN, GATE_UP
from w4gemm.checkpoints.gates import activation_of
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.weight import QuantizedWeight


class AwaitedLinear(nn.Module):
    """A linear layer whose 4-bit weight is still to come. :meth:`fill` makes it a :class:`W4Linear`, in place, as
    ``torch.nn.LazyLinear`` becomes a ``Linear``.

    Its only tensors are the dense layer's bias and ``place``, one byte without meaning that a framework moves to the
    device on which it wants the layer.

    Args:
        linear: the dense layer that was here.
        format: of the weight to come.
        pre_quant_scale: True if the layer is to have one.
    """

    filled: ClassVar[type[W4Linear]] = W4Linear
    bias: nn.Parameter | None
    place: torch.Tensor
    pre_quant_scale: torch.Tensor | None

    def __init__(self, linear: nn.Linear, format: WeightFormat, pre_quant_scale: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        self.dtype = linear.weight.dtype
        self._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism is to pass it no DTensors
        self.register_parameter("bias", linear.bias)
        scale = torch.empty(self.in_features, dtype=self.dtype, device="meta") if pre_quant_scale else None
        self.register_buffer("pre_quant_scale", scale)
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)
        # neither parameter nor buffer: for code that initializes the weights of a layer's parts by name (SigLIP's), to
        # which transformers says that this one is
        weight: Any = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        weight._is_hf_initialized = True
        self.weight = weight

    @property
    def has_bias(self) -> bool:
        """True if the dense layer had a bias."""
        return self.bias is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight to come, without padding of its layout."""
        return packed_shape(self.format, "canonical", self.out_features, self.in_features).nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The W4Linear's, for a framework that took hold of this method before the layer became one."""
        if not isinstance(self, W4Linear):
            raise RuntimeError(f"{type(self).__name__}: its weight was not loaded")
        return W4Linear.forward(self, x)

    def fill(self, w: QuantizedWeight) -> None:
        """Become a W4Linear with weight ``w``, which may be one shard of the layer's: the layer keeps the numbers of
        features that it had, because tensor parallelism asks for those of all shards."""
        features = self.in_features, self.out_features
        self._buffers.pop("place")
        self.__dict__.pop("weight", None)
        self.__class__ = self.filled  # type: ignore[assignment]
        assert isinstance(self, W4Linear)
        self.adopt(w, self.dtype)
        self.in_features, self.out_features = features


class AwaitedGrouped(AwaitedLinear):
    """One product of experts whose 4-bit weights are still to come; :meth:`fill` makes it a :class:`W4GroupedLinear`.

    Its bias comes with the weight, since transformers knows it by another name.

    Args:
        weight: the dense parameter that was here, (experts, n, k), or (experts, k, n) if ``transposed``.
        activation: of the product's result, or None.
    """

    filled = W4GroupedLinear

    def __init__(self, weight: nn.Parameter, transposed: bool, has_bias: bool, activation: str | None = None) -> None:
        nn.Module.__init__(self)
        self.experts, n, k = weight.shape
        self.out_features, self.in_features = (k, n) if transposed else (n, k)
        self.format, self.dtype, self._has_bias, self.activation = WeightFormat(), weight.dtype, has_bias, activation
        self.register_parameter("bias", None)
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)

    @property
    def has_bias(self) -> bool:
        return self._has_bias

    @property
    def nbytes(self) -> int:
        sizes = self.out_features, self.in_features, self.experts
        return packed_shape(self.format, "canonical", *sizes).nbytes

    def fill(self, w: QuantizedWeight) -> None:
        activation = self.activation
        super().fill(w)
        self.activation = activation
        self.register_buffer("expert_scale", None)
        del self._has_bias, self.experts


class AwaitedExperts(W4Experts):
    """Experts whose products' weights are still to come; :func:`finish` makes it a W4Experts.

    Args:
        experts: the dense experts that were here.
        config: the model's, which says by the time that it is asked for whether each process is to hold some of them.

    Raises:
        ValueError: if w4gemm computes no such experts.
    """

    gate_up: AwaitedGrouped  # type: ignore[assignment]
    down: AwaitedGrouped  # type: ignore[assignment]

    def __init__(self, experts: nn.Module, config: Any) -> None:
        nn.Module.__init__(self)
        if getattr(experts, "has_post_expert_norm", False):
            raise ValueError(f"its {type(experts).__name__} have a norm behind each expert")
        transposed, has_bias = (bool(getattr(experts, name, False)) for name in ("is_transposed", "has_bias"))
        up, down = experts.get_parameter(GATE_UP), experts.get_parameter(DOWN)
        self.gate_up = AwaitedGrouped(up, transposed, has_bias, activation_of(experts))
        self.down = AwaitedGrouped(down, transposed, has_bias)
        self.config = config

    @property
    def num_experts(self) -> int:
        """Experts of this process, for transformers' expert parallelism."""
        split = getattr(getattr(self.config, "distributed_config", None), "ep_size", None) or 1
        return self.gate_up.experts // split


def finish(model: nn.Module) -> None:
    """Let the experts whose products were filled be a :class:`W4Experts`."""
    for module in model.modules():
        if isinstance(module, AwaitedExperts):
            del module.config
            module.__class__ = W4Experts  # type: ignore[assignment]


@dataclass(frozen=True)
class Place:
    """The place of a module's weight, or of some of its rows."""

    layer: str
    """Name of the linear layer in the model."""
    rows: slice | None = None
    """Rows of the module that are this layer's; None for all."""
    dense: str = ""
    """Name of the experts' dense parameter that was here; empty for that of a linear layer."""
    unpacked: bool = False
    """True if the layer stays, because its own code reads a dense weight: a router, an embedding or a Conv1D."""

    @property
    def weight_name(self) -> str:
        """Name of the dense weight that was here."""
        return self.dense or f"{self.layer}.weight"

    @property
    def bias_name(self) -> str:
        """Name of the bias that is or was here, if there is one."""
        return f"{self.dense}_bias" if self.dense else f"{self.layer}.bias"

    def weight_of(self, w: QuantizedWeight) -> QuantizedWeight:
        """This layer's weight, of the module's in the canonical layout, where every tensor has a row for each."""
        if self.rows is None:
            return w
        tensors = tuple(t[self.rows].clone(memory_format=torch.contiguous_format) for t in w.tensors)
        return replace(w, n=len(tensors[0]), tensors=tensors)


def unpacked(layer: nn.Module, w: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight of a layer that stays, as its own code reads it."""
    dense = w.dequantize(dtype)
    return dense.T.contiguous() if _is_transposed(layer) else dense


def reserve(model: nn.Module, checkpoint: Checkpoint, renamed: Callable[[str], str]) -> dict[str, list[Place]]:
    """Replace the dense layers of a model that are in 4 bits in a checkpoint by :class:`AwaitedLinear`. Layers that are
    no plain linear ones stay as they are.

    Args:
        renamed: gives the name in the model of a module of the checkpoint.

    Returns:
        The places of each module of the checkpoint; none for a module that the model has no layers for.

    Raises:
        FormatError: if a layer has another shape or bias than the module, or is tied to the embedding.
    """
    found: dict[str, list[Place]] = {}
    plain = linear_layers(model, ())
    for name, module in checkpoint.modules.items():
        if (place := _place_of_experts(model, checkpoint, renamed(name), module)) is not None:
            found[name] = [place]
            continue
        layers = _layers_of(model, checkpoint, renamed(name), module, plain)
        if not layers and (place := _unpacked_place(model, checkpoint, renamed(name), module)) is not None:
            layer = model.get_submodule(place.layer)
            _check_bias(checkpoint, name, module, {place.layer: getattr(layer, "bias", None) is not None})
            found[name] = [place]
            continue
        _check_bias(checkpoint, name, module, {n: layer.bias is not None for n, layer in layers.items()})
        found[name] = [] if len(layers) > 1 else [Place(layer) for layer in layers]
        start = 0
        for i, (target, layer) in enumerate(layers.items()):
            rows = slice(i, None, len(layers)) if module.interleaved else slice(start, start + layer.out_features)
            start += layer.out_features
            if len(layers) > 1:
                found[name].append(Place(target, rows))
            model.set_submodule(target, AwaitedLinear(layer, module.format, module.pre_quant_scale))
    return found


def _layers_of(
    model: nn.Module, checkpoint: Checkpoint, name: str, module: Module, plain: Collection[str]
) -> dict[str, nn.Linear]:
    """Linear layers of the model that a module is the weight of, by name: one, or those that are fused in it; none if
    the model has no such layers among the ``plain`` ones."""
    owner = name.rpartition(".")[0]
    names = [name] if submodule(model, name) is not None else [f"{owner}.{part}" for part in module.fused]
    layers = {n: layer for n in names if n in plain and isinstance(layer := submodule(model, n), nn.Linear)}
    if module.experts or not layers or len(layers) < len(names):
        return {}
    sizes = [layer.out_features for layer in layers.values()]
    k = next(iter(layers.values())).in_features
    if (module.n, module.k) != (sum(sizes), k) or (module.interleaved and len(set(sizes)) > 1):
        raise FormatError(
            f"{checkpoint.path}: the weight of {name} has shape {(module.n, module.k)}, its config wants "
            f"({' + '.join(map(str, sizes))}, {k})"
        )
    embedding = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    if any(layer.weight is embedding for layer in layers.values()):
        raise FormatError(f"{checkpoint.path}: {name} is in 4 bits, but its config ties it to the embedding")
    return layers


def _unpacked_place(model: nn.Module, checkpoint: Checkpoint, name: str, module: Module) -> Place | None:
    """The place of a module in a layer of the model that is no plain linear one; None if there is no such layer."""
    layer, own = submodule(model, name), f"{name}.weight"
    weight = None if layer is None else layer._parameters.get("weight")
    if module.experts or layer is None or weight is None:
        return None
    wanted = tuple(weight.T.shape if _is_transposed(layer) else weight.shape)
    if (module.n, module.k) != wanted:
        raise FormatError(
            f"{checkpoint.path}: the weight of {name} has shape {(module.n, module.k)}, its config wants {wanted}"
        )
    if module.pre_quant_scale:
        raise FormatError(
            f"{checkpoint.path}: {name} has a pre_quant_scale, wanted none: a {type(layer).__name__} would not "
            "multiply its input by it"
        )
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is weight and other != own and other in checkpoint.tensors:
            raise FormatError(f"{checkpoint.path}: {name} is in 4 bits, but its config ties it to {other}")
    return Place(name, unpacked=True)


def _is_transposed(layer: nn.Module) -> bool:
    """True for a layer of GPT-2's, which keeps a linear layer's weight as (k, n)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


_PRODUCTS = {GATE_UP: "gate_up", DOWN: "down", "gate_up": "gate_up", "down": "down"}
"""Products of a :class:`W4Experts`, by the last part of a module's name in folders of others, and of our own."""


def _place_of_experts(model: nn.Module, checkpoint: Checkpoint, name: str, module: Module) -> Place | None:
    """The place of a module of several experts, or None if it is none of them or the model has no such experts. The
    first of both modules puts a :class:`W4Experts` in the place of the model's experts."""
    owner, _, leaf = name.rpartition(".")
    experts = submodule(model, owner)
    if not module.experts or leaf not in _PRODUCTS or experts is None:
        return None
    if not isinstance(experts, W4Experts):
        if not (hasattr(experts, GATE_UP) and hasattr(experts, "_apply_gate")):
            return None
        try:
            experts = AwaitedExperts(experts, getattr(model, "config", None))
        except ValueError as e:
            raise FormatError(f"{checkpoint.path}: {owner}: {e}") from e
        model.set_submodule(owner, experts)
    product = _PRODUCTS[leaf]
    layer = getattr(experts, product)
    came, wanted = (module.experts, module.n, module.k), (layer.experts, layer.out_features, layer.in_features)
    if came != wanted:
        raise FormatError(f"{checkpoint.path}: the weight of {name} has shape {came}, its config wants {wanted}")
    layer.format = module.format
    _check_bias(checkpoint, name, module, {name: layer.has_bias})
    dense = next(dense for dense, other in _PRODUCTS.items() if other == product)
    return Place(f"{owner}.{product}", dense=f"{owner}.{dense}")


def _check_bias(checkpoint: Checkpoint, name: str, module: Module, layers: Mapping[str, bool]) -> None:
    """Raise FormatError unless a module has a bias if its layers, True for those with one, have it. A bias of zeros
    may be there without a place: old GPTQ files have such a bias for every layer."""
    stored = f"{name}.bias"
    if not (others := [n for n, has_bias in layers.items() if has_bias != module.bias]):
        return
    unused = stored in checkpoint.tensors and len(others) == len(layers)
    if unused and not checkpoint.dense(stored).any():
        return
    has, wanted = ("a", "none") if module.bias else ("no", "one")
    raise FormatError(f"{checkpoint.path}: {name} has {has} bias, its config wants {wanted} of {listed(others)}")


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """A module of the model, or None if there is none of this name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def listed(names: list[str]) -> str:
    """The first names, and how many there are."""
    return f"{', '.join(names[:3])}{f', ... ({len(names)} in all)' if len(names) > 3 else ''}"
