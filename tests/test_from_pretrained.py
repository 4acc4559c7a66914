"""transformers' from_pretrained and save_pretrained with w4gemm's layers: the numbers are those of the checkpoint."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2Config

import test_awq
import test_bitsandbytes
import test_compressed_tensors
import test_gptq
from quantized_model import VOCABULARY, Writer, change, configure, convert, write_model
from tiny_model import HIDDEN, LAYERS, MIXTURES, write_dense
from w4gemm import FormatError, W4Linear, WeightFormat, quantize
from w4gemm.integrations.transformers import (
    W4GemmConfig,
    dequantize_layers,
    describe,
    disable,
    enable,
    load,
    quantize_layers,
    summarize,
)
from w4gemm.integrations.transformers.awaited import AwaitedLinear
from w4gemm.weights.file import name_as_tensor

ASYMMETRIC: dict[str, Any] = {"zeros": (1, 15)}
FOLDERS = {
    "gptq": (test_gptq.CONFIG, test_gptq.writer(-1)),
    "gptq-act-order": (
        test_gptq.CONFIG | {"desc_act": True, "sym": False},
        test_gptq.writer(-1, act_order=True, **ASYMMETRIC),
    ),
    "auto-round": (
        test_gptq.CONFIG | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        test_gptq.writer(-1),
    ),
    "bitsandbytes": (test_bitsandbytes.CONFIG, test_bitsandbytes.writer(nested=True)),
    "llm-int8": (test_bitsandbytes.INT8, test_bitsandbytes.in_int8),
    "awq": (test_awq.CONFIG, test_awq.writer(**ASYMMETRIC)),
    "compressed-tensors": (test_compressed_tensors.config(), test_compressed_tensors.writer()),
    "compressed-tensors-fp8": (
        test_compressed_tensors.config(
            packing="int-quantized",
            input_activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        ),
        test_compressed_tensors.writer(packed=False),
    ),
}
IDS = torch.arange(1, 8)[None]
EMBEDDING = "model.embed_tokens"


@pytest.fixture
def enabled() -> Iterator[None]:
    enable()
    yield
    disable()


def from_pretrained(folder: Path, **options: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32} | options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize(("config", "write"), FOLDERS.values(), ids=FOLDERS)
def test_quantized_folders(tmp_path: Path, config: dict[str, Any], write: Writer, enabled: None) -> None:
    expected = write_model(tmp_path, config, write)
    model, loaded = from_pretrained(tmp_path), load(tmp_path)[0]
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).weight.dequantize(), weight), name
    assert summarize(model) == summarize(loaded)
    assert summarize(model).quantized == 7 * LAYERS
    assert torch.equal(logits(model), logits(loaded))
    model.save_pretrained(tmp_path / "saved")
    saved = from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(saved), logits(model))
    assert summarize(saved) == summarize(model)
    for file in tmp_path.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")[0]), logits(model))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("config", "write"), FOLDERS.values(), ids=FOLDERS)
def test_on_a_gpu(tmp_path: Path, config: dict[str, Any], write: Writer, dtype: torch.dtype, enabled: None) -> None:
    expected = write_model(tmp_path, config, write)
    options: dict[str, Any] = {"dtype": dtype, "device_map": "cuda"}
    model = from_pretrained(tmp_path, **options)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).weight.dequantize().cpu(), weight), name
    ids = IDS.cuda()
    with torch.inference_mode():
        actual = model(ids).logits.float()
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(from_pretrained(tmp_path / "saved", **options)(ids).logits.float(), actual)
        dense = dequantize_layers(model, dtype)(ids).logits.float()
    assert (actual - dense).norm() / dense.norm() < (0.1 if "input_activations" in str(config) else 0.03)


@pytest.mark.gpu
def test_a_dense_model_is_quantized_on_the_gpu(tmp_path: Path) -> None:
    options = {"quantization_config": W4GemmConfig("int4_g32"), "dtype": torch.bfloat16}
    folder = write_dense(tmp_path)
    there, here = from_pretrained(folder, device_map="cuda", **options), from_pretrained(folder, **options)
    for name, layer in here.named_modules():
        if isinstance(layer, W4Linear):
            assert torch.equal(there.get_submodule(name).weight.dequantize().cpu(), layer.weight.dequantize()), name
    ids, settings = IDS.cuda(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    static = there.generate(ids, cache_implementation="static", **settings)  # compiled, so it may round otherwise
    assert torch.equal(static[:, : len(IDS[0]) + 1], there.generate(ids, **settings)[:, : len(IDS[0]) + 1])


def test_the_config_alone_is_enough_and_enable_is_undone(tmp_path: Path) -> None:
    write_model(tmp_path, *FOLDERS["awq"])
    model = from_pretrained(tmp_path, quantization_config=W4GemmConfig(activations="fp8"), dtype=torch.bfloat16)
    layers = [layer for layer in model.modules() if isinstance(layer, W4Linear)]
    assert len(layers) == 7 * LAYERS
    assert {(layer.activations, layer.dtype) for layer in layers} == {("fp8", torch.bfloat16)}
    enable()
    disable()
    with pytest.raises(Exception, match="gptqmodel"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("own", ["object", "dict", "of a loaded model"])
def test_a_config_of_transformers_may_hold_it(tmp_path: Path, own: str) -> None:
    """transformers asked the object for its method as if it were a dict."""
    write_dense(tmp_path)
    expected = from_pretrained(tmp_path, quantization_config=W4GemmConfig("int4_g32"))
    config = expected.config
    if own != "of a loaded model":
        config, quantized = AutoConfig.from_pretrained(tmp_path), W4GemmConfig("int4_g32")
        config.quantization_config = quantized.to_dict() if own == "dict" else quantized
    assert torch.equal(*map(logits, (from_pretrained(tmp_path, config=config), expected)))
    other = from_pretrained(tmp_path, config=config, quantization_config=W4GemmConfig("int8_g32"))
    assert {str(m.weight.format) for m in other.modules() if isinstance(m, W4Linear)} == {"int8_g32"}


def test_a_format_that_a_packed_folder_does_not_take_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, *FOLDERS["awq"])
    actual = summarize(from_pretrained(tmp_path, quantization_config=W4GemmConfig("mxfp4"))).formats
    assert len(actual) == 1 and f"its layers stay in {next(iter(actual))}; the format e2m1_g32_e8m0 of" in caplog.text
    caplog.clear()
    from_pretrained(tmp_path, quantization_config=W4GemmConfig(skip=("lm_head", "mlp.down_proj", "none_such")))
    assert "mlp.down_proj stay as the folder has them; skip of W4GemmConfig is for dense models" in caplog.text
    caplog.clear()
    from_pretrained(tmp_path, quantization_config=W4GemmConfig()).save_pretrained(tmp_path / "saved")
    from_pretrained(tmp_path / "saved")
    assert not caplog.text


def test_dense_folders(tmp_path: Path) -> None:
    folder = write_dense(tmp_path, "qwen2")
    dense = from_pretrained(folder)
    model = from_pretrained(folder, quantization_config=W4GemmConfig("int4_g32_zint", skip=("lm_head", "k_proj")))
    assert summarize(model).formats == {"int4_g32_zint": 6 * LAYERS}
    assert len(summarize(model).dense) == 1 + LAYERS
    for name, layer in model.named_modules():
        if isinstance(layer, W4Linear):
            assert torch.equal(
                layer.weight.dequantize(), quantize(dense.get_submodule(name).weight, layer.format).dequantize()
            )
            assert (layer.bias is None) == (dense.get_submodule(name).bias is None)
            assert layer.bias is None or torch.equal(layer.bias, dense.get_submodule(name).bias)
    whole = from_pretrained(folder, quantization_config=W4GemmConfig("int4_g32", skip=()))
    in_place = quantize_layers(from_pretrained(folder), "int4_g32", skip=())
    assert isinstance(whole.lm_head, W4Linear) and torch.equal(logits(whole), logits(in_place))
    for options in ({}, {"exclude_embeddings": True}):
        assert whole.num_parameters(**options) == dense.num_parameters(**options)
    assert whole.num_parameters(only_trainable=True) == sum(p.numel() for p in whole.parameters() if p.requires_grad)
    tokens = len(whole.get_input_embeddings().weight)
    assert len(whole.resize_token_embeddings(tokens).weight) == len(whole.resize_token_embeddings().weight) == tokens
    with pytest.raises(
        ValueError, match=f"new_num_tokens: wanted {tokens}, because a quantized head .*, got {tokens + 3}"
    ):
        whole.resize_token_embeddings(tokens + 3)
    assert torch.equal(logits(whole), logits(in_place))  # the embedding has its old size
    assert len(model.resize_token_embeddings(tokens + 3).weight) == model.lm_head.out_features == tokens + 3
    with pytest.raises(ValueError, match="skip: wanted names .*, got 'kproj'; nearest is 'k_proj'"):
        from_pretrained(folder, quantization_config=W4GemmConfig(skip=("lm_head", "kproj")))
    one = from_pretrained(folder, quantization_config=W4GemmConfig("int4_g32", skip=("lm_head", "model.layers.0")))
    assert {name.partition(".self")[0].partition(".mlp")[0] for name in summarize(one).dense} == {
        "lm_head",
        "model.layers.0",
    }
    assert summarize(from_pretrained(folder, quantization_config=W4GemmConfig())) == summarize(load(folder)[0])
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))
    skip = tuple({name.rpartition(".")[2] for name in summarize(dense).dense})
    with pytest.raises(ValueError, match="model: wanted one with dense linear layers to quantize, got 0 of "):
        from_pretrained(folder, quantization_config=W4GemmConfig(skip=skip))


def test_a_tied_head_in_place_is_a_weight_of_its_own(tmp_path: Path) -> None:
    """``tie_weights`` set a dense weight on it, which was a KeyError, and other readers of a saved folder tied both."""
    config = AutoConfig.from_pretrained(write_dense(tmp_path, "llama"))
    config.tie_word_embeddings = True
    model = quantize_layers(AutoModelForCausalLM.from_config(config), skip=())
    expected = logits(model)
    model.tie_weights()
    describe(model)
    assert not model.config.tie_word_embeddings and torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), expected)
    with pytest.raises(TypeError, match=r"weight: wanted a QuantizedWeight of no experts, got torch.float32 \("):
        model.lm_head.weight = model.get_input_embeddings().weight


def test_a_device_map_is_planned_by_packed_bytes_and_reaches_every_tensor(tmp_path: Path) -> None:
    from transformers.integrations.accelerate import compute_module_sizes

    write_model(tmp_path, *FOLDERS["gptq"])
    model = from_pretrained(tmp_path, quantization_config=W4GemmConfig(), device_map="auto")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    awaited = torch.nn.ModuleDict({"layer": AwaitedLinear(torch.nn.Linear(256, 128, bias=False), WeightFormat(32))})
    assert compute_module_sizes(awaited, model.hf_quantizer)[0][""] == 128 * 256 // 2 + 128 * 256 // 32 * 2
    for device_map in ({"model": "cpu", "lm_head": "disk"}, {"model": 0, "lm_head": "cpu"}):
        with pytest.raises(ValueError, match="device_map: wanted every quantized layer on a GPU"):
            from_pretrained(tmp_path, quantization_config=W4GemmConfig(), device_map=device_map)
    with pytest.raises(ValueError, match=r"device_map: wanted devices that hold numbers, .* got \['meta'\]"):
        from_pretrained(tmp_path, quantization_config=W4GemmConfig(), device_map="meta")


def test_the_base_model_of_a_language_model(tmp_path: Path, enabled: None) -> None:
    write_model(tmp_path, *FOLDERS["awq"])
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = from_pretrained(tmp_path).model(IDS).last_hidden_state
        assert torch.equal(base(IDS).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(logits(load_with_head(tmp_path)), logits(from_pretrained(tmp_path)))


def load_with_head(folder: Path) -> torch.nn.Module:
    """The saved base model under a head: its names get a prefix."""
    model = from_pretrained(folder / "base")
    model.lm_head = from_pretrained(folder).lm_head
    return model


def test_a_loaded_model_is_saved_whatever_it_came_from(tmp_path: Path) -> None:
    from tiny_model import write_gguf

    pytest.importorskip("gguf")
    model, _ = load(write_gguf(tmp_path / "tiny.gguf"))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))


def both_ways(folder: Path, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    return [from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=dtype), load(folder, dtype=dtype)[0]]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "mixtral", "qwen2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_routers_and_embeddings_in_4_bits(
    tmp_path: Path, architecture: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers' own code reads a dense weight, and so do heads that are tied to an embedding; it has the folder's
    numbers, rounded once to the model's dtype. An embedding alone stays packed."""
    for settings in MIXTURES.values():  # GPTQ packs 8 rows in a word
        for key in {"num_experts", "num_local_experts", "n_routed_experts"} & settings.keys():
            monkeypatch.setitem(settings, key, 8)
    folder = write_dense(tmp_path, architecture)
    expected = convert(folder, *FOLDERS["gptq"])
    parts, expected[EMBEDDING] = FOLDERS["gptq"][1](EMBEDDING, VOCABULARY, HIDDEN)
    change(folder, lambda t: t.pop(f"{EMBEDDING}.weight"))
    change(folder, lambda t: t.update({f"{EMBEDDING}.{leaf}": part.contiguous() for leaf, part in parts.items()}))
    if tied:
        change(folder, lambda t: t.pop("lm_head.weight"))
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    for dtype in (torch.float32, torch.bfloat16):
        models = both_ways(folder, dtype)
        for model in models:
            unpacked = {n: w for n, w in expected.items() if n == EMBEDDING or n.endswith(".gate")}
            assert len(unpacked) == {"qwen2": 1, "deepseek_v3": 2}.get(architecture, 3)
            for name, weight in unpacked.items():
                actual = model.get_submodule(name.replace("block_sparse_moe", "mlp")).weight
                whole = model._keep_in_fp32_modules_strict or ()  # DeepSeek's routers, in newer transformers
                kept = any(re.search(part, f"{name}.weight") for part in whole)
                if name == EMBEDDING and not tied:
                    assert torch.equal(model.get_input_embeddings()(torch.arange(VOCABULARY)), actual.dequantize(dtype))
                    actual = actual.dequantize(dtype)
                assert torch.equal(actual, weight.to(torch.float32 if kept else dtype)), name
            assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        assert torch.equal(*map(logits, models))
    models[0].save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)), logits(models[0]))


