"""Linear layers with 8-bit floats that vLLM multiplies by 16-bit activations: kernels in vLLM's lists.

On Hopper these are compressed-tensors' fp8 without activations in its config (W8A16) and MXFP8, for which Hopper has no
products of its own. Layers that vLLM multiplies by activations in fp8 are in other lists, and stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_MXFP8_KERNELS,
    _POSSIBLE_WFP8A16_KERNELS,
    FP8ScaledMMLinearKernel,
    Mxfp8LinearKernel,
)
from vllm.platforms import PlatformEnum

from w4gemm.checkpoints.fp8_folder import ScaleBlock, numbers
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.loading import check_known
from w4gemm.integrations.vllm.configs import add_hook, take_configs
from w4gemm.integrations.vllm.linear_kernel import FloatsKernel

CONFIGS = ("compressed-tensors", "modelopt_mxfp8", "modelopt_mixed", "inc", "quark")
"""Names of vLLM's quantization configs that may have such layers."""
_ROWS, _BLOCKS, _MX = (WeightFormat.parse(name) for name in ("e4m3_col_fp32", "e4m3_g128_b128", "mxfp8"))


def install() -> None:
    """Put our kernels first in vLLM's lists for NVIDIA GPUs, and watch what their layers load."""
    take_configs(CONFIGS)
    add_hook(_without_activations, ["compressed-tensors"])
    W4GemmFp8LinearKernel.put_first()
    W4GemmMxFp8LinearKernel.put_first()


def _without_activations(method: Any, layer: Any) -> Any:
    """Have vLLM load blocks of compressed-tensors without activations in its config. Whether activations have a static
    scale is None there, and vLLM 0.32 and 0.33 assert that it is False, when they have loaded the layer."""
    scheme: Any = getattr(layer, "scheme", None)
    if getattr(scheme, "is_static_input_scheme", False) is None:
        scheme.is_static_input_scheme = False
    return method


class _Fp8(FloatsKernel):
    """Base of both kernels."""

    kind = "linear layers of 8-bit floats with 16-bit activations"

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        return ["weight", "weight_scale"]

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        return ["weight", "weight_scale", "weight_scale_inv", "input_scale"]

    def numbers(self, layer: Any) -> Numbers:
        check_known(layer, {"bias", *self.weight_names(layer)})
        return numbers(*self.tensors(layer), ScaleBlock())

    def tensors(self, layer: Any) -> tuple[WeightFormat, torch.Tensor, torch.Tensor]:
        """Return format, codes (n, k) and scales of a layer whose parameters are known.

        Raises:
            ValueError: if there is no such format.
        """
        raise NotImplementedError


class W4GemmFp8LinearKernel(_Fp8, FP8ScaledMMLinearKernel):
    """e4m3 with a scale for each row, or for each block of 128 x 128."""

    possible = _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CUDA]

    def tensors(self, layer: Any) -> tuple[WeightFormat, torch.Tensor, torch.Tensor]:
        if hasattr(layer, "weight_scale_inv"):
            *merged, _ = layer.logical_widths
            if [*layer.weight_block_size] != [128, 128] or any(width % 128 for width in merged):
                raise ValueError(f"their blocks are {layer.weight_block_size} of parts {layer.logical_widths}")
            return _BLOCKS, layer.weight.data, layer.weight_scale_inv.data
        return _ROWS, layer.weight.data.t().contiguous(), layer.weight_scale.data  # vLLM has turned it

    def apply_scaled_mm(self, **arguments: Any) -> torch.Tensor:
        raise NotImplementedError("vLLM's base class calls it, which multiplies activations in fp8")


class W4GemmMxFp8LinearKernel(_Fp8, Mxfp8LinearKernel):
    """e4m3 with a power of two for each 32 columns."""

    possible = _POSSIBLE_MXFP8_KERNELS[PlatformEnum.CUDA]

    def tensors(self, layer: Any) -> tuple[WeightFormat, torch.Tensor, torch.Tensor]:
        return _MX, layer.weight.data, layer.weight_scale.data
