"""The vLLM plugin's linear layers, against a stub of vLLM's interfaces, on the CPU: formats, tensors, tracing."""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, make_dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import w4gemm
from vllm_parts import part_fixture
from w4gemm.choice import plan_cache
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations import vllm as plugin
from w4gemm.integrations.engines import engine
from w4gemm.integrations.engines.loading import mark
from w4gemm.integrations.vllm import takeover
from w4gemm.kernels import workspace
from w4gemm.packing.bits import pack, unpack
from w4gemm.tuning.random_weight import random_components

N, K = 96, 256

dense = part_fixture("dense")


class Case(NamedTuple):
    """A layer as a quantization method of vLLM makes it."""

    method: str
    """gptq, awq or ct: which dimension comes first, and what is stored."""
    group_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    asymmetric: bool = False
    act_order: bool = False
    fp8: bool = False
    bits: int = 4

    @property
    def format(self) -> WeightFormat:
        scale = {torch.float16: "fp16"}.get(self.dtype, "bf16")
        return WeightFormat(self.group_size, "int" if self.asymmetric else "none", scale, f"int{self.bits}")


CASES = [
    Case("gptq"),
    Case("gptq", 32, torch.float16),
    Case("gptq", -1),
    Case("gptq", 64, act_order=True),
    Case("awq", asymmetric=True),
    Case("awq", 64, torch.float16, asymmetric=True),
    Case("ct", 32),
    Case("ct", -1, torch.float16),
    Case("ct", 64, asymmetric=True),
    Case("ct", -1, asymmetric=True),
    Case("ct", fp8=True),
    Case("ct", dtype=torch.float16, fp8=True),
    Case("gptq", bits=8),
    Case("gptq", 32, torch.float16, act_order=True, bits=8),
    Case("ct", -1, bits=8),
    Case("ct", 64, torch.float16, asymmetric=True, bits=8),
    *(Case("ct", 32, bits=bits) for bits in (2, 3, 5, 6)),
    Case("ct", 64, asymmetric=True, bits=3),
]


def config_of(case: Case, n: int = N, k: int = K) -> Any:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import ScalarType, scalar_types

    kind = (
        scalar_types.int4 if case.fp8 else ScalarType(0, case.bits, False, 0 if case.asymmetric else 2**case.bits // 2)
    )
    act_type = torch.float8_e4m3fn if case.fp8 else case.dtype
    out_type = case.dtype if case.fp8 else None
    return MPLinearLayerConfig(
        (k, n), (k, n), kind, act_type, case.group_size, case.asymmetric, case.act_order, out_type
    )


class Made(NamedTuple):
    kernel: Any
    layer: torch.nn.Module
    w: w4gemm.QuantizedWeight


def make(case: Case, n: int = N, k: int = K, bias: bool = False, seed: int = 0) -> Made:
    """A layer with random numbers, and the weight that these are."""
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    config = config_of(case, n, k)
    names = {
        "ct": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        "gptq": ("qweight", "scales", "qzeros", "g_idx"),
        "awq": ("qweight", "scales", "qzeros"),
    }[case.method]
    kernel = choose_mp_linear_kernel(config)(config, *names)
    layer = torch.nn.Module()
    w = load(layer, case, names, n, k, seed)
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn(n, dtype=case.dtype))
    return Made(kernel, layer, w)


