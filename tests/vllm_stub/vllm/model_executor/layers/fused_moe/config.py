"""Settings of a mixture of experts."""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation


@dataclass
class FusedMoEParallelConfig:
    dp_size: int = 1
    ep_size: int = 1
    ep_rank: int = 0
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    enable_eplb: bool = False

    @property
    def use_all2all_kernels(self):
        return self.use_ep and self.dp_size > 1

    @property
    def use_deepep_ll_kernels(self):
        return self.all2all_backend == "deepep_low_latency"

    @property
    def use_deepep_ht_kernels(self):
        return self.all2all_backend == "deepep_high_throughput"

    @property
    def use_deepep_v2_kernels(self):
        return self.all2all_backend == "deepep_v2"

    @property
    def use_moonep_kernels(self):
        return self.all2all_backend == "moonep"

    @property
    def use_passthrough_all2all(self):
        return self.all2all_backend == "passthrough"

    @property
    def use_fi_nvl_two_sided_kernels(self):
        return self.all2all_backend == "flashinfer_nvlink_two_sided"

    @property
    def use_fi_nvl_one_sided_kernels(self):
        return self.all2all_backend == "flashinfer_nvlink_one_sided"


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    in_dtype: torch.dtype
    activation: MoEActivation = MoEActivation.SILU
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    moe_backend: str = "auto"
    has_bias: bool = False
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    intermediate_size_per_partition_unpadded: int | None = None


@dataclass
class FusedMoEQuantConfig:
    quant_dtype: Any = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None

    @staticmethod
    def make(quant_dtype=None, per_act_token_quant=False, block_shape=None, weight_dtype=None):
        return FusedMoEQuantConfig(quant_dtype, per_act_token_quant, block_shape)
