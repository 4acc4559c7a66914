"""``w4gemm eval`` and the page of what rounding costs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_model import LAYERS, write_dense, write_gguf
from w4gemm import quantize
from w4gemm.cli.__main__ import main
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations import calibrated
from w4gemm.integrations.calibrated import awq, check, gptq, round_layers
from w4gemm.integrations.generation import generate, positions
from w4gemm.integrations.quality import METHODS, calibration_windows, compare, load_dense, score, shipped_text, windows
from w4gemm.integrations.transformers import W4GemmConfig, dequantize_layers, quantize_layers

ROOT = Path(__file__).resolve().parent.parent


def test_eval_of_a_folder_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dense(tmp_path, "llama")
    for file in folder.glob("*token*"):
        file.unlink()
    assert main(["eval", str(folder), "--device", "cpu"]) == 1
    error = f"w4gemm: error: {folder} has no tokenizer: tokenizer.save_pretrained writes one\n"
    assert capsys.readouterr().err.endswith(error)


def test_eval_equals_transformers_own_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Perplexity is exp of the mean loss over all windows, also of a shorter last one; the rounded model is the one
    that from_pretrained makes."""
    folder = write_dense(tmp_path, "llama")
    arguments = ["--tokens", "40", "--length", "16", "--format", "int4_g32", "--format", "nf4_g32", "--json"]
    assert main(["eval", str(folder), *arguments, "--device", "cpu"]) == 0
    said = json.loads(capsys.readouterr().out)
    dense, int4, nf4 = said["rows"]
    assert [row["format"] for row in said["rows"]] == ["dense", "int4_g32", "nf4_g32"]
    _, tokenizer = load_dense(folder, torch.device("cpu"), torch.float32)
    parts = windows(tokenizer, shipped_text(), 40, 16)
    assert sum(part.shape[1] for part in parts) == 40 and said["tokens"] == 40 - len(parts)
    rounded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=W4GemmConfig("int4_g32"), dtype=torch.float32
    )
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    choices = []
    for model, row in ((own, dense), (dequantize_layers(rounded, torch.float32), int4)):
        with torch.inference_mode():
            outputs = [(model(part, labels=part), part.shape[1] - 1) for part in parts]
        mean = sum(out.loss * count for out, count in outputs) / said["tokens"]
        assert row["perplexity"] == pytest.approx(mean.exp().item(), rel=1e-4)
        choices.append(torch.cat([out.logits[0, :-1].argmax(-1) for out, _ in outputs]))
    assert int4["agreement"] == pytest.approx((choices[0] == choices[1]).float().mean().item(), abs=0.03)
    assert dense["agreement"] == 1 and dense["above_dense"] == 0 and dense["bits"] is None and nf4["bits"] == 4.5


def test_eval_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts are rounded too; a method that would leave them dense is refused."""
    folder = write_dense(tmp_path, "qwen3_moe")
    arguments = ["eval", str(folder), "--tokens", "40", "--length", "16", "--format", "int4_g32", "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    dense, int4 = json.loads(capsys.readouterr().out)["rows"]
    assert int4["layers"] == LAYERS * (4 + 2) and int4["bits"] == 4.5
    rounded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=W4GemmConfig("int4_g32"), dtype=torch.float32
    )
    tokenizer = load_dense(folder, torch.device("cpu"), torch.float32)[1]
    parts = windows(tokenizer, shipped_text(), 40, 16)
    assert int4["perplexity"] == pytest.approx(score(rounded, parts, lambda: None).perplexity) != dense["perplexity"]
    rounded.save_pretrained(tmp_path / "int4")
    tokenizer.save_pretrained(tmp_path / "int4")
    quantized = ["eval", str(tmp_path / "int4"), *arguments[2:]]
    assert main([*quantized, "--json"]) == 0
    out, err = capsys.readouterr()
    again = json.loads(out)["rows"][1]
    assert (again["layers"], again["bits"]) == (int4["layers"], 4.5) and "stay dense" not in err
    for command in (arguments, quantized):
        assert main([*command, "--method", "gptq"]) == 2
        assert "gptq rounds linear layers alone, got a model with model.layers.0.mlp.exper" in capsys.readouterr().err


def test_eval_of_a_file_in_4_bits_and_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own numbers count as dense; 8 bits change them little, and searched ones less than nearest."""
    path, text = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text("hello there " * 30)
    assert main(["eval", str(path), "--text", str(text), "--format", "int8_g32", "--device", "cpu"]) == 0
    heading, head, dense, int8 = capsys.readouterr().out.splitlines()
    assert "text.txt in windows of 512; float32 on the CPU" in heading and head.split()[:3] == [
        "format",
        "bits",
        "perplexity",
    ]
    assert dense.split()[0] == "dense" and int8.split()[:2] == ["int8_g32", "8.50"]
    assert float(int8.split()[2]) == pytest.approx(float(dense.split()[2]), rel=0.02)
    text.write_text("")
    assert main(["eval", str(path), "--text", str(text), "--device", "cpu"]) == 2
    assert "--text: wanted a text of at least 2 tokens, got 0" in capsys.readouterr().err
    text.write_text("words of a text")
    assert main(["eval", str(path), "--text", str(text), "--length", "1", "--device", "cpu"]) == 2
    assert "--length: wanted at least 2 tokens, got 1" in capsys.readouterr().err