def load(layer: torch.nn.Module, case: Case, names: tuple[str, ...], n: int, k: int, seed: int) -> Any:
    """Give the layer the parameters that vLLM's method makes; return the weight that they are."""
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter, RowvLLMParameter

    codes, scales, zeros, *_ = random_components(case.format, n, k, seed)
    g_idx = torch.arange(k, dtype=torch.int32) // case.format.group_length(k)
    if case.act_order:
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    first = 0 if case.method == "ct" else 1
    words: dict[str, Any] = {"packed_factor": Fraction(32, case.bits), "weight_loader": print}

    def placed(t: torch.Tensor, at: int) -> torch.Tensor:
        return t.contiguous() if at == 0 else t.t().contiguous()

    dims = {"output_dim": first, "input_dim": 1 - first}
    w_q, w_s, w_zp, *w_g = names
    parameter = PackedvLLMParameter(
        data=placed(in_words(codes, case.bits), first), packed_dim=1 - first, **dims, **words
    )
    layer.register_parameter(w_q, parameter)
    layer.register_parameter(w_s, GroupQuantScaleParameter(data=placed(scales, first), weight_loader=print, **dims))
    if zeros is not None:  # AWQ's are brought to this order too
        stored = in_words(zeros.t().contiguous(), case.bits).t()
        zero_dims = {"output_dim": 0, "input_dim": 1, "packed_dim": 0}
        layer.register_parameter(w_zp, PackedvLLMParameter(data=stored.contiguous(), **zero_dims, **words))
    elif case.method == "gptq":  # allocated, and not used
        unused = torch.full((1, n * case.bits // 32), 0x77777777 if case.bits == 4 else 0x7F7F7F7F).int()
        layer.register_parameter(w_zp, PackedvLLMParameter(data=unused, packed_dim=1, **dims, **words))
    if case.method == "gptq":
        layer.register_parameter(w_g[0], RowvLLMParameter(data=g_idx, input_dim=0, weight_loader=print))
    w = w4gemm.QuantizedWeight.from_codes(case.format, codes, scales, zeros, g_idx if case.act_order else None)
    return w4gemm.fold_scales(w)[0].repack(activations="fp8") if case.fp8 else w.repack()


def in_words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 (n, k * bits / 32), neighbouring columns in a word."""
    return pack(codes, bits).clone(memory_format=torch.contiguous_format).view(torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_layer_is_the_weight(dense: ModuleType, case: Case, bias: bool) -> None:
    kernel, layer, w = make(case, bias=bias)
    assert type(kernel) is dense.W4GemmLinearKernel
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 5, K, dtype=case.dtype)
    bias_of_layer = layer.bias if bias else None
    d = kernel.apply_weights(layer, x, bias_of_layer)
    expected = w4gemm.linear(x, w, None if bias_of_layer is None else bias_of_layer.detach())
    assert d.shape == (3, 5, N) and d.dtype == case.dtype
    assert torch.equal(d, expected)


def loading() -> tuple[Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """A layer of gate and up that vLLM's method for GPTQ has made, and what it is to load."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    layer, config = torch.nn.Module(), get_quantization_config("gptq")(4, 128, False, True)
    method = config.get_quant_method(layer, "model.layers.3.mlp.gate_up_proj")
    method.create_weights(layer, K, [N // 2, N // 2], K, N, torch.bfloat16)
    codes, scales, *_ = random_components(Case("gptq").format, N, K, 0)
    qzeros = torch.full((K // 128, N // 8), 0x77777777).int()
    return method, layer, {"qweight": in_words(codes).t(), "scales": scales.t(), "qzeros": qzeros}


def test_all_that_is_packed_was_loaded(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """A gate whose up the checkpoint lacks, and one that a loader has loaded in the place of its up."""
    for name, columns, expected in (("qweight", slice(N // 2, N), "50.00%"), ("scales", slice(N - 4, N), "4.17%")):
        method, layer, tensors = loading()
        made = {each: p.data.clone() for each, p in layer.named_parameters()}
        for each, t in tensors.items():
            getattr(layer, each).data.copy_(t)
        getattr(layer, name).data[:, columns] = made[name][:, columns]
        with pytest.raises(RuntimeError, match=rf"mlp.gate_up_proj: {name}: {expected} of its shape .* was not loaded"):
            method.process_weights_after_loading(layer)
    method, layer, tensors = loading()
    for each, t in tensors.items():
        getattr(layer, each).data.copy_(t)
    method.process_weights_after_loading(layer)
    assert hasattr(method.kernel, "packed")


def test_a_layer_of_which_nothing_is_loaded_stays_vllms(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """A draft model's head, for example, in whose place the model's own is put."""
    own = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    method, layer, _ = loading()
    method.kernel.next_kernel = lambda: own
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        method.process_weights_after_loading(layer)
    assert method.kernel.vllm_kernel is own and "nothing of them was loaded" in caplog.text


def test_random_weights_of_the_dummy_loader(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves int32 as its memory was, here that of a layer that was not loaded. Trainers send weights later."""
    engine = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"), scheduler_config=SimpleNamespace())
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    monkeypatch.setattr(takeover, "most_tokens", lambda: 8)
    method, layer, _ = loading()
    layer.scales.data.uniform_(-1e-3, 1e-3)
    mark(layer, ["qweight"])
    method.process_weights_after_loading(layer)
    assert hasattr(method.kernel, "packed")


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded", "tensorizer", "modelexpress"])
def test_what_an_engine_had_packed_is_left_to_vllm(
    load_format: str, dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads such a file over the parameters that it finds by name."""
    engine = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    assert takeover.why_not_here() == ""
    engine.load_config.load_format = load_format
    assert "as another engine had packed them" in takeover.why_not_here()


def test_parameters_that_are_not_understood(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """One more may change what the numbers mean; zero points of a symmetric layer must be what it says."""
    own = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    for name, value, reason in (
        ("weight_offset", torch.zeros(N), "they have a parameter 'weight_offset'"),
        ("qzeros", torch.full((K // 128, N // 8), 0x77777775).int(), "says that it is symmetric"),
    ):
        method, layer, tensors = loading()
        for each, t in tensors.items():
            getattr(layer, each).data.copy_(t)
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        method.kernel.next_kernel = lambda: own
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            method.process_weights_after_loading(layer)
        assert method.kernel.vllm_kernel is own and reason in caplog.text


def test_w4a8_has_the_numbers_of_vllms_own_kernel(dense: ModuleType) -> None:
    """vLLM's convert_bf16_scales_to_fp8: a row's scales are quantized like a row of activations, and divided by 8."""
    kernel, layer, _ = make(Case("ct", fp8=True), n=64, k=1024)
    codes = unpack(layer.weight_packed.data, 4).float() - 8
    scales = layer.weight_scale.data.float()
    channels = scales.abs().amax(1, keepdim=True) / 448
    in_fp8 = ((scales / channels).to(torch.float8_e4m3fn).float() / 8).to(torch.float8_e4m3fn).float()
    products = (codes * in_fp8.repeat_interleave(128, 1)).to(torch.float8_e4m3fn).double()
    kernel.process_weights_after_loading(layer)
    tensors = tuple(getattr(layer, name) for name in kernel.packed[0].names)
    w = w4gemm.QuantizedWeight(WeightFormat.parse("int4_g128_e4m3"), 64, 1024, kernel.packed[0].packed.layout, tensors)
    assert torch.allclose(w.dequantize().double(), products * (8 * channels).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", [Case("gptq", act_order=True), Case("ct", asymmetric=True), Case("ct", fp8=True)])
def test_a_layer_is_traced_whole_with_any_number_of_tokens(dense: ModuleType, case: Case) -> None:
    kernel, layer, _ = make(case, bias=True)
    kernel.process_weights_after_loading(layer)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x: kernel.apply_weights(layer, torch.relu(x), layer.bias), fullgraph=True, dynamic=True, backend=backend
    )
    with torch.inference_mode():
        for m in (7, 12, 64):
            x = torch.randn(m, K, dtype=case.dtype)
            d, eager = compiled(x), kernel.apply_weights(layer, torch.relu(x), layer.bias)
            assert torch.equal(d, eager)
    assert len(graphs) == 1
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.w4gemm.packed_linear) == 1
    assert called.count(torch.ops.w4gemm.quantize_activations) == case.fp8


OPERATORS = ("add_rms_norm", "add_rms_norm_quantize", "gate_halves", "quantize_activations", "packed_linear")


def fused(function: Callable[..., Any], *inputs: torch.Tensor, most: int | None = 64) -> tuple[Any, list[str]]:
    """Results of the function compiled for up to ``most`` rows, with the pass, and the names of operators it calls.
    most: None where vLLM leaves the compilation to PyTorch."""
    from vllm.compilation.passes.inductor_pass import Range, pass_context

    from w4gemm.integrations.vllm import fusion

    importlib.import_module("vllm.ir.ops")
    names = {getattr(torch.ops.w4gemm, name).default: name for name in OPERATORS}
    called: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        fusion.fuse(graph.graph)
        graph.graph.eliminate_dead_code()
        assert fusion.fuse(graph.graph) == 0
        graph.recompile()
        called.extend(names[node.target] for node in graph.graph.nodes if node.target in names)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0) if x.dim() > 1 else None
    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    with torch.inference_mode(), nullcontext() if most is None else pass_context(Range(1, most)):
        return torch.compile(function, backend=backend, fullgraph=True)(*inputs), called


@pytest.mark.parametrize("fp8", [False, True], ids=["W4A16", "W4A8"])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 64), (torch.float16, 64), (torch.bfloat16, 8192), (torch.bfloat16, None)]
)
def test_what_lies_between_products_is_fused(
    dense: ModuleType, dtype: torch.dtype, most: int | None, fp8: bool
) -> None:
    kernel, layer, _ = make(Case("ct" if fp8 else "gptq", fp8=fp8, dtype=dtype))
    kernel.process_weights_after_loading(layer)

    def piece(attention: Any, residual: Any, norm_weight: Any, both: Any) -> tuple[torch.Tensor, ...]:
        o = kernel.apply_weights(layer, attention.view(-1, K))
        x = torch.cat((o, o, o), 1)[:, :K] * 2
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, norm_weight, 1e-5, None)
        first = kernel.apply_weights(layer, normed)
        gated = torch.nn.functional.silu(both[..., :K]) * both[..., K:]
        return first, total, kernel.apply_weights(layer, gated)

    shapes = (7, 2, K // 2), (7, K), (K,), (7, 2 * K)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    actual, called = fused(piece, *inputs, most=most)
    small = ("quantize_activations", "add_rms_norm_quantize", "quantize_activations")
    if not fp8:
        small = ("", "add_rms_norm", "gate_halves")
    if most is None or most > 64:
        small = ("quantize_activations", "", "quantize_activations") if fp8 else ("", "", "")
    assert called == [name for each in small for name in (each, "packed_linear") if name]
    for d, expected in zip(actual, piece(*inputs), strict=True):
        assert (d - expected).norm() < 0.02 * expected.norm()


def test_what_others_read_too_stays(dense: ModuleType) -> None:
    """The norm before a router and gates that are returned; a norm in float32, as Gemma's."""
    kernel, layer, _ = make(Case("gptq"))
    kernel.process_weights_after_loading(layer)

    def piece(x: Any, residual: Any, norm_weight: Any, both: Any) -> tuple[torch.Tensor, ...]:
        normed, _ = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, norm_weight, 1e-5)
        other, _ = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, norm_weight.float() + 1, 1e-5)
        gated = torch.nn.functional.silu(both[..., :K]) * both[..., K:]
        return *(kernel.apply_weights(layer, y) for y in (normed, other, gated)), normed * 2, gated * 2

    inputs = [torch.randn(shape).bfloat16() for shape in ((7, K), (7, K), (K,), (7, 2 * K))]
    assert fused(piece, *inputs)[1] == ["packed_linear"] * 3


def test_a_compiled_graph_quantizes_with_what_the_compiler_makes(dense: ModuleType) -> None:
    """Attention's result, which is an input of a piece of the graph, is quantized by the operator."""
    kernel, layer, _ = make(Case("ct", fp8=True))
    kernel.process_weights_after_loading(layer)

    def piece(attention: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
        x = kernel.apply_weights(layer, attention.view(-1, K)) + residual
        normed = torch.nn.functional.rms_norm(x, (N,), norm_weight).repeat(1, 3)[:, :K]
        return kernel.apply_weights(layer, normed * 2)

    inputs = [torch.randn(7, 2, K // 2).bfloat16(), torch.randn(7, N).bfloat16(), torch.rand(N).bfloat16()]
    actual, called = fused(piece, *inputs)
    assert called == ["quantize_activations", "packed_linear", "packed_linear"]
    assert torch.equal(actual, piece(*inputs))


def test_the_engine_runs_the_pass_and_a_user_s_own_stays(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: dict[str, Any] = {}
    config = SimpleNamespace(inductor_compile_config=passes, compile_ranges_endpoints=[100, 8192])
    engine = SimpleNamespace(compilation_config=config)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    monkeypatch.setattr(takeover, "most_tokens", lambda: 8)
    make(Case("gptq"))
    ((key, first),) = passes.items()
    assert (
        key == "post_grad_custom_post_pass" and first.callable is sys.modules[dense.ListedKernel.__module__].fusion.fuse
    )
    make(Case("ct", fp8=True))
    assert passes[key] is first and config.compile_ranges_endpoints == [64, 100, 8192]
    passes[key] = mine = object()
    make(Case("ct", fp8=True))
    assert passes[key] is mine


def test_nothing_is_fused_where_results_must_not_depend_on_the_batch(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's norm would be another kernel's in a step of 64 tokens than in one of 65."""
    config = SimpleNamespace(inductor_compile_config={}, compile_ranges_endpoints=[8192])
    engine = SimpleNamespace(compilation_config=config)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(takeover, "most_tokens", lambda: 8)
    make(Case("gptq"))
    assert config == SimpleNamespace(inductor_compile_config={}, compile_ranges_endpoints=[8192])


def test_a_layer_s_tensors_are_parameters_of_its_own(dense: ModuleType) -> None:
    """vLLM moves, frees and reloads parameters; it finds the packed weight under the name of the codes. It keeps
    buffers through a sleep without weights, after which dense numbers may come, which say nothing of act-order."""
    kernel, layer, _ = make(Case("gptq", act_order=True))
    kernel.process_weights_after_loading(layer)
    held = dict(layer.named_parameters())
    assert "qweight" in held and not {"scales", "qzeros", "g_idx", "w4gemm_perm"} & held.keys()
    assert dict(layer.named_buffers()).keys() == {"w4gemm_perm"}
    assert not any(p.requires_grad for p in held.values())
    own = [v for v in vars(kernel).values() if isinstance(v, torch.Tensor)]
    assert not own
    x = torch.randn(4, K, dtype=torch.bfloat16)
    before = kernel.apply_weights(layer, x)
    for p in held.values():  # moved: the memory that held it is another's now
        moved = p.data.clone()
        p.data.zero_()
        p.data = moved
    assert torch.equal(kernel.apply_weights(layer, x), before)


def test_weights_are_loaded_anew(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    case = Case("gptq")
    kernel, layer, _ = make(case)
    kernel.process_weights_after_loading(layer)
    for name in list(layer._parameters):
        delattr(layer, name)
    w = load(layer, case, ("qweight", "scales", "qzeros", "g_idx"), N, K, seed=5)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        kernel.process_weights_after_loading(layer)
    assert not caplog.records
    x = torch.randn(4, K, dtype=case.dtype)
    assert torch.equal(kernel.apply_weights(layer, x), w4gemm.linear(x, w))


def test_flags_are_down_when_a_model_wakes(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of stream-k lie in memory that vLLM's sleep mode gives away with the weights, and gets back with them."""
    from vllm.v1.worker.gpu_worker import Worker

    worker, woken = Worker(), []
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags=None: woken.append(tags))
    for _ in range(2):
        make(Case("gptq"))
    for tags, cleared in ((["kv_cache"], False), (["weights"], True), (None, True)):
        flags = torch.full((8,), 7, dtype=torch.int32)
        monkeypatch.setattr(workspace, "_allocations", [flags])
        worker.wake_up(tags)
        assert flags.any() != cleared and woken.pop() == tags and not woken


def test_it_is_first_and_in_the_list_once(dense: ModuleType) -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms import PlatformEnum

    kernels = _POSSIBLE_KERNELS[PlatformEnum.CUDA]
    kernels.append(object)
    plugin.register()
    dense.install()
    assert kernels == [dense.W4GemmLinearKernel, object]


@pytest.mark.parametrize(("name", "value"), [("W4GEMM_VLLM", "on"), ("W4GEMM_MXFP4", "fp8"), ("W4GEMM_MXFP4", "16bit")])
def test_compiled_graphs_are_kept_apart(
    name: str, value: str, dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with 16 bits from those without a choice, which multiply by fp8 where a checkpoint asks for it."""
    from vllm import envs

    auto = envs.environment_variables["W4GEMM_VLLM"]()
    monkeypatch.setenv(name, value)
    takeover.enter_compile_key()
    assert envs.environment_variables["W4GEMM_VLLM"]() != auto


def refused(config: Any) -> str:
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms import PlatformEnum

    taken, reason = _POSSIBLE_KERNELS[PlatformEnum.CUDA][0].can_implement(config)
    assert taken == (reason is None)
    return reason or ""


@pytest.mark.parametrize(("gb", "group", "left"), [(0, 0, False), (4, 0, True), (0, 2, True)])
def test_weights_in_the_hosts_memory(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, gb: int, group: int, left: bool
) -> None:
    """vLLM moves the parameters that it knows, and a packed weight may have one more."""
    prefetch, uva = SimpleNamespace(offload_group_size=group), SimpleNamespace(cpu_offload_gb=gb)
    engine = SimpleNamespace(offload_config=SimpleNamespace(prefetch=prefetch, uva=uva))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    reason = refused(config_of(Case("gptq")))
    assert ("--cpu-offload-gb or --offload-group-size" in reason) == left == bool(reason)


def test_gpus_that_come_and_go(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes makes its layers of random numbers, and gets the tensors of another's."""
    engine = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    assert "--enable-elastic-ep" in refused(config_of(Case("gptq")))


def test_what_is_left_to_vllm(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.scalar_type import scalar_types

    plain, fp8 = config_of(Case("gptq")), config_of(Case("ct", fp8=True))
    rows = (2 * K, N)
    assert not refused(plain) and not refused(fp8)
    assert not refused(replace(plain, full_weight_shape=rows))  # shards of whole groups
    assert not refused(replace(plain, group_size=-1, full_weight_shape=rows))
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        assert "uint7b64" in refused(replace(plain, weight_type=scalar_types.uint7b64))
    assert "w4gemm leaves linear layers of GPTQ, AWQ and compressed-tensors to vLLM's own kernels" in caplog.text
    assert "kernels: their weights are uint7b64, wanted integers of 2, 3, 4, 5, 6, 8 bits" in caplog.text
    assert "int4" in refused(replace(fp8, weight_type=scalar_types.uint4b8))
    assert "activations are torch.int8" in refused(replace(plain, act_type=torch.int8))
    assert "results torch.float32" in refused(replace(plain, act_type=torch.float32))
    assert "zero points with" in refused(replace(fp8, zero_points=True))
    assert "have zero points with uint4b8" in refused(replace(plain, zero_points=True))
    assert "have no zero points with uint4 " in refused(replace(plain, weight_type=scalar_types.uint4))
    assert not refused(replace(plain, group_size=16))
    assert "groups are 24 columns, wanted a multiple of 16" in refused(replace(plain, group_size=24))
    assert "their 192 input features on this GPU are not whole groups of 128" in refused(
        replace(plain, partition_weight_shape=(192, N), full_weight_shape=(384, N))
    )
    assert "act-order" in refused(replace(config_of(Case("gptq", act_order=True)), full_weight_shape=rows))


def test_no_gpu_but_hopper_unless_forced(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    config = config_of(Case("gptq"))
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls: (8, 0)))
    assert "W4GEMM_VLLM=on takes over" in refused(config)
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    assert not refused(config)
    assert "needs compute capability 8.9" in refused(config_of(Case("ct", fp8=True)))


def test_a_config_without_act_order(dense: ModuleType) -> None:
    """vLLM 0.33 has no has_g_idx, and its kernels no w_gidx_name."""
    config = config_of(Case("gptq"))
    names = [f.name for f in fields(config) if f.name != "has_g_idx"]
    newer = make_dataclass("MPLinearLayerConfig", names)(*(getattr(config, name) for name in names))
    assert not refused(newer)
    kernel, layer, w = make(Case("gptq"))
    kernel.config = newer
    del kernel.w_gidx_name
    kernel.process_weights_after_loading(layer)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert torch.equal(kernel.apply_weights(layer, x), w4gemm.linear(x, w))


def test_a_config_that_is_not_known_is_left_to_vllm(dense: ModuleType) -> None:
    assert "this version of vLLM is not known: 'types.SimpleNamespace' object has no attribute" in refused(
        SimpleNamespace(act_type=torch.bfloat16)
    )


@pytest.mark.parametrize("spoiled", ["scales", "format"])
def test_a_layer_that_cannot_be_packed_runs_on_vllms_kernel(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoiled: str
) -> None:
    from vllm.model_executor.kernels.linear import MPLinearKernel

    class Other(MPLinearKernel):
        get_min_capability = classmethod(lambda cls: 80)
        can_implement = classmethod(lambda cls, c: (False, "no"))

    class Marlin(Other):
        can_implement = classmethod(lambda cls, c: (True, None))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            self.loaded = getattr(layer, self.w_q_name)

        def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            return x + 1

    class Blackwell(Marlin):
        get_min_capability = classmethod(lambda cls: 100)

    monkeypatch.setattr(dense.W4GemmLinearKernel, "possible", [dense.W4GemmLinearKernel, Other, Blackwell, Marlin])
    kernel, layer, _ = make(Case("gptq"))
    codes, scales = getattr(layer, kernel.w_q_name), getattr(layer, kernel.w_s_name)
    if spoiled == "scales":
        scales.data[1, 0] = float("nan")
    else:
        scales.data = scales.data.double()
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        kernel.process_weights_after_loading(layer)
    assert type(kernel.vllm_kernel) is Marlin and kernel.vllm_kernel.loaded is codes
    assert "w4gemm leaves linear layers of GPTQ, AWQ and compressed-tensors to vLLM's own kernels" in caplog.text
    assert torch.equal(kernel.apply_weights(layer, torch.ones(2)), torch.full((2,), 2.0))
    for name in list(layer._parameters):
        delattr(layer, name)
    load(layer, Case("gptq"), ("qweight", "scales", "qzeros", "g_idx"), N, K, seed=5)
    kernel.process_weights_after_loading(layer)  # weights that could be packed: vLLM has graphs of its kernel's tensors
    assert kernel.vllm_kernel.loaded is getattr(layer, kernel.w_q_name) is not codes
    assert torch.equal(kernel.apply_weights(layer, torch.ones(2)), torch.full((2,), 2.0))


def test_plans_are_ready_when_the_last_layer_is_loaded(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every number of tokens up to the engine's most, with and without a bias; no plan is chosen later."""
    engine = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=40))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    plan_cache.forget()
    made = [make(Case("gptq")), make(Case("gptq"), bias=True), make(Case("ct", 64), n=64)]
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        for kernel, layer, _ in made[:2]:
            kernel.process_weights_after_loading(layer)
        assert not caplog.records
        made[2].kernel.process_weights_after_loading(made[2].layer)
    (record,) = caplog.records
    assert "w4gemm runs 3 linear layers" in record.message
    monkeypatch.setattr("w4gemm.choice.plan_cache.choose", lambda *a: pytest.fail("a plan was chosen"))
    for kernel, layer, _ in made:
        for m in (1, 2, 3, 7, 8, 9, 33, 40):
            for bias in (None, getattr(layer, "bias", None)):
                kernel.apply_weights(layer, torch.randn(m, K, dtype=torch.bfloat16), bias)


def test_a_layer_that_is_dropped_is_not_waited_for(dense: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    kept, dropped = make(Case("gptq")), make(Case("gptq"))
    del dropped
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        kept.kernel.process_weights_after_loading(kept.layer)
    assert "w4gemm runs 1 linear layers" in caplog.text


def test_a_layer_that_is_kept_and_never_loaded_is_not_waited_for(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM keeps the encoder of a model that may get no images, and its loader passes it over."""

    def process(made: Made) -> str:
        made.kernel.process_weights_after_loading(made.layer)
        return "processed"

    package: Any = SimpleNamespace(base_loader=SimpleNamespace(process_weights_after_loading=process))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", package)
    cases, kept = (Case("gptq"), Case("ct", 64)), []
    for case in cases:  # a model, and a draft model
        loaded, never = make(case), make(case)
        kept.append(never)
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            assert package.base_loader.process_weights_after_loading(loaded) == "processed"
    assert [record.message[:27] for record in caplog.records] == ["w4gemm runs 1 linear layers"] * 2


def test_what_comes_under_other_names_counts_as_loaded(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM checks that a checkpoint has all parameters (enable_weights_track)."""
    seen: list[set[str] | None] = []

    class DefaultModelLoader:
        def track_weights_loading(self, model: torch.nn.Module, loaded: set[str] | None) -> None:
            seen.append(loaded)

    package, module = ModuleType("vllm.model_executor.model_loader"), ModuleType("default_loader")
    package.__path__, module.DefaultModelLoader = [], DefaultModelLoader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, f"{package.__name__}.default_loader", module)
    make(Case("gptq"))
    model: Any = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("experts", "gate_up", "qkv")})
    model.experts.register_parameter("w4gemm_last", torch.nn.Parameter(torch.zeros(1)))
    for merged in (model.gate_up, model.qkv):
        merged.w4gemm_shards = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])
    DefaultModelLoader().track_weights_loading(model, None)
    DefaultModelLoader().track_weights_loading(model, {"qkv.weight"})
    assert seen == [None, {"experts.w4gemm_last", "qkv.weight", "qkv.w4gemm_shards.0.weight"}]


def test_a_model_is_packed_in_segments_that_pytorch_uses_again(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads models with a limit of 20 MiB, of which PyTorch's segments have as many and are not divided."""
    from vllm.v1.worker.gpu_worker import Worker

    limits: list[int] = []

    @contextmanager
    def limited(self: Worker, max_split_size_mb: int) -> Iterator[None]:
        limits.append(max_split_size_mb)
        yield
        limits.pop()

    package: Any = SimpleNamespace(base_loader=SimpleNamespace(process_weights_after_loading=limits.copy))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", package)
    monkeypatch.setattr(Worker, "_scoped_allocator_max_split", limited)
    make(Case("gptq"))
    with Worker()._scoped_allocator_max_split(20):
        assert package.base_loader.process_weights_after_loading() == [20, 21]
        assert limits == [20]


def test_a_kernel_that_cannot_be_compiled_ends_the_start_not_a_request(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*arguments: Any) -> None:
        raise w4gemm.UnsupportedError("sm90_decode cannot be compiled")

    monkeypatch.setattr("w4gemm.integrations.engines.warmup.prepare", prepare)
    kernel, layer, _ = make(Case("gptq"))
    with pytest.raises(w4gemm.UnsupportedError, match=r"(?s)sm90_decode cannot be compiled.*W4GEMM_VLLM=off leaves"):
        kernel.process_weights_after_loading(layer)


def test_no_tuple_is_indexed_by_a_comparison() -> None:
    """PyTorch 2.11's compiler takes no bool as an index, which this PyTorch's does."""
    package = Path(w4gemm.__file__).parent
    actual = [
        f"{file.relative_to(package)}:{node.lineno}"
        for folder in ("api", "integrations/engines", "integrations/vllm", "core", "packing")
        for file in (package / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Compare, ast.BoolOp))
    ]
    assert not actual


@pytest.mark.parametrize(
    ("scheme", "facts", "reason"),
    [
        ("W8A8Int8", {}, "their activations are 8-bit integers"),
        ("W8A8Fp8", {}, "their activations are in fp8"),
        ("WNA8Int", {}, "their activations are 8-bit integers"),
        ("WNA4Int", {}, "their activations are 4-bit integers"),
        ("WNA8O8Int", {"is_int_quantized": True}, "their weights are stored in bytes"),
        ("WNA8O8Int", {"is_int_quantized": False}, ""),
        ("WNA16", {}, ""),
    ],
)
def test_schemes_that_are_left_to_vllm(
    scheme: str, facts: dict[str, bool], reason: str, dense: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where vLLM asks its kernels of integers for them."""
    possible, asked = dense.W4GemmLinearKernel.possible, []
    possible.append("Humming")
    engine._refuse.cache_clear()
    layer = torch.nn.Module()
    layer.scheme = type(f"CompressedTensors{scheme}", (), facts)()
    method = SimpleNamespace(create_weights=lambda layer, k: asked.extend(possible))
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        dense.leave(method, layer).create_weights(layer, k=64)
    line = f"w4gemm leaves linear layers of compressed-tensors to vLLM's own kernels: {reason}"
    assert (line in caplog.text) == bool(reason)
    assert asked == ["Humming"] if reason else asked == possible
    assert possible == [dense.W4GemmLinearKernel, "Humming"]


@pytest.mark.parametrize("runs", [True, False])
def test_our_kernel_is_asked_where_vllm_would_dequantize(dense: ModuleType, runs: bool) -> None:
    """With VLLM_BATCH_INVARIANT vLLM 0.33 asks no kernel for layers of compressed-tensors; its others depend on the
    batch."""
    possible, asked = dense.W4GemmLinearKernel.possible, []
    possible.append("Marlin")
    layer = torch.nn.Module()
    layer.scheme = scheme = SimpleNamespace(use_batch_invariant=True, kernel=None, apply_weights="dequantizes")

    def create_weights(layer: torch.nn.Module, k: int) -> None:
        if not scheme.use_batch_invariant:
            asked.extend(possible)
            if not runs:
                raise ValueError("no kernel runs it")
            scheme.kernel = SimpleNamespace()

    method = dense.ask_when_batch_invariant(SimpleNamespace(create_weights=create_weights), layer)
    method.create_weights(layer, 64)
    assert asked == [dense.W4GemmLinearKernel] and possible == [dense.W4GemmLinearKernel, "Marlin"]
    assert scheme.use_batch_invariant is not runs
    if runs:
        assert scheme.kernel.left.apply_weights == "dequantizes"
