"""Models from GGUF files hold the file's own numbers; dense models are quantized; nothing asks the network."""

from __future__ import annotations

import functools
import json
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
import transformers

from tiny_model import FFN, HEAD_DIM, HIDDEN, LAYERS, write_dense, write_gguf
from w4gemm import FormatError, W4Linear, WeightFormat, quantize
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.checkpoints.gguf.header import read_header
from w4gemm.core.problem import H200, Device
from w4gemm.integrations.transformers import W4GemmConfig, dequantize_layers, load, places, quantize_layers, summarize
from w4gemm.kernels import runs_on


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was tried: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def from_pretrained(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    # transformers makes the same map of names for every module
    with mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


def assert_same_numbers(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Bit for bit, after dequantizing ``model`` in place."""
    ours, theirs = dequantize_layers(model, next(expected.parameters()).dtype).state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name, t in theirs.items() if not torch.equal(ours[name], t)]
    assert not different
    for (name, ours_t), (_, theirs_t) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours_t, theirs_t), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_equals_from_pretrained(tmp_path: Path, architecture: str, type: str, tied: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture, type, tied)
    if architecture == "gemma3" and transformers.__version__.startswith("5.17."):
        pytest.skip("its tokens are other ones, and it is refused")
    model, tokenizer = load(path)
    assert (tokenizer("hello").input_ids[0] == tokenizer.bos_token_id) == (architecture == "gemma3")
    summary = summarize(model)
    format = "int4_g32_fp16" if type == "Q4_0" else "int4_g32_zfloat_fp16"
    # attn_v and the embedding, which a tied output layer shares, are Q8_0
    assert summary.formats == {format: 6 * LAYERS + (not tied), "int8_g32_fp16": LAYERS + tied}
    assert not summary.dense
    assert f"{summary.quantized} of {7 * LAYERS + 1} linear layers quantized" in str(summary)
    expected = from_pretrained(path)
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)
    assert_same_numbers(model, expected)


def test_layers_without_a_kernel_become_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", "Q4_0")
    monkeypatch.setattr(places, "runs_on", lambda device, format, *sizes: format.bits == 4)
    with caplog.at_level("WARNING", "w4gemm"):
        model, _ = load(path)
    assert summarize(model).formats == {"int4_g32_fp16": 6 * LAYERS}
    assert model.lm_head.weight is model.model.embed_tokens.weight and "lm_head" not in caplog.text
    assert "dense, because no kernel of the device takes int8_g32_fp16: model.layers.0.self_attn.v_proj" in caplog.text
    assert_same_numbers(model, from_pretrained(path))


def test_which_devices_run_a_format() -> None:
    t4 = Device("cuda", "NVIDIA T4", (7, 5), 40, 65536)
    for format, devices in ((WeightFormat(), {"H200", "CPU"}), (WeightFormat.parse("int4_g16_e4m3"), {"CPU"})):
        named = {"H200": H200, "CPU": Device("cpu"), "T4": t4}
        for experts in (0, 4):
            assert {name for name, d in named.items() if runs_on(d, format, 256, 512, experts)} == devices


def test_bfloat16(tmp_path: Path) -> None:
    # Q4_0: transformers rounds Q4_1 twice, to float32 and then to bfloat16
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", "Q4_0")
    model, _ = load(tmp_path, "cpu", torch.bfloat16)
    layers = [m for m in model.modules() if isinstance(m, W4Linear)]
    assert all(layer.dtype == torch.bfloat16 for layer in layers)
    assert_same_numbers(model, from_pretrained(path, torch.bfloat16))


def test_models_that_threads_load_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes PyTorch's default dtype while it makes a model: another one's layers took it, and what the
    last one put back was not what the first one had found. Configs and tokenizers of GGUF files come through a reader
    that is put in the package's place. from_pretrained waits for others, too."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    dense = write_dense(tmp_path / "dense")
    paths = [dense, write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", "qwen2")]
    own, reader, models = LlamaDecoderLayer.__init__, gguf.GGUFReader, {}

    def slowly(self: torch.nn.Module, config: object, layer_idx: int) -> None:
        time.sleep(0.1 + 0.1 * layer_idx)
        own(self, config, layer_idx)

    def work(path: Path) -> None:
        models[path] = load(path, dtype=torch.bfloat16)[0]

    def work_by_transformers(dtype: torch.dtype, **options: Any) -> None:
        models[dtype] = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=dtype, **options)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", slowly)
    threads = [threading.Thread(target=work, args=(path,)) for path in paths]
    packed = {"quantization_config": W4GemmConfig()}
    threads.insert(1, threading.Thread(target=work_by_transformers, args=(torch.float16,), kwargs=packed))
    threads.insert(2, threading.Thread(target=work_by_transformers, args=(torch.float32,)))
    for thread in threads:
        thread.start()
        time.sleep(0.15)
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == torch.float32 and gguf.GGUFReader is reader
    assert [type(models[path]).__name__[:5] for path in paths] == ["Llama", "Llama", "Qwen2"]
    for key, model in models.items():
        dtype = key if isinstance(key, torch.dtype) else torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {dtype}
        layers = {layer.dtype for layer in model.modules() if isinstance(layer, W4Linear)}
        assert layers == ({dtype} if dtype != torch.float32 else set())


def test_a_file_s_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and not by the package's reader, which makes arrays of each vocabulary entry."""
    path, read = write_gguf(tmp_path / "tiny.gguf"), []
    monkeypatch.setattr("gguf.GGUFReader", lambda path: pytest.fail("the slow reader is asked"))
    monkeypatch.setattr("w4gemm.checkpoints.gguf.file.read_header", lambda path: read.append(path) or read_header(path))
    load(path)
    assert read == [path]


def test_gemma_with_a_transformers_that_splits_its_text_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "gemma3")
    monkeypatch.setattr("w4gemm.checkpoints.gguf.version", lambda package: "5.17.0")
    with pytest.raises(FormatError, match=r"transformers 5\.17\.0 splits text into other tokens .* wanted 5\.18"):
        load(path)


def test_rope_factors_stretch_the_rotary_table(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2)
    plain, _ = load(write_gguf(tmp_path / "plain.gguf"))
    stretched, _ = load(write_gguf(tmp_path / "stretched.gguf", rope_freqs=factors))
    expected = plain.model.rotary_emb.inv_freq / torch.tensor(factors, dtype=torch.float32)
    assert torch.equal(stretched.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"device": "meta"}, ValueError, "device: wanted one that holds numbers"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype: wanted torch.float32 or .* got torch.float8_e4m3fn"),
        ({"dtype": torch.float64}, TypeError, "dtype: wanted .* got torch.float64; nearest is torch.float32"),
        ({"activations": "fp16"}, ValueError, "activations: wanted 'fp8' or None, got 'fp16'"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str) -> None:
    """Each is named before the model is read."""
    with pytest.raises(error, match=f"^{message}"):
        load(tmp_path / "nothing", **arguments)


def test_a_format_for_what_is_quantized_already(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    for format, warns in ((None, False), ("mxfp4", True)):
        caplog.clear()
        open_checkpoint(path, format)
        assert ("stay in int4_g32_zfloat_fp16, int8_g32_fp16; the format e2m1_g32_e8m0 is for" in caplog.text) == warns
    caplog.clear()
    open_checkpoint(write_dense(tmp_path / "dense"), "mxfp4")
    assert not caplog.text


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    load(write_gguf(tmp_path / "tiny.gguf"), progress=lambda *told: seen.append(told))
    assert seen[-1][0] <= seen[-1][1]
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_dense_folder(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = write_dense(tmp_path)
    seen: list[tuple[int, int, str]] = []
    model, tokenizer = load(folder, progress=lambda *told: seen.append(told))
    dense = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert summarize(model).formats == {"int4_g64": 6 * LAYERS, "int4_g32": LAYERS}  # k is 64, of down_proj 96
    assert summarize(model).dense == ("lm_head",)
    total = 9 * LAYERS + 3  # and two norms a layer, the last one, the embedding and lm_head
    assert seen[-1] == (total, total, "loading")
    for name, layer in dense.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            ours = model.model.get_submodule(name).weight
            assert torch.equal(ours.dequantize(), quantize(layer.weight, ours.format).dequantize()), name
    ids = tokenizer("hello", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_dense_folder_with_a_format(tmp_path: Path) -> None:
    model, _ = load(write_dense(tmp_path), format="int4_col_zint")
    assert summarize(model).formats == {"int4_col_zint": 7 * LAYERS}
    assert model.model.layers[0].mlp.up_proj.format == WeightFormat(-1, "int")


def test_attention_that_reads_its_weight_stays_dense() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96)
    quantize_layers(layer)
    assert isinstance(layer.linear1, W4Linear) and isinstance(layer.self_attn.out_proj, torch.nn.Linear)
    assert layer(torch.randn(5, 1, 64)).shape == (5, 1, 64)
    with torch.no_grad():
        assert layer.eval()(torch.randn(5, 1, 64)).shape == (5, 1, 64)


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'mamba' cannot be loaded; wanted one of llama, qwen2, qwen3"):
        load(write_gguf(tmp_path / "tiny.gguf", "mamba"))


def test_missing_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    assert data.count(b"blk.1.ffn_up.weight") == 1
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(FormatError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 1, "block_count is 1, but its tensors are of 2 blocks, up to blk.1"),
        ("block_count", 0, "block_count is 0, but"),
        ("block_count", 3, "block_count is 3, but"),
        ("attention.head_count", 0, "attention.head_count: wanted a number from 1, got 0"),
        ("attention.head_count", 3, "3 heads cannot share 2 heads of keys and values equally"),
        ("embedding_length", 512, r"embedding_length is 512, but token_embd.weight has shape \(259, 64\)"),
        ("tokenizer.ggml.bos_token_id", 2**31, "bos_token_id: wanted a token id below 259, got 2147483648"),
    ],
)
def test_metadata_that_contradict_the_tensors(tmp_path: Path, key: str, value: int, message: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    name = (key if key.startswith("tokenizer") else f"llama.{key}").encode()
    assert data.count(name + struct.pack("<I", 4)) == 1  # an unsigned int of 32 bits
    at = data.index(name + struct.pack("<I", 4)) + len(name) + 4
    path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    with pytest.raises(FormatError, match=message):
        load(path)


def test_tensors_that_no_layer_takes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", rope_freqs=np.ones(HEAD_DIM // 2))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(FormatError, match=r"no place for rope_other\.weight"):
        load(path)


def test_a_config_that_transformers_cannot_read(tmp_path: Path) -> None:
    folder = write_dense(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    with pytest.raises(FormatError, match="transformers makes no model"):
        load(folder)
    custom = {"model_type": "odd", "auto_map": {"AutoConfig": "modeling_odd.OddConfig"}}
    (folder / "config.json").write_text(json.dumps(config | custom))
    with pytest.raises(FormatError, match=r"code lies in the folder, .*from_pretrained.*trust_remote_code=True"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="has no tokenizer: tokenizer.save_pretrained writes one"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    with pytest.raises(FormatError, match="transformers makes no model"):
        _ = open_checkpoint(folder).modules


def test_wrong_shape(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    # rows and columns of blk.1.ffn_down exchanged
    entry = b"blk.1.ffn_down.weight" + struct.pack("<IQQ", 2, FFN, HIDDEN)
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, entry[:-16] + struct.pack("<QQ", HIDDEN, FFN)))
    with pytest.raises(FormatError, match=r"mlp.down_proj has shape \(96, 64\), its config wants \(64, 96\)"):
        load(path)


def test_smollm2() -> None:
    from w4gemm.integrations.generation import default_model

    try:
        path = default_model()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    model, _ = load(path)
    assert summarize(model).formats == {"int4_g32_zfloat_fp16": 210, "int8_g32_fp16": 1}
    assert model.lm_head.weight.n == 49152 and not model.config.tie_word_embeddings
    # a layer that llama.cpp does not permute, directly from the file
    assert torch.equal(
        model.model.layers[3].mlp.down_proj.weight.dequantize(), GGUFFile(path).dense("blk.3.ffn_down.weight")
    )
