"""Models whose token embedding stays packed, alone or together with their head."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from bench.engine.gguf import FILE
from bench.engine.gguf import write_gguf as write_k_quants
from bench.engine.models import model_named, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_model import write_gguf
from w4gemm import FormatError, W4Linear, WeightFormat
from w4gemm.checkpoints import open_checkpoint
from w4gemm.cli.__main__ import main
from w4gemm.core.problem import GPUS, H200, Device
from w4gemm.integrations.generation import generate
from w4gemm.integrations.transformers import (
    W4GemmConfig,
    dequantize_embedding,
    dequantize_layers,
    load,
    places,
    quantizer,
    summarize,
)
from w4gemm.integrations.transformers.awaited import AwaitedLinear
from w4gemm.integrations.transformers.embeddings import (
    AwaitedEmbedding,
    ScaledEmbedding,
    TiedEmbedding,
    dense_embedding,
    factor_of,
    reads_weight,
)
from w4gemm.packing.packed_shape import packed_shape

IDS = torch.tensor([[5, 1, 7, 7, 0, 12]])
ARCHITECTURES = ("llama", "gemma3")


@pytest.fixture(params=[(name, tied) for name in ARCHITECTURES for tied in (True, False)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.nn.Module]:
    architecture, tied = request.param
    import transformers

    if architecture == "gemma3" and transformers.__version__.startswith("5.17."):
        pytest.skip("its tokens are other ones, and it is refused")
    yield load(write_gguf(tmp_path / "tiny.gguf", architecture, "Q4_1", tied), dtype=torch.bfloat16)[0]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def test_logits_are_those_beside_a_dense_embedding(model: torch.nn.Module) -> None:
    packed, before = model.get_input_embeddings(), logits(model)
    is_tied = model.lm_head.format == WeightFormat.parse("int8_g32_fp16")
    assert isinstance(packed, TiedEmbedding if is_tied else ScaledEmbedding) and isinstance(model.lm_head, W4Linear)
    if is_tied:
        assert packed.weight is model.lm_head.weight
    assert summarize(model).quantized == 15 and not summarize(model).dense
    assert "embed_tokens.weight" not in dict(model.named_parameters()) and model.get_memory_footprint() > 0
    model.set_input_embeddings(dense := dense_embedding(packed, torch.bfloat16))
    assert torch.equal(logits(model), before) and torch.equal(dense(IDS), packed(IDS))
    assert type(dense).__name__ in ("Embedding", "Gemma3TextScaledWordEmbedding")


def test_it_generates_moves_and_is_copied(model: torch.nn.Module) -> None:
    before = logits(model)
    assert generate(model, IDS, 4, 0.0, 1).shape == (1, 4)
    with pytest.raises(FormatError, match="the tokenizer gives token 100012, but the model has embeddings of"):
        generate(model, IDS + 100000, 4, 0.0, 1)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), before)
    head, embedding = other.lm_head, other.get_input_embeddings()
    if isinstance(embedding, TiedEmbedding):
        head.half()
        assert embedding.weight is head.weight is not model.lm_head.weight
        assert embedding(IDS).dtype == torch.float16
        head.weight = head.weight.to("meta")
        assert embedding.weight.device.type == "meta"
    again = copy.deepcopy(model)
    again.lm_head.weight = model.lm_head.weight.to("meta").repack("canonical")
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), before)


def test_saved_and_loaded_again(model: torch.nn.Module, tmp_path: Path) -> None:
    before, kind = logits(model), type(model.get_input_embeddings())
    model.save_pretrained(folder := tmp_path / "saved")
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored.get("tied", {}) == ({"model.embed_tokens": "lm_head"} if kind is TiedEmbedding else {})
    checkpoint = open_checkpoint(folder)
    assert torch.equal(logits(load_folder(folder)), before)
    config = W4GemmConfig()
    again = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    assert type(again.get_input_embeddings()) is kind and torch.equal(logits(again), before)
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(load_folder(tmp_path / "twice")), before)
    if kind is TiedEmbedding:  # for readers that want a dense one
        dense = checkpoint.dense("model.embed_tokens.weight", torch.bfloat16)
        assert torch.equal(dense, again.lm_head.weight.dequantize(torch.bfloat16))
        assert checkpoint.stored_type("model.embed_tokens.weight") == ""
        placement = placed(folder, GPUS["sm_80"])
        assert "model.embed_tokens.weight" in {t for r in placement.made for t in r.targets}


def load_folder(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=torch.bfloat16)


def test_dense_again(model: torch.nn.Module) -> None:
    before = model.get_input_embeddings()(IDS)
    dequantize_layers(model, torch.bfloat16)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    assert torch.equal(model.get_input_embeddings()(IDS), before)


def test_dense_on_demand(model: torch.nn.Module, tmp_path: Path) -> None:
    before = logits(model)
    assert dequantize_embedding(dequantize_embedding(model)) is model and torch.equal(logits(model), before)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    model.save_pretrained(tmp_path / "saved")
    again = load_folder(tmp_path / "saved")
    assert isinstance(again.get_input_embeddings(), torch.nn.Embedding) and torch.equal(logits(again), before)


def test_it_is_not_resized(model: torch.nn.Module) -> None:
    rows = model.get_input_embeddings().num_embeddings
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    model.lm_head = torch.nn.Linear(64, rows, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="because a quantized head or embedding cannot get other rows"):
        model.resize_token_embeddings(rows + 8)


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("target_modules", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("trainable_token_indices", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
        ("prompt tuning", {}),
    ],
)
def test_peft_is_told_to_ask_for_a_dense_one(model: torch.nn.Module, argument: str, settings: dict[str, Any]) -> None:
    """Its own errors name neither the embedding nor what makes it dense."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**settings) if settings else peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)
    if not settings:
        prefixes = peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3)
        assert peft.get_peft_model(copy.deepcopy(model), prefixes)(IDS).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"{argument}: wanted a dense embedding, got model.embed_tokens, .*packed"):
        peft.get_peft_model(copy.deepcopy(model), config)
    assert peft.get_peft_model(dequantize_embedding(model), config)(IDS).logits.isfinite().all()


