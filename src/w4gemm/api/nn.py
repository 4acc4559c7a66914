"""The layers that replace ``torch.nn.Linear`` and ``torch.nn.Embedding``: :class:`W4Linear`, :class:`W4Embedding`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, ParamSpec

import torch

from w4gemm.api.arguments import DTYPES, FP8, checked_activation
from w4gemm.api.lookup import embedding
from w4gemm.api.modes import autocast, layer_dtype
from w4gemm.api.ops import linear
from w4gemm.api.packed_module import PackedModule, check_dtype
from w4gemm.api.product import bound_linear
from w4gemm.core.errors import device_here, require_bool, require_int
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

_Arguments = ParamSpec("_Arguments")


def _of_sizes(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Have a constructor that gets a weight or a layer in place of sizes name the one that takes it. Python's own error
    would be that out_features is missing."""

    @functools.wraps(init)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> None:
        if isinstance(args[1] if len(args) > 1 else None, (torch.Tensor, torch.nn.Module, QuantizedWeight)):
            expected = "sizes make a layer of zeros, W4Linear.from_linear takes a dense layer, from_weight a weight"
            raise TypeError(f"in_features: wanted an int, got {type(args[1]).__name__}; {expected}")
        init(*args, **options)

    return checked


class W4Linear(PackedModule):
    """The layer y = act(x @ weight.T + bias) with a quantized weight: x (..., in_features) to y (..., out_features), in
    x's dtype. It replaces torch.nn.Linear.

    A layer of 16 bits casts x of another dtype to its own ``dtype`` and y back, as PEFT's
    ``prepare_model_for_kbit_training`` needs, which makes norms float32. ``torch.autocast`` goes before. Gradients flow
    through the casts. A float32 layer takes 16-bit x as it is, unless it has a bias.

    Make one with :meth:`from_linear` or :meth:`from_weight`, or make it with zeros and load a state dict.

    ``weight`` is a :class:`QuantizedWeight`, always in the layout of its device: ``to(device)`` repacks it. Its tensors
    are registered as buffers of bytes, so ``half()`` and ``to(dtype)`` convert the bias and set ``dtype``, and leave
    the weight as it is. A state dict holds ``codes``, ``scales`` and, as the format has them, ``zeros``, ``channels``
    and ``factors``, in the canonical layout; ``perm`` for a weight in act-order; and the names of the format and the
    activations. Its bits are the same whatever device wrote it. The layer has these tensors as attributes to read. They
    are copies where the device's layout is another: to change the weight, assign it or load a state dict.

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

    if TYPE_CHECKING:  # torch.nn.Module's returns Any
        __call__: Callable[..., torch.Tensor]

    @_of_sizes
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
        format = WeightFormat.of(format)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype(dtype)
        device = device_here(torch.get_default_device() if device is None else device)
        w = _zeros(format, out_features, in_features, device, activations)
        super().__init__(w, torch.zeros(out_features, dtype=dtype, device=device) if bias else None, dtype)
        self.activation = checked_activation(activation, out_features)
        self.batch_invariant = batch_invariant

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
        layer = cls.__new__(cls)
        PackedModule.__init__(layer, w, bias, dtype)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y (..., out_features) for x (..., in_features), in x's dtype; with a gated activation (...,
        out_features / 2)."""
        if self._buffers.get("pre_quant_scale") is not None:  # asked here, because a call takes longer
            x = self._scaled(x)
        try:
            own: torch.Tensor | None = self._parameters["bias"]  # as _own_bias does, without a call
        except KeyError:
            own = self.bias
        x, bias = autocast(x, own)
        if (dtype := layer_dtype(x, bias, self.dtype)) is not None:
            return self._product(x.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)
        return self._product(x, bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return act(x @ weight.T + bias)."""
        w, activation, batch_invariant = self.weight, self.activation, self.batch_invariant
        if (warm := bound_linear(x, w, bias, activation, batch_invariant)) is not None:
            return warm(x, w, bias)
        _check_dtypes(bias, x)
        return linear(x, w, bias, activation=activation, batch_invariant=batch_invariant)


def _check_dtypes(bias: torch.Tensor | None, x: object) -> None:
    """Raise TypeError if x is not fp8 and differs in dtype from the layer's bias."""
    if bias is not None and isinstance(x, torch.Tensor) and x.dtype in DTYPES and x.dtype not in (FP8, bias.dtype):
        raise TypeError(f"x: wanted {bias.dtype} like the layer's bias, got {x.dtype}")


def _zeros(
    format: WeightFormat, n: int, k: int, device: torch.device, activations: str | None = None
) -> QuantizedWeight:
    """Return a weight whose stored tensors are zeros."""
    shapes = packed_shape(format, "canonical", n, k).tensors
    tensors = tuple(torch.zeros(shape, dtype=stored, device=device) for stored, shape in shapes)
    return QuantizedWeight(format, n, k, "canonical", tensors, activations=activations)


class W4Embedding(PackedModule):
    """The rows of a quantized weight by their ids: ids (...) to (..., embedding_dim), in ``dtype``. It replaces
    torch.nn.Embedding, bit for bit that of ``weight.dequantize(dtype)``; there are no gradients to the rows. An id
    that there is not raises IndexError on the CPU, and gives NaN on a GPU, see :func:`w4gemm.embedding`.

    Make one with :meth:`from_weight`, or make it with zeros and load a state dict. Weight, buffers and state dict are
    as of :class:`W4Linear`, without a bias and factors; ``half()`` and ``to(dtype)`` set the ``dtype`` of the rows.

    Args:
        num_embeddings, embedding_dim: n and k, the weight's rows and columns.
        padding_idx: kept as an attribute, because models read it: rows have no gradients to leave out.
        format: format of the weight, or its string. The weight starts at zero.
        dtype: of the rows, float32, float16 or bfloat16; None for torch's default dtype.
        device: device of the layer; None for torch's default device.

    Raises:
        TypeError, ValueError: for a bad size, format, dtype or device; the message names it.

    Examples:
        >>> w = w4gemm.quantize(torch.randn(1000, 256), "int4_g32")
        >>> w4gemm.W4Embedding.from_weight(w)(torch.tensor([[3, 999]])).shape
        torch.Size([1, 2, 256])
    """

    scale_names: ClassVar[tuple[str, ...]] = ()
    padding_idx: int | None = None
    if TYPE_CHECKING:
        __call__: Callable[..., torch.Tensor]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        format: WeightFormat | str = WeightFormat(),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            require_int(name, size)
        device = device_here(torch.get_default_device() if device is None else device)
        super().__init__(_zeros(WeightFormat.of(format), num_embeddings, embedding_dim, device), None, dtype)
        self.padding_idx = _checked_padding(padding_idx, num_embeddings)

    @classmethod
    def from_weight(
        cls, w: QuantizedWeight, padding_idx: int | None = None, *, dtype: torch.dtype | None = None
    ) -> W4Embedding:
        """Return an embedding with the rows of ``w``, on its device.

        Raises:
            TypeError, ValueError: for a bad weight, dtype or index; the message names it.
        """
        made = cls.__new__(cls)
        PackedModule.__init__(made, w, None, dtype)
        made.padding_idx = _checked_padding(padding_idx, w.n)
        return made

    @property
    def num_embeddings(self) -> int:
        """Rows of the weight."""
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        """Columns of the weight."""
        return self.in_features

    def _placed(self, w: QuantizedWeight) -> QuantizedWeight:
        # the CPU's products read a table of columns, where a row lies scattered
        return w.repack("canonical" if w.device.type == "cpu" else None, activations=None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (..., embedding_dim) of ids (...), int32 or int64."""
        return embedding(ids, self.weight, self.dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, format={self.format}, layout={self.weight.layout}"
        )


def _checked_padding(index: int | None, rows: int) -> int | None:
    """Return the index of a row from the first one, as torch.nn.Embedding does for one from the last."""
    if index is None:
        return None
    require_int("padding_idx", index, -rows, rows - 1)
    return index % rows
