"""Checkpoints of random numbers that bench.engine writes."""

from __future__ import annotations

import re

import pytest
import torch
from bench.engine import __main__ as program
from bench.engine import options
from bench.engine.checkpoint import tensors_of, write
from bench.engine.models import cut, model_named, tiny
from bench.engine.packing import Packing

from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.hugging_face import SafetensorsFolder
from w4gemm.core.formats import PER_COLUMN
from w4gemm.integrations.vllm.models import read_model

CHECKPOINTS = """
llama-3-8b        gptq-int4-g128, gptq-int4-g64-act, gptq-int4-g128-head, gptq-int4-g128-dynamic, ct-nvfp4-a16
llama-3-8b        modelopt-nvfp4-a16, quark-int4-g128: int4_g128, auto-round-int4-g128: int4_g128
llama-3-8b        gptq-int8-g128: int8_g128, ct-int3-g128: int3_g128, ct-int8-g64: int8_g64
llama-3-8b        ct-e4m3: e4m3_col_fp32, ct-e4m3-block: e4m3_g128_b128, ct-mxfp8: e4m3_g32_e8m0
qwen2.5-32b       awq-int4-g128, ct-nvfp4: e2m1_g16_e4m3_row, quark-mxfp4: e2m1_g32_e8m0, quark-mxfp6: e2m3_g32_e8m0
qwen3-30b-a3b     ct-int4-g128-fp8: int4_g128_e4m3, quark-nvfp4, auto-round-mxfp4: e2m1_g32_e8m0
minimax-m3        ct-int4-g32
nemotron-3-nano   ct-int4-g32
mixtral-8x7b      gptq-int4-g128
kimi-k3-quarter   ct-mxfp4: e2m1_g32_e8m0
qwen3.5-35b-a3b   modelopt-nvfp4-mixed
deepseek-v4-flash deepseek-v4
"""
"""Models and formats; behind a colon the format that the plugin packs."""
OTHERS = {"modelopt-nvfp4-mixed": PER_COLUMN, "deepseek-v4": 128}
"""Group sizes of modules beside the experts, in fp8."""
CASES = [
    (name, *format.partition(": ")[::2])
    for name, _, formats in (line.partition(" ") for line in CHECKPOINTS.strip().splitlines())
    for format in formats.strip().split(", ")
]


def gain(name: str) -> float:
    if name == "lm_head":
        return 4.0
    return 0.5 if name.endswith(("o_proj", "out_proj", "down_proj", "w2", "wo_b")) else 1.0


@pytest.mark.parametrize("name, format, packed", CASES)
def test_a_tiny_checkpoint_opens_and_keeps_the_size_of_activations(name, format, packed, tmp_path):
    model, packing = tiny(model_named(name)), Packing.parse(format)
    assert str(packing) == format
    size = write(model, packing, tmp_path)
    assert size == sum(t.nbytes for t in tensors_of(model, packing))
    checkpoint = open_checkpoint(tmp_path)
    assert ("lm_head" in checkpoint.modules) == (packing.option == "head") and checkpoint.modules
    assert not packed or {str(layer.format) for layer in read_model(str(tmp_path)).layers} == {packed}
    for at, module in checkpoint.modules.items():
        group_size = packing.group_size if module.experts else OTHERS.get(format, packing.group_size)
        activations = "fp8" if packing.option == "fp8" else None
        assert (module.format.group_size, module.activations) == (group_size, activations)
        std = checkpoint.weight(at).dequantize().std().item() * module.k**0.5
        scatter = (
            0.6 if re.search("mxfp|block", format) else 1.1 if "v4" in format else 0.1
        )  # a power of two for a block
        assert std == pytest.approx(gain(at), rel=scatter), at


def test_fused_modules_have_their_columns_in_one_order(tmp_path):
    """An engine keeps one g_idx of q, k and v."""
    write(tiny(model_named("llama-3-8b")), Packing.parse("gptq-int4-g64-act"), tmp_path)
    stored = SafetensorsFolder(tmp_path)
    orders = [stored.tensor(f"model.layers.1.self_attn.{name}_proj.g_idx") for name in "qkv"]
    assert all(torch.equal(order, orders[0]) for order in orders)
    assert not torch.equal(orders[0], orders[0].sort().values)
    assert orders[0].bincount().tolist() == [64] * 4


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen3.5-35b-a3b", "deepseek-v3-5-layers", "gpt-oss-20b"])
def test_transformers_makes_the_same_dense_model(name, tmp_path):
    """Names and shapes are those of transformers' own model of the config, which engines share."""
    transformers = pytest.importorskip("transformers")
    model = tiny(model_named(name))
    write(model, Packing.parse(model.own_format or "bf16"), tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in made.state_dict().items() if "experts." not in name}
    stored = {name: info.shape for name, info in SafetensorsFolder(tmp_path).tensors.items() if "experts." not in name}
    assert stored == {name: shape for name, shape in expected.items() if not name.endswith("inv_freq")}


@pytest.mark.parametrize(
    "name, format, gigabytes",
    [("llama-3-70b", "gptq-int4-g128", 39.8), ("qwen2.5-32b", "awq-int4-g128", 19.3), ("gpt-oss-20b", "mxfp4", 13.8)],
)
def test_models_are_as_large_as_the_published_ones(name, format, gigabytes):
    size = sum(t.nbytes for t in tensors_of(model_named(name), Packing.parse(format)))
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_bad_models_and_formats_are_named():
    with pytest.raises(ValueError, match="model: wanted one of llama-3-8b, .*got 'llama'"):
        model_named("llama")
    with pytest.raises(ValueError, match="format: wanted gptq-int4-g128, .*got 'gptq-int4-g128-fp8'"):
        Packing.parse("gptq-int4-g128-fp8")
    with pytest.raises(ValueError, match="gpt-oss-20b wants mxfp4, got gptq-int4-g128"):
        program.main(["--model", "gpt-oss-20b", "--format", "gptq-int4-g128"])
    with pytest.raises(ValueError, match="llama-3-8b wants a format of int4, got mxfp4"):
        program.main(["--model", "llama-3-8b", "--format", "mxfp4"])
    pairs = options.formats_of(model_named("gpt-oss-20b"), [Packing.parse("gptq-int4-g128"), Packing.parse("mxfp4")])
    assert [str(packing) for _, packing in pairs] == ["mxfp4"]
    args = options.parser().parse_args(["--layers", "2"])
    own = options.pairs_of("mixtral-8x7b=ct-int4-g128-fp8", [Packing.parse("bf16")], args)
    assert [(model.name, str(packing)) for model, packing in own] == [("mixtral-8x7b-2-layers", "ct-int4-g128-fp8")]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert cut(model_named("gpt-oss-20b"), 3).config["layer_types"] == kinds
