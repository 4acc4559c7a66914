"""Linear layers."""

from abc import abstractmethod

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
