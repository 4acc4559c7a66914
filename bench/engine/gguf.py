"""A GGUF file of random numbers for vLLM's plugin of GGUF: :func:`write_gguf`, in the types of Q4_K_M or Q5_K_M."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from bench.engine.models import Model
from bench.engine.modules import Matrix, Vector

FILE = "model.gguf"
_NAMES = {
    **{
        f"self_attn.{leaf}_proj": f"attn_{place}" for leaf, place in zip("qkvo", ("q", "k", "v", "output"), strict=True)
    },
    **{f"mlp.{leaf}_proj": f"ffn_{leaf}" for leaf in ("gate", "up", "down")},
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
}
_FACTORS = {"Q4_K": ((0, 1 / 255), (2, 7.5 / 255)), "Q5_K": ((0, 1 / 527), (2, 15.5 / 527)), "Q6_K": ((208, 1 / 1367),)}
"""Where the fp16 factors of a block lie, and their values for which random blocks have a mean of 0 and a standard
deviation of 1."""


def has_more_bits(index: int, layers: int) -> bool:
    """Return whether llama.cpp gives a layer's attn_v and ffn_down more bits."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def write_gguf(model: Model, folder: Path, main: str) -> None:
    """Write ``model.gguf`` and config.json of a Llama as llama.cpp mixes types: the head in Q6_K, of some layers attn_v
    and ffn_down too, the others in ``main``, "Q4_K" or "Q5_K"."""
    import gguf

    c = model.config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**c, "dtype": "bfloat16"}))
    writer, rng = gguf.GGUFWriter(folder / FILE, c["model_type"]), np.random.default_rng(0)
    writer.add_block_count(model.layers)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(model.vocabulary)

    def add(name: str, module: Any, type: str) -> None:
        if isinstance(module, Matrix):
            shape, std = (module.n, module.k), module.gain * module.k**-0.5
        else:
            shape, std = module.shape, module.std
        if not std:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            return
        number = gguf.GGMLQuantizationType[type]
        elements, size = gguf.GGML_QUANT_SIZES[number]
        blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
        for at, part in _FACTORS[type]:
            blocks[..., at : at + 2] = np.array([std * part], np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(shape[0], -1), raw_dtype=number)

    outer = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head": "output"}
    for module in model.outer():
        add(outer[module.name], module, "Q6_K" if module.name == "lm_head" else main)
    for i in range(model.layers):
        for module in model.layer(i):
            assert isinstance(module, Matrix | Vector)
            name = _NAMES[module.name]
            more = name in ("attn_v", "ffn_down") and has_more_bits(i, model.layers)
            add(f"blk.{i}.{name}", module, "Q6_K" if more else main)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
