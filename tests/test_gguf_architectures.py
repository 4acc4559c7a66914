"""Models of each architecture, written as llama.cpp names and stores them, answer as the models they were made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

import tiny_model  # noqa: E402
from tiny_model import EXPERTS, HEADS, LAYERS, add_metadata, write_dense, write_gguf, write_out  # noqa: E402
from w4gemm import FormatError, WeightFormat  # noqa: E402
from w4gemm.checkpoints import open_checkpoint  # noqa: E402
from w4gemm.checkpoints.experts import GATE_UP  # noqa: E402
from w4gemm.checkpoints.gguf.architectures import ARCHITECTURES as KNOWN  # noqa: E402
from w4gemm.checkpoints.gguf.architectures import llama3_parameters  # noqa: E402
from w4gemm.checkpoints.w4gemm import OwnWriter  # noqa: E402
from w4gemm.checkpoints.writing import write_folder  # noqa: E402
from w4gemm.integrations.transformers import dequantize_layers, load, summarize  # noqa: E402

ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
"""llama.cpp's name of each, by transformers'."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.5,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
CHANGED = {
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "qwen3_moe": {"norm_topk_prob": True, "rope_parameters": YARN},
}
"""Settings that files of a kind have, and that are not transformers' own."""
IDS = torch.tensor([[1, 5, 9, 2, 7, 7, 3, 8, 11, 4, 20, 30]])


def original(folder: Path, kind: str) -> Any:
    """A tiny model of transformers', with settings that files of its kind have."""
    model = AutoModelForCausalLM.from_pretrained(write_dense(folder, kind), dtype=torch.float32).eval()
    if kind not in CHANGED:
        return model
    for key, value in CHANGED[kind].items():
        setattr(model.config, key, value)
    again = type(model)(model.config).eval()
    for name, parameter in again.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if "norm" in name else 0.2)
    return again


def parts(name: str, parameter: torch.Tensor, transposed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """llama.cpp's tensors of one of the model's parameters: gates and ups apart, and their biases."""
    owner, _, leaf = name.rpartition(".")
    leaf, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
    if not owner.endswith(".experts"):
        yield name, parameter
        return
    rows = parameter if bias or not transposed else parameter.transpose(1, 2)
    suffix = "bias" if bias else "weight"
    if leaf != GATE_UP:
        yield f"{owner}.{leaf}.{suffix}", rows
        return
    gate, up = (rows[:, ::2], rows[:, 1::2]) if transposed else rows.chunk(2, 1)
    yield f"{owner}.gate_proj.{suffix}", gate
    yield f"{owner}.up_proj.{suffix}", up


def write(path: Path, model: Any, kind: str, types: dict[str, str]) -> Path:
    """Write a model's file; its parameters become views of what the file holds.

    Args:
        types: of the blocks' matrices with such a part in their name; others are Q4_0.
    """
    config, architecture = model.config, ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    add_metadata(writer, getattr(config, "head_dim", 16), rope["rope_theta"], config.rms_norm_eps)
    writer.add_add_bos_token(False)
    writer.add_pad_token_id(0)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma3_text":
        writer.add_sliding_window_pattern(2)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_scaling(writer, rope)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, LAYERS)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in parts(name, parameter, kind == "gpt_oss"):
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            stored = f"{stored}.weight" if part.endswith("sinks") else stored
            assert stored is not None, part
            linear = stored.startswith("blk.") and part.endswith("weight") and values.dim() > 1 and "_inp" not in stored
            type = next((t for each, t in types.items() if each in stored), "Q4_0") if linear else "F32"
            added = 1 if kind.startswith("gemma") and "norm" in stored else 0
            code = gguf.GGMLQuantizationType[type]
            raw = quantized((values + added).numpy(), code)
            writer.add_tensor(stored, raw, raw_dtype=code)
            values.copy_(torch.from_numpy(gguf.quants.dequantize(raw, code)).view(values.shape) - added)
            if type == "NVFP4":
                factors = torch.linspace(0.02, 0.01, values.shape[:-2].numel())
                values *= factors.view(*values.shape[:-2], 1, 1)
                for end in ("scale", "input_scale"):
                    writer.add_tensor(f"{stored.removesuffix('weight')}{end}", factors.numpy())
    write_out(writer)
    return path


