"""Models to serve: config.json as their publishers have it, and the tensors of a layer. No weights.

Every number of a layer is read from the config, so that :func:`tiny` gives the same model in small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.engine import published


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
_RESIDUAL_GAIN = 0.5


@dataclass(frozen=True)
class Model:
    """A model of a published shape."""

    name: str
    config: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def stacked(self) -> bool:
        """True if a layer's experts are one tensor, as gpt-oss keeps them; that is in MXFP4 only."""
        return self.config["model_type"] == "gpt_oss"

    @property
    def experts(self) -> bool:
        """True for a mixture of experts."""
        return any(key in self.config for key in ("num_experts", "num_local_experts", "n_routed_experts"))

    @property
    def quantized_matrices(self) -> bool:
        """True if linear layers outside the experts are quantized as well."""
        return not self.stacked and self.config["model_type"] != "deepseek_v3"

    def outer(self) -> Iterator[Module]:
        """Modules outside the layers, by their whole names."""
        hidden = self.config["hidden_size"]
        yield Vector("model.embed_tokens.weight", (self.vocabulary, hidden), 1.0)
        yield Vector("model.norm.weight", (hidden,))
        yield Matrix("lm_head", self.vocabulary, hidden, quantized=False, gain=4.0)

    def layer(self, index: int) -> Iterator[Module]:
        """Modules of layer ``index``, by their names within it."""
        c = self.config
        yield Vector("input_layernorm.weight", (c["hidden_size"],))
        yield Vector("post_attention_layernorm.weight", (c["hidden_size"],))
        yield from (_latent_attention if c["model_type"] == "deepseek_v3" else _attention)(c)
        yield from _FEED_FORWARD[c["model_type"]](c, index)


def _attention(c: Mapping[str, Any]) -> Iterator[Module]:
    kind, hidden, heads, kv_heads = (
        c["model_type"],
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
    )
    head_dim, quantized = c.get("head_dim", hidden // heads), kind != "gpt_oss"
    biases, all_biases = kind in ("qwen2", "gpt_oss", "glm4_moe"), kind == "gpt_oss"
    yield Matrix("self_attn.q_proj", heads * head_dim, hidden, biases, quantized)
    yield Matrix("self_attn.k_proj", kv_heads * head_dim, hidden, biases, quantized)
    yield Matrix("self_attn.v_proj", kv_heads * head_dim, hidden, biases, quantized)
    yield Matrix("self_attn.o_proj", hidden, heads * head_dim, all_biases, quantized, _RESIDUAL_GAIN)
    if kind == "qwen3_moe":
        yield Vector("self_attn.q_norm.weight", (head_dim,))
        yield Vector("self_attn.k_norm.weight", (head_dim,))
    if kind == "gpt_oss":
        yield Vector("self_attn.sinks", (heads,), 1.0)


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
    yield Matrix("self_attn.o_proj", hidden, heads * value, quantized=False, gain=_RESIDUAL_GAIN)


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
    yield Matrix(down, hidden, width, quantized=quantized, gain=_RESIDUAL_GAIN)


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
    yield Stack("mlp.experts.down_proj", experts, hidden, width, _RESIDUAL_GAIN)


_FEED_FORWARD = {
    "llama": _dense,
    "qwen2": _dense,
    "qwen3_moe": _qwen3_experts,
    "mixtral": _mixtral_experts,
    "deepseek_v3": _deepseek_experts,
    "glm4_moe": _deepseek_experts,
    "gpt_oss": _gpt_oss_experts,
}

MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", published.llama(4096, 14336, 32, 32)),
        Model("llama-3-70b", published.llama(8192, 28672, 80, 64)),
        Model("qwen2.5-32b", published.QWEN25_32B),
        Model("qwen3-30b-a3b", published.QWEN3_30B_A3B),
        Model("mixtral-8x7b", published.MIXTRAL_8X7B),
        Model("gpt-oss-20b", published.GPT_OSS_20B),
        Model("deepseek-v3-5-layers", published.DEEPSEEK_V3),
        Model("kimi-k2", published.KIMI_K2),
        Model("glm-4.5-air", published.GLM_45_AIR),
    )
}
"""deepseek-v3-5-layers: one dense layer and four of the mixture's 58, so that one GPU holds it."""


def tiny(model: Model) -> Model:
    """Return the same model with two small layers, to try everything else."""
    small = {key: value for key, value in published.TINY.items() if key in model.config}
    return replace(model, name=f"tiny-{model.name}", config={**model.config, **small})


def cut(model: Model, layers: int) -> Model:
    """Return the same model with its first layers only."""
    changed: dict[str, Any] = {"num_hidden_layers": layers}
    if "layer_types" in model.config:
        changed["layer_types"] = model.config["layer_types"][:layers]
    return replace(model, name=f"{model.name}-{layers}-layers", config={**model.config, **changed})


def model_named(name: str) -> Model:
    """Return one of ``MODELS``.

    Raises:
        ValueError: for a name that there is not.
    """
    if name not in MODELS:
        raise ValueError(f"model: wanted one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
