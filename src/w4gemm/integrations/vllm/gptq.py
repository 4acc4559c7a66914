"""Linear layers of GPTQ that vLLM has no method for: of 2, 3, 5, 6 and 7 bits, with zero points, or packed in planes.

vLLM's config refuses such models. It takes them here, gives each layer that vLLM knows its own method, and others
:class:`GptqLinearMethod`, whose tensors the reader of GPTQ's folders reads. Experts of such formats are refused as
before, when their layer is made. AutoRound's layers of 2 and 3 bits or with zero points, which vLLM gives to Humming or
refuses, get that method too.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)

from w4gemm.checkpoints.gptq import GPTQPacking
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.stored import NAMES
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.linear_kernel import LinearKernel
from w4gemm.integrations.wrapping import wrap

_BITS = range(2, 9)
_STREAMS = (2, 3, 4, 8)
"""Bits of codes that are not in planes."""
_OWN: dict[tuple[int, bool], Any] = {}
"""vLLM's own types, by bits and whether they are symmetric."""


class _Stored(NamedTuple):
    """dtype and shape of a tensor of a packing."""

    dtype: str
    shape: tuple[int, ...]


def install() -> None:
    """Have vLLM's config of GPTQ take every width, and give layers of other than its own our method.

    Raises:
        AttributeError: if this vLLM makes methods in another way.
    """
    if _OWN:
        return
    config = auto_gptq.AutoGPTQConfig
    _OWN.update(config.TYPE_MAP)
    wrap(auto_gptq, "get_linear_quant_method", _linear_method)
    wrap(auto_gptq, "get_moe_quant_method", _experts_method)
    wrap(INCWna16Scheme, "get_linear_method", _linear_method_of_auto_round)
    config.TYPE_MAP = {(bits, symmetric): None for bits in _BITS for symmetric in (True, False)} | _OWN


def _linear_method(
    own: Callable[..., Any], settings: Any, layer: torch.nn.Module, prefix: str, linear_method_cls: Any
) -> Any:
    def make(config: Any) -> Any:
        return linear_method_cls(config) if _is_vllms(config) else GptqLinearMethod(config, prefix)

    return own(settings, layer, prefix, make)


def _experts_method(own: Callable[..., Any], settings: Any, layer: Any, prefix: str, moe_method_cls: Any) -> Any:
    def make(config: Any, moe: Any) -> Any:
        if not _is_vllms(config):
            raise ValueError(
                f"Unsupported quantization config of experts: bits={config.weight_bits}, sym={config.is_sym}"
            )
        return moe_method_cls(config, moe)

    return own(settings, layer, prefix, make)


def _linear_method_of_auto_round(
    own: Callable[..., Any], scheme: Any, config: Any, layer: torch.nn.Module, prefix: str, layer_config: Any
) -> Any:
    bits, symmetric = layer_config.bits, layer_config.sym
    ours = layer_config.is_gptq and bits in _STREAMS and (bits, symmetric) not in _OWN
    if not ours or takeover.linear_backend("mixed_precision") or takeover.why_not_here():
        return own(scheme, config, layer, prefix, layer_config)
    settings = {"weight_bits": bits, "group_size": layer_config.group_size, "is_sym": symmetric, "desc_act": False}
    packing = {"quant_method": "auto-round", "packing_format": config.packing_format}
    return GptqLinearMethod(SimpleNamespace(**settings, full_config=packing), prefix)


def _is_vllms(config: Any) -> bool:
    planes = config.full_config.get("checkpoint_format") == "gptq_p"
    return (config.weight_bits, config.is_sym) in _OWN and not planes


@register_weight_loader_v2_supported_method
class GptqLinearMethod(LinearMethodBase):
    """A linear layer of GPTQ in a format of which vLLM has no method.

    Args:
        config: vLLM's quantization config, with the settings of the layer.
        prefix: name of the layer.

    Raises:
        ValueError: if w4gemm runs no layers here.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        self.config, self.prefix = config, prefix
        if reason := takeover.why_not_here():
            raise ValueError(
                f"Unsupported quantization config: bits={config.weight_bits}, sym={config.is_sym}: vLLM has no kernel "
                f"for it, and w4gemm runs no layers here: {reason}"
            )

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        config, k, n = self.config, input_size_per_partition, sum(output_partition_sizes)
        bits, group = config.weight_bits, config.group_size
        if config.desc_act and k != input_size:
            raise ValueError(f"{self.prefix}: desc_act, and its input features are divided among GPUs")
        if k % 32 or n % 32 or (group != -1 and k % group):
            raise ValueError(f"{self.prefix}: wanted a multiple of 32, and whole groups of {group}, got {n} x {k}")
        groups = 1 if group == -1 else k // group
        loader = {"weight_loader": extra_weight_attrs.get("weight_loader")}
        packed = {"packed_factor": Fraction(32, bits), **loader}
        codes, zeros = torch.empty(k * bits // 32, n).int(), torch.empty(groups, n * bits // 32).int()
        scales = torch.empty(groups, n, dtype=params_dtype)
        layer.register_parameter(
            "qweight", PackedvLLMParameter(data=codes, input_dim=0, output_dim=1, packed_dim=0, **packed)
        )
        if group == -1:
            layer.register_parameter("scales", ChannelQuantScaleParameter(data=scales, output_dim=1, **loader))
            layer.register_parameter("qzeros", PackedColumnParameter(data=zeros, output_dim=1, packed_dim=1, **packed))
        else:
            of_groups = {"input_dim": 0, "output_dim": 1}
            layer.register_parameter("scales", GroupQuantScaleParameter(data=scales, **of_groups, **loader))
            layer.register_parameter("qzeros", PackedvLLMParameter(data=zeros, packed_dim=1, **of_groups, **packed))
        if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__:  # else vLLM loads none
            order = torch.empty(k, dtype=torch.int32)
            layer.register_parameter("g_idx", RowvLLMParameter(data=order, input_dim=0, **loader))
        self.kernel = GptqKernel(config, self.prefix, params_dtype)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)


class GptqKernel(LinearKernel):
    """x @ w.T + bias. There is no kernel of vLLM's for the layer."""

    kind = "linear layers of GPTQ that vLLM has no kernel for"

    def __init__(self, config: Any, prefix: str, dtype: torch.dtype) -> None:
        self.prefix, self.dtype, self.in_order = prefix, dtype, not config.desc_act
        largest = (f"zero_stored_as_{2**bits - 1}" for bits in _BITS)
        keys = ("quant_method", "packing_format", "checkpoint_format", "format", "meta", *largest)
        self.packing = GPTQPacking(
            {
                **{key: config.full_config[key] for key in keys if key in config.full_config},
                "bits": config.weight_bits,
                "group_size": config.group_size,
                "sym": config.is_sym,
            }
        )
        self.expect()

    def model_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        return self.dtype

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        return ["qweight", "scales", "qzeros", *(["g_idx"] if not self.in_order else [])]

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        return ["qweight", "scales", "qzeros", "g_idx"]

    def numbers(self, layer: torch.nn.Module) -> Numbers:
        tensors = {name: getattr(layer, name).data for name in self.parameters(layer)}
        stored: Any = {name: _Stored(NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        module = self.packing.module(self.prefix, stored)
        return self.packing.numbers(module, tensors)

    def next_kernel(self) -> Any:
        raise ValueError(f"{self.prefix}: w4gemm cannot run it, and vLLM has no kernel for such tensors of GPTQ")
