"""4-bit-weight matrix multiplication for NVIDIA GPUs, from pure Python. Importing this touches no GPU."""

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from w4gemm.core.environment import configure_logging

__version__ = "0.2.0"

if TYPE_CHECKING or os.path.basename((getattr(sys, "argv", None) or [""])[0]) not in ("w4gemm", "-m"):
    from w4gemm.api import *  # noqa: F403 (its __all__)
    from w4gemm.api import __all__ as __all__
    from w4gemm.core.imports import when_imported

    def _adapt_peft() -> None:
        from w4gemm.integrations.peft import enable

        enable()

    when_imported("peft", _adapt_peft)
else:  # the program, also while Python looks for the module of `python -m w4gemm`: its --help does without PyTorch

    def __getattr__(name: str) -> Any:
        import w4gemm.api

        return getattr(w4gemm.api, name)


try:
    configure_logging()
except ValueError as e:  # a command says it again, and ends
    warnings.warn(str(e), stacklevel=2)
