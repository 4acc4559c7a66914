"""Environment variables."""

from collections.abc import Callable
from typing import Any

VLLM_BATCH_INVARIANT = False

environment_variables: dict[str, Callable[[], Any]] = {}
