"""A linear layer of vLLM that holds a packed weight: :class:`PackedLayer`. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from w4gemm.api.packed import PackedLinear
from w4gemm.core.epilogue import Epilogue
from w4gemm.weights.weight import QuantizedWeight

_PERM = "w4gemm_perm"


class PackedLayer:
    """x @ w.T + bias of a layer whose parameters are a weight's packed tensors, and which is passed with each call.

    Args:
        layer: gets the tensors as parameters, in act-order also ``w4gemm_perm``.
        first: name of the first of them, under which vLLM looks for a weight.
        replaced: names of the parameters that held the same numbers and go, as far as there are any.
        epilogue: of the product without a bias.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        w: QuantizedWeight,
        first: str,
        replaced: Iterable[str],
        epilogue: Epilogue,
        batch_invariant: bool,
    ) -> None:
        self.packed = w.packed
        self.names = (first, *(f"w4gemm_packed{i}" for i in range(1, len(w.tensors))))
        self.plain, self.biased = (
            PackedLinear(w.packed, epilogue._replace(bias=bias), batch_invariant) for bias in (False, True)
        )
        for name in (first, *replaced):
            if hasattr(layer, name):
                delattr(layer, name)
        named = dict(zip(self.names, w.tensors, strict=True)) | ({} if w.perm is None else {_PERM: w.perm})
        for name, t in named.items():
            layer.register_parameter(name, torch.nn.Parameter(t, requires_grad=False))

    def __call__(
        self,
        layer: torch.nn.Module,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product for rows (m, k); traced by torch.compile."""
        product = self.plain if bias is None else self.biased
        tensors = [getattr(layer, name) for name in self.names]
        return product(rows, tensors, bias, token_scale, getattr(layer, _PERM, None))
