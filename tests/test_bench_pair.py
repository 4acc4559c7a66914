"""What bench.engine.pair and ranks hold an engine with w4gemm to. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.engine import inside, pair, ranks
from bench.engine.checkpoint import dense_folder, tensors_of, write
from bench.engine.gguf import FILE, write_gguf
from bench.engine.models import Model, model_named, tiny
from bench.engine.packing import Packing

from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.hugging_face import SafetensorsFolder


def written(name: str, format: str, folder) -> Model:
    model = tiny(model_named(name))
    write(model, Packing.parse(format), folder)
    return model


def test_a_dense_folder_has_the_numbers_of_a_quantized_one(tmp_path):
    model = written("qwen3-30b-a3b", "ct-mxfp4", tmp_path / "packed")
    dense, checkpoint = SafetensorsFolder(dense_folder(tmp_path / "packed")), open_checkpoint(tmp_path / "packed")
    shapes = {t.name: t.shape for t in tensors_of(model, Packing("bf16"))}
    assert {name: info.shape for name, info in dense.tensors.items()} == shapes
    for layer, expert in ((0, 0), (1, 7)):
        prefix = f"model.layers.{layer}.mlp.experts"
        w = checkpoint.weight(f"{prefix}.gate_up_proj").expert(expert).dequantize(torch.bfloat16)
        for half, leaf in enumerate(("gate", "up")):
            assert torch.equal(dense.tensor(f"{prefix}.{expert}.{leaf}_proj.weight"), w[half::2])


@pytest.mark.parametrize(("name", "format"), [("mixtral-8x7b", "ct-int4-g32"), ("kimi-k3-quarter", "ct-mxfp4")])
def test_a_dense_folder_has_the_names_of_its_model(name: str, format: str, tmp_path) -> None:
    model = written(name, format, tmp_path / "packed")
    dense = SafetensorsFolder(dense_folder(tmp_path / "packed"))
    assert {n: info.shape for n, info in dense.tensors.items()} == {
        t.name: t.shape for t in tensors_of(model, Packing("bf16"))
    }


def test_a_dense_folder_keeps_biases(tmp_path):
    write(tiny(model_named("glm-4.5-air")), Packing.parse("ct-int4-g32"), tmp_path / "packed")
    stored, dense = SafetensorsFolder(tmp_path / "packed"), SafetensorsFolder(dense_folder(tmp_path / "packed"))
    biases = [name for name in stored.tensors if name.endswith("q_proj.bias")]
    assert biases and all(torch.equal(stored.tensor(name), dense.tensor(name)) for name in biases)


class Layer(torch.nn.Module):
    """A linear layer of vLLM's with a bf16 weight."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(apply=lambda layer, x: x @ w.bfloat16().T)


def test_errors_are_those_of_the_largest_layer(tmp_path):
    written("llama-3-8b", "ct-e4m3", tmp_path)
    checkpoint, model = open_checkpoint(tmp_path), torch.nn.Module()
    names = [f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    gate, up, down = (checkpoint.weight(name).dequantize() for name in names)
    model.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])})
    model.model["layers"][1].mlp = torch.nn.ModuleDict({"gate_up_proj": Layer(torch.cat((gate, up)))})
    assert 0 < inside.errors(model, tmp_path)["linear_error"] < 0.004
    model.model["layers"][1].mlp["down_proj"] = Layer(down * 1.1)
    assert inside.errors(model, tmp_path) == {"linear_error": pytest.approx(0.1, rel=0.05)}


