"""Modules of published models, by the numbers of their config: :func:`layer_modules`, :func:`outer_modules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A linear module: d = x @ w.T + bias, with w (n, k)."""

    name: str
    n: int
    k: int
    bias: bool = False
    quantized: bool = True
    gain: float = 1.0
    """Standard deviation of d for x of standard deviation 1. What is added to the residual has a smaller one."""


class Stack(NamedTuple):
    """Weights (experts, n, k) with biases (experts, n), which a checkpoint keeps as one tensor."""

    name: str
    experts: int
    n: int
    k: int
    gain: float = 1.0


class Vector(NamedTuple):
    """A tensor that is never quantized; ``std`` 0 for ones, as in a norm."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    dtype: str | None = None
    """None for the model's."""


Module = Matrix | Stack | Vector
RESIDUAL_GAIN = 0.5


def layer_modules(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """Modules of layer ``index``, by their names within it."""
    kind = c["model_type"]
    if kind in _LAYERS:
        yield from _LAYERS[kind](c, index)
        return
    yield Vector("input_layernorm.weight", (c["hidden_size"],))
    yield Vector("post_attention_layernorm.weight", (c["hidden_size"],))
    yield from (_latent_attention if kind == "deepseek_v3" else _attention)(c)
    yield from _FEED_FORWARD[kind](c, index)


def _attention(c: Mapping[str, Any]) -> Iterator[Module]:
    kind, hidden, heads = c["model_type"], c["hidden_size"], c["num_attention_heads"]
    head_dim, biases = c.get("head_dim", hidden // heads), kind in ("qwen2", "gpt_oss", "glm4_moe")
    yield from _projections(c, "self_attn", head_dim, biases, kind == "gpt_oss", quantized=kind != "gpt_oss")
    if kind == "qwen3_moe":
        yield Vector("self_attn.q_norm.weight", (head_dim,))
        yield Vector("self_attn.k_norm.weight", (head_dim,))
    if kind == "gpt_oss":
        yield Vector("self_attn.sinks", (heads,), 1.0)


def _projections(
    c: Mapping[str, Any],
    at: str,
    head_dim: int,
    biases: bool = False,
    o_bias: bool = False,
    gates: bool = False,
    quantized: bool = False,
) -> Iterator[Matrix]:
    """q, k, v and o of attention. gates: q_proj also has a gate for each number of a head."""
    hidden, heads, kv_heads = (c[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    for leaf, n in (("q", (1 + gates) * heads), ("k", kv_heads), ("v", kv_heads)):
        yield Matrix(f"{at}.{leaf}_proj", n * head_dim, hidden, biases, quantized)
    yield Matrix(f"{at}.o_proj", hidden, heads * head_dim, o_bias, quantized, RESIDUAL_GAIN)


def _latent_attention(c: Mapping[str, Any]) -> Iterator[Module]:
    """DeepSeek's, in 16 bits, as in the 4-bit checkpoints of Kimi-K2."""
    hidden, heads, q_rank, kv_rank = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["q_lora_rank"],
        c["kv_lora_rank"],
    )
    plain, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield Matrix("self_attn.q_a_proj", q_rank, hidden, quantized=False)
    yield Vector("self_attn.q_a_layernorm.weight", (q_rank,))
    yield Matrix("self_attn.q_b_proj", heads * (plain + rope), q_rank, quantized=False)
    yield Matrix("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, quantized=False)
    yield Vector("self_attn.kv_a_layernorm.weight", (kv_rank,))
    yield Matrix("self_attn.kv_b_proj", heads * (plain + value), kv_rank, quantized=False)
    yield Matrix("self_attn.o_proj", hidden, heads * value, quantized=False, gain=RESIDUAL_GAIN)


def _gated(
    prefix: str,
    hidden: int,
    width: int,
    quantized: bool = True,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Matrix]:
    gate, up, down = (f"{prefix}.{name}" for name in names)
    yield Matrix(gate, width, hidden, quantized=quantized)
    yield Matrix(up, width, hidden, quantized=quantized)
    yield Matrix(down, hidden, width, quantized=quantized, gain=RESIDUAL_GAIN)


def _dense(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    yield from _gated("mlp", c["hidden_size"], c["intermediate_size"])


def _qwen3_experts(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    yield Matrix("mlp.gate", c["num_experts"], c["hidden_size"], quantized=False)
    for e in range(c["num_experts"]):
        yield from _gated(f"mlp.experts.{e}", c["hidden_size"], c["moe_intermediate_size"])


def _mixtral_experts(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    hidden, width = c["hidden_size"], c["intermediate_size"]
    yield Matrix("block_sparse_moe.gate", c["num_local_experts"], hidden, quantized=False)
    for e in range(c["num_local_experts"]):
        yield from _gated(f"block_sparse_moe.experts.{e}", hidden, width, names=("w1", "w3", "w2"))


def _deepseek_experts(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """Routed experts in 4 bits. The first layers and the shared expert are in 16 in the checkpoints of Kimi-K2, and
    quantized in those of GLM."""
    quantized = c["model_type"] != "deepseek_v3"
    hidden, experts, width = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"]
    if index < c["first_k_dense_replace"]:
        yield from _gated("mlp", hidden, c["intermediate_size"], quantized)
        return
    yield Matrix("mlp.gate", experts, hidden, quantized=False)
    yield Vector("mlp.gate.e_score_correction_bias", (experts,), 0.01, "float32")
    yield from _gated("mlp.shared_experts", hidden, c["n_shared_experts"] * width, quantized)
    for e in range(experts):
        yield from _gated(f"mlp.experts.{e}", hidden, width)


def _gpt_oss_experts(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    hidden, experts, width = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]
    yield Matrix("mlp.router", experts, hidden, bias=True, quantized=False)
    yield Stack("mlp.experts.gate_up_proj", experts, 2 * width, hidden)
    yield Stack("mlp.experts.down_proj", experts, hidden, width, RESIDUAL_GAIN)


def _qwen35(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """Gated delta networks, and attention with gates in every fourth layer."""
    hidden = c["hidden_size"]
    yield Vector("input_layernorm.weight", (hidden,), 0.02)
    yield Vector("post_attention_layernorm.weight", (hidden,), 0.02)
    if c["layer_types"][index] == "linear_attention":
        heads = c["linear_num_value_heads"]
        values = heads * c["linear_value_head_dim"]
        qkv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
        yield Vector("linear_attn.dt_bias", (heads,), 0.1)
        yield Vector("linear_attn.A_log", (heads,), 0.1)
        yield Vector("linear_attn.conv1d.weight", (qkv, 1, c["linear_conv_kernel_dim"]), 0.5)
        yield Vector("linear_attn.norm.weight", (c["linear_value_head_dim"],))
        for leaf, n in (("qkv", qkv), ("z", values), ("b", heads), ("a", heads)):
            yield Matrix(f"linear_attn.in_proj_{leaf}", n, hidden, quantized=False)
        yield Matrix("linear_attn.out_proj", hidden, values, quantized=False, gain=RESIDUAL_GAIN)
    else:
        yield from _projections(c, "self_attn", c["head_dim"], gates=True)
        yield Vector("self_attn.q_norm.weight", (c["head_dim"],), 0.02)
        yield Vector("self_attn.k_norm.weight", (c["head_dim"],), 0.02)
    yield Matrix("mlp.gate", c["num_experts"], hidden, quantized=False)
    yield from _gated("mlp.shared_expert", hidden, c["shared_expert_intermediate_size"], False)
    yield Matrix("mlp.shared_expert_gate", 1, hidden, quantized=False)
    for e in range(c["num_experts"]):
        yield from _gated(f"mlp.experts.{e}", hidden, c["moe_intermediate_size"])


def _nemotron3(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """Mamba 2, attention or experts without gates."""
    hidden, kind = c["hidden_size"], c["hybrid_override_pattern"][index]
    yield Vector("norm.weight", (hidden,))
    if kind == "*":
        yield from _projections(c, "mixer", c["head_dim"])
        return
    if kind == "M":
        heads = c["mamba_num_heads"]
        inner, groups = heads * c["mamba_head_dim"], 2 * c["n_groups"] * c["ssm_state_size"]
        yield Matrix("mixer.in_proj", 2 * inner + groups + heads, hidden, quantized=False)
        yield Vector("mixer.conv1d.weight", (inner + groups, 1, c["conv_kernel"]), 0.5)
        yield Vector("mixer.conv1d.bias", (inner + groups,), 0.1)
        for leaf in ("dt_bias", "A_log", "D"):
            yield Vector(f"mixer.{leaf}", (heads,), 0.1)
        yield Vector("mixer.norm.weight", (inner,))
        yield Matrix("mixer.out_proj", hidden, inner, quantized=False, gain=RESIDUAL_GAIN)
        return
    experts, shared, width = c["n_routed_experts"], c["moe_shared_expert_intermediate_size"], c["moe_intermediate_size"]
    yield Matrix("mixer.gate", experts, hidden, quantized=False)
    yield Vector("mixer.gate.e_score_correction_bias", (experts,), 0.01, "float32")
    yield Matrix("mixer.shared_experts.up_proj", shared, hidden, quantized=False)
    yield Matrix("mixer.shared_experts.down_proj", hidden, shared, quantized=False, gain=RESIDUAL_GAIN)
    for e in range(experts):
        yield Matrix(f"mixer.experts.{e}.up_proj", width, hidden)
        yield Matrix(f"mixer.experts.{e}.down_proj", hidden, width, gain=RESIDUAL_GAIN)


def _minimax3(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """With dense attention, as the published model's first layers have it."""
    hidden, experts, width = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]
    yield Vector("input_layernorm.weight", (hidden,), 0.02)
    yield Vector("post_attention_layernorm.weight", (hidden,), 0.02)
    yield from _projections(c, "self_attn", c["head_dim"])
    yield Vector("self_attn.q_norm.weight", (c["head_dim"],), 0.02)
    yield Vector("self_attn.k_norm.weight", (c["head_dim"],), 0.02)
    if not c["moe_layer_freq"][index]:
        yield from _gated("mlp", hidden, c["dense_intermediate_size"], False)
        return
    yield Matrix("block_sparse_moe.gate", experts, hidden, quantized=False)
    yield Vector("block_sparse_moe.e_score_correction_bias", (experts,), 0.01, "float32")
    yield from _gated("block_sparse_moe.shared_experts", hidden, width, False)
    for e in range(experts):
        yield from _gated(f"block_sparse_moe.experts.{e}", hidden, width, names=("w1", "w3", "w2"))


def _kimi3(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """With latent attention in every layer, and experts of fewer features than the model."""
    hidden, latent, width = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    yield Vector("input_layernorm.weight", (hidden,))
    yield Vector("post_attention_layernorm.weight", (hidden,))
    yield from _latent_attention(c)
    if index < c["first_k_dense_replace"]:
        yield from _gated("mlp", hidden, c["intermediate_size"], False)
        return
    at = "block_sparse_moe"
    yield Matrix(f"{at}.gate", c["num_experts"], hidden, quantized=False)
    yield Vector(f"{at}.gate.e_score_correction_bias", (c["num_experts"],), 0.01, "float32")
    yield from _gated(f"{at}.shared_experts", hidden, width, False)
    yield Matrix(f"{at}.routed_expert_down_proj", latent, hidden, quantized=False)
    yield Matrix(f"{at}.routed_expert_up_proj", hidden, latent, quantized=False)
    for e in range(c["num_experts"]):
        yield from _gated(f"{at}.experts.{e}", latent, width, names=("w1", "w3", "w2"))


def _deepseek4(c: Mapping[str, Any], index: int) -> Iterator[Module]:
    """Under the names of DeepSeek's own code: attention with one key and value for all heads, which most layers have of
    several tokens together too, between streams of the residual."""
    hidden, heads, head_dim, streams = (c[f] for f in ("hidden_size", "num_attention_heads", "head_dim", "hc_mult"))
    q_rank, groups, o_rank = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    for half in ("attn", "ffn"):
        yield Vector(f"{half}_norm.weight", (hidden,))
        yield from _streams(f"hc_{half}", (2 + streams) * streams, streams * hidden, 3)
    yield Vector("attn.attn_sink", (heads,), 1.0, "float32")
    yield Matrix("attn.wq_a", q_rank, hidden)
    yield Vector("attn.q_norm.weight", (q_rank,))
    yield Matrix("attn.wq_b", heads * head_dim, q_rank)
    yield Matrix("attn.wkv", head_dim, hidden)
    yield Vector("attn.kv_norm.weight", (head_dim,))
    yield Matrix("attn.wo_a", groups * o_rank, heads * head_dim // groups)
    yield Matrix("attn.wo_b", hidden, groups * o_rank, gain=RESIDUAL_GAIN)
    kind = c["layer_types"][index]
    if kind == "compressed_sparse_attention":
        yield from _compressor("attn.compressor", hidden, head_dim, 4)
        yield from _compressor("attn.indexer.compressor", hidden, c["index_head_dim"], 4)
        yield Matrix("attn.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], q_rank)
        yield Matrix("attn.indexer.weights_proj", c["index_n_heads"], hidden, quantized=False)
    elif kind == "heavily_compressed_attention":
        yield from _compressor("attn.compressor", hidden, head_dim, 128)
    names, width = ("w1", "w3", "w2"), c["moe_intermediate_size"]
    yield Matrix("ffn.gate", c["n_routed_experts"], hidden, quantized=False)
    yield Vector("ffn.gate.bias", (c["n_routed_experts"],), 0.01, "float32")
    yield from _gated("ffn.shared_experts", hidden, c["n_shared_experts"] * width, names=names)
    for e in range(c["n_routed_experts"]):
        yield from _gated(f"ffn.experts.{e}", hidden, width, names=names)


def _streams(name: str, n: int, k: int, scales: int) -> Iterator[Vector]:
    """What mixes the streams of DeepSeek-V4's residual, or makes them one."""
    yield Vector(f"{name}_fn", (n, k), k**-0.5, "float32")
    yield Vector(f"{name}_base", (n,), 0.1, "float32")
    yield Vector(f"{name}_scale", (scales,), 0.1, "float32")


def _compressor(name: str, hidden: int, head_dim: int, tokens: int) -> Iterator[Module]:
    """What makes one key of several tokens; of four, those of two neighbours overlap."""
    width = (1 + (tokens == 4)) * head_dim
    yield Vector(f"{name}.ape", (tokens, width), 0.1, "float32")
    yield Matrix(f"{name}.wkv", width, hidden, quantized=False)
    yield Matrix(f"{name}.wgate", width, hidden, quantized=False)
    yield Vector(f"{name}.norm.weight", (head_dim,))


def outer_modules(c: Mapping[str, Any]) -> Iterator[Module]:
    """Modules outside the layers, by their whole names."""
    kind, hidden, words = c["model_type"], c["hidden_size"], c["vocab_size"]
    if kind == "deepseek_v4":
        names, streams = ("embed", "norm", "head"), c["hc_mult"]
        yield from _streams("hc_head", streams, streams * hidden, 1)
    elif kind == "nemotron_h":
        names = ("model.embeddings", "model.norm_f", "lm_head")
    else:
        names = ("model.embed_tokens", "model.norm", "lm_head")
    yield Vector(f"{names[0]}.weight", (words, hidden), 1.0)
    yield Vector(f"{names[1]}.weight", (hidden,))
    yield Matrix(names[2], words, hidden, quantized=False, gain=4.0)


_FEED_FORWARD = {
    "llama": _dense,
    "qwen2": _dense,
    "qwen3_moe": _qwen3_experts,
    "mixtral": _mixtral_experts,
    "deepseek_v3": _deepseek_experts,
    "glm4_moe": _deepseek_experts,
    "gpt_oss": _gpt_oss_experts,
}
_LAYERS = {
    "qwen3_5_moe_text": _qwen35,
    "nemotron_h": _nemotron3,
    "minimax_m3_text": _minimax3,
    "kimi_linear": _kimi3,
    "deepseek_v4": _deepseek4,
}
"""Whole layers, of models that share little with others."""