def test_no_text_is_longer_than_a_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 and OPT would end in PyTorch's IndexError."""
    folder = write_dense(tmp_path, "opt")
    arguments = [str(folder), "--device", "cpu"]
    assert main(["eval", *arguments, "--length", "2049"]) == 2
    assert "--length: wanted at most the model's 2048 tokens, got 2049" in capsys.readouterr().err
    assert main(["generate", "hello there " * 1030, "--model", *arguments]) == 2
    assert "PROMPT: wanted less than the model's 2048 tokens, got " in capsys.readouterr().err
    cpu = torch.device("cpu"), torch.float32
    model, _ = load_dense(folder, *cpu)
    prompt = torch.randint(1, 50, (1, 2045))
    model.generation_config.eos_token_id = None
    assert generate(model, prompt, 10, 0.0, 0).shape == (1, 3)
    llama, _ = load_dense(write_dense(tmp_path / "llama"), *cpu)
    assert positions(model) == 2048 and positions(llama) == math.inf


def test_a_long_text_is_read_as_far_as_its_tokens_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_dense(write_dense(tmp_path), torch.device("cpu"), torch.float32)[1]
    for text in (shipped_text(), " " * 5000 + shipped_text()):  # long runs of spaces may be few tokens
        ids = tokenizer(text, add_special_tokens=False).input_ids
        for tokens in (2, 100, 1000, len(ids), len(ids) + 9):
            assert torch.cat(windows(tokenizer, text, tokens, 512), 1)[0].tolist() == ids[:tokens]
    read = []
    whole = tokenizer.__class__.__call__
    monkeypatch.setattr(tokenizer.__class__, "__call__", lambda *a, **k: (read.append(len(a[1])), whole(*a, **k))[1])
    windows(tokenizer, shipped_text() * 1000, 100, 64)
    assert max(read) < 4000


def test_search_rounds_otherwise(tmp_path: Path) -> None:
    dense, tokenizer = load_dense(write_dense(tmp_path, "qwen2"), torch.device("cpu"), torch.float32)
    parts, steps = windows(tokenizer, shipped_text(), 64, 64), []
    nearest, searched = (
        list(compare(dense, parts, [WeightFormat.parse("int3_g32")], method, lambda *step: steps.append(step)))[1]
        for method in ("nearest", "search")
    )
    assert searched["perplexity"] != nearest["perplexity"] and nearest["bits"] == 3.5
    assert steps[-1] == (2, 2, "int3_g32") and len(steps) == 6


def test_the_page_has_the_stored_rows() -> None:
    sys.path.insert(0, str(ROOT))
    from bench import quality
    from bench.rows import read

    page = (ROOT / "docs/quality.md").read_text()
    assert quality.with_table(page, read(quality.RESULTS)) == page and "| `int4_g128` |" in page


@pytest.mark.parametrize("format", ["int4_g32", "int4_g64_zint", "int3_col"])
@pytest.mark.parametrize("k", [128, 72])
def test_gptq_minds_what_the_layer_reads(format: str, k: int) -> None:
    """Inputs that are independent leave nothing to spread: then it rounds to the nearest. A last group may be short."""
    torch.manual_seed(0)
    weight, rule = torch.randn(32, k), WeightFormat.parse(format)
    nearest = quantize(weight, rule).dequantize()
    assert torch.equal(gptq(weight, torch.eye(k), rule), nearest)
    x = torch.randn(500, 8) @ torch.randn(8, k) + 0.3 * torch.randn(500, k)
    ours, theirs = (((w - weight) @ x.T).norm() for w in (gptq(weight, x.T @ x, rule), nearest))
    assert ours < 0.5 * theirs


@pytest.mark.parametrize("format", ["int4_g32", "nf4"])
def test_awq_minds_columns_that_are_large(format: str) -> None:
    """Where all columns of x are of one size, it rounds to the nearest."""
    torch.manual_seed(0)
    weight, rule = torch.randn(32, 128), WeightFormat.parse(format)
    nearest = quantize(weight, rule).dequantize()
    assert torch.equal(awq(weight, torch.eye(128), rule), nearest)
    x = torch.randn(500, 128) * torch.where(torch.arange(128) % 16 == 0, 20, 1)
    ours, theirs = (((w - weight) @ x.T).norm() for w in (awq(weight, x.T @ x, rule), nearest))
    assert ours < 0.85 * theirs


