"""Linear layers of vLLM's, their parameters, and kernels in its lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch.nn import Parameter

from vllm_stub import VLLM
from vllm_stub.engine import PlatformEnum

at, put = VLLM.at, VLLM.put

# --- types and parameters --------------------------------------------------------------------------------------------


@at("scalar_type")
@dataclass(frozen=True)
class ScalarType:
    exponent: int
    mantissa: int
    signed: bool
    bias: int

    @property
    def size_bits(self):
        return self.exponent + self.mantissa + self.signed

    def is_signed(self):
        return self.signed

    def is_integer(self):
        return self.exponent == 0

    def __str__(self) -> str:
        return f"{'' if self.signed else 'u'}int{self.size_bits}{f'b{self.bias}' if self.bias else ''}"


@at("scalar_type")
class scalar_types:
    int4 = ScalarType(0, 3, True, 0)
    uint4 = ScalarType(0, 4, False, 0)
    uint8 = ScalarType(0, 8, False, 0)
    uint2b2 = ScalarType(0, 2, False, 2)
    uint3b4 = ScalarType(0, 3, False, 4)
    uint4b8 = ScalarType(0, 4, False, 8)
    uint5b16 = ScalarType(0, 5, False, 16)
    uint6b32 = ScalarType(0, 6, False, 32)
    uint7b64 = ScalarType(0, 7, False, 64)
    uint8b128 = ScalarType(0, 8, False, 128)


PARAMETER = "model_executor.parameter"


@at(PARAMETER)
class BasevLLMParameter(Parameter):
    def __new__(cls, data: torch.Tensor | None, **kwargs):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: Callable):
        pass


@at(PARAMETER)
class _ColumnvLLMParameter(BasevLLMParameter):
    def __init__(self, output_dim: int, **kwargs):
        self._output_dim = output_dim
        super().__init__(**kwargs)

    @property
    def output_dim(self):
        return self._output_dim


@at(PARAMETER)
class RowvLLMParameter(BasevLLMParameter):
    def __init__(self, input_dim: int, **kwargs):
        self._input_dim = input_dim
        super().__init__(**kwargs)

    @property
    def input_dim(self):
        return self._input_dim


@at(PARAMETER)
class ModelWeightParameter(_ColumnvLLMParameter, RowvLLMParameter):
    pass


@at(PARAMETER)
class GroupQuantScaleParameter(_ColumnvLLMParameter, RowvLLMParameter):
    pass


@at(PARAMETER)
class ChannelQuantScaleParameter(_ColumnvLLMParameter):
    pass


@at(PARAMETER)
class PackedColumnParameter(_ColumnvLLMParameter):
    def __init__(self, packed_factor: int | Fraction, packed_dim: int, marlin_tile_size: int | None = None, **kwargs):
        self._packed_dim = packed_dim
        super().__init__(**kwargs)


@at(PARAMETER)
class PackedvLLMParameter(ModelWeightParameter):
    def __init__(self, packed_factor: int | Fraction, packed_dim: int, marlin_tile_size: int | None = None, **kwargs):
        self._packed_dim = packed_dim
        super().__init__(**kwargs)


# --- kernels ---------------------------------------------------------------------------------------------------------

KERNELS = "model_executor.kernels.linear"


@at(f"{KERNELS}.mixed_precision.MPLinearKernel", f"{KERNELS}.mixed_precision", KERNELS)
@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool
    """vLLM 0.33 has no act-order: neither this nor w_gidx_param_name."""
    out_type: torch.dtype | None = None


@at(f"{KERNELS}.mixed_precision.MPLinearKernel", f"{KERNELS}.mixed_precision", KERNELS)
class MPLinearKernel:
    @classmethod
    def get_min_capability(cls) -> int:
        raise NotImplementedError

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        raise NotImplementedError

    def __init__(
        self,
        c: MPLinearLayerConfig,
        w_q_param_name: str,
        w_s_param_name: str,
        w_zp_param_name: str | None = None,
        w_gidx_param_name: str | None = None,
    ) -> None:
        self.config = c
        self.w_q_name = w_q_param_name
        self.w_s_name = w_s_param_name
        self.w_zp_name = w_zp_param_name
        self.w_gidx_name = w_gidx_param_name

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise NotImplementedError

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


class _Kernel(ABC):
    """What each of vLLM's bases of kernels of floats has."""

    def __init__(self, config) -> None:
        assert self.can_implement(config)[0]
        assert self.is_supported()[0]
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None):
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def can_implement(cls, config):
        raise NotImplementedError

    @abstractmethod
    def process_weights_after_loading(self, layer):
        raise NotImplementedError

    @abstractmethod
    def apply_weights(self, layer, x, bias=None):
        raise NotImplementedError


@at(f"{KERNELS}.mxfp4.base", f"{KERNELS}.mxfp4")
class MxFp4LinearLayerConfig:
    pass


@at(f"{KERNELS}.mxfp4.base", f"{KERNELS}.mxfp4")
class MxFp4LinearKernel(_Kernel):
    pass


@at(f"{KERNELS}.nvfp4.base", f"{KERNELS}.nvfp4")
class NvFp4LinearLayerConfig:
    pass


