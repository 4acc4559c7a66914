"""Tiny dense models of many architectures of transformers, whose every weight matters: :func:`base`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from tiny_model import MIXTURES
from w4gemm.checkpoints.hugging_face import model_class

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
VISION |= {"image_size": 28, "patch_size": 14}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "cohere": {},
    "granite": {},
    "mixtral": LOCAL,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "olmoe": EXPERTS,
    "deepseek_v2": MIXTURES["deepseek_v2"],
    "deepseek_v3": MIXTURES["deepseek_v3"],
    "deepseek_v3 mtp": MIXTURES["deepseek_v3"] | {"num_nextn_predict_layers": 1},
    "glm4_moe": MIXTURES["deepseek_v3"] | {"head_dim": 16, "num_key_value_heads": 2},
    "glm4_moe mtp": MIXTURES["deepseek_v3"] | {"head_dim": 16, "num_nextn_predict_layers": 1},
    "gpt_oss": MIXTURES["gpt_oss"],
    "llama4_text": LOCAL | {"head_dim": 16, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1},
    "nemotron_h": EXPERTS
    | {"layers_block_type": ["moe", "attention"], "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
    | {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
    "minimax": LOCAL | {"head_dim": 16, "layer_types": ["full_attention", "full_attention"]},
    "granitemoe": LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    "qwen3_vl": {"head_dim": 32},
    "llava": {"head_dim": 16},
}
"""Settings of each architecture's config besides :data:`TEXT`, by its name and words for what is special."""
Tensors = dict[str, torch.Tensor]


class Base(NamedTuple):
    """A dense model."""

    folder: Path
    tensors: Tensors
    """What the folder holds, by its names there."""
    cls: Any
    """transformers' class of the model."""
    unneeded: frozenset[str] = frozenset()
    """Names of tensors of a layer that predicts further tokens, which the model does without."""


@functools.cache
def base(architecture: str, folder: Path) -> Base:
    """Write a dense model to a folder of its own in ``folder``."""
    torch.manual_seed(0)
    kind = architecture.split()[0]
    config = AutoConfig.for_model(kind)
    settings = TEXT | MODELS[architecture]
    if hasattr(config, "vision_config"):
        text = type(config.text_config)(**settings)
        config = type(config)(text_config=text, vision_config=type(config.vision_config)(**VISION))
    else:
        config = type(config)(**settings)
    cls = model_class(config)
    model = cls.from_config(config, dtype=torch.float32)
    buffers = [(name, b) for name, b in model.named_buffers() if "correction_bias" in name]
    for name, t in [*model.named_parameters(), *buffers]:
        if name.endswith(("bias", "sinks")) or (t.dim() == 1 and "norm" in name):
            t.data += 0.1 * torch.randn(t.shape)
        elif t.dim() > 1 and "conv1d" not in name:
            t.data.normal_(std=0.2)
    target = folder / architecture.replace(" ", "_")
    model.save_pretrained(target)
    tokenizer().save_pretrained(target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    unneeded: Tensors = {}
    if "mtp" in architecture:
        last = {name: t for name, t in tensors.items() if ".layers.1." in name}
        unneeded = {name.replace(".layers.1.", ".layers.2."): t for name, t in last.items()}
        unneeded |= {
            "model.layers.2.eh_proj.weight": torch.randn(64, 128),
            "model.layers.2.enorm.weight": torch.ones(64),
        }
    return Base(target, tensors | unneeded, cls, frozenset(unneeded))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t3"))
    return PreTrainedTokenizerFast(tokenizer_object=words)
