"""A layer that holds experts."""

import torch


class RoutedExperts(torch.nn.Module):
    def __init__(
        self,
        layer_name,
        params_dtype,
        moe_config,
        quant_config,
        expert_map_manager,
        apply_router_weight_on_input=False,
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
