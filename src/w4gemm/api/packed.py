"""The product with a weight that an engine keeps as tensors of its own layer: :class:`PackedLinear`.

Compiled graphs call its operator ``torch.ops.w4gemm.packed_linear``. It has few arguments, because PyTorch's dispatcher
converts each of them at every call. Everything but tensors is one string. It is equal in every process, so that
compiled graphs can be kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from w4gemm.api.gather import gather_columns
from w4gemm.api.modes import is_eager
from w4gemm.api.product import Product, product_of
from w4gemm.core.epilogue import FLOATS, PLAIN, Epilogue, EpilogueOperands
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels import Operands
from w4gemm.kernels.base import selected
from w4gemm.packing.packed_shape import PackedShape, packed_shape

_DTYPES = {str(dtype): dtype for dtype in FLOATS}


class PackedLinear:
    """The function act(token_scale * (x @ w.T) + bias) for every weight of one packed shape. It holds no tensors, and
    checks nothing.

    Args:
        packed: format, layout, n and k of the weights.
        epilogue: an epilogue without alpha, residual, expert_scale and block_scale.
        batch_invariant: as for :func:`w4gemm.linear`.
    """

    def __init__(self, packed: PackedShape, epilogue: Epilogue = PLAIN, batch_invariant: bool = False) -> None:
        self.packed, self.epilogue, self.batch_invariant = packed, epilogue, batch_invariant
        supported = Epilogue(epilogue.activation, bias=epilogue.bias, token_scale=epilogue.token_scale)
        assert epilogue == supported._replace(out_dtype=epilogue.out_dtype), f"no operator for {epilogue}"
        flags = [name for name in ("bias", "token_scale") if getattr(epilogue, name)]
        flags += ["batch_invariant"] if batch_invariant else []
        facts = (packed.format.name, packed.layout, packed.n, packed.k, epilogue.activation or "")
        self.name = ";".join(map(str, (*facts, epilogue.out_dtype or "", ",".join(flags))))
        self._products: dict[tuple[torch.dtype, torch.device], Product] = {}

    @classmethod
    def named(cls, name: str) -> PackedLinear:
        """Return the PackedLinear that has this ``name``."""
        format, layout, n, k, activation, out_dtype, flags = name.split(";")
        on = flags.split(",")
        epilogue = Epilogue(activation or None, bias="bias" in on, token_scale="token_scale" in on)
        packed = packed_shape(WeightFormat.parse(format), layout, int(n), int(k), 0)
        return cls(packed, epilogue._replace(out_dtype=_DTYPES.get(out_dtype)), "batch_invariant" in on)

    def __call__(
        self,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result (m, columns), without gradients. torch.compile can trace this.

        Args:
            x: activations (m, k), columns contiguous; already quantized if the epilogue has token_scale.
            tensors, perm: the fields of a :class:`w4gemm.QuantizedWeight`.
            bias, token_scale: (n,) and float32 (m,), if the epilogue has them.
        """
        if is_eager(x, bias):
            return self.run(x if perm is None else gather_columns(x, perm), tensors, bias, token_scale)
        rows = x if perm is None else selected(x, 1, perm)
        return torch.ops.w4gemm.packed_linear(rows, list(tensors), bias, token_scale, self.name)

    def run(
        self,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        token_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result of a launch in plain eager mode. Arguments as for a call, with x's columns in packed
        order."""
        m, product = x.shape[0], self._product(x)
        out = product.empty_result(x, m)
        if m:
            product.launch(Operands(x, tuple(tensors), out, EpilogueOperands(None, bias, None, token_scale)), m)
        return out

    def empty_result(self, x: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor for the result."""
        return self._product(x).empty_result(x, x.shape[0])

    def _product(self, x: torch.Tensor) -> Product:
        kind = x.dtype, x.device
        product = self._products.get(kind)
        if product is None:
            product = self._products[kind] = product_of(self.packed, self.epilogue, *kind, self.batch_invariant)
        return product


_named = functools.cache(PackedLinear.named)

_NAME = "w4gemm::packed_linear"
torch.library.define(_NAME, "(Tensor x, Tensor[] weight, Tensor? bias, Tensor? token_scale, str name) -> Tensor")
torch.library.impl(_NAME, ("cpu", "cuda"))(
    lambda x, weight, bias, token_scale, name: _named(name).run(x, weight, bias, token_scale)
)
torch.library.register_fake(_NAME)(lambda x, weight, bias, token_scale, name: _named(name).empty_result(x))