@at(f"{KERNELS}.nvfp4.base", f"{KERNELS}.nvfp4")
class NvFp4LinearKernel(_Kernel):
    pass


@at(f"{KERNELS}.nvfp4.marlin", KERNELS)
class MarlinNvFp4LinearKernel(NvFp4LinearKernel):
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        layer.runs_on_vllm = True

    def apply_weights(self, layer, x, bias=None):
        return x + 1


@at(f"{KERNELS}.mxfp8.Mxfp8LinearKernel", f"{KERNELS}.mxfp8", KERNELS)
class Mxfp8LinearKernel(_Kernel):
    pass


@at(f"{KERNELS}.scaled_mm.ScaledMMLinearKernel")
class ScaledMMLinearKernel(_Kernel):
    def __init__(self, c, layer_param_names):
        super().__init__(c)
        self.layer_param_names = layer_param_names


@at(f"{KERNELS}.scaled_mm.ScaledMMLinearKernel", f"{KERNELS}.scaled_mm", KERNELS)
class FP8ScaledMMLinearKernel(ScaledMMLinearKernel):
    @abstractmethod
    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        raise NotImplementedError


put(
    KERNELS,
    _POSSIBLE_KERNELS={PlatformEnum.CUDA: []},
    _POSSIBLE_NVFP4_KERNELS={PlatformEnum.CUDA: []},
    _POSSIBLE_MXFP4_KERNELS={PlatformEnum.CUDA: []},
    _POSSIBLE_MXFP8_KERNELS={PlatformEnum.CUDA: []},
    _POSSIBLE_WFP8A16_KERNELS={PlatformEnum.CUDA: []},
)


@at(KERNELS)
def choose_mp_linear_kernel(config: MPLinearLayerConfig) -> type[MPLinearKernel]:
    from vllm.model_executor.kernels import linear

    reasons = []
    for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]:
        can_implement, reason = kernel.can_implement(config)
        if can_implement:
            return kernel
        reasons.append(reason)
    raise ValueError(f"no kernel: {reasons}")


@at(KERNELS)
def init_nvfp4_linear_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    from vllm.model_executor.kernels import linear

    if use_a16:
        return linear.MarlinNvFp4LinearKernel(NvFp4LinearLayerConfig())
    return _first(linear._POSSIBLE_NVFP4_KERNELS, NvFp4LinearLayerConfig())


@at(KERNELS)
def init_mxfp4_linear_kernel() -> MxFp4LinearKernel:
    from vllm.model_executor.kernels import linear

    return _first(linear._POSSIBLE_MXFP4_KERNELS, MxFp4LinearLayerConfig())


def _first(possible, config):
    from vllm import envs

    for kernel in possible[PlatformEnum.CUDA]:
        if kernel.__name__ not in envs.VLLM_DISABLED_KERNELS and kernel.is_supported()[0]:
            return kernel(config)
    raise ValueError("no kernel")


# --- layers ----------------------------------------------------------------------------------------------------------


@at("model_executor.layers.quantization.base_config")
class QuantizeMethodBase:
    def process_weights_after_loading(self, layer) -> None:
        layer.runs_on_vllm = True


LINEAR = "model_executor.layers.linear"


@at(LINEAR)
class LinearMethodBase(QuantizeMethodBase):
    pass


@at(LINEAR)
def register_weight_loader_v2_supported_method(cls):
    return cls


@at(LINEAR)
class LinearBase(torch.nn.Module):
    def __init__(
        self, input_size, output_size, bias=False, skip_bias_add=False, params_dtype=None, quant_config=None, prefix=""
    ):
        super().__init__()
        self.params_dtype, self.prefix = params_dtype or torch.bfloat16, prefix
        self.bias = torch.nn.Parameter(torch.randn(output_size, dtype=self.params_dtype)) if bias else None
        self.quant_method = quant_config.get_quant_method(self, prefix)


@at(LINEAR)
class ColumnParallelLinear(LinearBase):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        return_bias=True,
        disable_tp=False,
    ):
        super().__init__(input_size, output_size, bias, skip_bias_add, params_dtype, quant_config, prefix)
        self.output_size_per_partition = output_size
        sizes = getattr(self, "output_sizes", [output_size])
        self.quant_method.create_weights(
            self, input_size, sizes, input_size, output_size, self.params_dtype, weight_loader=self.weight_loader
        )
        for parameter in self._parameters.values():
            if parameter is not None and not hasattr(parameter, "weight_loader"):
                parameter.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight):
        param.data.copy_(loaded_weight)

    def forward(self, input_):
        return self.quant_method.apply(self, input_, self.bias), None


@at(LINEAR)
class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        input_size,
        output_sizes,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        return_bias=True,
        disable_tp=False,
    ):
        self.output_sizes = output_sizes
        arguments = gather_output, skip_bias_add, params_dtype, quant_config, prefix
        super().__init__(input_size, sum(output_sizes), bias, *arguments)


@at("model_executor.layers.vocab_parallel_embedding")
class VocabParallelEmbedding(torch.nn.Module):
    pass


@at("model_executor.layers.vocab_parallel_embedding")
class ParallelLMHead(VocabParallelEmbedding):
    pass
