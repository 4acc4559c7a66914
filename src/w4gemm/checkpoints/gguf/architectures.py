"""Architectures of GGUF files that are read: llama.cpp's names of tensors and settings, and what it changes of them.

Sources: llama.cpp's conversion/, src/llama-model.cpp, src/llama-context.cpp and src/models; the ``gguf`` package's
tensor_mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Value = Callable[[str], Any]
"""Gives a value of a file's metadata by its key without the architecture, or None."""


_ROPE_TYPES = ("none", "linear", "yarn")
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
"""Keys below rope.scaling of transformers' parameters of YaRN that a file may leave to their defaults."""
_ROPE_NEUTRAL = {"attn_factor": 1, "yarn_ext_factor": 1, "yarn_log_multiplier": 0}
"""Keys below rope.scaling that transformers has no parameter for, and the value with which they change nothing."""


def positive(value: Value, key: str) -> float | None:
    """Return a number of the metadata; None if it is missing or 0, which is llama.cpp's default.

    Raises:
        ValueError: for anything else; the message begins with the key.
    """
    number = value(key)
    if number is None or number == 0:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise ValueError(f"{key}: wanted a positive number, got {number!r}")
    return number


def count(value: Value, key: str) -> int:
    """Return a whole number of the metadata, which is not 0.

    Raises:
        ValueError: for anything else, or if there is none; the message begins with the key.
    """
    number = value(key)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{key}: wanted a number from 1, got {number!r}")
    return number


def check(value: Value) -> None:
    """Check what llama.cpp does not do without either: transformers would take numbers of its own.

    Raises:
        ValueError: with a message that begins with the key.
    """
    key = "attention.layer_norm_rms_epsilon"
    epsilon = value(key)
    if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
        raise ValueError(f"{key}: wanted a number from 0 to 1, got {epsilon!r}")
    if (experts := value("expert_count")) and count(value, "expert_used_count") > experts:
        raise ValueError(f"expert_used_count: wanted at most {experts}, got {value('expert_used_count')}")


def rope_base(value: Value, key: str = "rope.freq_base") -> float:
    """Return the base of the rotary embedding's frequencies."""
    return positive(value, key) or 10000.0


def rope_parameters(value: Value) -> dict[str, Any]:
    """Return transformers' parameters of the rotary embedding. A factor without a type scales linearly, as in
    llama.cpp.

    Raises:
        ValueError: for a type that is not known or a value that does not fit; the message begins with the key.
    """
    kind = value("rope.scaling.type")
    if kind not in (None, *_ROPE_TYPES):
        raise ValueError(f"rope.scaling.type: wanted {', '.join(_ROPE_TYPES)} or no such key, got {kind!r}")
    for key, neutral in _ROPE_NEUTRAL.items():
        if (setting := value(f"rope.scaling.{key}")) not in (None, neutral):
            raise ValueError(f"rope.scaling.{key}: wanted {neutral} or no such key, got {setting!r}")
    base = rope_base(value)
    factor = positive(value, "rope.scaling.factor") or positive(value, "rope.scale_linear") or 1
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": base}
    if kind != "yarn":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    length = positive(value, "rope.scaling.original_context_length") or value("context_length")
    yarn = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": length}
    stated = {name: positive(value, f"rope.scaling.{key}") for name, key in _YARN.items()}
    return yarn | {name: number for name, number in stated.items() if number is not None}


_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_parameters(factors: torch.Tensor, base: float) -> dict[str, Any] | None:
    """Return transformers' parameters of Llama 3.1 to 3.3, if a table of factors that frequencies are divided by is
    what llama.cpp makes of them; else None."""
    exponents = torch.arange(len(factors), dtype=torch.float64, device=factors.device) / len(factors)
    turns = _LLAMA_3["original_max_position_embeddings"] / (2 * math.pi * base**exponents)
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    kept, factor = ((turns - low) / (high - low)).clamp(0, 1), factors.max().item()
    if not torch.allclose(1 / ((1 - kept) / factor + kept), factors.double(), rtol=1e-5):
        return None
    return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **_LLAMA_3}


def _settings(value: Value) -> Mapping[str, Any]:
    """Settings of most architectures. A head is hidden / heads wide unless the file says otherwise."""
    size = value("attention.key_length") or _hidden_per_head(value)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := value(key)) not in (None, size):
            raise ValueError(f"{key}: wanted {size}, the size of a head, or no such key, got {other!r}")
    return {"head_dim": size, "rope_parameters": rope_parameters(value)}


