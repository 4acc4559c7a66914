"""A module that holds the tensors of a packed weight as buffers, which others may move, convert or replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from w4gemm.api.modes import is_watched
from w4gemm.api.product import BoundLinear
from w4gemm.core.errors import kind_of, require_int
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class PackedModule(torch.nn.Module):
    """A module with a ``weight``, whose tensors are the buffers ``packed0``, ``packed1``, ... and ``packed_perm``.

    The buffers ``packed0``, ... hold bytes, because a conversion of a module's dtype leaves integers alone, and because
    every backend of torch.distributed sends bytes. The product always takes what the buffers hold, since accelerate's
    hooks and ``torch.func.functional_call`` replace them.
    """

    grouped = False
    """True if the weight is one of several experts."""
    dtype: torch.dtype
    in_features: int
    out_features: int
    format: WeightFormat
    _weight: QuantizedWeight
    _packed: tuple[tuple[str, torch.Tensor], ...]
    """Names and buffers of ``_weight``'s tensors. A tuple, because every warm call iterates over it."""
    _bound: BoundLinear | None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A value that contradicts the weight, or would have no effect, is refused. Scales stay
        buffers, even if the value is a parameter."""
        if name == "dtype":
            check_dtype(value)
        elif name == "batch_invariant" and self.grouped and value:
            raise ValueError("batch_invariant: wanted False for experts, whose products depend on the batch, got True")
        elif name in _OF_WEIGHT and (w := self.__dict__.get("_weight")) is not None:
            _check_attribute(name, value, w)
        if name in _SCALES and isinstance(value, torch.nn.Parameter):
            value = value.detach()
        super().__setattr__(name, value)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, in the layout of its device. Another weight of any size and format may be assigned."""
        buffers = self._buffers
        for name, t in self._packed:
            if buffers.get(name) is not t:
                return self._of_buffers()
        return self._weight

    @weight.setter
    def weight(self, w: QuantizedWeight) -> None:
        if not isinstance(w, QuantizedWeight) or bool(w.experts) != self.grouped:
            raise TypeError(
                f"weight: wanted a QuantizedWeight of {'several experts' if self.grouped else 'no experts'}, got "
                f"{w if isinstance(w, QuantizedWeight) else kind_of(w)}"
            )
        self._set_weight(w)
        self.in_features, self.out_features, self.format = w.k, w.n, w.format

    @property
    def activations(self) -> str | None:
        """The weight's ``activations``: "fp8" if x is quantized before it is multiplied, else None. Setting it repacks
        the weight."""
        return self._weight.activations

    @activations.setter
    def activations(self, activations: str | None) -> None:
        self._set_weight(self.weight.repack(activations=activations))

    def _set_weight(self, w: QuantizedWeight) -> None:
        """Repack ``w`` for its device, keep it and register its tensors."""
        for name in [name for name in self._buffers if name.startswith("packed")]:
            del self._buffers[name]
        w = w.repack()
        packed = {f"packed{i}": t.view(torch.uint8) for i, t in enumerate(w.tensors)}
        if w.perm is not None:
            packed["packed_perm"] = w.perm
        for name, t in packed.items():
            self.register_buffer(name, t, persistent=False)
        self._weight, self._packed, self._bound = w, tuple(packed.items()), None

    def _of_buffers(self) -> QuantizedWeight:
        """Return the weight of the buffers after some were replaced. Unless a call is traced, the module keeps it."""
        buffers = {name: self._buffers.get(name) for name, _ in self._packed}
        for name, old in self._packed:
            t = buffers[name]
            if not isinstance(t, torch.Tensor) or t.dtype != old.dtype or t.shape != old.shape:
                expected = f"{old.dtype} {tuple(old.shape)}"
                raise ValueError(f"{name}: wanted {expected} for this layer's {self._weight!r}, got {kind_of(t)}")
        w = self._with(buffers)
        if not is_watched():
            self._set_weight(w)
            return self._weight
        return w.repack()

    def _with(self, buffers: dict[str, Any]) -> QuantizedWeight:
        """Return the weight with the tensors of ``buffers``."""
        old = self._weight
        tensors = tuple(buffers[f"packed{i}"].view(t.dtype) for i, t in enumerate(old.tensors))
        return replace(old, tensors=tensors, perm=buffers.get("packed_perm"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        w = self.weight
        dtype = fn(torch.empty(0, dtype=self.dtype, device=w.device)).dtype
        check_dtype(dtype)
        # flat, because fn would give another memory format to what has four dimensions
        moved = {name: moved_only(t.view(-1), fn).view(t.shape) for name, t in self._packed}
        for name in moved:
            del self._buffers[name]
        try:
            super()._apply(fn, recurse)
            self._set_weight(self._with(moved))
        except BaseException:
            self._set_weight(w)
            raise
        self.dtype = dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the buffers of bytes: they are views of the weight's tensors, and ``torch.save``
        refuses two dtypes of one memory."""
        buffers = {name: t for name, t in self._buffers.items() if not name.startswith("packed")}
        state = {**self.__dict__, "_weight": self.weight, "_buffers": buffers, "_bound": None}
        del state["_packed"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_weight(self._weight)


_OF_WEIGHT = ("format", "in_features", "out_features", "pre_quant_scale")
"""The attributes that have to fit the weight."""
_SCALES = ("pre_quant_scale", "expert_scale")


def _check_attribute(name: str, value: Any, w: QuantizedWeight) -> None:
    """Raise TypeError or ValueError unless ``value`` fits the weight as the attribute ``name`` of its module."""
    if name == "format":
        if value != w.format:
            raise ValueError(f"format: wanted the weight's, {w.format}; assign another weight, got {str(value)!r:.40}")
    elif name == "pre_quant_scale":
        if value is not None and (not isinstance(value, torch.Tensor) or not value.is_floating_point()):
            raise TypeError(f"{name}: wanted a floating-point tensor ({w.k},) or None, got {kind_of(value)}")
        if value is not None and tuple(value.shape) != (w.k,):
            raise ValueError(f"{name}: wanted shape ({w.k},), k of the weight, got {tuple(value.shape)}")
    else:
        require_int(name, value)
        letter, size = ("k", w.k) if name == "in_features" else ("n", w.n)
        if value % size:  # frameworks of tensor parallelism keep the size of all shards
            raise ValueError(f"{name}: wanted the weight's {letter} {size}, or that of all its shards, got {value}")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_dtype(dtype: object) -> None:
    """Raise TypeError unless both x and a bias may have ``dtype``."""
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        close = "; nearest is torch.float32" if dtype is torch.float64 else ""
        raise TypeError(f"dtype: wanted {' or '.join(map(str, _DTYPES))}, got {dtype!r:.40}{close}")


def moved_only(t: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return fn(t). If fn converts to another dtype, as ``module.type`` does with every tensor, return t on the device
    of fn(t) instead."""
    new = fn(t)
    return new if new.dtype == t.dtype else t.to(new.device)
