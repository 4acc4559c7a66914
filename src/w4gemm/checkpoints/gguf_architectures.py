"""Architectures of GGUF files that are read: llama.cpp's names of tensors and settings, and what it changes of them.

Sources: llama.cpp's convert_hf_to_gguf.py and src/models; the ``gguf`` package's tensor_mapping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Value = Callable[[str], Any]
"""Gives a value of a file's metadata by its key without the architecture, or None."""


class Architecture(NamedTuple):
    """Names and changes of tensors that llama.cpp makes of an architecture."""

    permuted: Mapping[str, str] = {}
    """Tensors whose rows it reorders, and the key of their number of heads."""
    names: Mapping[str, str] = {}
    """Names in the model that differ from those of others; a key with a leaf, such as "a.weight", names the tensor."""
    added_to_norms: int = 0
    """Number that it adds to the weights of norms."""
    settings: Callable[[Value], Mapping[str, Any]] = lambda value: {}
    """Gives settings of the model's config that transformers does not take from the file; None leaves its own."""
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
_GEMMA_2_27B_BLOCKS = 46


def _gemma2(value: Value) -> Mapping[str, Any]:
    """The number that scales queries is not in the file; llama.cpp knows it by the number of blocks."""
    large = value("block_count") == _GEMMA_2_27B_BLOCKS
    scale = value("embedding_length") // value("attention.head_count") if large else value("attention.key_length")
    return {"query_pre_attn_scalar": scale}


def _gpt_oss(value: Value) -> Mapping[str, Any]:
    """llama.cpp extends positions as the model does, with beta_fast 32 and beta_slow 1, and cuts no correction off."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": value("rope.freq_base"),
        "factor": value("rope.scaling.factor"),
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return {
        "rope_parameters": yarn if yarn["factor"] else None,
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("expert_feed_forward_length"),
        "sliding_window": value("attention.sliding_window"),
    }


def _phi3(value: Value) -> Mapping[str, Any]:
    """A window of 0 is none: it tells Phi-4 from earlier models."""
    head_dim = value("embedding_length") // value("attention.head_count")
    share = (value("rope.dimension_count") or head_dim) / head_dim
    rope = {"rope_type": "default", "rope_theta": value("rope.freq_base"), "partial_rotary_factor": share}
    return {"sliding_window": value("attention.sliding_window") or None, "rope_parameters": rope}


ARCHITECTURES = {
    "llama": Architecture({"attn_q": "head_count", "attn_k": "head_count_kv"}),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma2": Architecture(names=_GEMMA_NORMS, added_to_norms=1, settings=_gemma2),
    "gemma3": Architecture(names=_GEMMA_NORMS, added_to_norms=1),
    "phi3": Architecture(
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=_phi3,
    ),
    "qwen3moe": Architecture(
        names={"ffn_gate_inp": "mlp.gate"},
        settings=lambda value: {"moe_intermediate_size": value("expert_feed_forward_length")},
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
