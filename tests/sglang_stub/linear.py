"""Linear layers of SGLang's: schemes and methods, which make parameters."""

from __future__ import annotations

import types
from enum import Enum
from typing import NamedTuple

import torch

from sglang_stub.registry import Asked, Named, at, parameter


class Shapes(NamedTuple):
    """The fields that are read of MarlinLinearLayerConfig."""

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]


class _Scheme(Asked):
    def apply_weights(self, layer, x, bias=None):
        self.asked.append("apply")


class _Method(Asked):
    def apply(self, layer, x, bias=None):
        self.asked.append("apply")


@at("layers.quantization.gptq.schemes")
class GPTQMarlinLinearScheme(_Scheme):
    def __init__(self, quant_config):
        self.quant_config, self.kernel, self.asked = quant_config, types.SimpleNamespace(), []

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        weight_loader,
        **kwargs,
    ):
        k, n, config = input_size_per_partition, sum(output_partition_sizes), self.quant_config
        self.kernel.kernel_config = Shapes((input_size, output_size), (k, n))
        group = input_size if config.group_size == -1 else config.group_size
        groups = (input_size if config.desc_act else k) // group if config.group_size != -1 else 1
        _gptq_parameters(layer, config, groups, n, params_dtype, k)


def _gptq_parameters(layer, config, groups, n, dtype, k):
    layer.register_parameter("qweight", parameter(k * config.weight_bits // 32, n, dtype=torch.int32))
    layer.register_parameter("g_idx", parameter(k, dtype=torch.int32))
    layer.register_parameter("scales", parameter(groups, n, dtype=dtype))
    layer.register_parameter("qzeros", parameter(groups, n * config.weight_bits // 32, dtype=torch.int32))


@at("layers.quantization.gptq.schemes")
class GPTQLinearScheme:
    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []
        self.use_v2_format = quant_config.checkpoint_format == "gptq_v2"
        self.kernel = self._init_kernel(quant_config)

    def _init_kernel(self, quant_config):
        raise RuntimeError("The non-Marlin GPTQ CUDA kernel has been removed.")

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, params_dtype, weight_loader, **kwargs
    ):
        k, n, config = input_size_per_partition, sum(output_partition_sizes), self.quant_config
        self.kernel.use_shuffle = True
        _gptq_parameters(layer, config, k // config.group_size, n, params_dtype, k)

    def process_weights_after_loading(self, layer):
        self.kernel.process_weights_after_loading(layer)

    def apply_weights(self, layer, x, bias):
        return self.kernel.apply(layer, x, bias)


class _AWQ(_Scheme):
    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def _create(self, layer, k, n, dtype):
        groups = k // self.quant_config.group_size
        layer.register_parameter("qweight", parameter(k, n // 8, dtype=torch.int32))
        layer.register_parameter("qzeros", parameter(groups, n // 8, dtype=torch.int32))
        layer.register_parameter("scales", parameter(groups, n, dtype=dtype))


@at("layers.quantization.awq.schemes")
class AWQMarlinLinearScheme(_AWQ):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, params_dtype, weight_loader, **kwargs
    ):
        self._create(layer, input_size_per_partition, sum(output_partition_sizes), params_dtype)


@at("layers.quantization.awq.schemes")
class AWQLinearScheme(_AWQ):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, params_dtype, weight_loader, **kwargs
    ):
        self._create(layer, input_size_per_partition, sum(output_partition_sizes), params_dtype)


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsWNA16(_Scheme):
    def __init__(self, strategy, num_bits, group_size=None, symmetric=True, actorder=None):
        self.pack_factor, self.symmetric, self.asked = 32 // num_bits, symmetric, []
        self.group_size = -1 if group_size is None else group_size
        self.has_g_idx = actorder == "group"

    def create_weights(
        self,
        layer,
        output_size,
        input_size,
        output_partition_sizes,
        input_size_per_partition,
        params_dtype,
        weight_loader,
        **kwargs,
    ):
        k, n = input_size_per_partition, sum(output_partition_sizes)
        self.kernel_config = Shapes((input_size, output_size), (k, n))
        groups = 1 if self.group_size == -1 else k // self.group_size
        layer.register_parameter("weight_packed", parameter(n, k // self.pack_factor, dtype=torch.int32))
        layer.register_parameter("weight_scale", parameter(n, groups, dtype=params_dtype))
        layer.register_parameter("weight_shape", parameter(2, dtype=torch.int64))
        if not self.symmetric:
            layer.register_parameter("weight_zero_point", parameter(n // self.pack_factor, groups, dtype=torch.int32))
        if self.has_g_idx:
            layer.register_parameter("weight_g_idx", parameter(k, dtype=torch.int32))


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsW8A16Fp8(_Scheme):
    def __init__(self, strategy, is_static_input_scheme):
        self.strategy, self.is_static_input_scheme, self.asked = strategy, is_static_input_scheme, []

    def create_weights(
        self, layer, input_size, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs
    ):
        n, k, parts = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.register_parameter("weight", parameter(n, k, dtype=torch.float8_e4m3fn))
        shape = (n, 1) if self.strategy == "channel" else (parts,)
        layer.register_parameter("weight_scale", parameter(*shape, dtype=torch.float32))


class _Mxfp8Backend(Enum):
    UNSUPPORTED = "unsupported"

    def is_unsupported(self):
        return True


@at("layers.quantization.fp8")
class Fp8Config:
    def __init__(
        self,
        is_checkpoint_fp8_serialized=False,
        activation_scheme=None,
        ignored_layers=None,
        weight_block_size=None,
        packed_modules_mapping=None,
        use_mxfp8=False,
        is_fp4_experts=None,
        kv_cache_quant_algo=None,
        scale_fmt=None,
    ):
        self.is_checkpoint_fp8_serialized, self.use_mxfp8 = is_checkpoint_fp8_serialized, use_mxfp8
        self.convert_mxfp8_to_block_fp8 = None

    def get_min_capability(self):
        return 100 if self.use_mxfp8 else 80

    def get_quant_method(self, layer, prefix):
        return Fp8MoEMethod(self)


@at("layers.quantization.fp8")
class Fp8MoEMethod:
    def __init__(self, quant_config):
        self.quant_config = quant_config
        self.convert_mxfp8_to_block = bool(quant_config.convert_mxfp8_to_block_fp8)


@at("layers.quantization.fp8")
class Fp8LinearMethod(_Method):
    def __init__(self, quant_config):
        self.quant_config, self.use_mxfp8, self.asked = quant_config, quant_config.use_mxfp8, []
        self.is_checkpoint_fp8_serialized = quant_config.is_checkpoint_fp8_serialized
        self.convert_mxfp8_to_block = bool(quant_config.convert_mxfp8_to_block_fp8)
        own = self.use_mxfp8 and not self.convert_mxfp8_to_block
        self.mxfp8_dense_backend = _Mxfp8Backend.UNSUPPORTED if own else None

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        skip_block_quant_check=False,
        **extra_weight_attrs,
    ):
        n, k = sum(output_partition_sizes), input_size_per_partition
        layer.register_parameter("weight", parameter(n, k, dtype=torch.float8_e4m3fn))
        if self.use_mxfp8:
            layer.register_parameter("weight_scale_inv", parameter(n, k // 32, dtype=torch.uint8))
        else:
            layer.register_parameter("weight_scale", parameter(len(output_partition_sizes), dtype=torch.float32))
        layer.register_parameter("input_scale", None)


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsW4A16Fp4(_Scheme):
    def __init__(self, has_input_global_scale=False):
        self.has_input_global_scale, self.asked = has_input_global_scale, []

    def create_weights(
        self, layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs
    ):
        n, k, parts = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        layer.logical_widths, layer.params_dtype = output_partition_sizes, params_dtype
        layer.register_parameter("weight_packed", parameter(n, k // 2, dtype=torch.uint8))
        layer.register_parameter("weight_global_scale", parameter(parts, dtype=torch.float32))
        layer.register_parameter("weight_scale", parameter(n, k // 16, dtype=torch.float8_e4m3fn))
        if self.has_input_global_scale:
            layer.register_parameter("input_global_scale", parameter(parts, dtype=torch.float32))


class _ModelOptNvFp4(_Method):
    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        n, k, parts = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        layer.logical_widths, layer.params_dtype = output_partition_sizes, params_dtype
        layer.register_parameter("weight", parameter(n, k // 2, dtype=torch.uint8))
        layer.register_parameter("weight_scale_2", parameter(parts, dtype=torch.float32))
        scale = parameter(n, k // self.quant_config.group_size, dtype=torch.float8_e4m3fn)
        layer.register_parameter("weight_scale", scale)
        layer.register_parameter("input_scale", parameter(parts, dtype=torch.float32))


@at("layers.quantization.modelopt_quant")
class ModelOptFp4LinearMethod(_ModelOptNvFp4):
    pass


@at("layers.quantization.modelopt_quant")
class ModelOptNvFp4A16LinearMethod(_ModelOptNvFp4):
    pass


@at("layers.quantization.gguf")
class GGUFLinearMethod(_Method):
    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        self.params_dtype = params_dtype
        blocks = torch.nn.parameter.UninitializedParameter(requires_grad=False)
        blocks.tensor_shape = sum(output_partition_sizes), input_size_per_partition
        blocks.data_container, blocks.shard_id, blocks.shard_id_map = [], [], {}
        types = parameter(len(output_partition_sizes), dtype=torch.uint8)
        types.weight_type, types.shard_weight_type = 0, {}
        layer.register_parameter("qweight", blocks)
        layer.register_parameter("qweight_type", types)


@at("layers.quantization.fp4_utils")
def get_fp4_gemm_runner_backend():
    return Named("marlin")
