"""A product of a layer of experts: :class:`ExpertsProduct`. Importing this imports no vLLM."""

from __future__ import annotations

from typing import NamedTuple

import torch

from w4gemm.api.activations import quantize_rows
from w4gemm.api.product import launch
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.weights.weight import QuantizedWeight


class ExpertsProduct(NamedTuple):
    """One of the products of a layer, without the checks of a user's call, which take longer than a launch."""

    weight: QuantizedWeight
    bias: torch.Tensor | None
    """(experts, n), or None."""
    epilogue: Epilogue

    @classmethod
    def of(
        cls, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, activation: str | None
    ) -> ExpertsProduct:
        """Return the product beside x of ``dtype``, which is quantized if the weight says so."""
        plain = Epilogue(bias=bias is not None)
        epilogue = plain if weight.activations is None else plain.of_quantized(dtype)
        return cls(weight, bias, epilogue._replace(activation=activation))

    def with_block_scales(self) -> ExpertsProduct:
        """Return the product beside x that comes in fp8 with a scale for each 128 columns of a row."""
        return self._replace(epilogue=self.epilogue._replace(token_scale=False, block_scale=True))

    def write(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        rows: ExpertRows,
        scale: torch.Tensor | None,
        expected: int = 0,
    ) -> None:
        """Write the product of x (rows of x, k) to ``out`` (rows, columns).

        Args:
            scale: float32, one for each row of x, in any shape, or (..., one for each 128 columns of it); None if x is
                not quantized, or not yet.
            expected: rows that the plan is chosen for; 0 for all of ``out``.
        """
        if self.epilogue.token_scale and scale is None:
            x, scale = quantize_rows(x)
        operands = EpilogueOperands(bias=self.bias)
        if self.epilogue.block_scale:
            assert scale is not None
            # if copied, with contiguous rows, as kernels read it
            operands = operands._replace(block_scale=scale.movedim(-1, 0).reshape(scale.shape[-1], -1).T)
        elif scale is not None:
            operands = operands._replace(token_scale=scale.reshape(-1))
        launched = Operands(x, self.weight.tensors, out, operands, rows)
        launch(self.weight.packed, launched, self.epilogue, expected=expected)
