"""Mixtures of experts of SGLang's: runners, and methods, which make parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_stub.registry import Asked, Named, at, parameter


class ExpertsMethod(Asked):
    def apply(self, layer, dispatch_output):
        self.asked.append("apply")


@at("layers.moe.utils")
def get_moe_a2a_backend():
    return Named("none")


@at("layers.moe.utils")
def get_moe_runner_backend():
    return Named("auto")


@at("layers.quantization.base_config")
class FusedMoEMethodBase:
    def get_moe_quant_info(self, layer, runner_backend):
        raise NotImplementedError


_names: set[str] = set()


@at("layers.moe.utils")
def resolve_moe_runner_backend(backend):
    if backend not in _names:
        raise ValueError(f"MoE runner backend {backend!r} is neither built in nor registered")
    return Named(backend)


@at("layers.moe.moe_runner.base")
class MoeQuantInfo:
    pass


@at("layers.moe.moe_runner.base")
class DispatchMoeRunnerCore:
    def __init__(self, config):
        self.config = config

    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
        raise NotImplementedError


_factories: dict[str, Callable[[Any], DispatchMoeRunnerCore]] = {}


@at("layers.moe.moe_runner.runner")
def register_moe_runner_core(backend_name, factory):
    if backend_name in _factories:
        raise ValueError(f"Runner core for {backend_name!r} is already registered")
    _names.add(backend_name)
    _factories[backend_name] = factory


@at("layers.moe.moe_runner.runner")
class MoeRunner:
    def __init__(self, runner_backend, config, lora_enabled=False):
        self.runner_backend, self.config = runner_backend, config
        self.runner_core = _factories[runner_backend.value](config)

    def run(self, dispatch_output, quant_info, lora_info=None):
        return self.runner_core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=lora_info)


@at("layers.moe.token_dispatcher", "layers.moe.token_dispatcher.standard")
class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


@at("layers.moe.token_dispatcher", "layers.moe.token_dispatcher.standard")
class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any
    hidden_states_pre_quant: tuple[Any, ...] | None = None


@at("layers.moe.topk")
class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


@at("layers.moe.topk")
class PackedTopKOutput(NamedTuple):
    packed_topk_ids: torch.Tensor
    router_logits: torch.Tensor


class _Experts(Asked):
    """A scheme of experts; ``lies`` says how numbers lie in its parameters."""

    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def create_moe_runner(self, layer, moe_runner_config):
        self.asked.append("runner")

    def apply_weights(self, layer, dispatch_output):
        self.asked.append("apply")


@at("layers.quantization.gptq.schemes")
class GPTQMarlinMoEScheme(_Experts):
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        group, e = self.quant_config.group_size, num_experts
        for product, k, n in products(hidden_size, intermediate_size_per_partition):
            layer.register_parameter(f"{product}_qweight", parameter(e, k // 8, n, dtype=torch.int32))
            layer.register_parameter(f"{product}_scales", parameter(e, k // group, n, dtype=torch.half))
            layer.register_parameter(f"{product}_qzeros", parameter(e, k // group, n // 8, dtype=params_dtype))
            layer.register_parameter(f"{product}_g_idx", parameter(e, k, dtype=torch.int32))
            layer.register_parameter(f"{product}_g_idx_sort_indices", parameter(e, k, dtype=torch.int32))


@at("layers.quantization.awq.schemes")
class AWQMoEScheme(_Experts):
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        group, e = self.quant_config.group_size, num_experts
        for product, k, n in products(hidden_size, intermediate_size_per_partition):
            layer.register_parameter(f"{product}_qweight", parameter(e, k, n // 8, dtype=torch.int32))
            layer.register_parameter(f"{product}_scales", parameter(e, k // group, n, dtype=params_dtype))
            layer.register_parameter(f"{product}_qzeros", parameter(e, k // group, n // 8, dtype=torch.int32))


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsWNA16MoE(_Experts):
    def __init__(self, quant_config, weight_quant, num_gpu_experts=-1):
        super().__init__(quant_config)
        self.num_bits, self.strategy = weight_quant.num_bits, weight_quant.strategy
        self.group_size, self.actorder, self.sym = (
            weight_quant.group_size,
            weight_quant.actorder,
            weight_quant.symmetric,
        )

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        e = num_experts
        for product, k, n in products(hidden_size, intermediate_size_per_partition):
            groups = k // self.group_size
            layer.register_parameter(f"{product}_weight_packed", parameter(e, k // 8, n, dtype=torch.int32))
            layer.register_parameter(f"{product}_weight_scale", parameter(e, groups, n, dtype=params_dtype))
            layer.register_parameter(f"{product}_weight_shape", parameter(e, 2, dtype=torch.float32))
            if not self.sym:
                zeros = parameter(e, groups, n // 8, dtype=torch.int32)
                layer.register_parameter(f"{product}_weight_zero_point", zeros)
            layer.register_parameter(f"{product}_weight_g_idx", parameter(e, k, dtype=torch.int32))
            layer.register_parameter(f"{product}_g_idx_sort_indices", parameter(e, k, dtype=torch.int32))
        names = ("weight_packed", "weight_scale", "weight_zero_point")[: 3 - self.sym]
        names = [f"{product}_{name}" for product in ("w13", "w2") for name in names]
        layer._original_shapes = {name: tuple(layer._parameters[name].shape) for name in names}

    def restore_weights_before_loading(self, layer):
        for name, shape in getattr(layer, "_original_shapes", {}).items():
            if (param := getattr(layer, name, None)) is not None and param.shape != shape:
                param.resize_(shape)


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsW4AFP8MoE(_Experts):
    def __init__(self, quant_config, weight_quant, input_quant):
        super().__init__(quant_config)
        self.num_bits, self.group_size = weight_quant.num_bits, weight_quant.group_size
        self.weight_quant, self.input_quant = weight_quant, input_quant

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        e = num_experts
        for product, k, n in products(hidden_size, intermediate_size_per_partition):
            layer.register_parameter(f"{product}_weight_packed", parameter(e, n, k // 8, dtype=torch.int32))
            scale = parameter(e, n, k // self.group_size, dtype=torch.float32)
            layer.register_parameter(f"{product}_weight_scale", scale)
            layer.register_parameter(f"{product}_weight_shape", parameter(e, 2, dtype=torch.int32))


@at("layers.quantization.w4afp8")
class W4AFp8MoEMethod(ExpertsMethod):
    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        group, e = self.quant_config.group_size, num_experts
        for product, k, n in products(hidden_size, intermediate_size_per_partition):
            layer.register_parameter(f"{product}_weight", parameter(e, n, k // 2, dtype=torch.int8))
            scale = parameter(e, n, k // group, dtype=torch.float32)
            layer.register_parameter(f"{product}_weight_scale_inv", scale)
            shape = (e, 2) if product == "w13" else (e,)
            layer.register_parameter(f"{product}_input_scale", parameter(*shape, dtype=torch.bfloat16))

    def create_moe_runner(self, layer, moe_runner_config):
        self.asked.append("runner")


@at("layers.quantization.compressed_tensors.schemes")
class CompressedTensorsW4A16Nvfp4MoE(_Experts):
    def __init__(self, has_input_global_scale=False):
        super().__init__(None)
        self.has_input_global_scale = has_input_global_scale

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        _nvfp4_experts(self, layer, num_experts, hidden_size, intermediate_size_per_partition)

    names = "weight_packed", "weight_global_scale", "input_global_scale"


@at("layers.quantization.minimax_m3_nvfp4")
class MiniMaxM3Nvfp4MoE(CompressedTensorsW4A16Nvfp4MoE):
    def __init__(self):
        super().__init__(True)
        self.use_marlin = True


@at("layers.quantization.modelopt_quant")
class ModelOptNvFp4FusedMoEMethod(ExpertsMethod):
    has_input_global_scale = True
    names = "weight", "weight_scale_2", "input_scale"

    def __init__(self, quant_config):
        self.quant_config, self.asked = quant_config, []

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        _nvfp4_experts(self, layer, layer.num_local_experts, hidden_size, intermediate_size_per_partition)
        for product in ("w13", "w2"):
            swizzled = layer._parameters[f"{product}_weight_scale"].data.clone()
            setattr(layer, f"{product}_blockscale_swizzled", torch.nn.Parameter(swizzled, requires_grad=False))

    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config, self._moe_runner_backend = moe_runner_config, Named("marlin")


def _nvfp4_experts(method, layer, e, hidden, width):
    codes, factor, inputs = method.names
    for product, k, n in products(hidden, width):
        each = (e, 2) if product == "w13" else (e,)
        layer.register_parameter(f"{product}_{codes}", parameter(e, n, k // 2, dtype=torch.uint8))
        scale = parameter(e, n, k // 16, dtype=torch.float8_e4m3fn)
        layer.register_parameter(f"{product}_weight_scale", scale)
        layer.register_parameter(f"{product}_{factor}", parameter(*each, dtype=torch.float32))
        if method.has_input_global_scale:
            layer.register_parameter(f"{product}_{inputs}", parameter(*each, dtype=torch.float32))


@at("layers.quantization.mxfp4")
class Mxfp4MoEMethod(ExpertsMethod):
    def __init__(self, prefix):
        self.use_marlin = self.use_flashinfer = self.use_deep_gemm = self.use_mega_moe = False
        self.asked = []

    def create_weights(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        with_bias=False,
        **extra_weight_attrs,
    ):
        e, width = layer.num_local_experts, -(-intermediate_size_per_partition // 64) * 64
        for product, k, n in products(hidden_size, width):
            layer.register_parameter(f"{product}_weight", parameter(e, n, k // 2, dtype=torch.uint8))
            layer.register_parameter(f"{product}_weight_scale", parameter(e, n, k // 32, dtype=torch.uint8))
            layer.register_parameter(f"{product}_weight_bias", parameter(e, n, dtype=torch.bfloat16))
            layer._parameters[f"{product}_weight"].data.zero_()
            layer._parameters[f"{product}_weight_scale"].data.fill_(127)
            layer._parameters[f"{product}_weight_bias"].data.zero_()

    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config

    def get_moe_runner_backend(self, layer):
        return Named("triton_kernel")


@at("layers.quantization.mxfp4_marlin_moe")
class Mxfp4MarlinMoEMethod(ExpertsMethod):
    def __init__(self, fp8_method, prefix):
        self._fp8, self.asked = fp8_method, []

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        padded = -(-hidden_size // 256) * 256
        self.hidden_pad = padded - layer.hidden_size
        for product, k, n in products(padded, intermediate_size_per_partition):
            layer.register_parameter(f"{product}_weight", parameter(num_experts, n, k // 2, dtype=torch.int8))
            scales = parameter(num_experts, n, k // 32, dtype=torch.float8_e8m0fnu)
            layer.register_parameter(f"{product}_weight_scale_inv", scales)

    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config

    def get_moe_runner_backend(self, layer):
        return Named("marlin")


def products(hidden: int, width: int) -> tuple[tuple[str, int, int], ...]:
    """Name, k and n of both products."""
    return ("w13", hidden, 2 * width), ("w2", width, hidden)