def _hidden_per_head(value: Value) -> int:
    hidden, heads = value("embedding_length"), value("attention.head_count")
    return hidden // heads


class Architecture(NamedTuple):
    """Names and changes of tensors that llama.cpp makes of an architecture."""

    permuted: Mapping[str, str] = {}
    """Tensors whose rows it reorders, and the key of their number of heads."""
    names: Mapping[str, str] = {}
    """Names in the model that differ from those of others; a key with a leaf, such as "a.weight", names the tensor."""
    added_to_norms: int = 0
    """Number that it adds to the weights of norms."""
    settings: Callable[[Value], Mapping[str, Any]] = _settings
    """Gives settings of the model's config that transformers does not take from the file; None leaves its own. Raises
    ValueError with a message that begins with the key."""
    unread: str = ""
    """Beginning of keys that transformers would read wrongly, without the architecture."""
    experts_transposed: bool = False
    """True if the model's parameters of all experts are (experts, k, n), with gates and ups alternating along n; else
    they are (experts, n, k), all gates before all ups."""


NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_2_27B_BLOCKS, _GEMMA_3_27B_BLOCKS = 46, 62
"""Numbers of blocks, by which llama.cpp knows the models that scale queries by another size than their heads'."""
_GEMMA_3_PERIOD = 6
"""One block in so many attends to all positions, unless the file says otherwise."""


def _gemma2(value: Value) -> Mapping[str, Any]:
    large = value("block_count") == _GEMMA_2_27B_BLOCKS
    scale = _hidden_per_head(value) if large else value("attention.key_length")
    caps = {key: positive(value, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    window = "attention.sliding_window"
    settings = {"sliding_window": None if value(window) is None else count(value, window)}
    return {"query_pre_attn_scalar": scale, "rope_parameters": rope_parameters(value), **caps, **settings}


def _gemma3(value: Value) -> Mapping[str, Any]:
    """Positions are scaled in blocks that attend to all of them, and all blocks do in a file without a window. Queries
    of all models but the largest are scaled by 256, the size of their heads, as transformers takes for granted."""
    blocks, period = value("block_count"), value("attention.sliding_window_pattern")
    period = _GEMMA_3_PERIOD if period is None else period
    if not isinstance(period, int) or period < 1:
        raise ValueError(f"attention.sliding_window_pattern: wanted a number from 1, got {period!r}")
    if not value("attention.sliding_window"):
        period = 1
    local = {"rope_type": "default", "rope_theta": rope_base(value, "rope.freq_base_swa")}
    return {
        "query_pre_attn_scalar": _hidden_per_head(value) if blocks == _GEMMA_3_27B_BLOCKS else None,
        "rope_parameters": {"full_attention": rope_parameters(value), "sliding_attention": local},
        "layer_types": ["sliding_attention" if i % period else "full_attention" for i in range(1, blocks + 1)],
        "final_logit_softcapping": positive(value, "final_logit_softcapping"),
    }


def _gpt_oss(value: Value) -> Mapping[str, Any]:
    """llama.cpp extends positions as the model does, with beta_fast 32 and beta_slow 1, and cuts no correction off."""
    rope = rope_parameters(value)
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    return {
        "rope_parameters": yarn | rope,
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("expert_feed_forward_length"),
        "sliding_window": count(value, "attention.sliding_window"),
    }


def _phi3(value: Value) -> Mapping[str, Any]:
    """A window of 0 is none: it tells Phi-4 from earlier models."""
    head_dim, rope = _hidden_per_head(value), rope_parameters(value)
    share = (value("rope.dimension_count") or head_dim) / head_dim
    return {
        "sliding_window": value("attention.sliding_window") or None,
        "rope_parameters": rope | {"partial_rotary_factor": share},
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
    }


ARCHITECTURES = {
    "llama": Architecture({"attn_q": "head_count", "attn_k": "head_count_kv"}),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma2": Architecture(names=_GEMMA_NORMS, added_to_norms=1, settings=_gemma2),
    "gemma3": Architecture(names=_GEMMA_NORMS, added_to_norms=1, settings=_gemma3),
    "phi3": Architecture(
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=_phi3,
    ),
    "qwen3moe": Architecture(
        names={"ffn_gate_inp": "mlp.gate"},
        settings=lambda value: {"moe_intermediate_size": value("expert_feed_forward_length"), **_settings(value)},
    ),
    "gpt-oss": Architecture(
        names={
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
        },
        settings=_gpt_oss,
        unread="rope.scaling.",
        experts_transposed=True,
    ),
}
"""By name."""
