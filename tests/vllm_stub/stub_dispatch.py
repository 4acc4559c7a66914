"""The first and the last step of a mixture of experts, in few words: not vLLM's, but of its form."""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate


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


class NoDPEP:
    activation_format = mk.FusedMoEActivationFormat.Standard

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


class Received(NoDPEP):
    """DeepEP's receivers of many tokens: what comes in 16 bits gets one scale in all, whatever was asked for."""

    def prepare(self, a1, topk_weights, topk_ids, on_input, quant_config, defer_input_quant):
        if quant_config.quant_dtype is None or defer_input_quant:
            return a1, None, None
        x, scale = _quantized(a1.view(1, -1), quant_config, False)
        return x.view(a1.shape), scale.view(1), None


class Batched(NoDPEP):
    """Tokens in rows of their experts, of which each has room for more."""

    activation_format = mk.FusedMoEActivationFormat.BatchedExperts

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
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        return *_quantized(rows, quant_config, defer_input_quant), meta

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, weight_and_reduce_impl):
        assert isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate)
        output.zero_()
        for (t, j), (e, row) in self.places.items():
            output[t] += topk_weights[t, j].to(output.dtype) * fused_expert_output[e, row]