def test_an_adapter_of_the_head_is_not_merged_into_the_embedding(model: torch.nn.Module, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    embedding = model.get_input_embeddings()
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    before, rows = logits(model), embedding(IDS)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).unload()
    assert model.get_input_embeddings() is embedding
    adapted = peft.get_peft_model(model, config)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), before)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.get_input_embeddings()(IDS), rows) and not torch.equal(logits(merged), before)
    merged.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load_folder(tmp_path / "saved")), logits(merged))


def test_compressed_tensors_gets_a_dense_one(tmp_path: Path) -> None:
    """Engines read no other."""
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_0", True), dtype=torch.bfloat16)
    before = logits(model)
    model.save_pretrained(folder := tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors" and not config["tie_word_embeddings"]
    again = load_folder(folder)
    assert type(again.get_input_embeddings()) is torch.nn.Embedding and torch.equal(logits(again), before)


# --- where it stays dense --------------------------------------------------------------------------------------------


def placed(folder: Path, device: Device, dtype: torch.dtype = torch.bfloat16, **options: bool) -> places.Placement:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    path = folder / FILE if (folder / FILE).is_file() else folder
    return places.Placement(model, open_checkpoint(path), device, **options)


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_k_quants(tiny(model_named("llama-3-8b")), folder := tmp_path_factory.mktemp("model"), "Q4_K")
    return folder


def test_memory_is_that_of_the_file(k_quants: Path) -> None:
    pytest.importorskip("cutlass")
    placement, file = placed(k_quants, H200), open_checkpoint(k_quants / FILE).file
    layers = [m for m in placement._model.modules() if isinstance(m, AwaitedLinear)]
    assert any(isinstance(m, AwaitedEmbedding) for m in layers)
    packed = sum(packed_shape(m.format, "mma16", m.out_features, m.in_features).nbytes for m in layers)
    dense = 2 * sum(p.numel() for p in placement._model.parameters())
    stored = sum(info.nbytes for info in file.tensors.values())
    assert 0.97 < (packed + dense) / stored < 1.03


@pytest.mark.parametrize(
    "device, dtype, options, stays",
    [
        (H200, torch.bfloat16, {}, True),
        (H200, torch.float32, {}, False),
        (GPUS["sm_80"], torch.bfloat16, {}, False),
        (Device("cpu"), torch.float32, {}, True),
        (Device("cpu"), torch.float32, {"embeddings": False}, False),
    ],
)
def test_where_it_stays_packed(
    k_quants: Path, device: Device, dtype: torch.dtype, options: dict[str, bool], stays: bool
) -> None:
    pytest.importorskip("cutlass")
    placement = placed(k_quants, device, dtype, **options)
    assert isinstance(placement._model.get_input_embeddings(), AwaitedEmbedding) == stays
    dense = {target for recipe in placement.account.recipes for target in recipe.targets}
    assert ("model.embed_tokens.weight" in dense) == (not stays)


@pytest.mark.parametrize("tied", [True, False])
def test_inspect_says_that_it_stays_packed(tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write_gguf(tmp_path / "tiny.gguf", tied=tied)), "--device", "cpu"]) == 0
    memory = "it shares the weight of lm_head" if tied else "int8_g32_fp16, 259 x 64, 0.0 MiB"
    out = capsys.readouterr().out
    assert f"model.embed_tokens.weight stays packed: {memory}" in out and "dense matrices" not in out


