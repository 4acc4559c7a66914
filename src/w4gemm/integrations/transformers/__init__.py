"""Hugging Face models with their linear layers behind :func:`w4gemm.linear`.

:func:`load` makes a model of any checkpoint. It reserves the places of the 4-bit layers in a model without numbers
(``places.py``), and puts the weights there one at a time. transformers itself is imported when it is used.
"""

from w4gemm.integrations.transformers.layers import (
    Progress,
    Summary,
    dequantize_layers,
    quantize_layers,
    summarize,
)
from w4gemm.integrations.transformers.loading import load

__all__ = ["Progress", "Summary", "dequantize_layers", "load", "quantize_layers", "summarize"]
