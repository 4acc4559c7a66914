"""Environment variables."""

from collections.abc import Callable
from typing import Any

VLLM_BATCH_INVARIANT = False
VLLM_DISABLED_KERNELS: list[str] = []

environment_variables: dict[str, Callable[[], Any]] = {}
