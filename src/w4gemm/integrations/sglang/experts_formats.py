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
    named: str = ""
    """The string of a format that has one form only."""


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
    factors: str = ""
    """NVFP4's factors, which multiply an expert's weights, gates and ups each, or ``divides`` them."""
    divides: bool = False
    biases: str = ""
    """Follows ``w13_`` and ``w2_`` in the names of biases, if the method may load some."""
    in_pairs: bool = False
    """True if rows of ``w13_*`` are pairs of a gate and an up, as our epilogue wants them."""
    padded: bool = False
    """True if it makes zeros, of which a checkpoint may fill a part."""
    routes: bool = False
    """True if tokens are routed in a form that only SGLang's own runner reads, unless the method names another."""

    def parameters(self, facts: Facts, with_bias: bool) -> list[str]:
        """Return the names of the parameters whose numbers are used."""
        leaves = [self.codes, self.scales, self.factors, self.zeros if facts.asymmetric else ""]
        leaves += [self.biases] if with_bias else []
        return [f"{product}_{leaf}" for product in ("w13", "w2") for leaf in leaves if leaf]

    def numbers(self, layer: Any, product: str, facts: Facts) -> StackedNumbers:
        """Return the numbers of a product, "w13" or "w2", that a layer has loaded.

        Raises:
            ValueError: for a group size that there is not.
        """
        scales = getattr(layer, f"{product}_{self.scales}").data
        codes = Stacked(
            getattr(layer, f"{product}_{self.codes}").data, self.transposed, self.along, self.order, self.signed
        )
        if facts.named:
            format = WeightFormat.parse(facts.named)
            stored = Stacked(scales.view(format.scale_dtype), self.transposed)  # as bytes
            return StackedNumbers(format, codes, stored, factors=self._factors(layer, product))
        scales = scales.bfloat16() if scales.dtype == torch.float32 else scales  # as SGLang's own kernels take them
        zeros = getattr(layer, f"{product}_{self.zeros}").data if facts.asymmetric else None
        format = WeightFormat(facts.group_size, "int" if facts.asymmetric else "none", SCALES[scales.dtype])
        return StackedNumbers(
            format,
            codes,
            Stacked(scales, self.transposed),
            None if zeros is None else Stacked(zeros, self.transposed, "n", self.order),
        )

    def _factors(self, layer: Any, product: str) -> torch.Tensor | None:
        if not self.factors:
            return None
        factors = getattr(layer, f"{product}_{self.factors}").data.float()
        return (1 / factors if self.divides else factors).reshape(len(factors), -1)

    def bias(self, layer: Any, product: str) -> torch.nn.Parameter | None:
        """Return the biases (experts, n) of a product, or None if there are none."""
        return getattr(layer, f"{product}_{self.biases}") if self.biases and layer.with_bias else None


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


def _nvfp4(self: Any) -> Facts:
    return Facts(4, 16, named="nvfp4")


def _nvfp4_modelopt(self: Any) -> Facts:
    refused = ""
    if not self.quant_config.is_checkpoint_nvfp4_serialized:
        refused = "they are quantized while they are loaded"
    elif not self._moe_runner_backend.is_marlin():  # others load them in other orders
        refused = f"--moe-runner-backend {self._moe_runner_backend.value} runs them"
    return _nvfp4(self)._replace(refused=refused)


def _mxfp4(self: Any) -> Facts:
    config, refused = self.moe_runner_config, ""
    if self.use_marlin or self.use_flashinfer or self.use_deep_gemm or self.use_mega_moe:  # which pad them
        refused = "--moe-runner-backend names another one than triton_kernel"
    elif config.gemm1_alpha is None or not config.gate_up_interleaved:
        refused = "their gates and ups are not in pairs, as those of gpt-oss are"
    return Facts(4, 32, refused=refused, named="mxfp4")


UNUSED = (
    *("g_idx", "weight_g_idx", "g_idx_sort_indices", "weight_shape", "qzeros", "weight_zero_point"),
    *("input_scale", "input_global_scale", "blockscale_swizzled"),
)
"""Ends of the names of parameters that the numbers do not need: of columns in order, of symmetric weights, and of how
an engine's own kernels would quantize activations."""
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
    Method(
        "compressed-tensors' experts of NVFP4",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4A16Nvfp4MoE",
        _nvfp4,
        *("weight_packed", "weight_scale"),
        transposed=False,
        factors="weight_global_scale",
        divides=True,
    ),
    Method(
        "ModelOpt's experts of NVFP4",
        f"{QUANTIZATION}.modelopt_quant.ModelOptNvFp4FusedMoEMethod",
        _nvfp4_modelopt,
        *("weight", "weight_scale"),
        transposed=False,
        factors="weight_scale_2",
        apply="apply",
    ),
    Method(
        "gpt-oss' experts of MXFP4",
        f"{QUANTIZATION}.mxfp4.Mxfp4MoEMethod",
        _mxfp4,
        *("weight", "weight_scale"),
        transposed=False,
        apply="apply",
        biases="weight_bias",
        in_pairs=True,
        padded=True,
        routes=True,
    ),
)