def test_of_a_saved_head_that_quantizes_x(tmp_path: Path) -> None:
    """Its layout is another one, so that the embedding has a weight of its own: filling it ended in a KeyError."""
    pytest.importorskip("cutlass")
    load(write_gguf(tmp_path / "tiny.gguf"))[0].save_pretrained(folder := tmp_path / "saved")
    placement = placed(folder, H200, fp8=True)
    assert isinstance(placement._model.get_input_embeddings(), AwaitedEmbedding)
    placement.fill("model.embed_tokens", torch.device("cpu"), "fp8")
    rows = open_checkpoint(folder).weight("lm_head").dequantize()
    assert torch.equal(placement._model.get_input_embeddings().weight.dequantize(), rows)


def test_from_pretrained_of_a_saved_head_that_quantizes_x(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Placed as for a GPU. What it saves has the embedding among its modules, which no product computes."""
    pytest.importorskip("cutlass")
    load(write_gguf(tmp_path / "tiny.gguf"), dtype=torch.bfloat16)[0].save_pretrained(tmp_path / "saved")
    config = W4GemmConfig(activations="fp8")
    options = {"dtype": torch.bfloat16, "device_map": "cpu"}
    tied = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=config, **options)
    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "Device", SimpleNamespace(of=lambda _: H200))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=config, **options)
    assert isinstance(tied.get_input_embeddings(), TiedEmbedding) and model.lm_head.activations == "fp8"
    assert isinstance(model.get_input_embeddings(), ScaledEmbedding)
    model.save_pretrained(folder := tmp_path / "again")
    for other in (model, AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), **options)):
        assert torch.equal(logits(other), logits(tied))
    for device, runs in (("h200", "rows are looked up"), ("a100", "dense: no kernel looks up its rows")):
        assert main(["inspect", str(folder), "--device", device, "--m", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.endswith(runs) for line in lines if line.startswith("model.embed_tokens ")] == [True]


def test_embeddings_that_models_read_or_change() -> None:
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    assert factor_of(torch.nn.Embedding(3, 4)) == 1 and factor_of(Gemma3TextScaledWordEmbedding(3, 4, 0, 2.5)) == 2.5
    assert factor_of(BartScaledWordEmbedding(3, 4, 0, 2.5)) is None and factor_of(torch.nn.Linear(3, 4)) is None
    assert factor_of(torch.nn.Embedding(3, 4, max_norm=1.0)) is None and factor_of(None) is None
    changed = torch.nn.Embedding(3, 4)
    changed.forward = lambda ids: ids
    assert factor_of(changed) is None

    def of(file: str) -> torch.nn.Module:
        module = torch.nn.Module()
        module.__class__ = type("Other", (torch.nn.Module,), {"__module__": file})
        return module

    import transformers.models.t5gemma.modeling_t5gemma as reads

    assert not reads_weight(of(LlamaRotaryEmbedding.__module__), "embed_tokens")
    assert reads_weight(of(reads.__name__), "embed_tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_on_a_gpu(tmp_path: Path, tied: bool) -> None:
    """Rows are decoded by the kernel, also in the captured steps of generate."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_1", tied)
    model, ids = load(path, "cuda", torch.bfloat16)[0], IDS.cuda()
    packed = model.get_input_embeddings()
    assert isinstance(packed, TiedEmbedding if tied else ScaledEmbedding) and packed.weight.layout == "mma16"
    with torch.inference_mode():
        before = model(ids).logits
    tokens = generate(model, ids, 20, 0.0, 1)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", quantization_config=W4GemmConfig(), dtype=torch.bfloat16, device_map="cuda"
    )
    assert isinstance(again.get_input_embeddings(), type(packed))
    for other in (again, dequantize_embedding(model)):
        with torch.inference_mode():
            assert torch.equal(other(ids).logits, before)
        assert torch.equal(generate(other, ids, 20, 0.0, 1), tokens)
