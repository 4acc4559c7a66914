"""The part of SGLang 0.5.23 that the plugin uses, in little: the same names, methods, parameters and shapes.

The tests of the plugin run on this in place of SGLang, and on SGLang's own sources where they are (sglang_sources.py).
``tests/sglang_interface.json`` has the parameters of every function here as the sources have them; a test compares.
"""

from __future__ import annotations

import copy
import functools
import importlib.machinery
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

MODULES: dict[str, list[Any]] = defaultdict(list)
"""Classes and functions of this file by the module of SGLang that has them."""


def at(*modules: str) -> Callable[[Any], Any]:
    """Put a class or function into modules below ``sglang.srt``; the first is the one that defines it."""

    def put(value: Any) -> Any:
        for module in modules:
            MODULES[f"sglang.srt.{module}"].append(value)
        return value

    return put


def install() -> None:
    """Put the modules into sys.modules."""
    for name in MODULES:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            each = ".".join(parts[:i])
            if each not in sys.modules:
                sys.modules[each] = types.ModuleType(each)
                sys.modules[each].__path__ = []  # type: ignore[attr-defined]
                sys.modules[each].__spec__ = importlib.machinery.ModuleSpec(each, None)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[each])
        for value in MODULES[name]:
            setattr(sys.modules[name], value.__name__, value)


def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


@at("layers.parameter")
class ModelWeightParameter(torch.nn.Parameter):
    def __new__(cls, **kwargs):
        return super().__new__(cls, kwargs["data"], requires_grad=False)

    def __init__(self, output_dim, **kwargs):
        self.output_dim, self.weight_loader = output_dim, kwargs["weight_loader"]


# --- plugins ---------------------------------------------------------------------------------------------------------


@at("plugins.hook_registry")
class HookType(Enum):
    AROUND = "around"


@at("plugins.hook_registry")
class HookRegistry:
    _hooks: ClassVar[dict[str, list[Any]]] = defaultdict(list)
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None):
        cls._hooks[target].append(hook)

    @classmethod
    def apply_hooks(cls):
        for target in cls._hooks.keys() - cls._patched:
            module, name, method = target.rsplit(".", 2)
            owner = getattr(sys.modules[module], name)
            for hook in cls._hooks[target]:
                setattr(owner, method, _around(hook, getattr(owner, method)))
            cls._patched.add(target)


def _around(hook, own):
    @functools.wraps(own)
    def hooked(*args, **kwargs):
        return hook(own, *args, **kwargs)

    return hooked


@at("model_executor.model_runner")
class ModelRunner:
    def load_model(self):
        self.load()


class _Loader:
    def load_model(self, *, model_config, device_config):
        return self.load()


@at("model_loader.loader")
class ShardedStateLoader(_Loader):
    pass


@at("model_loader.loader")
class DummyModelLoader(_Loader):
    pass


@at("model_loader.loader")
class PreshardedModelLoader(_Loader):
    pass


@at("model_loader.loader")
class RemoteModelLoader:
    def _load_model_from_remote_kv(self, model, model_config, client):
        self.load()


class _Named(NamedTuple):
    """A backend of SGLang's by its name."""

    value: str

    def is_none(self):
        return self.value == "none"

    def is_marlin(self):
        return self.value == "marlin"


# --- linear layers ---------------------------------------------------------------------------------------------------


class Shapes(NamedTuple):
    """The fields that are read of MarlinLinearLayerConfig."""

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]


class _Asked:
    """What has weights. ``asked`` lists what was asked of it."""

    asked: list[str]

    def process_weights_after_loading(self, layer):
        self.asked.append("process")


class _Scheme(_Asked):
    def apply_weights(self, layer, x, bias=None):
        self.asked.append("apply")


class _Method(_Asked):
    def apply(self, layer, x, bias=None):
        self.asked.append("apply")


class _ExpertsMethod(_Asked):
    def apply(self, layer, dispatch_output):
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
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        params_dtype,
        weight_loader,
        **kwargs,
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
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        params_dtype,
        weight_loader,
        **kwargs,
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
        self,
        layer,
        input_size,
        output_partition_sizes,
        input_size_per_partition,
        params_dtype,
        weight_loader,
        **kwargs,
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
        self,
        layer,
        output_partition_sizes,
        input_size_per_partition,
        params_dtype,
        weight_loader,
        **kwargs,
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
        self.asked = []

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
    return _Named("marlin")


# --- linear layers, and the configs that make their methods -----------------------------------------------------------


@at("layers.quantization.base_config")
class LinearMethodBase:
    pass


@at("layers.linear")
class LinearBase(torch.nn.Module):
    scheme = None


@at("layers.linear")
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
        output_sizes=None,
        prefix="",
        *,
        use_presharded_weights=False,
        skip_block_quant_check=False,
        parallel_group=None,
    ):
        super().__init__()
        self.output_size_per_partition, self.parallel_group, self.params_dtype = (
            output_size,
            parallel_group,
            params_dtype,
        )
        self.quant_method = quant_config.get_quant_method(self, prefix)
        sizes = getattr(self, "output_sizes", [output_size])
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=input_size,
            output_partition_sizes=sizes,
            input_size=input_size,
            output_size=output_size,
            params_dtype=params_dtype,
            weight_loader=self.weight_loader,
        )
        for p in self._parameters.values():
            p.weight_loader = getattr(p, "weight_loader", self.weight_loader)

    def weight_loader(self, param, loaded_weight):
        assert param.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)


