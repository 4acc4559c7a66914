"""The layer that replaces ``torch.nn.Linear``: :class:`W4Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from w4gemm.api.arguments import DTYPES, FP8, check, checked_activation
from w4gemm.api.call import bind
from w4gemm.api.modes import autocast, is_eager, layer_dtype
from w4gemm.api.ops import linear
from w4gemm.api.packed_module import PackedModule, check_dtype
from w4gemm.api.product import argument_facts
from w4gemm.core.errors import device_here, kind_of, require_bool, require_int
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.checks import PERM_DTYPE, is_permutation
from w4gemm.weights.file import as_tensor, in_words, mean_the_same, of_tensor
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight


def _named_tensor(name: str) -> property:
    """Make the attribute ``name``, the tensor that a state dict has under it."""

    def read(self: W4Linear) -> torch.Tensor:
        if (t := self.weight.repack("canonical").named_tensors().get(name)) is None:
            raise AttributeError(name)  # torch.nn.Module raises another one, which names the class
        return t

    return property(read)


class W4Linear(PackedModule):
    """The layer y = act(x @ weight.T + bias) with a 4-bit weight: x (..., in_features) to y (..., out_features), in x's
    dtype. It replaces torch.nn.Linear.

    A layer of 16 bits casts x of another dtype to its own ``dtype`` and y back, as PEFT's
    ``prepare_model_for_kbit_training`` needs, which makes norms float32. ``torch.autocast`` goes before. Gradients flow
    through the casts. A float32 layer takes 16-bit x as it is, unless it has a bias.

    Make one with :meth:`from_linear` or :meth:`from_weight`, or make it with zeros and load a state dict.

    ``weight`` is a :class:`QuantizedWeight`, always in the layout of its device: ``to(device)`` repacks it. Its tensors
    are registered as buffers of bytes, so ``half()`` and ``to(dtype)`` convert the bias and set ``dtype``, and leave
    the weight as it is. A state dict holds ``codes``, ``scales`` and, as the format has them, ``zeros``, ``channels``
    and ``factors``, in the canonical layout; ``perm`` for a weight in act-order; and the names of the format and the
    activations. Its bits are the same whatever device wrote it. The layer has these tensors as attributes to read.

    ``pre_quant_scale`` is a buffer (in_features,) or None. It multiplies x before anything else, in x's dtype: for
    checkpoints that moved factors of x into the weight, such as ModelOpt's AWQ. A state dict holds it.

    ``format``, ``in_features`` and ``out_features`` are those of the weight, and change with it.

    Args:
        in_features, out_features: k and n, the weight's columns and rows.
        bias: True for a bias (out_features,), which starts at zero and requires no gradient.
        format: format of the weight, or its string. The weight starts at zero.
        dtype: dtype of the bias and of the activations to expect, float32, float16 or bfloat16, which frameworks read
            from the attribute ``dtype``; None for torch's default dtype. No product takes float64: ``double()`` raises
            TypeError.
        device: device of the layer; None for torch's default device.
        activation, batch_invariant: as for :func:`w4gemm.linear`. They are attributes and may be set later. With a
            gated activation y has out_features / 2 columns.
        activations: "fp8" to quantize x before it is multiplied (W4A8), on every device, or None. It is an attribute of
            the weight, which a loaded state dict replaces.

    Raises:
        TypeError, ValueError: for a bad size, format, dtype or device; the message names it.

    Examples:
        >>> layer = w4gemm.W4Linear.from_linear(torch.nn.Linear(1024, 512), "int4_g64_zint")
        >>> layer(torch.randn(3, 1024)).shape
        torch.Size([3, 512])
    """

    bias: torch.nn.Parameter | None
    pre_quant_scale: torch.Tensor | None

    if TYPE_CHECKING:  # torch.nn.Module's returns Any
        __call__: Callable[..., torch.Tensor]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: WeightFormat | str = WeightFormat(),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        activation: str | None = None,
        batch_invariant: bool = False,
        activations: str | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            require_int(name, size)
        if isinstance(bias, (str, WeightFormat)):
            raise TypeError(f"bias: wanted a bool, got {str(bias)!r}; format is the fourth argument")
        require_bool("bias", bias)
        require_bool("batch_invariant", batch_invariant)
        format = WeightFormat.of(format)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype(dtype)
        device = device_here("device", torch.get_default_device() if device is None else device)
        shapes = packed_shape(format, "canonical", out_features, in_features).tensors
        tensors = tuple(torch.zeros(shape, dtype=stored, device=device) for stored, shape in shapes)
        w = QuantizedWeight(format, out_features, in_features, "canonical", tensors, activations=activations)
        self._build(w, torch.zeros(out_features, dtype=dtype, device=device) if bias else None, dtype)
        self.activation = checked_activation(activation, out_features)
        self.batch_invariant = batch_invariant

    def _build(self, w: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.adopt(w, dtype)
        requires_grad = bias is not None and bias.requires_grad
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad))

    def adopt(self, w: QuantizedWeight, dtype: torch.dtype) -> None:
        """Take ``w`` as the weight and ``dtype`` as the dtype to advertise; the bias and the module's hooks stay."""
        self.activation, self.batch_invariant, self.dtype = None, False, dtype
        if "pre_quant_scale" not in self._buffers:
            self.register_buffer("pre_quant_scale", None)
        self.weight = w

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        format: WeightFormat | str = WeightFormat(),
        search: bool = False,
        *,
        activations: str | None = None,
    ) -> W4Linear:
        """Return a quantized copy of a dense layer, on its device. The bias is shared.

        Args:
            format, search: as for :func:`w4gemm.quantize`.
            activations: as for the class.

        Raises:
            TypeError, ValueError: if ``linear`` is no torch.nn.Linear, or as :func:`w4gemm.quantize`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: wanted a torch.nn.Linear, got {type(linear).__name__}")
        w = quantize(linear.weight.detach(), WeightFormat.of(format), search=search)
        return cls.from_weight(w.repack(activations=activations), linear.bias, dtype=linear.weight.dtype)

    @classmethod
    def from_weight(
        cls, w: QuantizedWeight, bias: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> W4Linear:
        """Return a layer with weight ``w``, on its device and with its activations.

        Args:
            bias: (n,) on w's device, floating point, or None; it is shared, unless ``dtype`` is another than its own.
            dtype: dtype of the bias, and to advertise; None for the bias's dtype, or torch's default dtype without a
                bias.

        Raises:
            TypeError, ValueError: for a bad weight, bias or dtype; the message names it.
        """
        if not isinstance(w, QuantizedWeight):
            raise TypeError(f"w: wanted a QuantizedWeight, got {type(w).__name__}")
        if bool(w.experts) != cls.grouped:
            raise ValueError(f"w: wanted {'several experts' if cls.grouped else 'a single weight'}, got {w!r}")
        shape = (w.experts, w.n) if w.experts else (w.n,)
        if bias is not None:
            if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
                actual = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
                raise TypeError(f"bias: wanted a floating-point tensor (n) or None, got {actual}")
            if tuple(bias.shape) != shape:
                raise ValueError(f"bias: wanted shape {shape}, n of w, got {tuple(bias.shape)}")
            if bias.device != w.device:
                raise ValueError(f"bias: wanted w's device {w.device}, got {bias.device}")
        if dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        check_dtype(dtype)
        layer = cls.__new__(cls)
        layer._build(w, bias if bias is None else bias.to(dtype), dtype)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y (..., out_features) for x (..., in_features), in x's dtype; with a gated activation (...,
        out_features / 2)."""
        if self._buffers.get("pre_quant_scale") is not None:  # asked here, because a call takes longer
            x = self._scaled(x)
        x, bias = autocast(x, self._parameters["bias"])  # self.bias takes nn.Module's slow way
        w = self.weight  # it forgets what is bound if buffers were replaced
        if is_eager(x, bias) and (bound := self._bound) is not None:
            facts = argument_facts(x, bias, self.activation, self.batch_invariant)
            if bound.facts == facts:
                return bound(x, w, bias)
        if (dtype := layer_dtype(x, bias, self.dtype)) is not None:
            return self._product(x.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)
        return self._product(x, bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return act(x @ weight.T + bias), and bind later calls like this one."""
        w, activation, batch_invariant = self.weight, self.activation, self.batch_invariant
        if not is_eager(x, bias):
            _check_dtypes(bias, x)
            return linear(x, w, bias, activation=activation, batch_invariant=batch_invariant)
        bound = self._bound
        if bound is None or bound.facts != argument_facts(x, bias, activation, batch_invariant):
            check(x, w)
            _check_dtypes(bias, x)
            bound = self._bound = bind(w, x.dtype, bias, activation, batch_invariant)
        return bound(x, w, bias)

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
        return as_tensor(in_words(self.format, self.activations))

    def set_extra_state(self, state: torch.Tensor) -> None:
        name, _, activations = of_tensor(state).partition(" ")
        if not mean_the_same(name, str(self.format)):
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
        for name in (*self.format.part_names, "perm", "pre_quant_scale", "expert_scale", "_extra_state"):
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
        for name, size in (("pre_quant_scale", w.k), ("expert_scale", w.experts)):
            loaded, own = state_dict.get(prefix + name), self._buffers.get(name)
            if loaded is not None and name in self._buffers and (own is None or own.is_meta):
                dtype = torch.float32 if name == "expert_scale" else loaded.dtype
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
            shapes, keys = (*shapes, (PERM_DTYPE, (w.k,))), [*keys, prefix + "perm"]
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


def _check_dtypes(bias: torch.Tensor | None, x: object) -> None:
    """Raise TypeError if x is not fp8 and differs in dtype from the layer's bias."""
    if bias is not None and isinstance(x, torch.Tensor) and x.dtype in DTYPES and x.dtype not in (FP8, bias.dtype):
        raise TypeError(f"x: wanted {bias.dtype} like the layer's bias, got {x.dtype}")
