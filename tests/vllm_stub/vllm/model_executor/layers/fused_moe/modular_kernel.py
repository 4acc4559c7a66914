"""The steps of a mixture of experts: prepare, experts, finalize."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        raise NotImplementedError


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