@at("layers.linear")
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
        use_presharded_weights=False,
        parallel_group=None,
    ):
        self.__dict__["output_sizes"] = output_sizes
        options = {"params_dtype": params_dtype, "quant_config": quant_config, "parallel_group": parallel_group}
        super().__init__(input_size, sum(output_sizes), bias, prefix=prefix, **options)


class _Dense(LinearMethodBase):
    def create_weights(self, layer, input_size, output_size, params_dtype, **sizes):
        layer.register_parameter("weight", parameter(output_size, input_size, dtype=params_dtype))

    def process_weights_after_loading(self, layer):
        pass

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class _OfScheme(LinearMethodBase):
    def __init__(self, config, made):
        self.config, self.made = config, made

    def create_weights(self, layer, **sizes):
        layer.scheme = self.made(self.config)
        layer.scheme.create_weights(layer, **sizes)

    def process_weights_after_loading(self, layer):
        layer.scheme.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return layer.scheme.apply_weights(layer, x, bias)


@at("layers.quantization.utils")
def get_dynamic_override(config, layer_name, key=None, default_value=None):
    for pattern, settings in config.dynamic.items():
        if pattern.startswith("-:") and re.match(pattern.removeprefix("-:"), layer_name):
            return False
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), layer_name):
            return settings if key is None else settings.get(key, default_value)
    return default_value


class _GPTQ:
    checkpoint_format = ""

    def get_quant_method(self, layer, prefix):
        if get_dynamic_override(self, prefix) is False:
            return _Dense()
        own = copy.copy(self)
        own.weight_bits = get_dynamic_override(self, prefix, "bits", self.weight_bits)
        return _OfScheme(own, self.scheme)


@at("layers.quantization.gptq")
class GPTQConfig(_GPTQ):
    scheme = GPTQLinearScheme

    def __init__(
        self,
        weight_bits,
        group_size,
        desc_act,
        lm_head_quantized,
        dynamic,
        checkpoint_format="",
        true_sequential=False,
        static_groups=False,
    ):
        self.weight_bits, self.group_size, self.desc_act, self.dynamic = weight_bits, group_size, desc_act, dynamic


@at("layers.quantization.gptq")
class GPTQMarlinConfig(_GPTQ):
    scheme = GPTQMarlinLinearScheme

    def __init__(self, weight_bits, group_size, desc_act, is_sym, lm_head_quantized, dynamic, full_config):
        self.weight_bits, self.group_size, self.desc_act, self.dynamic = weight_bits, group_size, desc_act, dynamic


@at("layers.quantization.compressed_tensors.compressed_tensors")
class CompressedTensorsConfig:
    def _get_scheme_from_parts(self, weight_quant, input_quant, format=None):
        raise NotImplementedError("No compressed-tensors compatible scheme was found.")

    def get_quant_method(self, layer, prefix):
        return None


@at("runtime_context")
def get_exec():
    return types.SimpleNamespace(
        deterministic=types.SimpleNamespace(enable_deterministic_inference=False),
        offload=types.SimpleNamespace(cpu_offload_gb=0, offload_group_size=-1),
    )


@at("runtime_context")
def get_lora():
    return types.SimpleNamespace(enable_lora=False)


@at("runtime_context")
def get_spec():
    return types.SimpleNamespace(speculative_algorithm=None)


@at("runtime_context")
def get_parallel():
    return types.SimpleNamespace(dwdp_size=1)


@at("layers.vocab_parallel_embedding")
class VocabParallelEmbedding(torch.nn.Module):
    pass


@at("layers.vocab_parallel_embedding")
class ParallelLMHead(VocabParallelEmbedding):
    pass


# --- mixtures of experts ---------------------------------------------------------------------------------------------


@at("layers.moe.utils")
def get_moe_a2a_backend():
    return _Named("none")


_names: set[str] = set()


@at("layers.moe.utils")
def resolve_moe_runner_backend(backend):
    if backend not in _names:
        raise ValueError(f"MoE runner backend {backend!r} is neither built in nor registered")
    return _Named(backend)


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
        return self.runner_core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=None)


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


class _Experts(_Asked):
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
class W4AFp8MoEMethod(_ExpertsMethod):
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


@at("layers.quantization.modelopt_quant")
class ModelOptNvFp4FusedMoEMethod(_ExpertsMethod):
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
        self.moe_runner_config, self._moe_runner_backend = moe_runner_config, _Named("marlin")


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
class Mxfp4MoEMethod(_ExpertsMethod):
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
        return _Named("triton_kernel")


@at("layers.quantization.mxfp4_marlin_moe")
class Mxfp4MarlinMoEMethod(_ExpertsMethod):
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
        return _Named("marlin")


def products(hidden: int, width: int) -> tuple[tuple[str, int, int], ...]:
    """Name, k and n of both products."""
    return ("w13", hidden, 2 * width), ("w2", width, hidden)
