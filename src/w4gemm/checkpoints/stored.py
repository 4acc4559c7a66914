"""What headers say of the tensors in a Hugging Face folder: their dtypes (:data:`DTYPES`), what dtype and name tell
(:func:`is_packed`, :func:`reason_to_skip`), and checks of a module's tensors, which packings share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from w4gemm.core.formats import PER_COLUMN, SCALE_OF, WeightFormat

if TYPE_CHECKING:
    from w4gemm.checkpoints.hugging_face import TensorInfo

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
WIDE_SCALES = {NAMES[dtype]: rule for dtype, rule in SCALE_OF.items()}
"""Scale rules by safetensors' name of the scales' dtype."""
SCALES = {name: rule for name, rule in WIDE_SCALES.items() if rule != "fp32"}
"""Those of 16 bits."""
SYMMETRIC = 8
"""Integer zero point of a symmetric weight of 4 bits."""
FP8 = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of the dtypes of dense weights in 8 bits, which have scales."""
_CODES = ("I8", "U8", "I16", "U16", "I32", "U32", "U64")
_NARROW = ("F8_", "F6_", "F4")
"""safetensors' names of the dtypes of codes, and how those of floats of 8 bits or fewer begin."""
_TABLES = re.compile(r"(?:.+\.)?(?:tid2eid|position_ids|relative_position_index|(?:attn|attention)\.bias)")
"""Names of tensors of such integers that are dense: tables of a model, and masks that old models saved."""
_SKIPPED = {
    re.compile(pattern): reason
    for pattern, reason in (
        # the factor of Gemma's embeddings, which compressed-tensors saves where it quantizes one
        (r".*\.(?:rotary_emb\.inv_freq|embed_tokens\w*\.embed_scale)", "the model computes it from its config"),
        (
            r".*(?:attn|attention|mixer|proj\w*)\.(?:(?:q|k|v|kv|prob)_(?:scale|zero_point)|prob_output_scale)",
            "of a quantized KV cache or attention, which stays in 16 bits",
        ),
        (r".*\.(?:[kv]_proj\.[kv]_bias|\w*proj\w*\.output_(?:scale|zero_point))", "of a quantized KV cache"),
        (
            r".*(?:[._](?:input|activation)_(?:scale(?:_2)?|global_scale|zero_point)|\.qscale_act)",
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
    """Return why a tensor that is part of no packed module is not read; "" if it is."""
    return next((reason for pattern, reason in _SKIPPED.items() if pattern.fullmatch(name)), "")


# --- a module's tensors -----------------------------------------------------------------------------------------------


def check_tensor(
    stored: Mapping[str, TensorInfo], leaf: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the shape of one of a module's tensors; raise ValueError if it is missing or another than wanted.

    Args:
        dtypes: safetensors' names of those that are legal.
        shape: None for any matrix.
    """
    if leaf not in stored:
        raise ValueError(missing(leaf, stored))
    info = stored[leaf]
    if info.dtype not in dtypes:
        raise ValueError(f"{leaf} is {info.dtype}, wanted {' or '.join(dtypes)}")
    if (len(info.shape) != 2 or 0 in info.shape) if shape is None else info.shape != shape:
        raise ValueError(f"{leaf} has shape {info.shape}, wanted {'a matrix' if shape is None else shape}")
    return info.shape


def check_finite(name: str, t: torch.Tensor) -> None:
    """Raise ValueError for a dense tensor of a module, such as its bias, with numbers that are not finite. Those of a
    weight are checked when it is packed; tensors of no packed module may hold any."""
    if not (finite := t.isfinite()).all():
        raise ValueError(f"{name}: wanted finite numbers, got {int((~finite).sum())} of NaN or infinity")


def missing(leaf: str, stored: Collection[str]) -> str:
    """Return the message about a module that lacks a tensor."""
    return f"there is no {leaf} beside its {', '.join(sorted(stored))}"


def whole_groups(format: WeightFormat, k: int) -> int:
    """Return the number of groups along k; raise ValueError if the last one would be shorter than the others."""
    if format.group_size != PER_COLUMN and k % format.group_size:
        raise ValueError(f"groups of {format.group_size} do not divide its {k} input features")
    return format.groups(k)


def check_bits(bits: Any, legal: Collection[int]) -> None:
    """Raise ValueError unless a packing has integers of so many bits."""
    if type(bits) is not int or bits not in legal:
        raise ValueError(f"its weight has {bits!r} bits, wanted {' or '.join(map(str, legal))}")


def check_symmetric(zeros: torch.Tensor, bits: int) -> None:
    """Raise ValueError unless all integer zero points are the middle of the codes."""
    middle = 1 << bits - 1
    if not (zeros == middle).all():
        raise ValueError(
            f"config.json says that it is symmetric, but its zero points are {int(zeros.min())} to "
            f"{int(zeros.max())} instead of {middle}"
        )
