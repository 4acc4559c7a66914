"""Linear layers of SGLang's that have methods of a config, the configs, and the settings of an engine."""

from __future__ import annotations

import copy
import re
import types

import torch

from sglang_stub.linear import GPTQLinearScheme, GPTQMarlinLinearScheme
from sglang_stub.registry import at, parameter


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