@pytest.mark.parametrize("tokens", [40, 64, 150])
def test_calibration_takes_the_tokens_behind_those_that_are_read(tmp_path: Path, tokens: int) -> None:
    """Once it took none of a text that is read in part of a window, and fewer if the last window was not full."""
    tokenizer = load_dense(write_dense(tmp_path), torch.device("cpu"), torch.float32)[1]
    after = torch.cat(calibration_windows(tokenizer, shipped_text(), tokens, 64), 1)[0].tolist()
    assert after == tokenizer(shipped_text(), add_special_tokens=False).input_ids[tokens : 2 * tokens]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_calibrated_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Each layer of the model is rounded on what comes after the text that is read."""
    dense, tokenizer = load_dense(write_dense(tmp_path, "qwen2"), torch.device("cpu"), torch.float32)
    parts, steps = windows(tokenizer, shipped_text(), 64, 64), []
    after = calibration_windows(tokenizer, shipped_text(), 64, 64)
    assert torch.equal(torch.cat([*parts, *after], 1), torch.cat(windows(tokenizer, shipped_text(), 128, 64), 1))
    format, blocks = WeightFormat.parse("int4_g32"), len(dense.model.layers)
    _, row = compare(dense, parts, [format], method, lambda *step: steps.append(step), after)
    assert row["bits"] == 4.5 and row["above_dense"] != 0 and row["layers"] == 7 * blocks
    assert steps[-1] == (2 + blocks, 2 + blocks, "int4_g32")
    layers = [layer for block in dense.model.layers for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    before = [layer.weight.clone() for layer in layers]
    assert round_layers(dense, after, format, method, lambda: None) == layers
    for layer, weight in zip(layers, before, strict=True):
        assert 0 < (layer.weight - weight).norm() / weight.norm() < 0.2
    arguments = ["eval", str(tmp_path), "--method", method, "--tokens", "32", "--length", "16", "--device", "cpu"]
    assert main([*arguments, "--format", "int4_g32"]) == 0
    assert f", {method} on 32 tokens that follow" in capsys.readouterr().out


class _Block(torch.nn.Module):
    """As Gemma 3n's, with an argument by position, and as Falcon-H1's, which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, factor: float, *, shift: float) -> tuple[torch.Tensor, None]:
        return self.up(hidden_states * factor + shift), None


class _Decoder(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Block(), _Block()])

    def forward(self, x: torch.Tensor, use_cache: bool) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x, 2.0, shift=1.0)
        return x


def test_calibration_calls_blocks_as_their_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, hessians = torch.nn.Module(), torch.randn(1, 5, 8), []
    model.model, model.device = _Decoder(), torch.device("cpu")
    monkeypatch.setitem(
        calibrated.METHODS, "kept", lambda weight, hessian, format: (hessians.append(hessian), weight)[1]
    )
    round_layers(model, [x], WeightFormat(), "kept", lambda: None)
    first = x[0] * 2 + 1
    second = model.model.layers[0].up(first) * 2 + 1
    torch.testing.assert_close(hessians, [first.T @ first, second.T @ second])


def test_what_calibration_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, text = write_dense(tmp_path / "model", "qwen2"), tmp_path / "text.txt"
    arguments = ["eval", str(folder), "--device", "cpu", "--method", "gptq", "--tokens", "16", "--length", "16"]
    for format in ("e2m1_g32_e8m0", "int4_g32_zfloat_fp16", "int4_g128_e4m3", "int6_g16_s8x256"):
        assert main([*arguments, "--format", format]) == 2
        expected = "gptq rounds to integers with one scale for each group, and integer zero points or none"
        assert f"--format: {expected}, got {format}; awq takes it" in capsys.readouterr().err
    text.write_text("hello there " * 4)
    assert main([*arguments, "--tokens", "64", "--text", str(text)]) == 2
    assert "--tokens: wanted fewer than the text's" in capsys.readouterr().err
    with pytest.raises(ValueError, match="awq wants a decoder with layers in model.layers, got Linear"):
        check(torch.nn.Linear(2, 2), [], "awq")
    jetmoe = AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", hidden_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"gptq rounds linear layers alone, got a model with model.layers.0.mlp"):
        check(jetmoe, [], "gptq")
    with caplog.at_level("WARNING"):
        quantize_layers(jetmoe, "int4_g32")
    assert "experts stay dense" in caplog.text


def test_eval_of_a_folder_that_is_no_whole_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers drew what is missing at random."""
    folder = write_dense(tmp_path / "model")
    arguments = ["eval", str(folder), "--device", "cpu", "--tokens", "16", "--length", "16"]
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(arguments) == 1
    assert "holds no whole model: no tensors model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    for command in (arguments, ["inspect", str(folder)], ["convert", str(folder), str(tmp_path / "out")]):
        assert main(command) == 1
        assert "it is a LlamaForSequenceClassification, no causal language model; its own" in capsys.readouterr().err


def test_eval_offers_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "{" + ",".join(METHODS) + "}" in capsys.readouterr().out
