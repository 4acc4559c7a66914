"""Hugging Face models with their linear layers behind :func:`w4gemm.linear`.

:func:`load` makes a model of any checkpoint. :class:`W4GemmConfig` and :func:`enable` let transformers'
``from_pretrained`` do so. Both reserve the places of the quantized layers in a model without numbers (``places.py``),
and put the weights there one at a time. transformers itself is imported when one of these is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from w4gemm.integrations.transformers.dequantize import dequantize_embedding, dequantize_layers
from w4gemm.integrations.transformers.layers import Progress, Summary, quantize_layers, summarize
from w4gemm.integrations.transformers.loading import load

if TYPE_CHECKING:
    from w4gemm.integrations.transformers.config import W4GemmConfig, disable, enable
    from w4gemm.integrations.transformers.quantizer import describe

_OF_CONFIG, _OF_QUANTIZER = ("W4GemmConfig", "disable", "enable"), ("describe",)


def __getattr__(name: str) -> Any:
    if name not in (*_OF_CONFIG, *_OF_QUANTIZER):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from w4gemm.integrations.transformers import config, quantizer  # both register with transformers

    return getattr(config if name in _OF_CONFIG else quantizer, name)


__all__ = [
    "Progress",
    "Summary",
    "W4GemmConfig",
    "dequantize_embedding",
    "dequantize_layers",
    "describe",
    "disable",
    "enable",
    "load",
    "quantize_layers",
    "summarize",
]
