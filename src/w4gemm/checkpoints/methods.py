"""The format that reads a folder, by its quantization_config: :func:`method_of`; and AutoRound's names of packings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def method_of(config: Mapping[str, Any]) -> str | None:
    """Name of the format of a quantization_config: the method that it names, but for AutoRound's integers the method
    whose packing they have, for fp8 with experts in 4 bits DeepSeek-V4's, and W4AFP8 for ModelOpt's name of it."""
    method = config.get("quant_method", config.get("method"))
    if method == "fp8" and config.get("expert_dtype") == "fp4":
        return "deepseek-v4"
    if method == "modelopt" and config.get("quant_algo") == "MIXED_PRECISION" and not config.get("quantized_layers"):
        return "w4afp8"
    if (packing := auto_round_packing(config)) is None:
        return method
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        return "awq"
    integers = packing in GPTQ_ZEROS and not str(config.get("data_type")).startswith("mx_")
    return "gptq" if integers else "auto-round"


GPTQ_ZEROS = {"auto_round:auto_gptq": -1, "auto_round:gptq": -1, "auto": -1, "auto_round": 0, "auto_round:gptqmodel": 0}
"""The number that AutoRound's GPTQ packings add to a zero point before they store it."""


_KERNEL = re.compile(r":(exllama|triton|marlin)\w*$")
"""End of a packing's name that says which kernel it was meant for."""


def auto_round_packing(config: Mapping[str, Any]) -> str | None:
    """Return AutoRound's name of a packing: ``packing_format``, or ``backend`` from before there was one; None if the
    config is another method's."""
    if config.get("quant_method", config.get("method")) not in ("auto-round", "auto_round", "intel/auto-round"):
        return None
    name = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
    return _KERNEL.sub("", str(name))  # what is no name has no packing


_ROTATIONS = ("transform_config", "rotation", "rotation_config", "spinquant_config")
"""Keys of compressed-tensors, of GPTQModel, and two of AutoRound."""


def check_plain_products(config: Mapping[str, Any]) -> None:
    """Raise ValueError if some products are more than x times the weight: if activations have to be rotated (by a
    Hadamard matrix) in front of it, or an adapter's product of low rank is added."""
    if key := next((key for key in _ROTATIONS if config.get(key)), None):
        raise ValueError(
            f"{key} rotates activations while the model runs, which cannot be done; quantize the dense model again "
            "without it"
        )
    adapter = config.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("path"):  # GPTQModel's EoRA
        raise ValueError(
            f"adapter is {adapter['path']!r}, whose product of low rank GPTQModel adds beside the weights, which is "
            "not done here; take it out of the config to load the weights without it"
        )