def quantized(values: np.ndarray, code: Any) -> np.ndarray:
    """Bytes of a type; of NVFP4, which gguf does not make, random ones with scales from 0.25 to 3.5."""
    if code.name != "NVFP4":
        return gguf.quants.quantize(values, code)
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // 64, 36), np.uint8)
    blocks[..., :4] = rng.integers(40, 70, blocks[..., :4].shape)
    return blocks.reshape(*values.shape[:-1], -1)


def add_scaling(writer: Any, rope: dict[str, Any]) -> None:
    """Add what llama.cpp writes for transformers' parameters of the rotary embedding."""
    if rope["rope_type"] == "default":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "linear":
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def also(monkeypatch: pytest.MonkeyPatch, add: Callable[[Any], None]) -> None:
    """Let ``add`` add metadata to files of ``write_gguf``."""

    def added(writer: Any, *args: Any, **options: Any) -> None:
        add_metadata(writer, *args, **options)
        add(writer)

    monkeypatch.setattr(tiny_model, "add_metadata", added)


@pytest.mark.parametrize(
    ("kind", "types", "formats"),
    [
        ("gemma2", {}, {"int4_g32_fp16": 7}),
        ("gemma3_text", {}, {"int4_g32_fp16": 7}),
        ("phi3", {"ffn_up": "Q4_1"}, {"int4_g32_fp16": 3, "int4_g32_zfloat_fp16": 1}),
        ("qwen3_moe", {"exps": "Q4_1"}, {"int4_g32_fp16": 4, "int4_g32_zfloat_fp16": 2}),
        ("qwen3_moe", {"ffn_down_exps": "Q8_0"}, {"int4_g32_fp16": 5, "int8_g32_fp16": 1}),
        ("qwen3_moe", {"ffn_up_exps": "Q4_1"}, {"int4_g32_fp16": 4}),
        ("qwen3_moe", {"attn_v": "NVFP4", "gate_exps": "NVFP4", "up_exps": "NVFP4"}, {"int4_g32_fp16": 4, "nvfp4": 2}),
        ("qwen3_moe", {"gate_exps": "NVFP4", "up_exps": "NVFP4", "down_exps": "F16"}, {"int4_g32_fp16": 4}),
        ("gpt_oss", {"attn_output": "Q4_0", "attn": "NVFP4", "exps": "F16"}, {"int4_g32_fp16": 1, "nvfp4": 3}),
        ("gpt_oss", {"exps": "MXFP4", "attn": "F16"}, {"mxfp4": 2}),
        ("gpt_oss", {"exps": "F16", "attn_q": "Q4_1", "attn": "Q8_0"}, {"int4_g32_zfloat_fp16": 1, "int8_g32_fp16": 3}),
    ],
)
def test_answers(tmp_path: Path, kind: str, types: dict[str, str], formats: dict[str, int]) -> None:
    if kind.startswith("gemma") and transformers.__version__.startswith("5.17."):
        pytest.skip("it splits text into other tokens than a file of Gemma says")
    model = original(tmp_path, kind)
    with torch.inference_mode():
        path = write(tmp_path / "tiny.gguf", model, kind, types)
        ours, _ = load(path)
        assert summarize(ours).formats == {str(WeightFormat.parse(f)): n * LAYERS for f, n in formats.items()}
        torch.testing.assert_close(ours(IDS).logits, model(IDS).logits, rtol=2e-4, atol=2e-5)


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = original(tmp_path, "qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    with torch.inference_mode():
        experts.down_proj = torch.nn.Parameter(experts.down_proj[:, :32].clone(), requires_grad=False)
        path = write(tmp_path / "tiny.gguf", model, "qwen3_moe", {})
    with pytest.raises(
        FormatError, match=r"block 1 have shapes \(4, 32, 64\), .*; wanted \(experts, n, k\), the same, and \("
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_converted_folder_answers_alike(tmp_path: Path, kind: str) -> None:
    model, folder = original(tmp_path, kind), tmp_path / "converted"
    with torch.inference_mode():
        path = write(tmp_path / "tiny.gguf", model, kind, {"exps": "MXFP4"})
        write_folder(open_checkpoint(path), folder, OwnWriter(), dtype=torch.float32)
        assert torch.equal(load(folder)[0](IDS).logits, load(path)[0](IDS).logits)


def test_a_setting_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        path = write(tmp_path / "tiny.gguf", original(tmp_path, "phi3"), "phi3", {})
    checkpoint = open_checkpoint(path)
    checkpoint.file.metadata["phi3.rope.dimension_count"] = "many"
    with pytest.raises(FormatError, match="a setting of phi3 is no number"):
        checkpoint.pretrained()


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("gpt_oss", "attention.layer_norm_rms_epsilon", None, "a number from 0 to 1"),
        ("gpt_oss", "attention.sliding_window", None, "a number from 1"),
        ("gpt_oss", "expert_used_count", None, "a number from 1"),
        ("qwen3_moe", "expert_used_count", 0, "a number from 1"),
        ("qwen3_moe", "expert_used_count", 5, "at most 4"),
        ("gemma2", "attention.sliding_window", 0, "a number from 1"),
    ],
)
def test_numbers_that_transformers_would_make_up(
    tmp_path: Path, kind: str, key: str, value: Any, expected: str
) -> None:
    """llama.cpp refuses a file without them. Once the model had other logits, without a word."""
    with torch.inference_mode():
        checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", original(tmp_path, kind), kind, {}))
    architecture, metadata = ARCHITECTURES[kind], checkpoint.file.metadata
    metadata[f"{architecture}.{key}"] = value
    with pytest.raises(FormatError, match=rf"tiny\.gguf: {architecture}\.{key}: wanted {expected}, got {value}"):
        checkpoint.pretrained()


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}