def test_a_gguf_layer_is_compared_in_the_rows_of_the_file(tmp_path):
    """A Llama's q and k lie there in another order than in the model, and vLLM's GGUF plugin does not change it."""
    pytest.importorskip("gguf")
    write_gguf(tiny(model_named("llama-3-8b")), tmp_path, "Q5_K")
    checkpoint, model, qkv = open_checkpoint(tmp_path / FILE), torch.nn.Module(), [f"attn_{leaf}" for leaf in "qkv"]
    stored = [checkpoint.file.weight(f"blk.0.{leaf}.weight").dequantize() for leaf in qkv]
    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"self_attn": torch.nn.Module()})])
    model.layers[0]["self_attn"].qkv_proj = Layer(torch.cat(stored))
    model = torch.nn.ModuleDict({"model": model})
    assert 0 < inside.errors(model, tmp_path / FILE)["linear_error"] < 0.004
    ordered = [checkpoint.weight(f"model.layers.0.self_attn.{leaf}_proj").dequantize() for leaf in "qkv"]
    model["model"].layers[0]["self_attn"].qkv_proj = Layer(torch.cat(ordered))
    assert inside.errors(model, tmp_path / FILE)["linear_error"] > 1


@pytest.mark.parametrize("fault", ["", "grown_bytes", "bits_equal", "same_addresses", "answers_change", "answers_back"])
def test_updates_are_held_to_bits_addresses_memory_and_answers(fault, monkeypatch, tmp_path):
    state = SimpleNamespace(update=0, model=torch.nn.Linear(4, 4))

    def update(llm, model, matrices, by_reload, seed, compared):
        state.update += fault != "answers_change"
        return {"seconds": 1.0 + seed, "equal": fault != "bits_equal" or seed < 2}

    def back(method, kwargs):
        state.update = 7 if fault == "answers_back" else 0
        if fault == "same_addresses":
            state.model.weight.data = state.model.weight.data.clone()

    memory = iter((5, 5, 9 if fault == "grown_bytes" else 5, 5, 5))
    monkeypatch.setattr(inside, "update", update)
    monkeypatch.setattr(inside, "allocated", lambda: next(memory))
    answers = lambda prompts: pair.Answers([[state.update]], [[0.0]], [])  # noqa: E731
    engine = SimpleNamespace(answer=answers, model=state.model, llm=SimpleNamespace(collective_rpc=back))
    row = pair.updated(engine, tiny(model_named("llama-3-8b")), tmp_path, [], 5)
    assert [row[name] for name in ("updates", "first_seconds", "seconds", "reload_seconds")] == [5, 1.0, 4.0, 4.0]
    good = {"grown_bytes": 0, **dict.fromkeys(("bits_equal", "same_addresses", "answers_change", "answers_back"), True)}
    assert {name for name, value in good.items() if row[name] != value} == ({fault} if fault else set())


class Experts(torch.nn.Module):
    """Experts of vLLM's: what they return is what they were called with."""

    hidden_size, global_num_experts, top_k = 8, 4, 2

    def __init__(self, monolithic: bool) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(is_monolithic=monolithic, topk_indices_dtype=torch.int64)

    def forward_modular(self, x, weights, ids):
        return "chosen", weights, ids

    def forward_monolithic(self, x, logits):
        return "logits", logits


def test_experts_are_timed_from_the_logits_on_if_one_engine_routes_in_its_kernels():
    runners = [torch.nn.Module(), torch.nn.Module()]
    for runner, monolithic in zip(runners, (False, True), strict=True):
        runner.routed_experts, runner.router = Experts(monolithic), torch.nn.Module()
        runner.router.select_experts = lambda x, logits, topk_indices_dtype: ("weights", topk_indices_dtype)
    modular, monolithic = (inside._expert_products([runner], 64, routes=True)[0]() for runner in runners)
    assert modular == ("chosen", "weights", torch.int64)
    assert monolithic[0] == "logits" and monolithic[1].shape == (64, 4)
    _, weights, ids = inside._expert_products(runners[:1], 64, routes=False)[0]()
    assert weights.shape == ids.shape == (64, 2) and ids.dtype == torch.int32


