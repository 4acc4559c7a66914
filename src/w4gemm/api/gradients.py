"""Gradients of products with float16 activations.

If something multiplies a product's sums, such as alpha, their gradient is float32 and may be far too small or too large
for float16. So it stays float32 as long as PyTorch computes with it (:func:`narrowed`). Tensor cores multiply it by
float16 weights as float16 rows, each with a power of two of its own (:func:`halved`), and give float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_TOP = 15
"""A row's largest number becomes 2**14 to 2**15, near the end of float16's range."""
_LEAST, _MOST = -126, 127
"""Smallest and largest binary exponent of float32's normal numbers."""


def narrowed(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of sums in ``dtype``, the dtype of x. For float16 x a float32 gradient stays float32."""
    return grad if (grad.dtype, dtype) == (torch.float32, torch.float16) else grad.to(dtype)


def product_of(rows: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return ``product(rows)`` of gradients (m, columns), in their dtype. On a GPU it gets float32 rows in float16.

    Args:
        product: gives float32 if it gets float16 in place of float32.
    """
    if rows.dtype != torch.float32 or not rows.is_cuda:
        return product(rows)
    half, factors = halved(rows)
    return product(half) * factors


def halved(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float16 rows (m, columns) and powers of two (m, 1). Their products are the float32 ``rows``, rounded to 11
    bits. Numbers below 2**-29 of their row's largest one lose more bits. Infinities and NaN stay."""
    top = rows.abs().amax(1, keepdim=True)
    exponent = torch.frexp(top).exponent - _TOP
    usable = top.isfinite() & (top > 0)
    factors = torch.where(usable, torch.exp2(exponent.clamp(_LEAST, _MOST).float()), 1.0)
    return (rows / factors).half(), factors
