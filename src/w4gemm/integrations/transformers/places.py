"""Places of a checkpoint's 4-bit modules in a model without numbers: :func:`reserve`, then :meth:`AwaitedLinear.fill`.

A layer keeps its identity from one to the other. Hooks that a framework puts on it in between, such as those of tensor
parallelism, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints import Checkpoint, Module
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
    """

    bias: nn.Parameter | None
    place: torch.Tensor

    def __init__(self, linear: nn.Linear, format: WeightFormat) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        self.dtype = linear.weight.dtype
        self._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism is to pass it no DTensors
        self.register_parameter("bias", linear.bias)
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)

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
        self.__class__ = W4Linear  # type: ignore[assignment]
        assert isinstance(self, W4Linear)
        self.adopt(w, self.dtype)
        self.in_features, self.out_features = features


@dataclass(frozen=True)
class Place:
    """The place of a module's weight, or of some of its rows."""

    layer: str
    """Name of the linear layer in the model."""
    rows: slice | None = None
    """Rows of the module that are this layer's; None for all."""

    def weight_of(self, w: QuantizedWeight) -> QuantizedWeight:
        """This layer's weight, of the module's in the canonical layout, where every tensor has a row for each."""
        if self.rows is None:
            return w
        tensors = tuple(t[self.rows].clone(memory_format=torch.contiguous_format) for t in w.tensors)
        return replace(w, n=len(tensors[0]), tensors=tensors)


Places = Mapping[str, tuple[Place, ...]]
"""Places of the modules of a checkpoint, by their names there."""


def reserve(model: nn.Module, checkpoint: Checkpoint, renamed: Callable[[str], str] = str) -> dict[str, list[Place]]:
    """Replace the dense layers of a model that are in 4 bits in a checkpoint by :class:`AwaitedLinear`.

    Args:
        renamed: gives the name in the model of a module of the checkpoint.

    Returns:
        The places of each module of the checkpoint; none for a module that the model has no layers for.

    Raises:
        FormatError: if a layer has another shape or bias than the module, or is tied to the embedding.
    """
    found = {}
    for name, module in checkpoint.modules.items():
        layers = _layers_of(model, checkpoint, renamed(name), module)
        _check_bias(checkpoint, name, module, layers)
        found[name] = [] if len(layers) > 1 else [Place(layer) for layer in layers]
        start = 0
        for i, (target, layer) in enumerate(layers.items()):
            rows = slice(i, None, len(layers)) if module.interleaved else slice(start, start + layer.out_features)
            start += layer.out_features
            if len(layers) > 1:
                found[name].append(Place(target, rows))
            model.set_submodule(target, AwaitedLinear(layer, module.format))
    return found


def _layers_of(model: nn.Module, checkpoint: Checkpoint, name: str, module: Module) -> dict[str, nn.Linear]:
    """Linear layers of the model that a module is the weight of, by name: one, or those that are fused in it; none if
    the model has no such layers."""
    owner = name.rpartition(".")[0]
    names = [name] if submodule(model, name) is not None else [f"{owner}.{part}" for part in module.fused]
    layers = {n: layer for n in names if isinstance(layer := submodule(model, n), nn.Linear)}
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


def _check_bias(checkpoint: Checkpoint, name: str, module: Module, layers: Mapping[str, nn.Linear]) -> None:
    """Raise FormatError unless a module has a bias if its layers have one. A bias of zeros may be there without a
    place: old GPTQ files have such a bias for every layer."""
    stored = f"{name}.bias"
    if not (others := [n for n, layer in layers.items() if (layer.bias is not None) != module.bias]):
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
