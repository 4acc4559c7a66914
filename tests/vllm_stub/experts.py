"""Mixtures of experts of vLLM's: settings, layers, and the steps of a layer. The first and the last step are not
vLLM's, but of its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import torch

from vllm_stub import VLLM
from vllm_stub.linear import QuantizeMethodBase

at = VLLM.at
MOE = "model_executor.layers.fused_moe"

# --- settings --------------------------------------------------------------------------------------------------------


@at(f"{MOE}.activation")
class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SITU = "situ"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"


@at(f"{MOE}.config")
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
    def use_nixl_ep_kernels(self):
        return self.all2all_backend == "nixl_ep"

    @property
    def use_fi_nvl_two_sided_kernels(self):
        return self.all2all_backend == "flashinfer_nvlink_two_sided"

    @property
    def use_fi_nvl_one_sided_kernels(self):
        return self.all2all_backend == "flashinfer_nvlink_one_sided"


@at(f"{MOE}.config")
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


@at(f"{MOE}.config")
@dataclass
class FusedMoEQuantConfig:
    quant_dtype: Any = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None

    @staticmethod
    def make(quant_dtype=None, per_act_token_quant=False, block_shape=None, weight_dtype=None):
        return FusedMoEQuantConfig(quant_dtype, per_act_token_quant, block_shape)


# --- a layer and its method ------------------------------------------------------------------------------------------


@at(f"{MOE}.fused_moe_method_base")
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


@at(f"{MOE}.routed_experts", MOE)
class RoutedExperts(torch.nn.Module):
    def __init__(
        self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager, apply_router_weight_on_input=False
    ):
        super().__init__()
        self.layer_name = layer_name
        self.moe_config = moe_config
        self.params_dtype = params_dtype
        self.hidden_size = moe_config.hidden_dim
        self.global_num_experts = moe_config.num_experts
        self.local_num_experts = moe_config.num_local_experts
        self.activation = moe_config.activation
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.register_buffer("_expert_map", expert_map_manager.expert_map)
        self.quant_method = quant_config.get_quant_method(self, layer_name)
        moe_config.intermediate_size_per_partition = self.quant_method.maybe_roundup_sizes(
            self.hidden_size,
            moe_config.intermediate_size_per_partition,
            moe_config.in_dtype,
            moe_config.moe_parallel_config,
        )[1]

    @property
    def expert_map(self):
        return self._expert_map

    def _expert_routing_tables(self):
        return None

    def get_expert_weights(self):
        weights = list(self.named_parameters())
        assert all(weight.is_contiguous() for _, weight in weights)
        return [weight.view(self.local_num_experts, -1) for _, weight in weights]

    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        assert not self.quant_method.is_monolithic
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


# --- the steps -------------------------------------------------------------------------------------------------------


@at(f"{MOE}.modular_kernel")
class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@at(f"{MOE}.modular_kernel")
@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None


@at(f"{MOE}.modular_kernel")
class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        raise NotImplementedError


@at(f"{MOE}.topk_weight_and_reduce")
class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        raise RuntimeError("The caller is expected to choose an implementation.")


@at(f"{MOE}.modular_kernel")
class FusedMoEExperts(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        batched = self.activation_format() == FusedMoEActivationFormat.BatchedExperts
        assert batched == (max_num_tokens is not None) == (num_dispatchers is not None)
        self.moe_config = moe_config
        self.quant_config = quant_config
        self.max_num_tokens = max_num_tokens
        self.num_dispatchers = num_dispatchers

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_activation(activation) -> bool:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False


@at(f"{MOE}.modular_kernel")
class FusedMoEExpertsModular(FusedMoEExperts):
    @abstractmethod
    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError

    def moe_problem_size(self, a1, w1, w2, topk_ids) -> tuple[int, int, int, int, int]:
        raise NotImplementedError

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        raise NotImplementedError

    @abstractmethod
    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ) -> None:
        raise NotImplementedError


@at(f"{MOE}.modular_kernel")
class FusedMoEKernel:
    def __init__(self, prepare_finalize, fused_experts):
        assert prepare_finalize.activation_format == fused_experts.activation_format()
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(
        self,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        apply_router_weight_on_input,
        shared_experts=None,
        shared_experts_input=None,
    ):
        experts, output = self.fused_experts, torch.empty_like(hidden_states)
        on_input = apply_router_weight_on_input
        x, scale, meta = self.prepare_finalize.prepare(
            hidden_states, topk_weights, topk_ids, on_input, experts.quant_config, experts.expects_unquantized_inputs
        )
        _, m, n, k, topk = experts.moe_problem_size(x, w1, w2, topk_ids)
        if m == 0:
            fused_out = torch.empty_like(x, dtype=hidden_states.dtype)
        else:
            sizes = (m, n, k, topk, global_num_experts, w1.shape[0], meta, activation)
            first, second, out = experts.workspace_shapes(*sizes)
            common = torch.full((max(prod(first), prod(out)),), torch.nan, dtype=hidden_states.dtype)
            workspace2 = torch.full(second, torch.nan, dtype=hidden_states.dtype)
            fused_out = common[: prod(out)].view(out)
            experts.apply(
                output=fused_out,
                hidden_states=x,
                w1=w1,
                w2=w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=activation,
                global_num_experts=global_num_experts,
                expert_map=expert_map,
                a1q_scale=scale,
                a2_scale=None,
                workspace13=common[: prod(first)].view(first),
                workspace2=workspace2,
                expert_tokens_meta=meta,
                apply_router_weight_on_input=on_input,
            )
        impl = experts.finalize_weight_and_reduce_impl()
        self.prepare_finalize.finalize(output, fused_out, topk_weights, topk_ids, on_input, impl)
        return output


def _quantized(a1, quant_config, defer_input_quant):
    """A scale for each token, as vLLM's own kernel has it; or, as DeepEP gives them, one for each 128 columns, with
    contiguous tokens."""
    if quant_config.quant_dtype is None or defer_input_quant:
        return a1, None
    if quant_config.block_shape:
        blocks = a1.unflatten(-1, (-1, quant_config.block_shape[1]))
        x, scale = _quantized(blocks, FusedMoEQuantConfig.make(quant_config.quant_dtype, True), False)
        return x.flatten(-2), scale.squeeze(-1).mT.contiguous().mT
    scale = (a1.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1 / (448 * 512))
    return (a1.float() / scale).to(quant_config.quant_dtype), scale


class _Alone:
    activation_format = FusedMoEActivationFormat.Standard

    def __init__(self, moe):
        self.moe = moe

    def prepare(self, a1, topk_weights, topk_ids, on_input, quant_config, defer_input_quant):
        a1 = a1 * topk_weights.to(a1.dtype) if on_input else a1
        return *_quantized(a1, quant_config, defer_input_quant), None

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, weight_and_reduce_impl):
        weight_and_reduce_impl.apply(
            output=output,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=on_input,
        )


class _Received(_Alone):
    """DeepEP's receivers of many tokens: what comes in 16 bits gets one scale in all, whatever was asked for."""

    def prepare(self, a1, topk_weights, topk_ids, on_input, quant_config, defer_input_quant):
        if quant_config.quant_dtype is None or defer_input_quant:
            return a1, None, None
        x, scale = _quantized(a1.view(1, -1), quant_config, False)
        return x.view(a1.shape), scale.view(1), None


