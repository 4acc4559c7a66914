"""The names of activations and of routers' scorings. Importing this does without PyTorch, so that a command answers a
mistyped --activation or --router at once; ``activation.py`` and ``router.py`` say what the names mean."""

from __future__ import annotations

import re

from w4gemm.core.words import nearest

ACTIVATION_NAMES = (
    *("relu", "relu2", "gelu", "gelu_tanh", "silu"),
    *("silu_mul", "gelu_mul", "gelu_tanh_mul", "swiglu_oai", "situ_mul"),
)
"""Keys of ``ACTIVATIONS``, in their order."""
SCORINGS = ("softmax", "sigmoid")

_OTHER_NAMES = {
    "swish": "silu",
    "squared_relu": "relu2",
    "relu_squared": "relu2",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swiglu": "silu_mul",
    "silu_and_mul": "silu_mul",
    "geglu": "gelu_mul",
    "gelu_and_mul": "gelu_mul",
    "gelu_tanh_and_mul": "gelu_tanh_mul",
    "swigluoai": "swiglu_oai",
    "swigluoai_and_mul": "swiglu_oai",
}
"""Names of the same formulas in transformers, vLLM and papers, for messages alone."""


def activation_parts(text: object) -> tuple[str, str]:
    """Return the name in an activation's text such as ``"silu_mul(limit=10)"``, and what is in its parentheses.

    Raises:
        ValueError: for an unknown name.
    """
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", text) if isinstance(text, str) else None
    name, inside = match.groups(default="") if match else ("", "")
    if name not in ACTIVATION_NAMES:
        expected = f"one of {', '.join(ACTIVATION_NAMES)} (constants as in silu_mul(limit=10)) or None"
        raise ValueError(f"activation: wanted {expected}, got {text!r}{_nearest(text)}")
    return name, inside


def require_scoring(name: str) -> None:
    """Raise ValueError unless ``name`` is a router's scoring."""
    if name not in SCORINGS:
        raise ValueError(f"scoring: wanted one of {', '.join(SCORINGS)}, got {name!r}{nearest(name, SCORINGS)}")


def _nearest(wrong: object) -> str:
    """Return the end of a message that names the activation meant by another name, or by a function."""
    called = wrong
    if callable(wrong):  # such as torch.nn.functional.silu, torch.nn.SiLU or torch.nn.SiLU()
        called = getattr(wrong, "__name__", type(wrong).__name__)
    name = _OTHER_NAMES.get(called.lower()) if isinstance(called, str) else None
    return f"; nearest is {name!r}" if name else nearest(called, ACTIVATION_NAMES)
