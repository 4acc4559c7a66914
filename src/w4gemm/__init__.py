"""Products of activations with weights of few bits, on NVIDIA GPUs and CPUs. Importing this touches no GPU."""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from w4gemm.core import environment
from w4gemm.core.words import nearest

__version__ = "0.2.0"

if TYPE_CHECKING or os.path.basename((getattr(sys, "argv", None) or [""])[0]) not in ("w4gemm", "-m"):
    from w4gemm.api import *  # noqa: F403 (its __all__)
    from w4gemm.api import __all__ as __all__
    from w4gemm.core.imports import when_imported

    def _adapt_peft() -> None:
        import w4gemm.integrations.peft  # noqa: F401 (its last line does it: it may be what imports PEFT)

    def _adapt_transformers() -> None:
        import w4gemm.integrations.pretrained_model  # noqa: F401 (alike)

    when_imported("peft", _adapt_peft)
    when_imported("transformers.modeling_utils", _adapt_transformers)
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a public name in the program, whose --help does without PyTorch; else only say where a name is."""
        if name.startswith("_"):
            raise AttributeError(f"module 'w4gemm' has no attribute {name!r}")
        import w4gemm.api

        public = getattr(w4gemm.api, "__all__", ())  # not yet there while it is imported
        if name in public:
            return getattr(w4gemm.api, name)
        raise AttributeError(f"module 'w4gemm' has no attribute {name!r}{_place_of(name, public)}")


def _place_of(name: str, public: Sequence[str]) -> str:
    """Return the end of a message: where a name is that is not here, or which one is nearest."""
    if name.isidentifier() and find_spec(f"w4gemm.{name}"):
        return f"; import w4gemm.{name}"
    if name in ("load", "quantize_layers", "dequantize_layers", "describe", "W4GemmConfig"):
        return f"; from w4gemm.integrations.transformers import {name}"
    if name in ("open_checkpoint", "find_checkpoint"):
        return f"; from w4gemm.checkpoints import {name}"
    return nearest({"gemm": "linear", "matmul": "linear", "mm": "linear"}.get(name, name), public)


try:
    environment.configure_logging()
except ValueError as e:  # a command says it again, and ends
    warnings.warn(str(e), stacklevel=2)
for _text in environment.unknown():
    warnings.warn(_text, stacklevel=2)
