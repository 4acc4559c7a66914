"""A module that holds the tensors of a packed weight as buffers, which others may move, convert or replace:
:class:`PackedModule`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from w4gemm.api.arguments import check
from w4gemm.api.modes import is_watched
from w4gemm.core.epilogue import FLOATS
from w4gemm.core.errors import kind_of, require_bool, require_int, require_tensor
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.checks import PERM_DTYPE, is_permutation
from w4gemm.weights.file import format_name, is_same_format, name_as_tensor, name_of_tensor
from w4gemm.weights.weight import QuantizedWeight

_replacing = threading.RLock()
"""Held while a layer's weight and buffers are replaced, so that other threads see all of them old or new."""


def _named_tensor(name: str) -> property:
    """Make the attribute ``name``, the tensor that a state dict has under it."""

    def read(self: PackedModule) -> torch.Tensor:
        if (t := self.weight.repack("canonical").named_tensors().get(name)) is None:
            raise AttributeError(name)  # torch.nn.Module raises another one, which names the class
        return t

    def write(self: PackedModule, _: object) -> None:
        raise AttributeError(
            f"{name}: it cannot be set; weight takes a QuantizedWeight, load_state_dict a state dict, functional_call "
            "named_parameters and named_buffers"
        )

    return property(read, write)


class PackedModule(torch.nn.Module):
    """A module with a ``weight``, whose tensors are the buffers ``packed0``, ``packed1``, ... and ``packed_perm``; with
    a bias, and a state dict. Its subclasses are :class:`w4gemm.W4Linear`, :class:`w4gemm.W4GroupedLinear` and
    :class:`w4gemm.W4Embedding`.

    The buffers ``packed0``, ... hold bytes, because a conversion of a module's dtype leaves integers alone, and because
    every backend of torch.distributed sends bytes. The product always takes what the buffers hold, since accelerate's
    hooks and ``torch.func.functional_call`` replace them.
    """

    grouped: ClassVar[bool] = False
    """True if the weight is one of several experts."""
    scale_names: ClassVar[tuple[str, ...]] = ("pre_quant_scale",)
    """Buffers with factors of x or of the products, or None. A loaded state dict may bring them."""
    bias: torch.nn.Parameter | None
    pre_quant_scale: torch.Tensor | None
    activation: str | None
    batch_invariant: bool
    dtype: torch.dtype
    in_features: int
    out_features: int
    format: WeightFormat
    _held: tuple[QuantizedWeight, tuple[tuple[str, torch.Tensor], ...]]
    """The weight, and the names and buffers of its tensors. Both are one attribute, because other threads may read it
    while it is replaced, and tuples, because every warm call iterates over it."""

    def __init__(self, w: QuantizedWeight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """Hold ``w``, and a bias (n,) or (experts, n). Arguments and errors as of :meth:`W4Linear.from_weight`."""
        if not isinstance(w, QuantizedWeight):
            raise TypeError(f"w: wanted a QuantizedWeight, got {type(w).__name__}")
        if bool(w.experts) != self.grouped:
            raise ValueError(f"w: wanted {'several experts' if self.grouped else 'a single weight'}, got {w!r}")
        shape = (w.experts, w.n) if w.experts else (w.n,)
        if bias is not None:
            require_tensor("bias", bias, (), shape, w.device, size=", n of w", whose="w's device", contiguous=False)
        if dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        check_dtype(dtype)
        super().__init__()
        self.adopt(w, dtype)
        requires_grad = bias is not None and bias.requires_grad
        bias = None if bias is None else bias.to(dtype).detach()
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad))

    def adopt(self, w: QuantizedWeight, dtype: torch.dtype) -> None:
        """Take ``w`` as the weight and ``dtype`` as the dtype to advertise; the bias and the module's hooks stay."""
        self.activation, self.batch_invariant, self.dtype = None, False, dtype
        for name in self.scale_names:
            if name not in self._buffers:
                self.register_buffer(name, None)
        self.weight = w

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A value that contradicts the weight, or would have no effect, is refused. Scales stay
        buffers, even if the value is a parameter, and the weight a property."""
        if name == "dtype":
            check_dtype(value)
        elif name == "batch_invariant":
            require_bool(name, value)
        elif name in _OF_WEIGHT and (held := self.__dict__.get("_held")) is not None:
            _check_attribute(name, value, held[0])
        if name in (*self.scale_names, "weight") and isinstance(value, torch.nn.Parameter):
            value = value.detach()
        super().__setattr__(name, value)
        if name == "dtype" and "_held" in self.__dict__:
            with _replacing:
                w, packed = self._held
                self._held = w.of_layer(value), packed

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, in the layout of its device. Another weight of any size and format may be assigned."""
        buffers = self._buffers
        w, packed = self._held
        for name, t in packed:
            if buffers.get(name) is not t:
                return self._of_buffers()
        return w

    @weight.setter
    def weight(self, w: QuantizedWeight) -> None:
        if not isinstance(w, QuantizedWeight) or bool(w.experts) != self.grouped:
            raise TypeError(
                f"weight: wanted a QuantizedWeight of {'several experts' if self.grouped else 'no experts'}, got "
                f"{w if isinstance(w, QuantizedWeight) else kind_of(w)}"
            )
        self._set_weight(w)
        # not one by one: another thread may set another weight in between, which they would not fit
        self.__dict__.update(in_features=w.k, out_features=w.n, format=w.format)

    @property
    def activations(self) -> str | None:
        """The weight's ``activations``: "fp8" if x is quantized before it is multiplied, else None. Setting it repacks
        the weight."""
        return self._held[0].activations

    @activations.setter
    def activations(self, activations: str | None) -> None:
        self._set_weight(self.weight.repack(activations=activations))

    def _placed(self, w: QuantizedWeight) -> QuantizedWeight:
        """Return a weight in the layout that the module reads on the weight's device."""
        return w.repack()

    def _set_weight(self, w: QuantizedWeight) -> QuantizedWeight:
        """Repack ``w`` for its device, keep it and register its tensors; return it."""
        w = self._placed(w).of_layer(self.dtype)
        packed = {f"packed{i}": t.view(torch.uint8) for i, t in enumerate(w.tensors)}
        if w.perm is not None:
            packed["packed_perm"] = w.perm
        with _replacing:
            for name in [name for name in self._buffers if name.startswith("packed")]:
                del self._buffers[name]
            for name, t in packed.items():
                self.register_buffer(name, t, persistent=False)
            self._held = w, tuple(packed.items())
        return w

    def _of_buffers(self) -> QuantizedWeight:
        """Return the weight of the buffers after some were replaced. Unless a call is traced, the module keeps it."""
        if is_watched():
            return self._placed(self._with_buffers()).of_layer(self.dtype)
        with _replacing:
            w, packed = self._held
            if all(self._buffers.get(name) is t for name, t in packed):
                return w  # another thread was about to replace both
            return self._set_weight(self._with_buffers())

    def _with_buffers(self) -> QuantizedWeight:
        """Return the weight with the tensors that the buffers hold now."""
        w, packed = self._held
        buffers = {name: self._buffers.get(name) for name, _ in packed}
        for name, old in packed:
            t = buffers[name]
            if not isinstance(t, torch.Tensor) or t.dtype != old.dtype or t.shape != old.shape:
                expected = f"{old.dtype} {tuple(old.shape)}"
                raise ValueError(f"{name}: wanted {expected} for this layer's {w!r}, got {kind_of(t)}")
        return _with(w, buffers)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        with _replacing:
            w = self.weight
            dtype = fn(torch.empty(0, dtype=self.dtype, device=w.device)).dtype
            check_dtype(dtype)
            # flat, because fn would give another memory format to what has four dimensions
            moved = {name: moved_only(t.view(-1), fn).view(t.shape) for name, t in self._held[1]}
            for name in moved:
                del self._buffers[name]
            try:
                super()._apply(fn, recurse)
                self._set_weight(_with(w, moved))
            except BaseException:
                self._set_weight(w)
                raise
            self.dtype = dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the buffers of bytes: they are views of the weight's tensors, and ``torch.save``
        refuses two dtypes of one memory."""
        buffers = {name: t for name, t in self._buffers.items() if not name.startswith("packed")}
        state = {**self.__dict__, "_weight": self.weight, "_buffers": buffers}
        del state["_held"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_weight(self.__dict__.pop("_weight"))

    def _own_bias(self) -> torch.Tensor | None:
        """Return ``bias``, but not by nn.Module's slow way."""
        try:
            return self._parameters["bias"]
        except KeyError:  # FullyShardedDataParallel has taken it out, and sets a view of its own
            return self.bias

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return x * pre_quant_scale, or x if there is none.

        Raises:
            TypeError, ValueError: if they do not fit; the product would check only their broadcast result.
        """
        scale = self._buffers.get("pre_quant_scale")
        if scale is None:
            return x
        w = self.weight
        check(x, w, grouped=self.grouped, any_dtype=True)  # x may be cast yet
        if len(scale) != w.k:
            raise ValueError(f"pre_quant_scale: wanted shape ({w.k},), k of the weight, got {tuple(scale.shape)}")
        return x * scale.to(x.dtype)

    def extra_repr(self) -> str:
        w = self.weight
        extra = f", experts={w.experts}" if w.experts else ""
        extra += ", act_order=True" if w.perm is not None else ""
        extra += f", activation={self.activation}" if self.activation else ""
        extra += ", pre_quant_scale=True" if self._buffers.get("pre_quant_scale") is not None else ""
        extra += ", batch_invariant=True" if self.batch_invariant else ""
        extra += f", activations={self.activations}" if self.activations else ""
        return (
            f"in_features={w.k}, out_features={w.n}, bias={self.bias is not None}, format={w.format}, "
            f"layout={w.layout}{extra}"
        )

    # --- state dict -------------------------------------------------------------------------------------------------

    # torch.distributed.checkpoint looks for an attribute of each name in a state dict
    codes, scales, zeros, channels, factors, perm = map(
        _named_tensor, ("codes", "scales", "zeros", "channels", "factors", "perm")
    )

    def get_extra_state(self) -> torch.Tensor:
        """Return the names of the format and the activations as bytes, see :mod:`w4gemm.weights.file`."""
        return name_as_tensor(format_name(self.format, self.activations))

    def set_extra_state(self, state: torch.Tensor) -> None:
        name, _, activations = name_of_tensor(state).partition(" ")
        if not is_same_format(name, str(self.format)):
            raise ValueError(f"wanted a weight in {self.format} like this layer, got one in {name!r}")
        if (activations or None) != self.activations:
            self.activations = activations or None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, t in self.weight.repack("canonical").named_tensors().items():
            destination[prefix + name] = t

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in (*self.format.part_names, "perm", *self.scale_names, "_extra_state"):
            if not isinstance(t := state_dict.get(prefix + name), torch.Tensor | None):
                error_msgs.append(f"{prefix}{name}: wanted a tensor, got {kind_of(t)}")
                return
        self._make_room_for_scales(state_dict, prefix)
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        except ValueError as e:  # the extra state's
            error_msgs.append(f"{prefix}_extra_state: {e}")
            return
        if self.bias is not None and self.bias.dtype != self.dtype:  # it was assigned, not copied
            try:
                self.dtype = self.bias.dtype
            except TypeError as e:
                error_msgs.append(f"{prefix}bias: {e}")
                return
        assign = local_metadata.get("assign_to_params_buffers", False)
        self._load_weight(state_dict, prefix, assign, strict, missing_keys, unexpected_keys, error_msgs)

    def _make_room_for_scales(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Make a buffer for each scale that a state dict brings, unless there is one that holds numbers."""
        w = self.weight
        for name in self.scale_names:
            loaded, own = state_dict.get(prefix + name), self._buffers[name]
            if loaded is not None and (own is None or own.is_meta):
                size, dtype = (w.experts, torch.float32) if name == "expert_scale" else (w.k, loaded.dtype)
                device = loaded.device if w.device.type == "meta" else w.device
                setattr(self, name, torch.ones(size, dtype=dtype, device=device))

    def _load_weight(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        assign: bool,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the whole weight of a state dict or, with a message, nothing. Messages and keys are added to PyTorch's
        lists."""
        w = self.weight
        shapes = packed_shape(self.format, "canonical", w.n, w.k, w.experts).tensors
        keys = [prefix + name for name in self.format.part_names]
        if prefix + "perm" in state_dict:  # only a weight in act-order has one
            perms = w.shape[::2] if w.experts else (w.k,)
            shapes, keys = (*shapes, (PERM_DTYPE, tuple(perms))), [*keys, prefix + "perm"]
        unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        absent = [key for key in keys if key not in state_dict]
        if absent:
            missing_keys.extend(absent if strict else ())
            if here := [key for key in keys if key in state_dict]:  # strict=False would hide that they are not loaded
                error_msgs.append(f"{here[0]}: wanted a weight's tensors together, got it without {', '.join(absent)}")
            return
        # on the meta device there is nothing to copy into, so the weight goes where the state dict is
        assign = assign or w.device.type == "meta"
        tensors = []
        for key, (dtype, shape) in zip(keys, shapes, strict=True):
            t = state_dict[key]
            if t.dtype != dtype or tuple(t.shape) != shape:
                error_msgs.append(f"{key}: wanted {dtype} {shape} for {self.format}, got {t.dtype} {tuple(t.shape)}")
                return
            t = t.detach().contiguous()
            tensors.append(t if assign else torch.empty_like(t, device=w.device).copy_(t))
        perm = tensors.pop() if keys[-1] == prefix + "perm" else None
        if perm is not None and perm.device.type != "meta" and not is_permutation(perm):
            error_msgs.append(f"{keys[-1]}: wanted each of 0..{w.k - 1} once")
            return
        facts = perm, w.experts, self.activations
        loaded = QuantizedWeight(self.format, w.n, w.k, "canonical", tuple(tensors), *facts)
        try:
            loaded.check_range()
        except ValueError as e:
            error_msgs.append(f"{prefix}{e}")
            return
        self._set_weight(loaded)


def _with(w: QuantizedWeight, buffers: Mapping[str, Any]) -> QuantizedWeight:
    """Return a weight with the tensors of a layer's ``buffers`` in place of its own."""
    tensors = tuple(buffers[f"packed{i}"].view(t.dtype) for i, t in enumerate(w.tensors))
    return replace(w, tensors=tensors, perm=buffers.get("packed_perm"))


_OF_WEIGHT = ("format", "in_features", "out_features", "pre_quant_scale")
"""The attributes that have to fit the weight."""


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


def check_dtype(dtype: object) -> None:
    """Raise TypeError unless both x and a bias may have ``dtype``."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        close = "; nearest is torch.float32" if dtype is torch.float64 else ""
        raise TypeError(f"dtype: wanted {' or '.join(map(str, FLOATS))}, got {dtype!r:.40}{close}")


def moved_only(t: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return fn(t). If fn converts to another dtype, as ``module.type`` does with every tensor, return t on the device
    of fn(t) instead."""
    new = fn(t)
    return new if new.dtype == t.dtype else t.to(new.device)
