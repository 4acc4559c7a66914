"""MXFP4."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class Mxfp4Config(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        cls = GptOssMxfp4MoEMethod if isinstance(self, GptOssMxfp4Config) else Mxfp4MoEMethod
        return cls(layer.moe_config)


class GptOssMxfp4Config(Mxfp4Config):
    pass


class Mxfp4MoEMethod(FusedMoEMethodBase):
    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ) -> tuple[int, int]:
        return -(-hidden_size // 256) * 256, -(-intermediate_size_per_partition // 256) * 256


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ) -> tuple[int, int]:
        return -(-hidden_size // 256) * 256, -(-intermediate_size_per_partition // 256) * 256
