"""4-bit experts as SGLang's methods load them: :data:`METHODS`. Importing this imports no SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.awq import ORDER
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.integrations.engines.stacked import Stacked, StackedNumbers
from w4gemm.integrations.engines.weights import SCALES
from w4gemm.integrations.sglang.takeover import QUANTIZATION


class Facts(NamedTuple):
    """Facts that a method says of its experts."""

    bits: int
    group_size: int
    asymmetric: bool = False
    activations: str | None = None
    refused: str = ""
    """Why they cannot be taken, or the empty string."""


class Method(NamedTuple):
    """A class of SGLang's for layers of experts, and how it loads them.

    Parameters are named ``w13_*`` (gates, then ups) and ``w2_*``; ``codes``, ``scales`` and ``zeros`` are what follows.
    """

    kind: str
    """Its layers, in sentences."""
    target: str
    """Dotted name of the class."""
    facts: Callable[[Any], Facts]
    codes: str
    scales: str
    zeros: str = ""
    transposed: bool = True
    """True if matrices lie as (k, n)."""
    along: str = "k"
    """Dimension of which codes are packed; zero points are along n."""
    order: tuple[int, ...] | None = None
    signed: bool = False
    apply: str = "apply_weights"
    """Name of the method that multiplies."""

    def numbers(self, layer: Any, product: str, facts: Facts) -> StackedNumbers:
        """Return the numbers of a product, "w13" or "w2", that a layer has loaded.

        Raises:
            ValueError: for a group size that there is not.
        """
        scales = getattr(layer, f"{product}_{self.scales}").data
        scales = scales.bfloat16() if scales.dtype == torch.float32 else scales  # as SGLang's own kernels take them
        zeros = getattr(layer, f"{product}_{self.zeros}").data if facts.asymmetric else None
        format = WeightFormat(facts.group_size, "int" if facts.asymmetric else "none", SCALES[scales.dtype])
        return StackedNumbers(
            format,
            Stacked(
                getattr(layer, f"{product}_{self.codes}").data, self.transposed, self.along, self.order, self.signed
            ),
            Stacked(scales, self.transposed),
            None if zeros is None else Stacked(zeros, self.transposed, "n", self.order),
        )


def _gptq(self: Any) -> Facts:
    config = self.quant_config
    act_order = config.desc_act and config.group_size != PER_COLUMN
    refused = "they are in act-order (desc_act), each expert in its own" if act_order else ""
    return Facts(config.weight_bits, config.group_size, refused=refused)


def _awq(self: Any) -> Facts:
    return Facts(self.quant_config.weight_bits, self.quant_config.group_size, True)


def _compressed_tensors(self: Any) -> Facts:
    act_order = self.actorder is not None and self.actorder not in ("static", "weight")
    refused = f"they are in act-order (actorder {self.actorder}), each expert in its own" if act_order else ""
    group_size = PER_COLUMN if self.strategy == "channel" else self.group_size
    return Facts(self.num_bits, group_size, not self.sym, refused=refused)


def _compressed_tensors_fp8(self: Any) -> Facts:
    kind = self.input_quant.type
    refused = "" if kind == "float" else f"their activations are 8-bit {kind}"
    return Facts(self.num_bits, self.group_size, activations="fp8", refused=refused)


def _w4afp8(self: Any) -> Facts:
    """Activations get a scale for each token, where SGLang's own kernel takes one from the checkpoint for all."""
    return Facts(4, self.quant_config.group_size, activations="fp8")


_COMPRESSED = "weight_packed", "weight_scale", "weight_zero_point"

METHODS = (
    Method(
        "GPTQ's experts",
        f"{QUANTIZATION}.gptq.schemes.GPTQMarlinMoEScheme",
        _gptq,
        *("qweight", "scales"),
    ),
    Method(
        "AWQ's experts",
        f"{QUANTIZATION}.awq.schemes.AWQMoEScheme",
        _awq,
        *("qweight", "scales", "qzeros"),
        along="n",
        order=ORDER,
    ),
    Method(
        "compressed-tensors' experts",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16MoE",
        _compressed_tensors,
        *_COMPRESSED,
    ),
    Method(
        "compressed-tensors' experts with fp8 activations",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4AFP8MoE",
        _compressed_tensors_fp8,
        *_COMPRESSED,
        transposed=False,
    ),
    Method(
        "W4AFP8's experts",
        f"{QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
        _w4afp8,
        *("weight", "weight_scale_inv"),
        transposed=False,
        signed=True,
        apply="apply",
    ),
)
