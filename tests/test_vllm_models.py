"""Layers that vLLM makes of a checkpoint: fused, divided among GPUs, compiled for ahead of time."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench.engine import checkpoint
from bench.engine.models import model_named, tiny
from bench.engine.packing import Packing
from safetensors.torch import save_file

from test_vllm_dense import Case, config_of
from tiny_model import write_out
from vllm_parts import part_fixture
from w4gemm import FormatError, choice, quantize
from w4gemm.checkpoints import Module
from w4gemm.cli.__main__ import main
from w4gemm.cli.needs import Use, helpers_of, problems_of
from w4gemm.cli.problems import layers_of
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.integrations.engines.warmup import ExpertsCall, LinearUse, experts_need, linear_need, token_counts
from w4gemm.integrations.vllm.models import Model, read_model
from w4gemm.jit import Unit
from w4gemm.packing.layouts import layout_for
from w4gemm.packing.packed_shape import packed_shape

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 256, 384, 8, 2, 1000

dense = part_fixture("dense")


def write(
    folder: Path, modules: dict[str, tuple[int, int, bool]], group: int = 64, bits: int = 4, **config: Any
) -> Path:
    """A GPTQ folder of modules (n, k, with a bias); its scales are float16."""
    folder.mkdir(exist_ok=True)
    scheme = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False}
    settings = {"num_key_value_heads": KV_HEADS, "dtype": "bfloat16", "quantization_config": scheme} | config
    (folder / "config.json").write_text(json.dumps(settings))
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(HIDDEN)}
    for name, (n, k, bias) in modules.items():
        tensors[f"{name}.qweight"] = torch.zeros(k * bits // 32, n, dtype=torch.int32)
        tensors[f"{name}.qzeros"] = torch.zeros(k // group, n * bits // 32, dtype=torch.int32)
        tensors[f"{name}.scales"] = torch.zeros(k // group, n, dtype=torch.float16)
        if bias:
            tensors[f"{name}.bias"] = torch.zeros(n, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def llama(folder: Path, **config: Any) -> Path:
    head = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN, True),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN, True),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN, True),
        "self_attn.o_proj": (HIDDEN, HIDDEN, False),
        "mlp.gate_proj": (INNER, HIDDEN, False),
        "mlp.up_proj": (INNER, HIDDEN, False),
        "mlp.down_proj": (HIDDEN, INNER, False),
    }
    named = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    return write(folder, named | {"lm_head": (VOCABULARY, HIDDEN, False)}, **config)


def sizes(model: Model) -> set[tuple[int, int, bool]]:
    return {(layer.n, layer.k, layer.bias) for layer in model.layers}


def test_neighbours_are_fused(tmp_path: Path) -> None:
    model = read_model(str(llama(tmp_path / "m")))
    assert sizes(model) == {
        (HIDDEN + 2 * 64, HIDDEN, True),
        (HIDDEN + 2 * 64, HIDDEN, False),  # GPUs but the first add no bias of a layer whose inputs are divided
        (HIDDEN, HIDDEN, False),
        (2 * INNER, HIDDEN, False),
        (HIDDEN, INNER, False),
        (1024, HIDDEN, False),  # the vocabulary, rounded up
    }
    assert len(model.layers) == 6 and model.dtype == torch.bfloat16 and not model.act_order
    assert {str(layer.format) for layer in model.layers} == {"int4_g64"}  # scales in the model's dtype
    half = read_model(str(tmp_path / "m"), dtype=torch.float16)
    text = {"num_key_value_heads": KV_HEADS}  # a config of images and text
    assert half == read_model(str(llama(tmp_path / "half", dtype="float16", text_config=text)))
    assert half.dtype == torch.float16 and {str(layer.format) for layer in half.layers} == {"int4_g64_fp16"}


def test_other_widths(tmp_path: Path) -> None:
    model = read_model(str(write(tmp_path / "m", {"lm_head": (VOCABULARY, HIDDEN, False)}, bits=8)))
    assert [str(layer.format) for layer in model.layers] == ["int8_g64"]


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_fp8(activations: dict[str, Any] | None, tmp_path: Path) -> None:
    """With activations in fp8 vLLM's own kernels run it."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    scheme = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": scheme}))
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = {name: torch.zeros(64, 256).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(64, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    if activations:
        with pytest.raises(FormatError, match="left to vLLM's own kernels"):
            read_model(str(tmp_path))
    else:
        assert [str(layer.format) for layer in read_model(str(tmp_path)).layers] == ["e4m3_col_fp32"]


@pytest.mark.parametrize(("packing", "activations"), [("ct-mxfp4", None), ("ct-mxfp4-fp8", "fp8")])
def test_activations_of_layers_in_mxfp4(packing: str, activations: str | None, tmp_path: Path) -> None:
    checkpoint.write(tiny(model_named("llama-3-8b")), Packing.parse(packing), tmp_path)
    assert {layer.activations for layer in read_model(str(tmp_path)).layers} == {activations}


def test_parts_of_linear_attention_are_fused(tmp_path: Path) -> None:
    """Qwen 3.5's, as vLLM's packed_modules_mapping has them."""
    shapes = {"in_proj_qkv": 384, "in_proj_z": 128, "in_proj_b": 16, "in_proj_a": 16, "out_proj": HIDDEN}
    named = {f"model.layers.0.linear_attn.{name}": (n, HIDDEN, False) for name, n in shapes.items()}
    assert sizes(read_model(str(write(tmp_path / "m", named)))) == {
        (512, HIDDEN, False),
        (32, HIDDEN, False),
        (HIDDEN, HIDDEN, False),
    }


def test_a_config_of_another_kind_says_nothing(tmp_path: Path) -> None:
    shapes = {"gate_proj": (96, HIDDEN, False), "up_proj": (96, HIDDEN, False), "down_proj": (HIDDEN, 128, False)}
    named = {f"model.layers.0.mlp.experts.{e}.{name}": shape for e in range(4) for name, shape in shapes.items()}
    model = read_model(str(write(tmp_path / "m", named, num_experts_per_tok=[2, 2], hidden_act=["silu"])))
    assert (model.top_k, model.activation) == (0, "")


@pytest.mark.parametrize(
    ("actorder", "act_order"), [(None, False), ("weight", False), ("static", False), ("group", True), ("dynamic", True)]
)
def test_the_act_order_of_compressed_tensors(tmp_path: Path, actorder: str | None, act_order: bool) -> None:
    """Then the gather of x's columns has to be compiled, without which W4GEMM_COMPILE=off ends the start."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "actorder": actorder}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    name = "model.layers.0.mlp.down_proj"
    tensors = {
        f"{name}.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
        f"{name}.weight_scale": torch.ones(64, 2, dtype=torch.float16),
        f"{name}.weight_g_idx": (torch.arange(128) % 2).int(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": scheme}))
    assert read_model(str(tmp_path)).act_order == act_order


def test_layers_are_divided_among_gpus(tmp_path: Path) -> None:
    """Heads of keys and values are copied if there are fewer than GPUs."""
    actual = sizes(read_model(str(llama(tmp_path / "m")), tensor_parallel=4))
    assert {(HIDDEN // 4 + 2 * 32, HIDDEN, False), (HIDDEN, 64, False), (2 * INNER // 4, HIDDEN, False)} <= actual
    assert (256, HIDDEN, False) in actual  # lm_head
    assert not {k for n, k, _ in actual if k == INNER // 4}  # 96 columns are not whole groups of 64: left to vLLM
    with pytest.raises(
        ValueError, match=r"--tensor-parallel: lm_head has 1024 output features, which do not divide by 3"
    ):
        read_model(str(tmp_path / "m"), tensor_parallel=3)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"hidden_act": "silu"}, ""),
        ({"hidden_act": "silu", "swiglu_limit": 10.0}, "silu_mul(limit=10)"),
        ({"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "swiglu_oai"),
        (
            {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 20.0},
            "situ_mul(linear_beta=20)",
        ),
        ({"hidden_act": "silu", "mlp_hidden_act": "relu2"}, "relu2"),
    ],
)
def test_activations_of_experts(config: dict[str, Any], activation: str, tmp_path: Path) -> None:
    gates = () if activation == "relu2" else ("gate_proj",)
    shapes = dict.fromkeys((*gates, "up_proj"), (128, HIDDEN, False)) | {"down_proj": (HIDDEN, 128, False)}
    named = {f"model.layers.0.mlp.experts.{e}.{name}": shape for e in range(4) for name, shape in shapes.items()}
    model = read_model(str(write(tmp_path / "m", named, num_experts_per_tok=2, **config)))
    assert model.activation == activation
    assert {(m.experts, m.n, m.k) for m in model.layers} == {(4, 128 * (1 + len(gates)), HIDDEN), (4, HIDDEN, 128)}


@pytest.mark.parametrize("fp8, top_k", [(False, "num_experts_per_tok"), (True, "num_experts_per_token")])
def test_experts_of_deepseek_v4(fp8: bool, top_k: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the config names the number of a token's experts as Kimi-K3's does, for which kernels were missing."""
    monkeypatch.setenv("W4GEMM_MXFP4", "fp8" if fp8 else "auto")
    tensors = {"embed.weight": torch.ones(8, HIDDEN)}
    for e, (name, n, k) in itertools.product(range(2), (("w1", 128, HIDDEN), ("w3", 128, HIDDEN), ("w2", HIDDEN, 128))):
        tensors[f"layers.0.ffn.experts.{e}.{name}.weight"] = torch.zeros(n, k // 2, dtype=torch.int8)
        tensors[f"layers.0.ffn.experts.{e}.{name}.scale"] = torch.full((n, k // 32), 127, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"expert_dtype": "fp4", "hidden_act": "silu", "swiglu_limit": 10.0, top_k: 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    model = read_model(str(tmp_path))
    assert model.activation == "silu_mul(limit=10)" and model.top_k == 2
    assert {(m.experts, m.n, m.k, str(m.format), m.activations) for m in model.layers} == {
        (2, n, k, "e2m1_g32_e8m0", "fp8" if fp8 else None) for n, k in ((256, HIDDEN), (HIDDEN, 128))
    }


def test_experts_are_layers_of_several(tmp_path: Path) -> None:
    shapes = {"gate_proj": (96, HIDDEN, False), "up_proj": (96, HIDDEN, False), "down_proj": (HIDDEN, 128, False)}
    named = {f"model.layers.0.mlp.experts.{e}.{name}": shape for e in range(4) for name, shape in shapes.items()}
    model = read_model(str(write(tmp_path / "m", named)))
    assert {(m.experts, m.n, m.k) for m in model.layers} == {(4, 192, HIDDEN), (4, HIDDEN, 128)}


def test_other_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(FormatError):
        read_model(str(tmp_path))
    assert main(["compile", "--vllm", str(tmp_path / "no"), "-o", str(tmp_path / "o")]) == 1
    assert main(["compile", "--shapes", "64x64", "--tensor-parallel", "2", "-o", str(tmp_path / "o")]) == 2
    assert "--tensor-parallel: wanted it with --vllm only" in capsys.readouterr().err


@pytest.mark.parametrize("case", [Case("gptq", 64), Case("ct", dtype=torch.float16), Case("ct", fp8=True)], ids=str)
def test_what_is_compiled_is_what_the_plugin_runs(
    case: Case, dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setattr(
        "w4gemm.integrations.engines.engine.Device", type("OnH200", (), {"of": staticmethod(lambda device: H200)})
    )
    scale = "e4m3" if case.fp8 else case.format.scale
    module = Module(192, 256, WeightFormat(case.group_size, scale=scale), activations="fp8" if case.fp8 else None)
    use, tokens = Use(H200, case.dtype), [1, 16, 512]
    for bias in (False, True):
        compiled = {p for layer in layers_of([replace(module, bias=bias)]) for p in problems_of(layer, tokens, use)}
        config = config_of(case, 192, 256)
        problem = dense.problem_of(config)
        run = {replace(problem, m=m, epilogue=problem.epilogue._replace(bias=bias)) for m in tokens}
        assert {choice.choose(p).unit for p in compiled} == {choice.choose(p).unit for p in run}


@pytest.mark.parametrize("fp8", [False, True], ids=["W4A16", "W4A8"])
def test_small_kernels_that_are_compiled_are_those_that_the_plugin_prepares(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "w4gemm.integrations.engines.warmup.Device", type("OnH200", (), {"of": staticmethod(lambda device: H200)})
    )
    monkeypatch.setattr("w4gemm.kernels.helpers.base.missing_for_dsl", lambda: "")
    w = quantize(torch.randn(64, 256), "int4_g128").repack(activations="fp8" if fp8 else None)
    prepared = linear_need([w], None, LinearUse(torch.bfloat16, most_tokens=1, fused=True)).helpers
    (layer,) = layers_of([Module(64, 256, w.format, activations=w.activations)])
    compiled = set(helpers_of(layer, Use(H200, torch.bfloat16, fused=True)))
    assert set(prepared) == compiled and len(prepared) == (4 if fp8 else 2)


@pytest.mark.parametrize("name, packing", [("gpt-oss-20b", "mxfp4"), ("qwen3-30b-a3b", "modelopt-nvfp4")])
def test_folders_of_4_bit_floats(name: str, packing: str, tmp_path: Path) -> None:
    """Kernels compiled for experts have the activation, the bias and the rows of x that the plugin's products have."""
    pytest.importorskip("cutlass")
    checkpoint.write(tiny(model_named(name)), Packing.parse(packing), tmp_path)
    model, gpt_oss = read_model(str(tmp_path)), packing == "mxfp4"
    assert (model.activation, model.top_k) == ("swiglu_oai" if gpt_oss else "", 2)
    assert {(layer.n, layer.k) for layer in model.layers if not layer.experts} == (
        set() if gpt_oss else {(512, 256), (256, 256)}
    )
    experts = {(layer.n, layer.k): layer for layer in model.layers if layer.experts}
    use = Use(H200, model.dtype, epilogue_activations=(model.activation,) * gpt_oss, top_k=model.top_k)
    compiled = {p for layer in layers_of(experts.values()) for p in problems_of(layer, [1, 64], use)}
    plain = Epilogue(bias=gpt_oss)
    products = (
        (experts[1024 if gpt_oss else 512, 256], plain._replace(activation=model.activation or "silu_mul"), True),
        (experts[256, 512 if gpt_oss else 256], plain, False),
    )
    for layer, epilogue, gathered in products:
        layout = layout_for(H200, layer.format, model.dtype)
        for m in (layer.experts, 64 * layer.experts):
            run = GemmProblem(m, layer.n, layer.k, model.dtype, layer.format, layout, epilogue, H200)
            assert replace(run, experts=layer.experts, gathered=gathered) in compiled


@pytest.mark.parametrize(
    "name, packing",
    [("nemotron-3-nano", "ct-int4-g32"), ("kimi-k3-quarter", "ct-mxfp4"), ("gpt-oss-20b", "mxfp4")],
)
def test_all_that_experts_prepare_is_compiled(
    name: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine whose steps have up to 8 tokens. Once layers without gates in one launch were missing, and the sum
    over a token's experts if the config has its own name for their number."""
    pytest.importorskip("cutlass")
    checkpoint.write(tiny(model_named(name)), Packing.parse(packing), tmp_path)
    compiled: set[Unit] = set()
    monkeypatch.setattr("w4gemm.cli.compile.fill", lambda folder, units, workers: compiled.update(units) or 0)
    monkeypatch.setattr("w4gemm.kernels.helpers.base.missing_for_dsl", lambda: "")
    assert main(["compile", "--vllm", str(tmp_path), "--m", "1..8", "-o", str(tmp_path / "o")]) == 0
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: H200))
    model = read_model(str(tmp_path))
    pairs = itertools.product((layer for layer in model.layers if layer.experts), repeat=2)
    gates = 1 if model.activation == "relu2" else 2
    gate_up, down = next((a, b) for a, b in pairs if (a.n, a.k) == (gates * b.k, b.n))
    shapes = [
        packed_shape(w.format, layout_for(H200, w.format, model.dtype), w.n, w.k, w.experts) for w in (gate_up, down)
    ]
    fakes = [
        SimpleNamespace(packed=p, k=p.k, experts=p.experts, format=p.format, device="cuda", activations=None)
        for p in shapes
    ]
    rows = [tokens * model.top_k for tokens in token_counts(8, model.top_k, gate_up.experts)]
    call = ExpertsCall(model.dtype, [model.top_k], rows, bias=bool(gate_up.bias))
    need: Any = experts_need(*fakes, model.activation or "silu_mul", call, None)  # type: ignore[arg-type]
    prepared = {*need.helpers, *(choice.choose(key.problem()).unit for key in need.keys)}
    assert {unit.name for unit in prepared - compiled} == set()
    assert {"expert_route", "row_combine", "expert_layer"} <= {unit.name for unit in prepared}


def test_what_vllm_does_not_load_is_left_out(tmp_path: Path) -> None:
    """ModelOpt's INT4, for which vLLM has no method."""
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 256, dtype=torch.uint8)}
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(128, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    scheme = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": scheme}))
    with pytest.raises(FormatError, match="its quantized layers are left to vLLM's own kernels"):
        read_model(str(tmp_path))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass")
    asked: list[int] = []
    monkeypatch.setattr("w4gemm.cli.compile.fill", lambda folder, units, workers: asked.append(len(units)) or 0)
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "c"))
    folder = str(llama(tmp_path / "m"))
    assert main(["compile", "--vllm", folder, "--tensor-parallel", "2", "--m", "1,64", "-o", str(tmp_path / "o")]) == 0
    assert asked and asked[0] >= 2
    assert "12 problems" in capsys.readouterr().err  # six layers, two numbers of tokens


# --- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_file(path: Path, architecture: str, tensors: dict[str, tuple[str, tuple[int, ...]]], **counts: int) -> Path:
    """A GGUF file of zeros. tensors: type and shape of a weight by the name of its tensor."""
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(path, architecture)
    for key, count in counts.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", count)
    for name, (type, (*rows, k)) in tensors.items():
        kind = gguf.GGMLQuantizationType[type]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((*rows, k // elements * size), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    write_out(writer)
    return path


QWEN3_MOE = {
    "token_embd": ("Q4_K", (VOCABULARY, HIDDEN)),
    "output": ("Q6_K", (VOCABULARY, HIDDEN)),
    "blk.0.attn_q": ("Q4_K", (512, HIDDEN)),
    "blk.0.attn_k": ("Q4_K", (128, HIDDEN)),
    "blk.0.attn_v": ("Q6_K", (128, HIDDEN)),
    "blk.0.attn_output": ("Q4_K", (HIDDEN, 512)),
    "blk.0.ffn_gate_exps": ("Q4_K", (4, INNER * 2, HIDDEN)),
    "blk.0.ffn_up_exps": ("Q4_K", (4, INNER * 2, HIDDEN)),
    "blk.0.ffn_down_exps": ("Q6_K", (4, HIDDEN, INNER * 2)),
}


def test_a_gguf_file(tmp_path: Path) -> None:
    """As Q4_K_M has them: neighbours of one type are one product."""
    counts = {"attention__head_count_kv": 2, "expert_used_count": 2}
    file = gguf_file(tmp_path / "a.gguf", "qwen3moe", QWEN3_MOE, **counts)
    model = read_model(str(file))
    q4, q6 = (str(WeightFormat.parse(name)) for name in ("q4_k", "q6_k"))
    alone = {
        (1024, HIDDEN, 0, q6),  # the head
        (640, HIDDEN, 0, q4),
        (128, HIDDEN, 0, q6),
        (HIDDEN, 512, 0, q4),
        (4 * INNER, HIDDEN, 4, q4),
        (HIDDEN, 2 * INNER, 4, q6),
    }
    assert {(m.n, m.k, m.experts, str(m.format)) for m in model.layers} == alone
    assert (model.dtype, model.activation, model.top_k) == (torch.bfloat16, "", 2)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dtype": "float16"}}))
    two = read_model(str(file), tensor_parallel=4)
    assert two.dtype == torch.float16 and two.top_k == 2
    # heads of keys and values are copied; 128 and 192 columns are no whole blocks
    assert {(m.n, m.k, m.experts, str(m.format)) for m in two.layers} == {
        (256, HIDDEN, 0, q6),
        (192, HIDDEN, 0, q4),
        (64, HIDDEN, 0, q6),
        (INNER, HIDDEN, 4, q4),
    }


def test_gguf_files_that_are_not_compiled_for(tmp_path: Path) -> None:
    tied = {"token_embd": ("Q4_K", (VOCABULARY, HIDDEN))}
    with pytest.raises(FormatError, match="left to vLLM's own kernels"):
        read_model(str(gguf_file(tmp_path / "tied.gguf", "llama", tied)))
    with pytest.raises(FormatError, match="architecture: wanted one of llama, .*, got 'deepseek2'"):
        read_model(str(gguf_file(tmp_path / "other.gguf", "deepseek2", tied)))


def test_the_command_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    asked: list[int] = []
    monkeypatch.setattr("w4gemm.cli.compile.fill", lambda folder, units, workers: asked.append(len(units)) or 0)
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "c"))
    file = gguf_file(tmp_path / "a.gguf", "qwen3moe", QWEN3_MOE, expert_used_count=2)
    assert main(["compile", "--vllm", str(file), "--m", "1,64", "-o", str(tmp_path / "o")]) == 0
    assert asked and asked[0] >= 8
