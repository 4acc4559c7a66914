"""Mixtures of experts."""

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

__all__ = ["RoutedExperts"]
