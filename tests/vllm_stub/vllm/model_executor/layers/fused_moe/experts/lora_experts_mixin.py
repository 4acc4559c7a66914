"""Experts beside LoRA adapters."""


class LoRAExpertsMixin:
    _lora_context = None

    def set_lora_context(self, ctx) -> None:
        self._lora_context = ctx

    @staticmethod
    def supports_lora() -> bool:
        return True

    def apply_w13_lora(
        self,
        lora_context,
        *,
        y,
        x,
        topk_ids,
        topk_weights,
        expert_map,
        w1,
        w2,
        num_tokens,
        top_k_num,
        add_inputs=True,
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
