"""The engine's settings."""

from typing import Any


def get_current_vllm_config_or_none() -> Any:
    return None
