"""dtypes of tensors in a Hugging Face folder (:data:`DTYPES`), and what dtype and name say of a tensor:
:func:`is_packed`, :func:`reason_to_skip`."""

from __future__ import annotations

import re

import torch

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""dtypes of packed tensors by safetensors' names of them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""safetensors' names of dtypes."""
FP8 = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of the dtypes of dense weights in 8 bits, which have scales."""
_CODES = ("I8", "U8", "I32")
_NARROW = ("F8_", "F6_", "F4")
"""safetensors' names of the dtypes of codes, and how those of floats of 8 bits or fewer begin."""
_TABLES = re.compile(r"(?:.+\.)?(?:tid2eid|position_ids|relative_position_index|(?:attn|attention)\.bias)")
"""Names of tensors of such integers that are dense: tables of a model, and masks that old models saved."""
_SKIPPED = {
    re.compile(pattern): reason
    for pattern, reason in (
        (r".*\.rotary_emb\.inv_freq", "the model computes it from its config"),
        (
            r".*(?:attn|attention|mixer|proj\w*)\.(?:(?:q|k|v|kv|prob)_(?:scale|zero_point)|prob_output_scale)",
            "of a quantized KV cache or attention, which stays in 16 bits",
        ),
        (r".*\.(?:[kv]_proj\.[kv]_bias|\w*proj\w*\.output_(?:scale|zero_point))", "of a quantized KV cache"),
        (
            r".*[._](?:input|activation)_(?:scale(?:_2)?|global_scale|zero_point)",
            "of quantized activations, which stay in 16 bits or get a scale for each token",
        ),
    )
}
"""Why tensors with such names hold nothing of the model, as compressed-tensors, ModelOpt and Quark call them."""


def is_packed(name: str, dtype: str) -> bool:
    """True for a dtype whose numbers are no weights by themselves: codes, or floats of 8 bits or fewer, which lack
    their scales."""
    return (dtype in _CODES or dtype.startswith(_NARROW)) and not _TABLES.fullmatch(name)


def reason_to_skip(name: str) -> str:
    """Return why a tensor that is part of no 4-bit module is not read; "" if it is."""
    return next((reason for pattern, reason in _SKIPPED.items() if pattern.fullmatch(name)), "")