def test_a_router_of_bitsandbytes(tmp_path: Path) -> None:
    """Its bytes have the name that the dense weight has in the model."""
    expected = convert(write_dense(tmp_path, "qwen3_moe"), *FOLDERS["bitsandbytes"])
    models = both_ways(tmp_path)
    for model, name in itertools.product(models, [name for name in expected if name.endswith(".gate")]):
        assert torch.equal(model.get_submodule(name).weight, expected[name]), name
    assert torch.equal(*map(logits, models))


def test_a_gpt2(tmp_path: Path) -> None:
    """Its layers are no nn.Linear, and keep their weights transposed."""
    sizes = {"n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(write_dense(tmp_path))
    with pytest.raises(ValueError, match=r"got 0 of 1 .*; 4 Conv1D stay dense, because code reads their weights"):
        from_pretrained(tmp_path, quantization_config=W4GemmConfig())
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [key.removesuffix(".weight") for key in tensors if re.search(r"\.c_\w+\.weight$", key)]:
        parts, expected[name] = FOLDERS["gptq"][1](name, *reversed(tensors.pop(f"{name}.weight").shape))
        tensors |= {f"{name}.{leaf}": t.contiguous() for leaf, t in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FOLDERS["gptq"][0]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    models = both_ways(tmp_path)
    for model, name in itertools.product(models, expected):
        assert torch.equal(model.get_submodule(name).weight, expected[name].T), name
    assert len(expected) == 4 and torch.equal(*map(logits, models))


def test_a_router_of_another_shape(tmp_path: Path) -> None:
    expected = convert(write_dense(tmp_path, "qwen3_moe"), *FOLDERS["bitsandbytes"])
    gate = next(name for name in expected if name.endswith(".gate"))
    parts = {f"{gate}.{leaf}": t for leaf, t in FOLDERS["bitsandbytes"][1](gate, 16, HIDDEN)[0].items()}
    change(tmp_path, lambda t: t.update({key: part.contiguous() for key, part in parts.items()}))
    for way in (load, both_ways):
        with pytest.raises(FormatError, match=rf"'{gate}.weight' has shape \(16, 64\), its config wants \(4, 64\)"):
            way(tmp_path)


def test_an_embedding_in_4_bits_beside_a_head_that_the_config_ties(tmp_path: Path) -> None:
    """Both keep their own numbers, as transformers keeps those of dense ones."""
    convert(write_dense(tmp_path), *FOLDERS["bitsandbytes"])
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    parts, expected = FOLDERS["bitsandbytes"][1](EMBEDDING, VOCABULARY, HIDDEN)
    change(tmp_path, lambda t: t.update({f"{EMBEDDING}.{leaf}": part.contiguous() for leaf, part in parts.items()}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in both_ways(tmp_path):
        assert torch.equal(model.lm_head.weight, head) and torch.equal(model.get_input_embeddings().weight, expected)


def test_a_model_whose_layers_are_saved_by_other_names(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """transformers writes a Mixtral's old names; config.json has the model's, and each layer's own state its format."""
    model, tokenizer = load(write_dense(tmp_path / "in", "mixtral"))
    assert len(summarize(model).formats) == 2
    for name, options in (("old", {}), ("own", {"save_original_format": False})):
        model.save_pretrained(tmp_path / name, **options)
        tokenizer.save_pretrained(tmp_path / name)
        assert any("block_sparse_moe" in key for key in load_file(tmp_path / name / "model.safetensors")) == (
            not options
        )
        for saved in (load(tmp_path / name)[0], from_pretrained(tmp_path / name, quantization_config=W4GemmConfig())):
            assert summarize(saved) == summarize(model)
            assert torch.equal(logits(saved), logits(model))
    assert not [w for w in recwarn if "quantization_config names" in str(w.message)]
    change(
        tmp_path / "old",
        lambda t: t.update({"model.layers.0.block_sparse_moe.experts.down._extra_state": name_as_tensor("int4_g64")}),
    )
    with pytest.raises(FormatError, match="experts.down: scales has shape"):  # a format that config.json does not know
        load(tmp_path / "old")


def test_a_model_is_saved_in_one_file_where_it_was_in_shards(tmp_path: Path, enabled: None) -> None:
    write_model(tmp_path / "in", *FOLDERS["gptq"])
    model = from_pretrained(tmp_path / "in")
    AutoTokenizer.from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "saved")
    for size in ("20KB", "5GB"):
        model.save_pretrained(tmp_path / "saved", max_shard_size=size)
        assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))
        assert torch.equal(logits(load(tmp_path / "saved")[0]), logits(model))


def test_dequantize(tmp_path: Path) -> None:
    write_model(tmp_path, *FOLDERS["awq"])
    model = from_pretrained(tmp_path, quantization_config=W4GemmConfig())
    expected = dequantize_layers(load(tmp_path)[0], torch.float32)
    model.save_pretrained(tmp_path / "saved")  # which leaves the name of a dtype in the config
    dense = model.dequantize()
    assert not summarize(dense).quantized
    assert torch.equal(logits(dense), logits(expected))
    dense.save_pretrained(tmp_path / "dense")
    assert torch.equal(logits(from_pretrained(tmp_path / "dense")), logits(expected))


def test_models_that_initialize_weights_of_layers_by_name(tmp_path: Path) -> None:
    """SigLIP names its attention's and MLP's layers, also those whose numbers are still to come."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for key in [key for key in tensors if re.search(r"encoder.*(proj|fc\d)\.weight", key)]:
        name = key.removesuffix(".weight")
        parts, expected[name] = test_bitsandbytes.writer(block=32)(name, *tensors.pop(key).shape)
        tensors |= {f"{name}.{leaf}": t.contiguous() for leaf, t in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": test_bitsandbytes.CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = SiglipVisionModel.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    actual = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, W4Linear)}
    assert len(actual) == len(expected) == 6
    for name, weight in actual.items():
        (same,) = (w for stored, w in expected.items() if stored.endswith(name) or name.endswith(stored))
        assert torch.equal(weight.dequantize(), same), name


def test_a_variant_is_not_mixed_with_another(tmp_path: Path, enabled: None) -> None:
    """transformers would take the dense tensors of the variant, beside packed ones of model.safetensors."""
    model = from_pretrained(write_dense(tmp_path / "dense"), quantization_config=W4GemmConfig())
    model.save_pretrained(tmp_path / "4bit", variant="x")
    for call in (from_pretrained, load):
        options: dict[str, Any] = {"variant": "x"} if call is from_pretrained else {}
        with pytest.raises(FormatError, match=r"no model.safetensors; variants .* rename 'model.x.safetensors' to"):
            call(tmp_path / "4bit", **options)
    expected = logits(model)
    model.save_pretrained(tmp_path / "4bit")
    with pytest.raises(ValueError, match=r"^variant, .* read from model.safetensors; got files .* model.x.safetensors"):
        from_pretrained(tmp_path / "4bit", variant="x")
    assert torch.equal(logits(from_pretrained(tmp_path / "4bit")), expected)
    (tmp_path / "4bit" / "model.x.safetensors").rename(tmp_path / "4bit" / "model.safetensors")  # as the message says
    assert torch.equal(logits(from_pretrained(tmp_path / "4bit")), expected)


def test_a_variant_in_shards(tmp_path: Path, enabled: None) -> None:
    model = from_pretrained(write_dense(tmp_path / "dense"), quantization_config=W4GemmConfig())
    model.save_pretrained(tmp_path / "4bit", variant="x", max_shard_size="50KB")
    index = "model.safetensors.index.json"
    with pytest.raises(FormatError, match=rf"rename 'model.safetensors.index.x.json' to '{index}'"):
        from_pretrained(tmp_path / "4bit", variant="x")
    (tmp_path / "4bit" / "model.safetensors.index.x.json").rename(tmp_path / "4bit" / index)
    assert torch.equal(logits(from_pretrained(tmp_path / "4bit")), logits(model))


def test_layers_that_changed_are_described_before_they_are_saved(tmp_path: Path) -> None:
    model = from_pretrained(write_dense(tmp_path), quantization_config=W4GemmConfig("nf4_g32"))
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = quantize(layer.weight.dequantize(), "nf4_g64")
    with pytest.raises(ValueError, match=r"describe\(model\)"):
        model.save_pretrained(tmp_path / "saved")
    describe(model)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["modules"]) == ("nf4_g32", {"model.layers.0.mlp.up_proj": "nf4_g64"})
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))
    in_place = quantize_layers(from_pretrained(tmp_path), "nf4_g32")
    with pytest.raises(ValueError, match=r"call w4gemm.integrations.transformers.describe\(model\)"):
        in_place.save_pretrained(tmp_path / "in_place")
    describe(in_place)
    in_place.save_pretrained(tmp_path / "in_place")
    assert torch.equal(logits(from_pretrained(tmp_path / "in_place")), logits(in_place))
    configure(tmp_path / "saved", modules={})
    with pytest.raises(FormatError, match="up_proj: scales has shape"):
        from_pretrained(tmp_path / "saved")
    dense = dequantize_layers(in_place, torch.float32)
    describe(dense)
    dense.save_pretrained(tmp_path / "of no layers")
    assert "quantization_config" not in json.loads((tmp_path / "of no layers" / "config.json").read_text())
    assert torch.equal(logits(from_pretrained(tmp_path / "of no layers")), logits(dense))


def test_an_index_without_metadata_is_refused_in_words(tmp_path: Path) -> None:
    model = from_pretrained(write_dense(tmp_path), quantization_config=W4GemmConfig("nf4_g32"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    file = tmp_path / "saved" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["metadata"]
    file.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"model.safetensors.index.json has no \"metadata\".*: add \"metadata\": {}"):
        from_pretrained(tmp_path / "saved")
    file.write_text(json.dumps(index | {"metadata": {}}))
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))


def test_a_part_that_was_quantized_is_described_before_the_model_is_saved(tmp_path: Path) -> None:
    write_dense(tmp_path)
    in_part, by_hand = from_pretrained(tmp_path), from_pretrained(tmp_path)
    quantize_layers(in_part.model, "nf4_g32")
    mlp = by_hand.model.layers[0].mlp
    mlp.up_proj = W4Linear.from_linear(mlp.up_proj, "int4_g32")
    for model in (in_part, by_hand):
        with pytest.raises(ValueError, match=r"such as model.layers.0.*: call .*describe\(model\), then save"):
            model.save_pretrained(tmp_path / "saved")
        describe(model)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"'model.norm.weight' has shape \(3,\)"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}), "up_proj has a bias, its config"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.qweight"), "there is no qweight"),
        (
            lambda t: t.update(
                {
                    k.replace(".mlp.", ".mlp.experts.0."): t.pop(k)
                    for k in list(t)
                    if "0.mlp.up" in k or "0.mlp.gate" in k
                }
            ),
            "no place for model.layers.0.mlp.experts.gate_up_proj .* in the model of its config",
        ),
    ],
    ids=["shape", "bias", "part", "experts"],
)
def test_folders_that_are_refused(tmp_path: Path, changed: Any, message: str) -> None:
    write_model(tmp_path, *FOLDERS["awq"])
    change(tmp_path, changed)
    with pytest.raises(FormatError, match=message):
        from_pretrained(tmp_path, quantization_config=W4GemmConfig())


def test_a_dense_folder_without_a_weight_is_refused(tmp_path: Path) -> None:
    folder = write_dense(tmp_path)
    change(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(FormatError, match="no tensor for model.layers.1.mlp.up_proj.weight"):
        from_pretrained(folder, quantization_config=W4GemmConfig())


def test_a_dense_weight_of_another_size(tmp_path: Path) -> None:
    folder, name = write_dense(tmp_path, "llama"), "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name][:, :32].contiguous()}))
    with pytest.raises(FormatError, match=rf"tensor '{name}' has shape \(96, 32\), its config wants \(96, 64\)"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64])
def test_a_dtype_that_no_layer_has_is_refused_before_the_model_is_made(dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers makes the model in it, which PyTorch refuses in words of its own for fp8."""
    folder = write_dense(tmp_path)
    with pytest.raises(TypeError, match=f"dtype: wanted torch.float32 or torch.float16 or torch.bfloat16, got {dtype}"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=dtype)


def test_bad_configs() -> None:
    with pytest.raises(ValueError, match="format: wanted int4_g"):
        W4GemmConfig("int5")
    with pytest.raises(ValueError, match="activations: wanted 'fp8' or None, got"):
        W4GemmConfig(activations="fp4")
    with pytest.raises(TypeError, match="wanted format, activations, skip or modules, got 'bits'"):
        W4GemmConfig(bits=4)


def test_layers_that_a_model_shares_are_saved_each(tmp_path: Path) -> None:
    """The head is dense and tied to the embedding: the folder lacked it when the config said that nothing is tied."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "chunk_size": 8}
    sizes |= {
        "num_attention_heads": 4,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "adapter_rank": 32,
    }
    shared = {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 1, "mamba_ngroups": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **sizes, **shared), dtype=torch.float32)
    quantize_layers(model.eval(), "nf4_g32")
    describe(model)
    ids = torch.tensor([[5, 1, 7, 7]])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    assert summarize(again).dense == ("lm_head",) and again.config.tie_word_embeddings
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)
