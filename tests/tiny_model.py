"""Models small enough to write in a test: GGUF files and a dense Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
EXPERTS = 4
_DEEPSEEK = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
}
MIXTURES = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": HEAD_DIM},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v4": {
        "moe_intermediate_size": 32,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_hash_layers": 1,
        "sliding_window": 8,
        "compress_ratios": [0, 4],
    },
    "kimi_linear": {
        "moe_intermediate_size": 32,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "num_key_value_heads": HEADS,
        "bos_token_id": 0,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": HEAD_DIM, "sliding_window": 8},
    "llama4_text": {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": HEAD_DIM,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
    },
}
"""Settings of a mixture's config, besides those of every model."""


def _vocabulary() -> tuple[list[str], list[str]]:
    """Byte-level tokens as GPT-2's, with two merges: transformers 5.17 cannot read a GGUF file with one."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<end>", *bytes_to_unicode().values(), "he", "the"], ["h e", "t he"]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    type: str = "Q4_1",
    tied: bool = True,
    rope_freqs: np.ndarray | None = None,
    head_dim: int | None = None,
) -> Path:
    """A random model with linear layers of ``type``, but attn_v in Q8_0; qwen2 has biases, qwen3 and gemma3 norms per
    head."""
    import gguf

    tokens, _ = _vocabulary()
    if head_dim is None:  # transformers does not read a qwen3's, but takes the one that all of them have
        head_dim = 128 if architecture == "qwen3" else HEAD_DIM
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, head_dim)
    writer.add_add_bos_token(architecture == "gemma3")

    def add(name: str, shape: tuple[int, ...], kind: str = "F32") -> None:
        values = rng.standard_normal(shape, np.float32) * 0.1 + (1 if "norm" in name else 0)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)

    add("token_embd.weight", (len(tokens), HIDDEN), "Q8_0")
    add("output_norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", (len(tokens), HIDDEN), type)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    for i in range(LAYERS):
        behind = ("post_attention_norm", "post_ffw_norm") if architecture == "gemma3" else ()
        for norm in ("attn_norm", "ffn_norm", *behind):
            add(f"blk.{i}.{norm}.weight", (HIDDEN,))
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            add(f"blk.{i}.{name}.weight", (heads * head_dim, HIDDEN), "Q8_0" if name == "attn_v" else type)
            if architecture == "qwen2":
                add(f"blk.{i}.{name}.bias", (heads * head_dim,))
            if architecture in ("qwen3", "gemma3") and name != "attn_v":
                add(f"blk.{i}.{name}_norm.weight", (head_dim,))
        add(f"blk.{i}.attn_output.weight", (HIDDEN, HEADS * head_dim), type)
        for name, shape in (("ffn_gate", (FFN, HIDDEN)), ("ffn_up", (FFN, HIDDEN)), ("ffn_down", (HIDDEN, FFN))):
            add(f"blk.{i}.{name}.weight", shape, type)
    write_out(writer)
    return path


def write_out(writer: Any) -> None:
    """Write the file of a ``gguf.GGUFWriter``, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: Any, head_dim: int, rope_theta: float = 10000.0, eps: float = 1e-5) -> None:
    """Add a tiny model's settings and its tokenizer to a file that ``gguf.GGUFWriter`` writes."""
    tokens, merges = _vocabulary()
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)


def write_dense(folder: Path, architecture: str = "llama") -> Path:
    """A random model in safetensors, with a tokenizer; qwen2 and gpt_oss have biases, which are not zero."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokens, merges = _vocabulary()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokens),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        eos_token_id=0,
        pad_token_id=0,
        **{"num_key_value_heads": KV_HEADS} | MIXTURES.get(architecture, {}),
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter)
        elif ".experts." in name or "gate.weight" in name:  # so that experts and their choice matter
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(m.split()) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    return folder