@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_scaled_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, rope: dict[str, Any]
) -> None:
    """The keys rope.scaling.* were dropped, and the model had other positions than llama.cpp's."""
    also(monkeypatch, lambda writer: add_scaling(writer, rope))
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", architecture))
    assert model.config.rope_parameters == rope
    assert model.model.rotary_emb.attention_scaling == rope.get("attention_factor", 1)
    model.save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == rope


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "default"),
        ({"rope.scaling.factor": 4.0}, "linear"),
        ({"rope.scale_linear": 4.0}, "linear"),
        ({"rope.scaling.factor": 0.0}, "default"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, "default"),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn"),
    ],
)
def test_what_llama_cpp_takes_for_scaling(metadata: dict[str, Any], expected: str) -> None:
    sizes = {"context_length": 128, "embedding_length": 64, "attention.head_count": 4}
    rope = KNOWN["llama"].settings((sizes | metadata).get)["rope_parameters"]
    assert (rope["rope_type"], rope["rope_theta"], rope.get("factor", 4.0)) == (expected, 10000.0, 4.0)
    assert rope.get("original_max_position_embeddings", 128) == 128


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_heads_of_another_size_than_hidden_per_head(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", architecture, head_dim=32))
    assert model.config.head_dim == 32 and model.model.layers[0].self_attn.q_proj.out_features == HEADS * 32
    ids = torch.tensor([[1, 5, 9]])
    dense = type(model)(model.config).eval()
    dense.load_state_dict(dequantize_layers(copy.deepcopy(model), torch.float32).state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
    also(monkeypatch, lambda writer: writer.add_rope_dimension_count(16))
    with pytest.raises(FormatError, match=r"rope\.dimension_count: wanted 32, the size of a head, or .*, got 16"):
        load(write_gguf(tmp_path / "other.gguf", architecture, head_dim=32))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("type", "longrope", "none, linear, yarn or no such key, got 'longrope'"),
        ("factor", float("nan"), "a positive number, got nan"),
        ("factor", "eight", "a positive number, got 'eight'"),
        ("yarn_ext_factor", 0.0, "1 or no such key, got 0.0"),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_other_scaling_is_refused(tmp_path: Path, architecture: str, key: str, value: Any, expected: str) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", architecture))
    checkpoint.file.metadata[f"{architecture}.rope.scaling.{key}"] = value
    with pytest.raises(FormatError, match=rf"tiny\.gguf: {architecture}\.rope\.scaling\.{key}: wanted {expected}"):
        checkpoint.pretrained()


def test_settings_of_gemma_3() -> None:
    """Files of 1B (no scaling), 27B (queries scaled by hidden size / heads), and one without a window."""
    small = {
        "block_count": 26,
        "embedding_length": 1152,
        "attention.head_count": 4,
        "attention.key_length": 256,
        "attention.sliding_window": 512,
        "rope.freq_base": 1e6,
    }
    large = {
        "block_count": 62,
        "embedding_length": 5376,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    actual = KNOWN["gemma3"].settings(small.get)
    assert actual["query_pre_attn_scalar"] is actual["final_logit_softcapping"] is None
    assert actual["rope_parameters"] == {"full_attention": plain | {"rope_theta": 1e6}, "sliding_attention": plain}
    assert [i for i, type in enumerate(actual["layer_types"]) if type == "full_attention"] == [5, 11, 17, 23]
    actual = KNOWN["gemma3"].settings((small | large).get)
    assert actual["query_pre_attn_scalar"] == 168
    assert actual["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": plain,
    }
    del small["attention.sliding_window"]
    assert set(KNOWN["gemma3"].settings(small.get)["layer_types"]) == {"full_attention"}
    with pytest.raises(ValueError, match=r"attention\.sliding_window_pattern: wanted a number from 1, got 0"):
        KNOWN["gemma3"].settings((small | {"attention.sliding_window_pattern": 0}).get)


def llama3_factors(base: float, factor: float, head_size: int = 16) -> np.ndarray:
    """The table that llama.cpp writes for a Llama 3: what transformers divides its frequencies by."""
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(head_dim=head_size, rope_parameters=rope)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    return (1.0 / base ** (torch.arange(0, head_size, 2) / head_size) / stretched).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_llama_3_is_saved_with_its_positions(tmp_path: Path, factor: float) -> None:
    """A saved folder had other logits, because its config said nothing of the file's factors; none was converted."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_0", rope_freqs=llama3_factors(10000.0, factor))
    model, tokenizer = load(path)
    assert model.config.rope_parameters["rope_type"] == "llama3" and model.config.rope_parameters["factor"] == factor
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    expected = plain / torch.from_numpy(llama3_factors(10000.0, factor))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    write_folder(open_checkpoint(path), tmp_path / "converted", OwnWriter(), dtype=torch.float32)
    with torch.inference_mode():
        for folder in ("saved", "converted"):
            assert torch.equal(load(tmp_path / folder)[0](IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("factor", "head_size"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_tables_of_llama_3(factor: float, head_size: int) -> None:
    """The tables of 3.1 8B, 3.2 1B and 3.2 3B; with another base they are none."""
    factors = torch.from_numpy(llama3_factors(500000.0, factor, head_size))
    actual = llama3_parameters(factors, 500000.0)
    assert actual is not None and (actual["factor"], actual["original_max_position_embeddings"]) == (factor, 8192)
    assert llama3_parameters(factors, 400000.0) is None


def test_another_rotary_table_is_loaded_but_not_saved(tmp_path: Path) -> None:
    """A table for which no config has parameters: one factor of Llama 3's is another."""
    factors = llama3_factors(10000.0, 8.0)
    factors[3] = 2
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_0", rope_freqs=factors))
    assert model.config.rope_parameters["rope_type"] == "default"
    with pytest.raises(ValueError, match=r"model\.rotary_emb\.inv_freq of the model is its file's own, and a saved"):
        model.save_pretrained(tmp_path / "saved")


def test_a_rotary_table_beside_scaling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    also(monkeypatch, lambda writer: add_scaling(writer, LINEAR))
    path = write_gguf(tmp_path / "tiny.gguf", "llama", rope_freqs=llama3_factors(10000.0, 8.0))
    with pytest.raises(
        FormatError, match=r"llama\.rope\.scaling\.factor: wanted no such key beside rope_freqs\.weight"
    ):
        load(path)
