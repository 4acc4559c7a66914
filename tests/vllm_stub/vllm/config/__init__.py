"""The engine's settings."""

from vllm.config.vllm import get_current_vllm_config_or_none

__all__ = ["get_current_vllm_config_or_none"]