class _Batched(_Alone):
    """Tokens in rows of their experts, of which each has room for more."""

    activation_format = FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self):
        return 4

    def num_dispatchers(self):
        return 2

    def prepare(self, a1, topk_weights, topk_ids, on_input, quant_config, defer_input_quant):
        rows = torch.full((self.moe.num_local_experts, 8, a1.shape[1]), torch.nan, dtype=a1.dtype)
        counts = torch.zeros(self.moe.num_local_experts, dtype=torch.int32)
        self.places = {}
        for t, j in torch.nonzero(topk_ids >= 0).tolist():
            e = int(topk_ids[t, j])
            rows[e, counts[e]] = a1[t]
            self.places[t, j] = e, int(counts[e])
            counts[e] += 1
        meta = ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        return *_quantized(rows, quant_config, defer_input_quant), meta

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, weight_and_reduce_impl):
        assert isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate)
        output.zero_()
        for (t, j), (e, row) in self.places.items():
            output[t] += topk_weights[t, j].to(output.dtype) * fused_expert_output[e, row]


@at(f"{MOE}.all2all_utils")
def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False):
    assert allow_new_interface
    parallel = moe.moe_parallel_config
    if parallel.use_deepep_ll_kernels:
        return _Batched(moe)
    received = parallel.use_deepep_ht_kernels or parallel.use_deepep_v2_kernels
    return _Received(moe) if received else _Alone(moe)


@at(f"{MOE}.experts.lora_experts_mixin")
class LoRAExpertsMixin:
    _lora_context = None

    def set_lora_context(self, ctx) -> None:
        self._lora_context = ctx

    @staticmethod
    def supports_lora() -> bool:
        return True

    def apply_w13_lora(
        self, lora_context, *, y, x, topk_ids, topk_weights, expert_map, w1, w2, num_tokens, top_k_num, add_inputs=True
    ):
        stacked = lora_context.w13_lora_a_stacked, lora_context.w13_lora_b_stacked
        wrapper = lora_context.punica_wrapper
        return wrapper.add_lora_w13(y, x, *stacked, topk_ids, topk_weights, expert_map, w1, w2, num_tokens, top_k_num)

    def apply_w2_lora(
        self,
        lora_context,
        *,
        y,
        x,
        topk_weights,
        sorted_token_ids_lora,
        expert_ids_lora,
        num_tokens_post_padded_lora,
        token_lora_mapping,
        num_tokens,
        w1,
        w2,
        top_k_num,
        add_inputs=True,
    ) -> None:
        stacked = lora_context.w2_lora_a_stacked, lora_context.w2_lora_b_stacked
        order = sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, token_lora_mapping
        lora_context.punica_wrapper.add_lora_w2(y, x, *stacked, topk_weights, *order, num_tokens, w1, w2, top_k_num)
