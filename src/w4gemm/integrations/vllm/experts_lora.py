"""The experts of a layer with LoRA adapters, several in a step: :class:`LoraExperts`.

vLLM's kernels add what adapters contribute to rows in the order of the tokens' choices: before the activation, and to
the results of the second product. So the first product has no activation in its epilogue, and PyTorch's operators bring
rows from one order to the other. The launches do not depend on which adapters a step has.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from w4gemm.api.routing import by_expert, combined, route
from w4gemm.core.activation import parse
from w4gemm.integrations.vllm.experts_formats import in_pairs
from w4gemm.integrations.vllm.experts_kernel import ExpertsProduct, LastStep, W4gemmExperts
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.packing.repack import rows_in_pairs


class LoraExperts(LoRAExpertsMixin, W4gemmExperts):  # type: ignore[misc, unused-ignore]
    """Tokens as they are, and adapters of some of them.

    Args:
        gate_up, down, others: as for :class:`W4gemmExperts`.
    """

    def __init__(self, gate_up: ExpertsProduct, down: ExpertsProduct, **others: Any) -> None:
        assert gate_up.epilogue.activation is not None
        self.formula = parse(gate_up.epilogue.activation)
        super().__init__(gate_up._replace(epilogue=gate_up.epilogue._replace(activation=None)), down, **others)
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
        **unused: Any,
    ) -> None:
        routing = route(topk_ids, self.gate_up.experts, expert_map)
        gate_up, down = self.products
        first, end = routing.m_offsets[:-1], routing.m_offsets[1:]
        gate_up.write(hidden_states, workspace2, ExpertRows(first, end, routing.tokens), a1q_scale)
        rows = workspace2[routing.row_of_choice.flatten().clamp(min=0)]
        added, sorting = self._first_contributions(rows, hidden_states, topk_weights, topk_ids, expert_map)
        hidden = self.formula.apply((rows + added).float()).to(rows.dtype)
        sent = by_expert(hidden, routing.row_of_choice)
        down.write(sent, output.view(-1, self.down.n), ExpertRows(first, end), None)
        contributions: torch.Tensor | None = None
        if sorting is not None:  # times the weights
            contributions = torch.zeros(*topk_ids.shape, self.down.n, dtype=rows.dtype, device=rows.device)
            self.apply_w2_lora(
                self._lora_context,
                y=contributions,
                x=hidden,
                topk_weights=topk_weights,
                **sorting,
                num_tokens=len(topk_ids),
                w1=self._unpacked[0],
                w2=self._unpacked[1],
                top_k_num=topk_ids.shape[1],
            )

        def add_up(d: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            total = combined(d, routing.row_of_choice, weights, out, settled=True)
            return total if contributions is None else total.add_(contributions.sum(1))

        self._last_step = LastStep(add_up)

    def _first_contributions(
        self,
        rows: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any] | None]:
        """Return the contributions of adapters to the rows of choices, and how vLLM has sorted these; zeros and None
        for a layer without adapters."""
        added, context = torch.zeros_like(rows), self._lora_context
        if context is None:
            return added, None
        sent: torch.Tensor | None = context.original_hidden_states
        sorting = self.apply_w13_lora(
            context,
            y=added,
            x=sent if sent is not None and len(sent) == len(hidden_states) else hidden_states,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            expert_map=expert_map,
            w1=self._unpacked[0],
            w2=self._unpacked[1],
            num_tokens=len(topk_ids),
            top_k_num=topk_ids.shape[1],
        )
        if self.formula.formula.gated and not in_pairs(self.moe_config):
            added = rows_in_pairs(added)
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
        return added, dict(zip(names, sorting, strict=True))
