"""``skip`` means the same to ``from_pretrained`` and to ``quantize_layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import test_image_models
from w4gemm import W4Linear
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.transformers import W4GemmConfig, quantize_layers, summarize

IDS = torch.tensor([[3, 17, 42, 5]])
SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
INNER = {"intra_bottleneck_size": 32}
BLOCKS = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
HALVES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HALVES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100}


class Case(NamedTuple):
    """A model's config, transformers' class that makes it, and layers that stay dense in any case."""

    config: str
    settings: dict[str, Any]
    cls: Any = AutoModelForCausalLM
    dense: frozenset[str] = frozenset()


CASES = {
    "llama": Case("LlamaConfig", SIZES),
    "llama tied": Case("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "opt": Case("OPTConfig", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bert": Case("BertConfig", SIZES, AutoModelForMaskedLM, frozenset({"cls.predictions.transform.dense"})),
    "bart": Case("BartConfig", HALVES, AutoModelForSeq2SeqLM),
    # whose wo its class keeps in float32
    "t5": Case("T5Config", BLOCKS, AutoModelForSeq2SeqLM, frozenset({"wo"})),
}


def write(folder: Path, name: str) -> Any:
    """Write a dense model, and return its class."""
    if name in test_image_models.MODELS:
        test_image_models.write(folder, name)
        return transformers.AutoModelForImageTextToText
    config, settings, cls, _ = CASES[name]
    torch.manual_seed(0)
    model = cls.from_config(getattr(transformers, config)(**settings), dtype=torch.float32)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(folder)
    return cls


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        both = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        return model.eval()(input_ids=IDS, **both).logits


@pytest.mark.parametrize("name", [*CASES, "gemma3", "mistral3"])
def test_both_ways_quantize_the_same_layers(name: str, tmp_path: Path) -> None:
    """By default no head; by ``skip=()`` every head, also one that is tied to the embedding, which stays dense."""
    cls = write(tmp_path, name)
    dense = cls.from_pretrained(tmp_path, dtype=torch.float32)
    stay = CASES[name].dense if name in CASES else frozenset({"vision_tower", "multi_modal_projector"})
    head = next(n for n, m in dense.named_modules() if m is dense.get_output_embeddings())
    for skip in (("lm_head",), ()):
        config = W4GemmConfig("int4_g32", skip=skip)
        loaded = cls.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
        in_place = quantize_layers(cls.from_pretrained(tmp_path, dtype=torch.float32), "int4_g32", skip=skip)
        assert summarize(loaded) == summarize(in_place)
        assert torch.equal(logits(loaded), logits(in_place))
        assert isinstance(loaded.get_output_embeddings(), W4Linear) == (skip == ())
        others = [n for n in summarize(loaded).dense if not any(part in f".{n}." for part in stay)]
        assert others == ([head] if skip else [])
        assert torch.equal(loaded.get_input_embeddings().weight, dense.get_input_embeddings().weight)
        if skip:
            by_default = {n for n, m in loaded.named_modules() if isinstance(m, W4Linear)}
        loaded.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / "saved", dtype=torch.float32)), logits(loaded))
    if cls is AutoModelForCausalLM:  # other classes' heads are none that a checkpoint knows
        assert {*open_checkpoint(tmp_path).modules} == by_default


@pytest.mark.parametrize("stored", ["the head alone", "equal", "different"])
def test_a_tied_head_of_a_folder_that_has_it(stored: str, tmp_path: Path) -> None:
    """transformers says which of the two a tied weight is."""
    cls, file = write(tmp_path, "llama tied"), tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if stored == "the head alone":
        del tensors["model.embed_tokens.weight"]
    elif stored == "different":
        head.mul_(2)
    save_file(tensors, file, {"format": "pt"})
    loaded = cls.from_pretrained(tmp_path, quantization_config=W4GemmConfig("int8_g32", skip=()), dtype=torch.float32)
    in_place = quantize_layers(cls.from_pretrained(tmp_path, dtype=torch.float32), "int8_g32", skip=())
    assert isinstance(loaded.lm_head, W4Linear) and torch.equal(logits(loaded), logits(in_place))
    torch.testing.assert_close(loaded.lm_head.weight.dequantize(), head, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("config", "settings", "cls"),
    [
        # whose head's input is scaled if their config says that it is tied
        ("SwitchTransformersConfig", BLOCKS | {"num_experts": 2}, AutoModelForSeq2SeqLM),
        # which multiplies by the weight of its head itself
        ("MobileBertConfig", SIZES | {"hidden_size": 64, "embedding_size": 32} | INNER, AutoModelForMaskedLM),
    ],
)
def test_a_head_that_has_to_be_dense_and_tied(config: str, settings: Any, cls: Any, tmp_path: Path) -> None:
    dense = cls.from_config(getattr(transformers, config)(**settings), dtype=torch.float32)
    dense.save_pretrained(tmp_path)
    head, expected = dense.get_output_embeddings(), logits(dense)
    loaded = cls.from_pretrained(tmp_path, quantization_config=W4GemmConfig("int8_g32", skip=()), dtype=torch.float32)
    for model in (loaded, quantize_layers(dense, "int8_g32", skip=())):
        assert summarize(model).quantized and type(model.get_output_embeddings()) is type(head)
        assert (logits(model) - expected).norm() < 0.05 * expected.norm()


def test_a_tied_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    cls = write(tmp_path, "llama tied")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][5, 3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="^lm_head: weight: wanted finite values"):
        cls.from_pretrained(tmp_path, quantization_config=W4GemmConfig("int4_g32", skip=()), dtype=torch.float32)
