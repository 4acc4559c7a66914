"""Models that read images beside text: their language model is in 4 bits, the rest dense, and nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from w4gemm import W4Linear
from w4gemm.cli.__main__ import main
from w4gemm.integrations.decoder import decode_by_graph, loop
from w4gemm.integrations.transformers import W4GemmConfig, load

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
VISION |= {"image_size": 28, "patch_size": 14}
PICTURE_TOKENS = 4
MODELS = {"gemma3": {}, "mistral3": {}, "llava": {}, "qwen3_vl": {}, "qwen3_5": LINEAR | LAYERS}
"""Sizes of the language model beside those of TEXT. transformers makes a causal language model of Gemma 3's config and,
without images, of Qwen 3.5's, and none of the others'."""


def write(folder: Path, name: str) -> Any:
    """Write a dense model with random weights and a tokenizer."""
    torch.manual_seed(0)
    try:
        default = AutoConfig.for_model(name)
    except ValueError:
        pytest.skip(f"this transformers has no {name}")
    text = type(default.text_config)(**TEXT, **MODELS[name])
    config = type(default)(text_config=text, vision_config=type(default.vision_config)(**VISION))
    config.mm_tokens_per_image = PICTURE_TOKENS
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(320)}, unk_token="t3"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


def images_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters outside of the language model and its head."""
    return {n: p for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n}


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_a_model_gives_the_same(name: str, tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", name)
    expected = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "dense", quantization_config=W4GemmConfig("int4_g32"), dtype=torch.float32
    ).eval()
    actual = [load(tmp_path / "dense", format="int4_g32")[0]]
    for to in ("w4gemm", "compressed-tensors"):
        out = str(tmp_path / to)
        assert main(["convert", str(tmp_path / "dense"), out, "--format", "int4_g32", "--to", to]) == 0
        actual.append(load(out)[0])
    for model in actual:
        assert type(model) is type(dense)
        assert torch.equal(logits(model), logits(expected))
        layers = [n for n, m in model.named_modules() if isinstance(m, W4Linear)]
        assert layers and all("language_model" in n for n in layers)
        there, here = images_of(model), images_of(dense)
        assert there and there.keys() == here.keys() and all(torch.equal(there[n], here[n]) for n in here)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "compressed-tensors", dtype=torch.float32).eval()
    torch.nn.Module.float(theirs)  # older versions of transformers have the weights in bfloat16
    torch.testing.assert_close(logits(theirs), logits(expected), rtol=0.05, atol=0.02)


def test_the_language_model_alone_beside_the_config_of_the_whole(tmp_path: Path) -> None:
    """transformers makes the language model then, which has a config of its own."""
    whole = write(tmp_path / "whole", "qwen3_5").config
    dense = AutoModelForCausalLM.from_config(whole, dtype=torch.float32).eval()
    dense.save_pretrained(tmp_path / "text")
    whole.architectures = [type(dense).__name__]
    whole.save_pretrained(tmp_path / "text")
    for file in (tmp_path / "whole").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "text")
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", quantization_config=W4GemmConfig("int4_g32"), dtype=torch.float32
    ).eval()
    model = load(tmp_path / "text", format="int4_g32")[0]
    assert type(model) is type(dense) and type(model.config) is not type(whole)
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llava", "qwen3_vl"])
def test_text_alone_is_decoded_step_by_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the steps are replays of a CUDA graph, fused also where the vision tower has attention of another kind.
    A position is several numbers in Qwen's models."""
    monkeypatch.setattr(loop, "DEVICES", ("cpu", "cuda"))
    write(tmp_path, name)
    model, _ = load(tmp_path, format="int4_g32")
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 12, "do_sample": False}
    for mask in (torch.ones_like(ids), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])):
        decode_by_graph(model)  # forgets its step
        ours = model.generate(input_ids=ids, attention_mask=mask, **options)
        step = loop.step_of(model)
        assert step is not None
        with torch.inference_mode():
            assert step.choose(model).__name__ == "_run_fused"
        theirs = model.generate(input_ids=ids, attention_mask=mask, disable_compile=True, **options)
        assert torch.equal(ours, theirs)


def test_images_are_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step knows tokens alone: with a picture in the prompt the first step needs more."""
    monkeypatch.setattr(loop, "DEVICES", ("cpu", "cuda"))
    write(tmp_path, "gemma3")
    model, _ = load(tmp_path, format="int4_g32")
    pixels, picture = torch.randn(1, 3, 28, 28), [model.config.image_token_id] * PICTURE_TOKENS
    ids = torch.tensor([[5, *picture, 6]])
    actual = model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=3, do_sample=False)
    assert loop.step_of(model) is None and actual.shape == (1, ids.shape[1] + 3)
