"""The experts of a layer with LoRA adapters, several in a step: :class:`LoraExperts`.

vLLM's kernels add what adapters contribute to rows in the order of the tokens' choices: before the activation, and to
the results of the second product. So the first product has no activation in its epilogue, and a launch of its own adds,
activates and brings rows into both orders. The launches do not depend on which adapters a step has; one without any
runs as without LoRA.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from w4gemm.api.routing import combined, routed
from w4gemm.integrations.engines.adapters import adapted, beside_adapters
from w4gemm.integrations.engines.warmup import Need
from w4gemm.integrations.vllm.experts_formats import in_pairs
from w4gemm.integrations.vllm.experts_kernel import ExpertsProduct, LastStep, W4gemmExperts
from w4gemm.kernels.arguments import ExpertRows


class LoraExperts(LoRAExpertsMixin, W4gemmExperts):  # type: ignore[misc, unused-ignore]
    """Tokens as they are, and adapters of some of them.

    Args:
        gate_up, down, others: as for :class:`W4gemmExperts`.
    """

    def __init__(self, gate_up: ExpertsProduct, down: ExpertsProduct, **others: Any) -> None:
        super().__init__(gate_up, down, **others)
        assert gate_up.epilogue.activation is not None
        self.activation = gate_up.epilogue.activation
        self.rows_to_adapt = gate_up._replace(epilogue=gate_up.epilogue._replace(activation=None))
        self._warms_up = False
        """True while all that runs beside adapters is launched without any."""
        # vLLM reads the sizes of unpacked weights off these
        self._unpacked = [torch.empty(w.experts, w.n, w.k, device="meta") for w in (self.gate_up, self.down)]

    @property
    def columns_between(self) -> int:
        return self.gate_up.n

    def apply(  # vLLM names every argument
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        workspace2: torch.Tensor,
        **others: Any,
    ) -> None:
        if not (self._warms_up or self._has_adapters()):
            size = len(workspace2), super().columns_between
            super().apply(
                output=output,
                hidden_states=hidden_states,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                expert_map=expert_map,
                a1q_scale=a1q_scale,
                workspace2=workspace2.view(-1)[: math.prod(size)].view(size),
                **others,
            )
            return
        routing = routed(topk_ids, self.gate_up.experts, expert_map)
        down = self.products[1]
        first, end = routing.m_offsets[:-1], routing.m_offsets[1:]
        self.rows_to_adapt.write(hidden_states, workspace2, ExpertRows(first, end, routing.tokens), a1q_scale)
        choices, sizes = topk_ids.numel(), (self.gate_up.n, self.down.n)
        zeros = workspace2.new_zeros(choices * sum(sizes))  # of both products' adapters, in one launch
        added, added_to_down = (part.view(choices, -1) for part in zeros.split([choices * n for n in sizes]))
        chosen = {"topk_weights": topk_weights, "num_tokens": len(topk_ids), "top_k_num": topk_ids.shape[1]}
        chosen |= dict(zip(("w1", "w2"), self._unpacked, strict=True))
        sorting = self._add_to_gate_up(added, hidden_states, topk_ids, expert_map, chosen)
        hidden = adapted(workspace2, added, routing.row_of_choice, self.activation, not in_pairs(self.moe_config))
        down.write(hidden.by_expert, output.view(-1, self.down.n), ExpertRows(first, end, settled=1), None)
        if sorting is not None:  # times the weights
            y = added_to_down.view(*topk_ids.shape, -1)
            self.apply_w2_lora(self._lora_context, y=y, x=hidden.by_choice, **sorting, **chosen)

        def add_up(d: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            return combined(d, routing.row_of_choice, weights, out, settled=True, added=added_to_down)

        self._last_step = LastStep(add_up)

    def _has_adapters(self) -> bool:
        """True unless no token of this step has an adapter. The host knows that, and vLLM replays a CUDA graph that was
        captured without adapters only for such steps."""
        context = self._lora_context
        if context is None:
            return False
        if getattr(context, "local_token_lora_mapping", None) is not None:  # tokens of other processes too
            return True
        step = getattr(context.punica_wrapper, "token_mapping_meta", None)
        return step is None or not step.no_lora_flag_cpu.item()

    def _add_to_gate_up(
        self,
        added: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        chosen: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Add the contributions of adapters to the rows of choices, and return how vLLM has sorted these; None for a
        layer without adapters. chosen: what vLLM wants to know behind both products."""
        context = self._lora_context
        if context is None:
            return None
        sent: torch.Tensor | None = context.original_hidden_states
        x = sent if sent is not None and len(sent) == len(hidden_states) else hidden_states
        sorting = self.apply_w13_lora(context, y=added, x=x, topk_ids=topk_ids, expert_map=expert_map, **chosen)
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
        return dict(zip(names, sorting, strict=True))

    def need(self, most_tokens: int) -> Need:
        moe = self.moe_config
        facts = moe.in_dtype, moe.experts_per_token, self.activation, not in_pairs(moe)
        return beside_adapters(super().need(most_tokens), self.gate_up.device, *facts)

    def _run_once(self, count: int) -> None:
        for self._warms_up in (True, False):
            super()._run_once(count)
