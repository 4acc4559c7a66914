"""The method of a layer of experts."""

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: FusedMoEConfig):
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ) -> tuple[int, int]:
        padded = 256 if moe_parallel_config.all2all_backend == "deepep_high_throughput" else 1
        return -(-hidden_size // padded) * padded, intermediate_size_per_partition

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def is_monolithic(self) -> bool:
        return True
