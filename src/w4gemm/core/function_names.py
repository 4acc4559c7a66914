"""The names of activations, with their constants, and of routers' scorings. Importing this does without PyTorch, so
that a command answers a mistyped --activation or --router at once; ``activation.py`` and ``router.py`` say what the
names mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from w4gemm.core.words import nearest

ACTIVATION_NAMES = (
    *("relu", "relu2", "gelu", "gelu_tanh", "silu"),
    *("silu_mul", "gelu_mul", "gelu_tanh_mul", "swiglu_oai", "situ_mul"),
)
"""Keys of ``ACTIVATIONS``, in their order."""
CONSTANTS: Mapping[str, Mapping[str, float | None]] = {
    "silu_mul": {"limit": None},
    "swiglu_oai": {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    "situ_mul": {"beta": 4.0, "linear_beta": 25.0},
}
"""The constants of activations that have some, with their usual values."""
_OPTIONAL = {("silu_mul", "limit"), ("swiglu_oai", "beta"), ("swiglu_oai", "limit"), ("situ_mul", "linear_beta")}
"""The constants that may be None, for no limit or no addend."""
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


def activation_parts(text: object) -> tuple[str, dict[str, float | None]]:
    """Return the name in an activation's text such as ``"silu_mul(limit=10)"``, and all its constants.

    Raises:
        ValueError: for an unknown name or constant, or a constant that is no number above 0.
    """
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", text) if isinstance(text, str) else None
    name, inside = match.groups(default="") if match else ("", "")
    if name not in ACTIVATION_NAMES:
        expected = f"one of {', '.join(ACTIVATION_NAMES)} (constants as in silu_mul(limit=10)) or None"
        raise ValueError(f"activation: wanted {expected}, got {text!r}{_nearest(text)}")
    constants = dict(CONSTANTS.get(name, {}))
    for constant in map(str.strip, inside.split(",") if inside else ()):
        key, _, value = constant.partition("=")
        if key not in constants:
            expected = f"wanted {' or '.join(f'{c}=NUMBER' for c in constants)}" if constants else "it has no constants"
            raise ValueError(f"activation: {name}: {expected}, got {constant!r}")
        constants[key] = _number(name, key, value)
    return name, constants


def _number(name: str, key: str, text: str) -> float | None:
    optional = (name, key) in _OPTIONAL
    if optional and text == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        expected = "a number above 0" + (" or none" if optional else "")
        raise ValueError(f"activation: {name}: {key}: wanted {expected}, got {text!r}")
    return number


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
