"""Linear layers."""

from abc import abstractmethod

import torch

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
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
        raise NotImplementedError


def register_weight_loader_v2_supported_method(cls):
    return cls


class LinearBase(torch.nn.Module):
    def __init__(
        self,
        input_size,
        output_size,
        bias=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
    ):
        super().__init__()
        self.params_dtype, self.prefix = params_dtype or torch.bfloat16, prefix
        self.bias = torch.nn.Parameter(torch.randn(output_size, dtype=self.params_dtype)) if bias else None
        self.quant_method = quant_config.get_quant_method(self, prefix)


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