@pytest.mark.parametrize("parts", [inside.PARTS, ("linear",), ("experts",)])
def test_the_parts_that_are_asked_for_are_timed(parts: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setattr(inside, "layers_of", lambda model: ({0: []}, {0: []}))
    points = inside._points({"w4gemm": torch.nn.Module()}, (1, 8), parts)
    assert [(part, m) for part, m, _ in points] == [(part, m) for part in parts for m in (1, 8)]


def test_answers_are_compared_up_to_the_first_other_token():
    ours = pair.Answers([[1, 2, 3], [4, 5, 6]], [[-1.0, -2.0, -9.0], [-3.0, 0.0, 0.0]], [[-1.0], [-2.0]])
    others = pair.Answers([[1, 2, 4], [5, 5, 6]], [[-1.5, -2.5, -1.0], [-4.0, 0.0, 0.0]], [[-1.25], [-2.75]])
    row = pair.compared(ours, others)
    assert (row["equal_prefix"], row["equal_first"], row["logprobs"]) == (1.0, 1, 0.5)
    assert (row["prompt_logprobs"], row["prompt_logprobs_most"]) == (0.5, 0.75)


@pytest.mark.parametrize("fault", ["", "equal", "bytes"])
def test_updates_of_several_ranks_are_those_of_the_worst_rank(fault: str) -> None:
    def call(method: str, args: Any = ()) -> list[Any]:
        if method == "addresses":
            return [[1, 2], [3, 4]]
        seed = args[3]
        row = {"seconds": 1.0 + seed, "equal": True, "bytes": 5}
        wrong = {
            "seconds": 2.0 + seed,
            "equal": fault != "equal" or seed != 1,
            "bytes": 9 if fault and seed == 2 else 5,
        }
        return [row, wrong]

    engine: Any = SimpleNamespace(llm=SimpleNamespace(collective_rpc=call), answer=lambda prompts: None)
    row = ranks.updated(engine, tiny(model_named("llama-3-8b")), 4, [[1, 2], [3, 4]])
    assert [row[name] for name in ("first_seconds", "seconds", "reload_seconds")] == [2.0, 4.0, 5.0]
    assert row["ranks_seconds"] == [3.0, 4.0] and row["same_addresses"]
    assert row["bits_equal"] == (fault != "equal") and row["grown_bytes"] == (4 if fault else 0)


def test_an_engine_answers_until_experts_have_moved() -> None:
    asked: list[int] = []
    before, after = [[[[0, 10], [1, 11]]], [[[2, 12], [0, 10]]]], [[[[2, 12], [1, 11]]], [[[0, 10], [0, 10]]]]

    def answer(prompts: list[list[int]]) -> pair.Answers:
        asked.append(len(prompts))
        return pair.Answers([[len(asked) > 3, 2]], [[-1.0, -2.0]], [])

    def call(method: str) -> list[Any]:
        return after if len(asked) > 2 else before

    engine: Any = SimpleNamespace(answer=answer, llm=SimpleNamespace(collective_rpc=call))
    row = ranks.moved(engine, pair.Answers([[1, 2]], [[-1.5, -2.0]], []), before, [[7]])
    assert len(asked) == 4 and [row[name] for name in ("places", "moved", "intact")] == [4, 2, True]
    assert row["logprobs"] == 0.25


def test_a_model_takes_the_format_that_the_options_name(monkeypatch, tmp_path, capsys):
    """``--model NAME`` without ``=FORMAT`` takes ``--format``'s."""
    monkeypatch.setattr(pair, "write_once", lambda model, packing, folder: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(pair, "plugin_metadata", lambda folder: None)

    def served(*options: str) -> list[str]:
        args = pair.parser().parse_args(["--tiny", "--work", str(tmp_path), "--out", str(tmp_path / "rows"), *options])
        folders: list[str] = []

        def rows_of(model: Model, folder: Path, args: Any) -> Iterator[dict[str, Any]]:
            folders.append(folder.name)
            yield from ()

        pair.serve(args, {}, rows_of)
        return folders

    assert served() == ["tiny-llama-3-8b-gptq-int4-g128"]
    assert served("--format", "ct-nvfp4") == ["tiny-llama-3-8b-ct-nvfp4"]
    assert served("--model", "gpt-oss-20b=mxfp4") == ["tiny-gpt-oss-20b-mxfp4"]
    with pytest.raises(SystemExit):
        served("--format", "ct-nvfp4", "awq-int4-g128")
    assert "--model, --format: wanted one of each" in capsys.readouterr().err
