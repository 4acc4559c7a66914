"""Converted folders hold the same bits; runs that were interrupted go on; inspect says what is in a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import test_awq
import test_compressed_tensors
import test_gptq
from quantized_model import Writer, change, write_model
from tiny_model import LAYERS, write_dense, write_gguf
from w4gemm import FormatError, quantize
from w4gemm.checkpoints import compressed_tensors_writer, find_checkpoint, open_checkpoint
from w4gemm.checkpoints.stored import NAMES
from w4gemm.checkpoints.w4gemm import OwnPacking
from w4gemm.checkpoints.writing import one_of_each
from w4gemm.cli.__main__ import main
from w4gemm.cli.convert import WRITERS
from w4gemm.cli.problems import embeddings_of
from w4gemm.core.formats import SCALES, ScaleRule
from w4gemm.integrations.transformers import W4GemmConfig, load

SOURCES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (test_gptq.CONFIG | {"sym": False}, test_gptq.writer(-1, zeros=(1, 15))),
    "awq": (test_awq.CONFIG, test_awq.writer(zeros=(0, 15))),
    "compressed-tensors": (
        test_compressed_tensors.config(
            packing="int-quantized",
            input_activations=test_compressed_tensors.FP8,
            weights={"group_size": -1} | {"strategy": "channel"},
        ),
        test_compressed_tensors.writer(-1, packed=False),
    ),
}


@pytest.fixture
def their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers open folders of compressed-tensors by that package, also those that w4gemm wrote."""
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", CompressedTensorsConfig)


def gptq_folder(folder: Path) -> Path:
    write_model(folder, *SOURCES["gptq"])
    return folder


def convert(*args: object) -> int:
    return main(["convert", *map(str, args)])


def assert_same(folder: Path, source: Path) -> None:
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    ours, theirs = open_checkpoint(folder), one_of_each(open_checkpoint(source), WRITERS[method])
    assert ours.modules == {name: replace(m, shared=False) for name, m in theirs.modules.items()}
    for name in theirs.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize()), name
        assert ours.weight(name).activations == theirs.weight(name).activations
    assert {name: ours.tensors[name] for name in theirs.tensors} == dict(theirs.tensors)
    assert all(torch.equal(ours.dense(name), theirs.dense(name)) for name in theirs.tensors)


@pytest.mark.parametrize("to", ["w4gemm", "compressed-tensors"])
@pytest.mark.parametrize("source", SOURCES)
def test_bits_stay(tmp_path: Path, source: str, to: str) -> None:
    write_model(tmp_path / "in", *SOURCES[source])
    assert convert(tmp_path / "in", tmp_path / "out", "--to", to) == 0
    assert find_checkpoint(tmp_path / "out").format.name == to
    assert_same(tmp_path / "out", tmp_path / "in")
    (model, tokenizer), (expected, _) = load(tmp_path / "out"), load(tmp_path / "in")
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits)


IN_ACT_ORDER = (
    test_gptq.CONFIG | {"desc_act": True, "sym": False},
    test_gptq.writer(-1, zeros=(1, 15), act_order=True),
)


