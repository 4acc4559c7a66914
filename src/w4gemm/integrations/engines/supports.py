"""Whether a kernel runs the products of an engine's layer: :func:`product`, :func:`why_no_kernel`."""

from __future__ import annotations

import functools

import torch

from w4gemm.core.epilogue import PLAIN
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.packing.layouts import layout_for

_TOKENS = 16
"""Whether something runs does not depend on m; that of the question."""


def product(
    device: torch.device, format: WeightFormat, n: int, k: int, dtype: torch.dtype, fp8: bool = False, experts: int = 0
) -> GemmProblem:
    """Return the product x (m, k) @ w.T of a layer, with some m.

    Args:
        dtype: of the model's activations.
        fp8: True if they are quantized to float8_e4m3fn before they are multiplied.
        experts: 0 for a product with one weight.
    """
    here = Device.of(device)
    taken = torch.float8_e4m3fn if fp8 else dtype
    epilogue = PLAIN.of_quantized(dtype) if fp8 else PLAIN
    layout = layout_for(here, format, taken)
    return GemmProblem(_TOKENS, n, k, taken, format, layout, epilogue, here, experts=experts)


@functools.cache
def why_no_kernel(problem: GemmProblem) -> str:
    """Return every reason why no kernel runs a product, or the empty string."""
    answers = [kernel.supports(problem) for kernel in KERNELS]
    return "" if any(answers) else "; ".join(dict.fromkeys(answer.reason for answer in answers))