@pytest.mark.parametrize(
    "source, why",
    [
        (SOURCES["gptq"], ""),
        (SOURCES["compressed-tensors"], ""),
        (IN_ACT_ORDER, "compressed-tensors from 0.20 on does not hold weights in act-order"),
    ],
    ids=["gptq", "compressed-tensors", "act-order"],
)
def test_the_folder_is_of_compressed_tensors_if_that_holds_every_bit(tmp_path, capsys, source, why) -> None:
    write_model(tmp_path / "in", *source)
    assert convert(tmp_path / "in", tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == find_checkpoint(tmp_path / "out").format.name == ("w4gemm" if why else "compressed-tensors")
    assert said["why"] == (f"model.layers.0.mlp.down_proj: {why}" if why else "")
    assert_same(tmp_path / "out", tmp_path / "in")
    if why:
        assert convert(tmp_path / "in", tmp_path / "other", "--to", "compressed-tensors") == 1
        assert f"{why}; --to w4gemm does" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors.torch import load_file

    write_model(tmp_path / "in", *SOURCES["awq"])
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "compressed-tensors") == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    n, k = tensors[f"{name}.weight_shape"].tolist()
    codes = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, torch.Size((n, k)))
    zeros = unpack_from_int32(tensors[f"{name}.weight_zero_point"], 4, torch.Size((n, k // 32)), packed_dim=0)
    scales = tensors[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
    expected = open_checkpoint(tmp_path / "in").weight(name).dequantize()
    assert torch.equal((codes.float() - zeros.float().repeat_interleave(32, 1)) * scales, expected)


def test_a_head_that_is_tied_is_none_of_the_4_bit_layers(their_own: None, tmp_path: Path) -> None:
    """compressed-tensors takes every linear layer that its config does not leave out, and a tied head is one."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = write_dense(tmp_path / "in")
    config = json.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    args = ("--to", "compressed-tensors", "--format", "int4_g32", "--dtype", "float32")
    assert convert(folder, tmp_path / "out", *args) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, tokenizer = load(tmp_path / "out")
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert theirs(ids).logits.isclose(ours(ids).logits, rtol=1e-4, atol=1e-5).all()


@pytest.mark.parametrize("format", ["int4_g32_zint", "int8_g32", "int6_col_zint", "int3_g32", "mxfp6"])
def test_transformers_reads_every_width_and_zero_points(their_own: None, format: str, tmp_path: Path) -> None:
    """By default it allocates zero points unpacked, so the folder asks it to make layers dense while it loads them."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = write_dense(tmp_path / "in")
    dtype = "bfloat16" if format == "mxfp6" else "float32"  # compressed-tensors makes it bf16
    assert convert(folder, tmp_path / "out", "--format", format, "--dtype", dtype) == 0
    assert find_checkpoint(tmp_path / "out").format.name == "compressed-tensors"
    ours, rounded = open_checkpoint(tmp_path / "out"), open_checkpoint(folder, format)
    assert ours.modules == rounded.modules
    assert all(torch.equal(ours.weight(n).dequantize(), rounded.weight(n).dequantize()) for n in ours.modules)
    ids = torch.arange(1, 8)[None]
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits.float()
        assert theirs.isclose(load(tmp_path / "out")[0](ids).logits, rtol=0.05, atol=0.02).all()  # dense ones are bf16


def test_zero_points_that_transformers_does_not_read_are_said(their_own: None, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    one, two = (test_compressed_tensors.config({"symmetric": symmetric}) for symmetric in (True, False))
    two["config_groups"] |= {"group_1": one["config_groups"]["group_0"] | {"targets": ["re:.*q_proj"]}}
    plain, shifted = test_compressed_tensors.writer(), test_compressed_tensors.writer(zero_point=True, zeros=(0, 15))
    write_model(tmp_path / "mixed", two, lambda name, *nk: (plain if "q_proj" in name else shifted)(name, *nk))
    write_model(tmp_path / "gptq", *SOURCES["gptq"])
    for folder, why, error in (
        (write_dense(tmp_path / "experts", "qwen3_moe"), "it reads no zero points of experts", "conversion"),
        (tmp_path / "mixed", "it reads zero points only if all layers have one format", "mismatched"),
        (tmp_path / "gptq", "", ""),
    ):
        out, format = tmp_path / f"{folder.name}_out", ("--format", "int4_g32_zint") if folder.name == "experts" else ()
        assert convert(folder, out, *format) == 0
        said = capsys.readouterr().err
        assert ("transformers reads it with w4gemm alone" in said) == bool(why) and why in said
        with pytest.raises(RuntimeError, match=error) if why else contextlib.nullcontext():
            AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_have_the_names_of_published_files(their_own: None, architecture: str, tmp_path: Path) -> None:
    """transformers, which has other names for Mixtral's, finds them under these, and so do engines."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = write_dense(tmp_path / "in", architecture)
    args = ("--to", "compressed-tensors", "--format", "int4_g32", "--dtype", "float32")
    assert convert(folder, tmp_path / "out", *args) == 0
    named, stored = (
        {n.rpartition(".")[0] for n in load_file(p / "model.safetensors")} for p in (folder, tmp_path / "out")
    )
    assert {n for n in named if ".experts." in n} == {n for n in stored if ".experts." in n} != set()
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    ours, tokenizer = load(tmp_path / "out")
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert theirs(ids).logits.isclose(ours(ids).logits, rtol=0.05, atol=0.02).all()  # theirs are rounded to bf16
    ours.save_pretrained(tmp_path / "saved")  # as gate_up and down of all experts
    assert convert(tmp_path / "saved", tmp_path / "again", *args[:2]) == 0
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == again.keys() and all(torch.equal(t, again[name]) for name, t in first.items())


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was left out without a word, and transformers refused the written folder, which had the adapter's config."""
    folder = write_dense(tmp_path / "in")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"in: adapter_config.json says .* wanted the model alone: move adapter_\*"):
        load(folder)
    assert convert(folder, tmp_path / "out") != 0
    assert "move adapter_* to a folder" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_layers_that_are_one_tensor_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers splits it into theirs (Sarvam's query_key_value), and says the same name for each: all but one were
    lost."""
    source = open_checkpoint(write_dense(tmp_path))
    one = re.compile(r"[qkv]_proj|mlp\.\w+_proj(?=\.bias)")
    monkeypatch.setattr(compressed_tensors_writer, "_saved_as", lambda model, name, t: [one.sub("fused", name)])
    named = compressed_tensors_writer.in_files(source)
    assert named.modules.keys() == source.modules.keys() and named.tensors.keys() == source.tensors.keys()


def test_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2")
    assert convert(path, tmp_path / "out", "--dtype", "float32") == 0
    assert "stays dense" not in capsys.readouterr().err
    assert_same(tmp_path / "out", path)
    (model, tokenizer), (expected, _) = load(tmp_path / "out"), load(path)
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)
    assert convert(path, tmp_path / "other", "--to", "compressed-tensors") == 1
    assert "compressed-tensors does not hold int4_g32_zfloat_fp16; --to w4gemm does" in capsys.readouterr().err
    stretched = write_gguf(tmp_path / "stretched.gguf", rope_freqs=np.linspace(1, 8, 8))
    assert convert(stretched, tmp_path / "third") == 1
    assert "model.rotary_emb.inv_freq is of its own" in capsys.readouterr().err


@pytest.mark.parametrize("architecture, tied", [("llama", True), ("llama", False), ("gemma3", True)])
def test_packed_embeddings_stay_packed(
    tmp_path: Path, architecture: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """They became dense, and with them a tied head: a folder of a small model was a third larger than its file."""
    path = write_gguf(tmp_path / "tiny.gguf", architecture, "Q4_1", tied)
    assert convert(path, tmp_path / "out", "--dtype", "float32") == 0
    assert convert(tmp_path / "out", tmp_path / "again") == 0
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert config.get("tied") == ({"model.embed_tokens": "lm_head"} if tied else None)
    (expected, _), ids = load(path), torch.tensor([[5, 1, 7]])
    for folder in (tmp_path / "out", tmp_path / "again"):
        model, _ = load(folder)
        assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert main(["inspect", str(folder)]) == 0 and "dense matrices" not in capsys.readouterr().out
        args, own = (argparse.Namespace(model=each, format=None) for each in (folder, path))
        assert [m.format for m in embeddings_of(args)] == [m.format for m in embeddings_of(own)] != []


def test_embeddings_are_dense_in_compressed_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", "Q8_0", True)
    assert convert(path, tmp_path / "out", "--dtype", "float32") == 0
    said = capsys.readouterr().err
    assert "a compressed-tensors folder" in said and "stays dense, like the tensor that it shares: lm_head\n" in said
    assert_same(tmp_path / "out", path)


def test_an_architecture_that_is_not_known_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused when config.json was to be written, behind all weights."""
    path = write_gguf(tmp_path / "in.gguf")
    old, new = (len(name).to_bytes(8, "little") + name for name in (b"llama", b"lhama"))
    path.write_bytes(path.read_bytes().replace(old, new))
    assert convert(path, tmp_path / "out") == 1
    assert "architecture 'lhama' cannot be loaded; wanted one of llama, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_quantized(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "in")
    args = ("--to", "compressed-tensors", "--format", "int4_g32", "--search")
    assert convert(folder, tmp_path / "out", *args) == 0
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(folder, "int4_g32")
    assert len(ours.modules) == 7 * LAYERS
    theirs.search = True  # type: ignore[attr-defined]
    for name in ours.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize())
    with torch.inference_mode():
        plain = quantize(torch.randn(4, 64), "int4_g32")
    assert plain.format == ours.modules["model.layers.0.mlp.up_proj"].format


def test_groups_that_do_not_divide_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """compressed-tensors was written with a shorter last group, which no reader of it takes."""
    folder = write_dense(tmp_path / "in")
    args = ("--format", "int4_g48")
    assert convert(folder, tmp_path / "out", *args, "--to", "compressed-tensors") == 1
    assert "k to be a multiple of the group size 48, got 64; --to w4gemm holds a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert(folder, tmp_path / "own", *args) == 0
    assert "a w4gemm folder" in capsys.readouterr().err
    ours, theirs = open_checkpoint(tmp_path / "own"), open_checkpoint(folder, "int4_g48")
    for name in theirs.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize())


def test_8_bit_zero_points_of_one_group(tmp_path: Path) -> None:
    """They are a column, which PyTorch transposes without moving it."""
    folder = write_dense(tmp_path / "in")
    assert convert(folder, tmp_path / "out", "--to", "compressed-tensors", "--format", "int8_col_zint") == 0
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(folder, "int8_col_zint")
    assert ours.modules == theirs.modules
    for name in theirs.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize())


def test_interrupted_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_model(tmp_path / "in", *SOURCES["gptq"])
    out, read = tmp_path / "out", []
    from w4gemm.checkpoints import gptq

    numbers = gptq.GPTQPacking.numbers

    def counted(self: Any, module: Any, tensors: Any) -> Any:
        read.append(module)
        if len(read) == limit:
            raise KeyboardInterrupt
        return numbers(self, module, tensors)

    monkeypatch.setattr(gptq.GPTQPacking, "numbers", counted)
    sizes = ("--shard-size", 1)
    monkeypatch.setattr("w4gemm.cli.convert.MIB", 2**13)
    limit = 6
    assert convert(tmp_path / "in", out, *sizes) == 130
    assert not (out / "config.json").exists()
    there = len(list(out.glob("*.safetensors")))
    assert there > 1
    limit, before = -1, len(read)
    assert convert(tmp_path / "in", out, *sizes) == 0
    assert f"there already: {there} files" in capsys.readouterr().err
    assert len(read) - before < 7 * LAYERS
    assert not list(out.glob("*.unfinished"))
    assert_same(out, tmp_path / "in")
    (out / "config.json").unlink()  # interrupted while the small files were written
    assert convert(tmp_path / "in", out, *sizes) == 0
    assert_same(out, tmp_path / "in")
    config = (out / "config.json").read_text() + " "
    (out / "config.json").write_text(config)
    read.clear()
    capsys.readouterr()
    assert convert(tmp_path / "in", out, *sizes) == 0  # there is nothing to do
    assert not read and (out / "config.json").read_text() == config
    assert f"there already: {len(list(out.glob('*.safetensors')))} files" in capsys.readouterr().err
    (out / "generation_config.json").unlink()
    assert convert(tmp_path / "in", out, *sizes) == 0 and (out / "generation_config.json").exists()
    assert convert(tmp_path / "in", out, "--shard-size", 2) == 1
    assert "not of an interrupted run" in capsys.readouterr().err
    shard = sorted(out.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    assert convert(tmp_path / "in", out, *sizes) == 1
    assert f"holds {shard.name}, which is damaged" in capsys.readouterr().err


def test_a_dtype_in_config_that_is_none_is_bfloat16(tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": {"text": "float16"}}))
    assert convert(folder, tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the name that it was to get. The first error is one of safetensors' own, as of a full disk."""
    folder, out = gptq_folder(tmp_path / "in"), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert convert(folder, out) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"w4gemm: error: cannot write '{out}/model.safetensors': " in capsys.readouterr().err
    assert not out.exists()
    (out / "model.safetensors").mkdir(parents=True)
    assert convert(folder, out) == 1
    assert "holds model.safetensors, which is damaged" in capsys.readouterr().err


def test_a_folder_that_another_process_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both would write the same files."""
    folder, out = gptq_folder(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # convert's must be exclusive: two shared ones would both be granted
    try:
        assert convert(folder, out) == 1
    finally:
        os.close(descriptor)
    assert capsys.readouterr().err.endswith(f"w4gemm: error: {out} is being written by another process\n")
    assert convert(folder, out) == 0


def test_a_tokenizer_that_cannot_be_written_is_no_fault_of_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    assert convert(source, out) == 0
    (out / "config.json").unlink()  # the run was interrupted
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").mkdir()
    assert convert(source, out) == 1
    assert f"w4gemm: error: {out}: the tokenizer cannot be written: " in capsys.readouterr().err
    assert not (out / "config.json").exists()


def test_layers_that_config_counts_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "in", *SOURCES["gptq"])
    file = tmp_path / "in/config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"num_hidden_layers": LAYERS + 2}))
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert f"num_hidden_layers {LAYERS + 2}, but there are no tensors of layer {LAYERS}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "prefix, message",
    [
        ("lm_head", "no tensor for lm_head.weight"),
        ("model.embed_tokens", "no tensor for model.embed_tokens.weight"),
        ("model.norm", "no tensor for model.norm.weight"),
        ("model.layers.1.mlp.up_proj", "no tensor for model.layers.1.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.k_proj has no bias, its config wants one"),
    ],
)
def test_a_quantized_folder_that_lacks_a_part_is_refused(
    prefix: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    """``load`` refused what was written; the head may be the embedding, and a model without a head needs none."""
    folder, out = gptq_folder(tmp_path / "in"), tmp_path / "out"
    change(folder, lambda tensors: tensors.update({"model.of_an_engine.weight": torch.ones(3)}))
    assert convert(folder, tmp_path / "whole") == 0
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)])
    assert convert(folder, out) == 1
    assert capsys.readouterr().err.endswith(f"w4gemm: error: {folder}: {message}\n")
    assert not out.exists()
    file = folder / "config.json"
    config = json.loads(file.read_text())
    heads = {"lm_head", "model.embed_tokens"}
    for i, (setting, needless) in enumerate(
        (
            ({"tie_word_embeddings": True}, heads),
            ({"architectures": ["Qwen2Model"]}, {"lm_head"}),
            ({"architectures": [], "model_type": "of tomorrow"}, {prefix}),
        )
    ):
        file.write_text(json.dumps(config | setting))
        assert convert(folder, tmp_path / f"{i}") == (prefix not in needless), setting


def test_a_folder_is_not_converted_into_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gptq_folder(tmp_path / "in")
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, tmp_path / "link"):
        assert convert(folder, out) == 2
        assert f"OUTPUT: wanted another folder than PATH, got '{out}' for both" in capsys.readouterr().err


def test_a_search_does_not_go_on_where_a_nearest_one_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dense(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    (tmp_path / "out" / "config.json").unlink()
    assert convert(tmp_path / "in", tmp_path / "out", "--search") == 1
    assert "not of an interrupted run of the same conversion" in capsys.readouterr().err


def test_other_conversions_do_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "in", *SOURCES["awq"])
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "w4gemm") == 0
    (tmp_path / "out" / "config.json").unlink()
    for file in tmp_path.glob("out/*"):
        if file.suffix != ".safetensors":
            file.unlink()
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "compressed-tensors") == 1
    assert "holds model.safetensors, which is damaged, or not of an interrupted run" in capsys.readouterr().err
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "w4gemm") == 0
    assert convert(tmp_path / "in", tmp_path / "x", "--format", "int4_g32") == 2
    assert "is quantized already" in capsys.readouterr().err


def test_a_source_that_changed_is_another_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The finished folder of the old one was taken for that of the new one."""
    dense = write_dense(tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    (dense / "model.safetensors").unlink()
    torch.save(tensors, dense / "pytorch_model.bin")
    write_model(tmp_path / "gptq", *SOURCES["gptq"])
    config = tmp_path / "gptq" / "config.json"
    for source in (dense, tmp_path / "gptq"):
        assert convert(source, tmp_path / "out" / source.name) == 0
        assert convert(source, tmp_path / "out" / source.name) == 0
        assert "there already: 1 file" in capsys.readouterr().err
    torch.save({name: -t for name, t in tensors.items()}, dense / "pytorch_model.bin")
    said = json.loads(config.read_text())
    said["quantization_config"]["checkpoint_format"] = "gptq_v2"  # the same tensors, with other zero points
    config.write_text(json.dumps(said))
    for source in (dense, tmp_path / "gptq"):
        assert convert(source, tmp_path / "out" / source.name) == 1
        assert "not of an interrupted run of the same conversion" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["other", "equal", "pickled"])
def test_a_head_that_the_config_ties_to_other_numbers(tmp_path: Path, kind: str) -> None:
    """transformers keeps both. ``load`` and ``convert`` of a dense folder took the embedding as the head."""
    dense = write_dense(tmp_path / "dense")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(dense / "model.safetensors")
    if kind == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    if kind == "pickled":
        (dense / "model.safetensors").unlink()
        torch.save(tensors, dense / "pytorch_model.bin")
        with pytest.raises(
            FormatError, match=r"lm_head.weight and model.embed_tokens.weight differ.* wanted \"tie_word_"
        ):
            load(dense, format="int8_g32")
        return
    assert ("lm_head.weight" in open_checkpoint(dense).tensors) == (kind == "other")
    assert convert(dense, tmp_path / "out", "--format", "int8_g32") == 0
    expected = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=W4GemmConfig("int8_g32"), dtype=torch.float32
    )
    ids = torch.tensor([[1, 5, 9, 2]])
    for folder in (dense, tmp_path / "out"):
        model, tokenizer = load(folder, format="int8_g32")
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)
        model.save_pretrained(tmp_path / "saved" / folder.name)
        tokenizer.save_pretrained(tmp_path / "saved" / folder.name)
        again = load(tmp_path / "saved" / folder.name)[0]
        torch.testing.assert_close(again(ids).logits, expected(ids).logits)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] == (kind == "equal")


def test_a_head_alone_stays_tied(tmp_path: Path) -> None:
    """A quantized folder may have the numbers of both by the head's name."""
    write_model(tmp_path / "in", *SOURCES["gptq"])
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    ids = torch.tensor([[1, 5, 9, 2]])
    models = [load(tmp_path / folder)[0] for folder in ("in", "out")]
    assert torch.equal(*(model(ids).logits for model in models))


def test_another_part_of_a_split_file_is_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What had been written of a damaged download stayed, beside the numbers of the next one."""
    gguf = pytest.importorskip("gguf")
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=8))
    write_gguf(tmp_path / "in" / "tiny.gguf")
    first, second, *_ = sorted((tmp_path / "in").iterdir())
    for _ in range(2):
        assert convert(first, tmp_path / "out") == 0
    assert "there already: 1 file" in capsys.readouterr().err
    second.write_bytes(second.read_bytes()[:-1] + bytes([second.read_bytes()[-1] ^ 1]))
    assert convert(first, tmp_path / "out") == 1
    assert "not of an interrupted run of the same conversion" in capsys.readouterr().err


def test_config_and_tensors_that_disagree_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "in", *SOURCES["awq"])
    assert convert(tmp_path / "in", tmp_path / "out", "--to", "w4gemm") == 0
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "w4gemm"}}))
    with pytest.raises(FormatError, match="config.json names no format"):
        open_checkpoint(tmp_path / "out")
    settings = {"quant_method": "w4gemm", "format": "int4_g32_zint_fp16 fp8"}
    file.write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(FormatError, match="config.json says that it is int4_g32_zint_fp16 fp8, _extra_state says"):
        open_checkpoint(tmp_path / "out").weight("model.layers.0.mlp.up_proj")
    assert OwnPacking({"format": None}).marks


@pytest.mark.parametrize("rule", SCALES.values(), ids=lambda rule: rule.name)
def test_a_folder_can_hold_every_scale_rule(rule: ScaleRule) -> None:
    assert rule.dtype in NAMES, "a line of DTYPES in checkpoints/stored.py"


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = write_model(tmp_path, *SOURCES["gptq"])
    assert main(["inspect", str(tmp_path), "--device", "h200"]) == 0
    text = capsys.readouterr().out
    assert f"{len(expected)} quantized modules" in text and "NVIDIA H200" in text
    row = next(line for line in text.splitlines() if line.startswith("model.layers.*.mlp.down_proj"))
    assert "int4_g32_zint_fp16" in row and "64 x 96" in row and "x 2" in row and "sm90_" in row
    assert main(["inspect", str(tmp_path), "--device", "cpu", "--m", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["checkpoint"] == "gptq" and facts["modules"].keys() == expected.keys()
    module = facts["modules"]["model.layers.1.mlp.up_proj"]
    assert (module["n"], module["k"], module["bytes"]) == (96, 64, 96 * 32 + 96 * 2 * 3)
    assert all(run.startswith("cpu_mixed_gemm") for run in module["runs"].values())
    assert facts["dense"]["model.norm.weight"] == {"shape": [64], "stored": "F32"}


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 16), ("float8_e4m3fn", 16), ("float32", 32)])
def test_inspect_says_the_size_of_what_stays_dense(
    dtype: str, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp8 is the dtype of the inputs of quantized layers alone, so the other matrices stay in 16 bits beside it."""
    write_model(tmp_path, *SOURCES["gptq"])
    assert main(["inspect", str(tmp_path), "--device", "cpu", "--dtype", dtype]) == 0
    table = capsys.readouterr().out.split("dense matrices")[1].splitlines()
    row = next(line.split() for line in table if line.startswith("model.embed_tokens.weight"))
    n, k = int(row[2]), int(row[4])
    assert table[0].endswith(f"MiB in {bits} bits") and row[-1] == f"{n * k * bits / 2**23:.1f}"


def test_a_device_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder in 4 bits is converted on no device, and yet a name that is none is refused."""
    folder = gptq_folder(tmp_path / "in")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--device", "gpu"]) == 2
    assert "--device: wanted cpu, cuda or cuda:N, got 'gpu'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(folder), str(tmp_path / "out"), "--device", "cpu"]) == 0


@pytest.mark.parametrize("kind", ["gguf", "dense", "gptq"])
def test_a_name_that_there_is_not_has_a_nearest_one(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        path = write_gguf(tmp_path / "tiny.gguf")
    else:
        path = tmp_path / "in"
        write_dense(path) if kind == "dense" else write_model(path, *SOURCES["gptq"])
    checkpoint = open_checkpoint(path)
    name = next(iter(checkpoint.modules))
    with pytest.raises(FormatError, match=f"'{name}.weight' among its .*; nearest is '{name}'$"):
        checkpoint.weight(f"{name}.weight")
    with pytest.raises(FormatError, match=r"'model.norm' among its .*; nearest is 'model.norm.weight'$"):
        checkpoint.dense("model.norm")
    for unknown in ("model.norm", f"{name}.qweight"):
        with pytest.raises(FormatError, match=f"'{unknown}' among its .*; nearest is "):
            checkpoint.stored_type(unknown)


def test_an_error_names_file_and_module_once(tmp_path: Path) -> None:
    folder, name = gptq_folder(tmp_path / "in"), "model.layers.1.mlp.up_proj"
    change(folder, lambda tensors: tensors[f"{name}.g_idx"].fill_(33))
    with pytest.raises(FormatError, match=f"{name}: g_idx: wanted groups 0..1") as error:
        main(["--traceback", "convert", str(folder), str(tmp_path / "out")])
    assert str(error.value).count(str(folder)) == str(error.value).count(name) == 1


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dense(tmp_path / "dense", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = r"tensor 'model\.norm\.weight' holds 1e\+06, which float16 cannot hold; wanted bfloat16 or float32"
    with pytest.raises(FormatError, match=message):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.bfloat16)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--dtype", "float16"]) == 1
    assert "which float16 cannot hold" in capsys.readouterr().err


def test_dense_matrices_are_listed_with_their_type_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(write_dense(tmp_path, "qwen2")), "--device", "h100"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model.embed_tokens.weight"))
    assert line.split()[1] == "F32"


@pytest.mark.parametrize("known", [True, False])
def test_experts_in_one_fp8_tensor_stay_packed(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model's code says that all gates come before all ups; else they become dense, as the model takes them."""
    folder = write_dense(tmp_path / "in", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    for i in range(LAYERS):
        owner = f"model.layers.{i}.mlp.experts"
        each = {
            role: [tensors.pop(f"{owner}.{e}.{role}_proj.weight") for e in range(4)] for role in ("gate", "up", "down")
        }
        rows = {
            "gate_up": [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)],
            "down": each["down"],
        }
        for role, weights in rows.items():
            tensors[f"{owner}.{role}_proj"] = torch.stack(weights).to(torch.float8_e4m3fn)
            tensors[f"{owner}.{role}_proj_scale_inv"] = torch.rand(4, len(weights[0]), 1) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    if not known:
        monkeypatch.setattr("w4gemm.checkpoints.model_experts.dense_products", lambda model: {})
    made = main(["convert", str(folder), str(tmp_path / "out")])
    if not known:
        assert made == 2  # nothing else is quantized
        return
    assert made == 0
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {str(m.format) for m in checkpoint.modules.values()} == {"e4m3_col_fp32"} and len(checkpoint.modules) == 4
    assert not any(".experts." in name for name in checkpoint.tensors)
    models = [load(path)[0] for path in (folder, tmp_path / "out")]
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        logits = [model(tokens).logits for model in models]
    assert torch.equal(*logits)
