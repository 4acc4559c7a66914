"""The vLLM plugin's experts, against a stub of vLLM's interfaces, on the CPU: formats, expert parallelism, refusals."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import pickle
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from expert_layers import Layer, emulated, spec_of
from reference import linear_reference
from test_vllm_dense import vllm_stub
from w4gemm import QuantizedWeight, choice, fold_scales
from w4gemm.api.expert_layer import LayerKey, OneLaunch
from w4gemm.api.product import Product
from w4gemm.checkpoints.awq import ORDER
from w4gemm.choice import plan
from w4gemm.core.activation import parse
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations import vllm as plugin
from w4gemm.kernels.base import selected
from w4gemm.tuning.random_weight import random_components

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 128, 128
FP8_ERROR = 0.06
"""Relative error of two products that round their activations to e4m3."""


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported beside the stub and installed by the entry point."""
    with vllm_stub(monkeypatch, "experts"):
        yield importlib.import_module(f"{plugin.__name__}.experts")


class Case(NamedTuple):
    """Experts as a method of vLLM loads them."""

    name: str
    """vLLM's name of the quantization."""
    group_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    asymmetric: bool = False
    fp8: bool = False
    transposed: bool = False
    """True if matrices lie as (k, n): GPTQ, AWQ, and compressed-tensors in vLLM 0.26."""
    element: str = ""
    """mxfp4 or nvfp4; int4 if empty."""

    @property
    def format(self) -> WeightFormat:
        if self.element:
            return WeightFormat.parse(self.element)
        scale = {torch.float16: "fp16"}.get(self.dtype, "bf16")
        return WeightFormat(self.group_size, "int" if self.asymmetric else "none", scale)

    def config(self) -> Any:
        """The model's quantization config, of the class that vLLM looks up."""
        from vllm.model_executor.layers.quantization import get_quantization_config

        cls = get_quantization_config(self.name)
        if self.name == "gptq":
            return cls(4, self.group_size, False, True)
        if self.name == "awq":
            return cls(4, self.group_size, True)
        if self.name == "moe_wna16":
            return cls("awq" if self.asymmetric else "gptq", 4, self.group_size, self.asymmetric, {})
        if self.name in ("mxfp4", "gpt_oss_mxfp4", "modelopt_fp4"):
            return cls()
        grouped = self.group_size != -1
        weights = SimpleNamespace(
            num_bits=4,
            type="float" if self.element else "int",
            symmetric=not self.asymmetric,
            actorder=None,
            strategy="group" if grouped else "channel",
            group_size=self.group_size if grouped else None,
        )
        activations = SimpleNamespace(num_bits=8) if self.fp8 else None
        return cls({"Linear": {"weights": weights, "input_activations": activations}})


CASES = [
    Case("gptq", transposed=True),
    Case("gptq", 32, torch.float16, transposed=True),
    Case("gptq", -1, transposed=True),
    Case("awq", asymmetric=True, transposed=True),
    Case("awq", 64, torch.float16, asymmetric=True, transposed=True),
    Case("moe_wna16", 64),
    Case("moe_wna16", 32, asymmetric=True),
    Case("compressed-tensors", 32),
    Case("compressed-tensors", 64, asymmetric=True),
    Case("compressed-tensors", 32, transposed=True),
    Case("compressed-tensors", 64, asymmetric=True, transposed=True),
    Case("compressed-tensors", 16, element="nvfp4"),
    Case("compressed-tensors", 32, element="mxfp4"),
    Case("modelopt_fp4", 16, torch.float16, element="nvfp4"),
    Case("compressed-tensors", -1, torch.float16),
    Case("mxfp4", 32, element="mxfp4"),
    Case("compressed-tensors", 32, element="mxfp4", fp8=True),
    Case("compressed-tensors", fp8=True),
    Case("compressed-tensors", 32, torch.float16, fp8=True),
]


def words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 32) -> torch.Tensor:
    """Numbers 0..15 (..., m) as integers of ``bits`` bits (..., 4 m / bits)."""
    each = numbers.long().unflatten(-1, (-1, bits // 4))
    word = sum(each[..., i] << (4 * order[i]) for i in range(bits // 4))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int() if bits == 32 else word.to(torch.uint8)


def stored(case: Case, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> dict[str, Any]:
    """The parameters of a product of all experts, from its numbers (experts, n, columns)."""
    bits, along_n = (8 if case.name == "moe_wna16" or case.element else 32), case.name == "awq"
    order = tuple(ORDER) if along_n else tuple(range(bits // 4))

    def packed(numbers: torch.Tensor, over_rows: bool) -> torch.Tensor:
        return words(numbers.mT, order, bits).mT if over_rows else words(numbers, order, bits)

    compressed = case.name == "compressed-tensors"
    names = ("weight_packed", "weight_scale", "weight_zero_point") if compressed else ("qweight", "scales", "qzeros")
    if case.element and not compressed:
        names = ("weight", "weight_scale", "")
    if case.element == "mxfp4":
        scales = scales.view(torch.uint8)
    tensors = [packed(codes, along_n), scales, None if zeros is None else packed(zeros, True)]
    return {name: t for name, t in zip(names, tensors, strict=True) if t is not None}


class Mixture(NamedTuple):
    """A layer with random experts, and the weights that it must compute with, in float64's eyes."""

    layer: Any
    gate_up: QuantizedWeight
    down: QuantizedWeight
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Biases of gate_up and down, (experts, n)."""

    def expected(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        on_input: bool = False,
        activation: str = "silu_mul",
    ) -> torch.Tensor:
        """The weighted sum over the experts of each token, of those that ids of 0 and more name."""
        d = torch.zeros(x.shape, dtype=torch.float64)
        for t, j in torch.nonzero(ids >= 0).tolist():
            e, weight = int(ids[t, j]), weights[t, j].double()
            row = x[t : t + 1].double() * (weight.to(x.dtype).double() if on_input else 1)
            biases = [None if bias is None else bias[e].double() for bias in self.biases]
            hidden = linear_reference(row, self.gate_up.expert(e), biases[0], activation=activation)
            d[t] += (1 if on_input else weight) * linear_reference(hidden, self.down.expert(e), biases[1])[0]
        return d


def mixture(case: Case, seed: int = 0, packed: bool = True, **settings: Any) -> Mixture:
    """Make a layer of ``case`` as vLLM does, load it and pack its experts.

    Args:
        packed: False to leave it as it is loaded.
        settings: of FusedMoEConfig, FusedMoEParallelConfig and RoutedExperts, by name.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if case.name == "gpt_oss_mxfp4":
        settings |= {"has_bias": True, "activation": "SWIGLUOAI"}
    with_bias, activation = settings.get("has_bias", False), settings.get("activation", "SILU")
    gated = not activation.endswith("NO_MUL")
    layer = RoutedExperts(*layer_arguments(case, settings), **settings)
    weights, biases = {}, []
    for product, n, k in (("w13", (1 + gated) * WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
        each = [random_components(case.format, n, k, seed=seed + 31 * e + n) for e in range(EXPERTS)]
        if case.element == "nvfp4":  # factors of an expert's gates, ups and downs
            parts_of_rows = 1 + gated if product == "w13" else 1
            factors = 2.0 ** -(8 + (torch.arange(EXPERTS)[:, None] + torch.arange(parts_of_rows)) % 3)
            each = [
                parts._replace(channels=factor.repeat_interleave(n // len(factor)))
                for parts, factor in zip(each, factors, strict=True)
            ]
            name, held = (
                ("weight_scale_2", factors) if case.name == "modelopt_fp4" else ("weight_global_scale", 1 / factors)
            )
            held = torch.nn.Parameter(held if product == "w13" else held.flatten(), requires_grad=False)
            layer.register_parameter(f"{product}_{name}", held)
            layer.register_parameter(f"{product}_input_scale", torch.nn.Parameter(held.detach().clone()))
        weights[product] = [
            QuantizedWeight.from_codes(case.format, *parts[:3], channels=parts.channels) for parts in each
        ]
        if case.fp8:  # as vLLM's own kernel rounds them; vLLM 0.26 has factors of rows for it that no file holds
            weights[product] = [fold_scales(w)[0] for w in weights[product]]
            ones = torch.nn.Parameter(torch.ones(layer.local_num_experts, n), requires_grad=False)
            layer.register_parameter(f"{product}_weight_chan_scale", ones)
        here = each[-layer.local_num_experts :]
        codes, scales = (torch.stack([parts[i] for parts in here]) for i in range(2))
        zeros = torch.stack([parts.zeros for parts in here]) if case.asymmetric else None
        for name, t in stored(case, codes, scales, zeros).items():
            parameter = torch.nn.Parameter((t.mT if case.transposed else t).contiguous(), requires_grad=False)
            parameter.is_transposed = case.transposed
            layer.register_parameter(f"{product}_{name}", parameter)
        biases.append(torch.randn(EXPERTS, n).to(case.dtype) if with_bias else None)
        if with_bias:
            here = torch.nn.Parameter(biases[-1][-layer.local_num_experts :].clone(), requires_grad=False)
            layer.register_parameter(f"{product}_bias", here)
        for unused in ("g_idx", "weight_shape"):
            layer.register_parameter(f"{product}_{unused}", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    if packed:
        layer.quant_method.process_weights_after_loading(layer)
    down = QuantizedWeight.stack(weights["w2"])
    if activation == "SWIGLUOAI" or not gated:
        return Mixture(layer, QuantizedWeight.stack(weights["w13"]), down, tuple(biases))
    pairs = [QuantizedWeight.interleave(*(half(w, rows) for rows in HALVES)) for w in weights["w13"]]
    if with_bias:
        biases[0] = biases[0].unflatten(1, (2, -1)).mT.flatten(1)
    return Mixture(layer, QuantizedWeight.stack(pairs), down, tuple(biases))


HALVES = (slice(WIDTH), slice(WIDTH, None))


def half(w: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """Some rows of a weight."""
    codes, scales, zeros, channels, _ = (None if t is None else t[rows] for t in w.parts())
    return QuantizedWeight.from_codes(w.format, codes, scales, zeros, channels=channels)


def layer_arguments(case: Case, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Positional arguments of RoutedExperts; takes those of its configs out of ``settings``."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

    def of(cls: Any) -> dict[str, Any]:
        return {name: settings.pop(name) for name in list(settings) if name in cls.__dataclass_fields__}

    local = settings.pop("num_local_experts", EXPERTS)
    if "activation" in settings:
        settings["activation"] = MoEActivation[settings["activation"]]
    parallel = FusedMoEParallelConfig(**of(FusedMoEParallelConfig))
    sizes = (EXPERTS, TOP_K, settings.pop("hidden_dim", HIDDEN), settings.pop("width", WIDTH), local, case.dtype)
    moe = FusedMoEConfig(*sizes, moe_parallel_config=parallel, **of(FusedMoEConfig))
    manager = SimpleNamespace(expert_map=settings.pop("expert_map", None))
    return "experts", case.dtype, moe, case.config(), manager


def inputs(dtype: torch.dtype, tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the router's weights and its ids, one of them a padding of -1."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)])
    ids[-1, 0] = -1
    return torch.randn(tokens, HIDDEN, generator=g).to(dtype), torch.rand(tokens, TOP_K, generator=g), ids.int()


def assert_near(got: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    bound = FP8_ERROR if case.fp8 else 4 * torch.finfo(case.dtype).eps
    assert ((got.double() - expected).norm() / expected.norm()).item() < bound


def test_results_that_must_not_depend_on_the_batch(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_BATCH_INVARIANT every product has one order of sums, whichever of its configs is chosen for a number of
    rows, and no layer runs in one launch."""
    from w4gemm.integrations.vllm import experts_kernel

    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(experts_kernel, "one_launch_now", None)
    ranked = plan.ranked
    monkeypatch.setattr(plan, "ranked", lambda among, problem: ranked(among, problem)[:: -1 if problem.m % 2 else 1])
    choice.forget()
    made = mixture(CASES[0])
    need = made.layer.quant_method.moe_kernel.fused_experts.need(64)
    assert need.keys and all(key.batch_invariant for key in need.keys)
    x, weights, ids = inputs(CASES[0].dtype, 40)
    whole = made.layer.forward_modular(x, weights, ids)
    for rows in (slice(1), slice(3, 8), slice(39, 40), slice(33)):
        assert torch.equal(made.layer.forward_modular(x[rows], weights[rows], ids[rows]), whole[rows])
    choice.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formats(experts: ModuleType, case: Case) -> None:
    made = mixture(case)
    x, weights, ids = inputs(case.dtype)
    assert type(made.layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"
    with torch.inference_mode():
        got = made.layer.forward_modular(x, weights, ids)
        none = made.layer.forward_modular(x[:0], weights[:0], ids[:0])
    assert got.dtype == case.dtype and none.shape == (0, HIDDEN)
    assert_near(got, made.expected(x, weights, ids), case)


GPT_OSS = Case("gpt_oss_mxfp4", 32, element="mxfp4")


def test_gpt_oss(experts: ModuleType) -> None:
    """MXFP4 with biases and its activation, in its own sizes: vLLM's method would pad 128 features to 256."""
    made = mixture(GPT_OSS)
    x, weights, ids = inputs(torch.bfloat16)
    assert {name for name, _ in made.layer.named_parameters()} >= {"w13_bias", "w2_bias", "w13_weight", "w2_weight"}
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation="swiglu_oai"), GPT_OSS)


MXFP4, NVFP4 = Case("mxfp4", 32, element="mxfp4"), Case("modelopt_fp4", 16, element="nvfp4")
ACTIVATIONS = [
    (MXFP4, {"swiglu_limit": 1.5}, "silu_mul(limit=1.5)"),  # DeepSeek-V4
    (MXFP4, {"has_bias": True}, "silu_mul"),
    (
        Case("compressed-tensors", 32, element="mxfp4"),  # Kimi-K3
        {"activation": "SITU", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        "situ_mul",
    ),
    (
        MXFP4,
        {"activation": "SITU", "activation_situ_beta": 1.5, "activation_situ_linear_beta": None},
        "situ_mul(beta=1.5,linear_beta=none)",
    ),
    (
        NVFP4,  # MiniMax-M3
        {"activation": "SWIGLUOAI_UNINTERLEAVE", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        "swiglu_oai",
    ),
    (
        MXFP4,
        {"activation": "SWIGLUOAI_UNINTERLEAVE", "swiglu_limit": 2.0, "has_bias": True},
        "swiglu_oai(alpha=1,beta=none,limit=2)",
    ),
    (NVFP4, {"activation": "RELU2_NO_MUL"}, "relu2"),  # Nemotron 3
    (Case("compressed-tensors", 32), {"activation": "RELU2_NO_MUL"}, "relu2"),
    (Case("awq", 64, asymmetric=True, transposed=True), {"activation": "SILU_NO_MUL"}, "silu"),
    (Case("compressed-tensors", fp8=True), {"activation": "GELU_TANH_NO_MUL"}, "gelu_tanh"),
]


@pytest.mark.parametrize(("case", "settings", "activation"), ACTIVATIONS, ids=str)
def test_activations_of_models(experts: ModuleType, case: Case, settings: dict[str, Any], activation: str) -> None:
    made = mixture(case, **settings)
    x, weights, ids = inputs(case.dtype)
    assert made.layer.quant_method.moe_kernel.fused_experts.products[0].epilogue.activation == activation
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case)


def test_features_that_a_model_adds(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-K3 has vLLM make wider experts for many GPUs, says so afterwards, and loads nothing into the rest."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    made, loaded = mixture(MXFP4, packed=False), WIDTH - 32
    stored = {name: p.data for name, p in made.layer.named_parameters() if name.endswith(("weight", "scale"))}

    def create_weights(self: Any, layer: Any) -> None:
        for name, t in stored.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(t), requires_grad=False))

    monkeypatch.setattr(Mxfp4MoEMethod, "create_weights", create_weights, raising=False)
    layer = RoutedExperts(*layer_arguments(MXFP4, {}))
    layer.quant_method.create_weights(layer)
    layer.moe_config.intermediate_size_per_partition_unpadded = loaded
    for name, t in stored.items():
        pair = t, getattr(layer, name).data
        parts, held = (each.unflatten(1, (2, -1)) if name.startswith("w13") else each for each in pair)
        size = parts.shape[2] * loaded // WIDTH
        held.narrow(2, 0, size).copy_(parts.narrow(2, 0, size))
    layer.quant_method.process_weights_after_loading(layer)
    x, weights, ids = inputs(MXFP4.dtype)
    gate_up, down = made.gate_up.dequantize(), made.down.dequantize()
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.nonzero(ids >= 0).tolist():
        gate, up = (gate_up[ids[t, j], : 2 * loaded].double() @ x[t].double()).view(-1, 2).T
        hidden = torch.nn.functional.silu(gate) * up
        expected[t] += weights[t, j].double() * (down[ids[t, j], :, :loaded].double() @ hidden)
    assert_near(layer.forward_modular(x, weights, ids), expected, MXFP4)


@pytest.mark.parametrize(("format", "case"), [("MXFP4", MXFP4), ("MXFP4", GPT_OSS), ("NVFP4", NVFP4)], ids=str)
def test_floats_beside_fp8_x_by_choice(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, format: str, case: Case
) -> None:
    monkeypatch.setenv(f"W4GEMM_{format}", "fp8")
    made = mixture(case)
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert all(product.epilogue.token_scale for product in kernel.products)
    activation = "swiglu_oai" if case is GPT_OSS else "silu_mul"
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case._replace(fp8=True))
    monkeypatch.setenv(f"W4GEMM_{format}", "16bit")
    made = mixture(case)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case)


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_experts_of_other_ranks_add_nothing(experts: ModuleType, case: Case) -> None:
    """Rank 1 has the last two of five experts."""
    here = EXPERTS - 2
    expert_map = torch.tensor([-1] * here + [0, 1], dtype=torch.int32)
    made = mixture(case, num_local_experts=2, ep_size=2, ep_rank=1, use_ep=True, dp_size=2, expert_map=expert_map)
    x, weights, ids = inputs(case.dtype)
    assert not made.layer.quant_method.moe_kernel.fused_experts.expects_unquantized_inputs
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, torch.where(ids >= here, ids, -1)), case)


def test_few_tokens_run_in_one_launch(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the work is then vLLM's last step, into vLLM's own output; the kernel is emulated. A map may say which
    experts are here. Weights on the input, and more tokens, run in four launches."""
    pytest.importorskip("cutlass")
    from w4gemm.integrations.vllm import experts_kernel

    case, calls = CASES[7], []
    sizes = {"experts": EXPERTS, "features": HIDDEN, "width": WIDTH, "ids": torch.int32, "mapped": True}
    spec = spec_of(8, format=case.format.name, **sizes)

    def chosen(key: LayerKey, device: Any) -> OneLaunch:
        fits = key.choice is None and key.ids is torch.int32 and not any(key.operands) and key.tokens <= spec.tokens
        return OneLaunch(spec, "", "") if fits else OneLaunch(None, "too many tokens", "")

    def launched(x: Any, choices: Any, gate_up: Any, down: Any, activation: str, expert_map: Any, out: Any) -> Any:
        calls.append((len(x), expert_map is not None, out))
        layer = Layer(spec, gate_up.weight.repack("mma16"), down.weight.repack("mma16"), None, None, None, None)
        every = torch.arange(EXPERTS, dtype=torch.int32) if expert_map is None else expert_map
        return out.copy_(emulated(layer, x, choices, every))

    made = mixture(case)
    monkeypatch.setattr(experts_kernel, "one_launch_now", chosen)
    monkeypatch.setattr(experts_kernel, "expert_layer", launched)
    for tokens in (3, 8, 9):
        x, weights, ids = inputs(case.dtype, tokens)
        for choices in (ids, ids.long()):
            got = made.layer.forward_modular(x, weights, choices)
            assert_near(got, made.expected(x, weights, ids), case)
        if tokens <= 8:
            assert [call[:2] for call in calls] == 2 * [(tokens, False)] and calls[-1][2] is got
        calls.clear()
    made.layer.forward_modular(x[:3], weights[:3], ids[:3])
    assert made.layer.forward_modular(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN) and len(calls) == 1
    made.layer.apply_router_weight_on_input = True
    x, weights, ids = inputs(case.dtype, 3)
    one = weights[:, :1], ids[:, :1]
    assert_near(made.layer.forward_modular(x, *one), made.expected(x, *one, on_input=True), case)
    made.layer.apply_router_weight_on_input = False
    monkeypatch.setattr(type(made.layer), "expert_map", torch.tensor([0, -1, 2, 3, -1], dtype=torch.int32))
    got = made.layer.forward_modular(x, weights, ids)
    here = torch.where((ids == 1) | (ids == 4), -1, ids)
    assert_near(got, made.expected(x, weights, here), case)
    assert [call[:2] for call in calls] == [(3, False), (3, True)]


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_tokens_from_receivers_that_would_give_them_one_scale(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """They come in 16 bits. DeepEP v2 may send a token once for each of its experts, which are then its only one."""
    from w4gemm.integrations.vllm import experts_kernel

    calls, need = [], experts_kernel.experts_need
    monkeypatch.setattr(experts_kernel, "experts_need", lambda *args: calls.append(args[3]) or need(*args))
    made = mixture(case, use_ep=True, dp_size=2, all2all_backend="deepep_v2")
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert kernel.expects_unquantized_inputs == case.fp8
    assert_near(made.layer.forward_modular(x, weights, ids), made.expected(x, weights, ids), case)
    assert [call.top_k for call in calls] == [[TOP_K, 1]]
    kernel.moe_config.moe_parallel_config.all2all_backend = "deepep_high_throughput"  # it would pad so few features
    assert kernel.expects_unquantized_inputs == case.fp8


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"swiglu_limit": 0.5}, "silu_mul(limit=0.5)"),
        ({"activation": "GELU"}, "gelu_mul"),
        ({"activation": "GELU_TANH"}, "gelu_tanh_mul"),
    ],
)
def test_activations(experts: ModuleType, settings: dict[str, Any], activation: str) -> None:
    made = mixture(CASES[0], **settings)
    x, weights, ids = inputs(torch.bfloat16)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), CASES[0])


def test_router_weights_on_the_input(experts: ModuleType) -> None:
    made = mixture(CASES[0], apply_router_weight_on_input=True)
    x, weights, ids = inputs(torch.bfloat16)
    weights, ids = weights[:, :1], ids[:, :1]  # vLLM allows it with one expert a token only
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, on_input=True), CASES[0])


def test_one_expert_for_each_token(experts: ModuleType) -> None:
    """Rows are then as many as tokens, in another order: they must not lie in vLLM's output, which newer versions than
    0.26 offer for rows of its shape."""
    made = mixture(CASES[0])
    x, weights, ids = inputs(torch.bfloat16)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    *_, rows = kernel.workspace_shapes(len(x), 2 * WIDTH, HIDDEN, 1, EXPERTS, EXPERTS, None, None)
    assert rows != tuple(x.shape) and math.prod(rows) == x.numel()
    weights, ids = weights[:, :1], ids[:, :1].flip(0)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids), CASES[0])


@pytest.mark.parametrize("case", [CASES[3], CASES[-2]], ids=str)
def test_batched_rows(experts: ModuleType, case: Case) -> None:
    """Rows past an expert's count are NaN, and are not read."""
    made = mixture(case, all2all_backend="deepep_low_latency")
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel
    assert type(kernel.fused_experts).__name__ == "BatchedW4gemmExperts"
    assert (made.layer.quant_method.moe_quant_config.block_shape == [128, 128]) == case.fp8
    assert kernel.fused_experts.products[0].epilogue.block_scale == case.fp8
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids), case)


def test_a_plan_of_batched_rows_is_for_the_tokens_of_this_step(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.forward_context as context

    ran: list[int] = []
    launch = Product.launch

    def spied(product: Product, operands: Any, m: int) -> None:
        ran.append(m)
        launch(product, operands, m)

    monkeypatch.setattr(Product, "launch", spied)
    for case in (CASES[3], CASES[-2]):  # the last of them with fp8 tokens
        made = mixture(case, all2all_backend="deepep_low_latency")
        assert set(ran) == {rows * EXPERTS for rows in (1, 2, 3, 5)}  # launched at start-up: every plan for 1 to 8 rows
        ran.clear()
    made = mixture(CASES[3], all2all_backend="deepep_low_latency")
    x, weights, ids = inputs(torch.bfloat16)
    room = 8
    for metadata, rows in (
        (None, room),
        (context.DPMetadata(torch.tensor([3, 2])), 2),  # 10 rows of 5 experts
        (context.DPMetadata(torch.tensor([1, 0])), 1),
        (context.DPMetadata(torch.tensor([999, 1])), room),
    ):
        monkeypatch.setattr(context, "_forward_context", context.ForwardContext(metadata))
        ran.clear()
        got = made.layer.forward_modular(x, weights, ids)
        assert ran == 2 * [rows * EXPERTS]
        assert_near(got, made.expected(x, weights, ids), CASES[3])


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-2]], ids=str)
def test_rows_that_are_copied_move_an_expert(experts: ModuleType, case: Case) -> None:
    """Every tensor of an expert is a row of a parameter: EPLB copies rows between calls."""
    made = mixture(case, enable_eplb=True)
    assert made.layer.quant_method.supports_eplb
    x, weights, ids = inputs(case.dtype)
    before = made.layer.forward_modular(x, weights, ids)
    moved = torch.tensor([3, 0, 4, 1, 2])
    for rows in made.layer.get_expert_weights():
        assert rows.shape[0] == EXPERTS
        rows.copy_(selected(rows, 0, moved))
    where = moved.argsort()
    after = made.layer.forward_modular(x, weights, torch.where(ids < 0, ids, where[ids.clamp(min=0)].int()))
    assert torch.equal(after, before)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-2], GPT_OSS], ids=str)
def test_weights_that_are_loaded_anew_lie_where_the_first_did(experts: ModuleType, case: Case) -> None:
    """vLLM (reload_weights) copies what it finds to the tensors that it had before, and makes these the layer's."""
    layer, new = mixture(case).layer, mixture(case, seed=1000, packed=False)
    before = {name: (p, p.data_ptr()) for name, p in layer.named_parameters()}
    for name in before:
        delattr(layer, name)
    for name, p in new.layer.named_parameters():
        layer.register_parameter(name, p)
    layer.quant_method.process_weights_after_loading(layer)
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys() and all(p is after[name] for name, (p, _) in before.items())
    assert all(p.data_ptr() == address for p, address in before.values())
    x, weights, ids = inputs(case.dtype)
    activation = "swiglu_oai" if case is GPT_OSS else "silu_mul"
    got = layer.forward_modular(x, weights, ids)
    assert_near(got, new.expected(x, weights, ids, activation=activation), case)


class Punica:
    """vLLM's wrapper of kernels for adapters of experts, in PyTorch.

    Args:
        adapters: of each token, or -1.
        shapes: of the unpacked weights, which vLLM reads.
    """

    def __init__(self, adapters: torch.Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.adapters, self.shapes = adapters, shapes
        self.choices: list[tuple[int, int, int]] = []

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        tokens: int,
        top_k: int,
        *others: Any,
        **more: Any,
    ) -> tuple[None, ...]:
        assert [tuple(w1.shape), tuple(w2.shape)] == self.shapes and (tokens, top_k) == ids.shape
        here = ids if expert_map is None else torch.where(ids < 0, ids, expert_map[ids.clamp(min=0).long()])
        self.choices = [
            (t, j, int(here[t, j])) for t, j in (torch.nonzero(here >= 0)).tolist() if self.adapters[t] >= 0
        ]
        for t, j, e in self.choices:
            which = self.adapters[t]
            parts = [b_each[which, e] @ (a_each[which, e] @ x[t]) for a_each, b_each in zip(a, b, strict=True)]
            y.view(tokens, top_k, -1)[t, j] += torch.cat(parts)
        return (None,) * 4

    def add_lora_w2(
        self, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, weights: torch.Tensor, *others: Any, **more: Any
    ) -> None:
        for t, j, e in self.choices:
            which = self.adapters[t]
            part = b[0][which, e] @ (a[0][which, e] @ x.view(*y.shape[:2], -1)[t, j])
            y[t, j] += (weights[t, j] * part).to(y.dtype)


def context_of(adapters: torch.Tensor, gated: bool, shapes: list[tuple[int, ...]], local: int = EXPERTS) -> Any:
    """vLLM's MoELoRAContext for two adapters of rank 4, and which of them each token has."""

    def matrices(n: int, k: int) -> torch.Tensor:
        return torch.randn(2, local, n, k, dtype=torch.bfloat16) / k**0.5

    slices = 1 + gated
    return SimpleNamespace(
        w13_lora_a_stacked=tuple(matrices(4, HIDDEN) for _ in range(slices)),
        w13_lora_b_stacked=tuple(matrices(WIDTH, 4) for _ in range(slices)),
        w2_lora_a_stacked=(matrices(4, WIDTH),),
        w2_lora_b_stacked=(matrices(HIDDEN, 4),),
        punica_wrapper=Punica(adapters, shapes),
        original_hidden_states=None,
    )


@pytest.mark.parametrize(
    ("case", "settings", "activation"),
    [
        (CASES[0], {}, "silu_mul"),
        (Case("compressed-tensors", fp8=True), {}, "silu_mul"),
        (MXFP4, {"swiglu_limit": 1.5, "has_bias": True}, "silu_mul(limit=1.5)"),
        (NVFP4, {"activation": "RELU2_NO_MUL"}, "relu2"),
        (CASES[3], {"num_local_experts": 2, "ep_size": 2, "ep_rank": 1, "use_ep": True}, "silu_mul"),
    ],
    ids=str,
)
def test_adapters_of_several_tokens(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case, settings: dict[str, Any], activation: str
) -> None:
    """Two adapters and none in one step, each with its own matrices for each expert."""
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    local = settings.get("num_local_experts", EXPERTS)
    expert_map = torch.tensor([-1] * (EXPERTS - 2) + [0, 1], dtype=torch.int32) if local == 2 else None
    made = mixture(case, is_lora_enabled=True, expert_map=expert_map, **settings)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert kernel.supports_lora()
    x, weights, ids = inputs(case.dtype, 6)
    here = ids if local == EXPERTS else torch.where(ids >= EXPERTS - local, ids, -1)
    plain = made.expected(x, weights, here, activation=activation)
    assert_near(made.layer.forward_modular(x, weights, ids), plain, case)  # a layer that no adapter can have
    adapters = torch.tensor([0, -1, 1, 1, 0, -1])
    gated = activation != "relu2"
    shapes = [(local, (1 + gated) * WIDTH, HIDDEN), (local, HIDDEN, WIDTH)]
    context = context_of(adapters, gated, shapes, local)
    kernel.set_lora_context(context)
    got = made.layer.forward_modular(x, weights, ids)
    expected, first = torch.zeros(x.shape, dtype=torch.float64), EXPERTS - local
    for t, j in torch.nonzero(here >= 0).tolist():
        e, which = int(here[t, j]), int(adapters[t])
        biases = [None if bias is None else bias[e].double() for bias in made.biases]
        rows = linear_reference(x[t : t + 1].double(), made.gate_up.expert(e), biases[0])[0]
        stacks = [
            [each[which, e - first].double() for each in stack]
            for stack in (
                context.w13_lora_a_stacked,
                context.w13_lora_b_stacked,
                context.w2_lora_a_stacked,
                context.w2_lora_b_stacked,
            )
        ]
        if which >= 0:
            parts = torch.stack([b @ (a @ x[t].double()) for a, b in zip(*stacks[:2], strict=True)])
            rows = rows + parts.T.flatten()
        hidden = parse(activation).apply(rows)
        d = linear_reference(hidden[None], made.down.expert(e), biases[1])[0]
        if which >= 0:
            d = d + stacks[3][0] @ (stacks[2][0] @ hidden)
        expected[t] += weights[t, j].double() * d
    assert_near(got, expected, case._replace(fp8=True) if case.fp8 else case._replace(dtype=torch.bfloat16))
    assert torch.equal(got[adapters < 0], made.layer.forward_modular(x, weights, ids)[adapters < 0])
    assert (got.double() - plain)[adapters >= 0].norm() > 0.1 * plain.norm()


def test_adapters_that_are_left_to_vllm(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    monkeypatch.setenv("W4GEMM_VLLM", "on")
    for case, settings, reason in (
        (CASES[0], {"apply_router_weight_on_input": True}, "applied on the input"),
        (CASES[0], {"all2all_backend": "deepep_low_latency"}, "in rows of experts"),
        (CASES[-2], {"dp_size": 2, "use_ep": True}, "tokens come in fp8"),
    ):
        on_input = settings.pop("apply_router_weight_on_input", False)
        layer = RoutedExperts(*layer_arguments(case, {**settings, "is_lora_enabled": True}))
        layer.apply_router_weight_on_input = on_input
        method = type(case.config()).__mro__[2].get_quant_method(case.config(), layer, "")
        assert reason in experts.why_not(method, layer)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert "may depend on the batch" in experts.why_not(method, layer)


def test_names_that_vllm_and_pickle_look_for(experts: ModuleType) -> None:
    """RoutedExperts loads by the name of a method's class; configs travel to other processes and are copied."""
    config = CASES[0].config()
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config) and vars(again) == vars(config)
    assert type(config).__name__ == "AutoGPTQConfig"
    method = mixture(CASES[0]).layer.quant_method
    assert type(method).__name__ == "AutoGPTQMoEMethod" and not method.is_monolithic
    experts.install()
    assert type(CASES[0].config()) is type(config)


REFUSED = [
    (Case("gptq"), {"moe_backend": "marlin"}, "--moe-backend marlin was asked for"),
    (Case("gptq"), {"has_bias": True}, "they have biases"),
    (Case("gptq"), {"is_lora_enabled": True}, "LoRA is on"),
    (
        GPT_OSS,
        {"has_bias": True, "activation": "SWIGLUOAI", "width": 80},
        "80 features of this GPU are not whole groups",
    ),
    (Case("gptq"), {"activation": "RELU2"}, "activation is relu2"),
    (MXFP4, {"activation": "SWIGLUSTEP"}, "activation is swiglustep"),
    (MXFP4, {"activation": "SWIGLUOAI_UNINTERLEAVE"}, "activation is swigluoai_uninterleave"),
    (MXFP4, {"activation": "SWIGLUOAI"}, "the order of their gates and ups is not known"),
    (GPT_OSS, {"activation": "SWIGLUOAI", "swiglu_beta": 0.0}, "activation is swigluoai"),
    (MXFP4, {"swiglu_limit": -1.0}, "limit: wanted a number above 0"),
    (MXFP4, {"all2all_backend": "moonep"}, "tokens come in the form of moonep"),
    (Case("gptq"), {"activation": "GELU", "swiglu_limit": 7.0}, "activation is gelu with limit 7"),
    (Case("gptq"), {"all2all_backend": "flashinfer_nvlink_one_sided"}, "tokens come in the form of flashinfer"),
    (Case("gptq"), {"all2all_backend": "deepep_high_throughput", "hidden_dim": 320}, "padded to (512, 128)"),
    (Case("gptq", 24), {}, "multiple of 16"),
]


@pytest.mark.parametrize(("case", "settings", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_refused(
    experts: ModuleType, case: Case, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    takeover_lines(caplog)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layers = [RoutedExperts(*layer_arguments(case, dict(settings))) for _ in range(2)]
    assert type(layers[0].quant_method).__mro__[1].__name__ == "FusedMoEMethodBase"
    (line,) = takeover_lines(caplog)
    assert reason in line and f"experts of {type(layers[0].quant_method).__name__} to vLLM's own kernels" in line


def test_experts_whose_gpus_come_and_go(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    engine = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = RoutedExperts(*layer_arguments(CASES[0], {}))
    assert type(layer.quant_method).__mro__[1].__name__ == "FusedMoEMethodBase"
    assert "--enable-elastic-ep" in takeover_lines(caplog)[0]


def test_models_that_ask_for_the_class_of_experts(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ask before weights are loaded, and let experts of certain classes leave the last step to them."""
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    from w4gemm.checkpoints.packed_numbers import PackedNumbers

    make = AutoGPTQMoEMethod.__init__
    monkeypatch.setattr(
        AutoGPTQMoEMethod, "__init__", lambda self, *a: (make(self, *a), setattr(self, "experts_cls", "vLLM's"))[0]
    )
    layer = mixture(CASES[0], packed=False).layer
    assert layer.quant_method.experts_cls is experts.W4gemmExperts
    monkeypatch.setattr(PackedNumbers, "check_range", lambda numbers: float("not a number"))
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.runs_on_vllm and layer.quant_method.experts_cls == "vLLM's"


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("gptq", {"desc_act": True}, "in act-order"),
        ("gptq", {"is_sym": False}, "asymmetric GPTQ"),
        ("gptq", {"weight_bits": 8}, "they have 8 bits"),
        ("awq", {"zero_point": False}, "without zero points"),
    ],
)
def test_weights_that_are_refused(experts: ModuleType, name: str, changed: dict[str, Any], reason: str) -> None:
    case = Case(name)
    _, _, moe, config, _ = layer_arguments(case, {})
    vars(config).update(changed)
    layer = SimpleNamespace(moe_config=moe, params_dtype=case.dtype, hidden_size=HIDDEN)
    method = type(config).__mro__[2].get_quant_method(config, layer, "")
    assert reason in experts.why_not(method, layer)


def test_zero_points_that_readers_of_gptq_read_differently(
    experts: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """15 in version 1, which vLLM has added 1 to, and any in version 2, to which it adds 1 too."""
    for version, zero, packed in (("gptq", 3, True), ("gptq", 0, False), ("gptq_v2", 3, False)):
        layer = mixture(Case("moe_wna16", 32, asymmetric=True), packed=False).layer
        layer.quant_method.quant_config.linear_quant_method = "gptq"
        layer.quant_method.quant_config.full_config = {"checkpoint_format": version}
        for product in ("w13", "w2"):
            getattr(layer, f"{product}_qzeros").data.fill_(0x33)[1, 2] = 0x30 | zero
        if version == "gptq_v2":
            reason = experts.why_not(layer.quant_method, layer)
            assert "zero points are of version 2" in reason
            continue
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            layer.quant_method.process_weights_after_loading(layer)
        assert packed != hasattr(layer, "runs_on_vllm")
    assert "zero points are stored as 15" in takeover_lines(caplog)[0]


def test_all_experts_that_are_packed_were_loaded(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ups of an expert were loaded in the place of another's; no expert was; a parameter is not known."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    stored = {name: p.data for name, p in mixture(CASES[0], packed=False).layer.named_parameters()}

    def create_weights(self: Any, layer: Any) -> None:
        for name, t in stored.items():
            parameter = torch.nn.Parameter(torch.empty_like(t), requires_grad=False)
            parameter.is_transposed = CASES[0].transposed
            layer.register_parameter(name, parameter)

    monkeypatch.setattr(AutoGPTQMoEMethod, "create_weights", create_weights, raising=False)

    def loaded(lacking: str = "", rest: bool = True) -> Any:
        layer = RoutedExperts(*layer_arguments(CASES[0], {}))
        layer.quant_method.create_weights(layer)
        for name, t in stored.items():
            held = getattr(layer, name).data
            made = held.clone()
            if rest:
                held.copy_(t)
            if name == lacking:
                held[2, :, WIDTH:] = made[2, :, WIDTH:]
        return layer

    for name in ("w13_qweight", "w13_scales"):
        layer = loaded(name)
        with pytest.raises(RuntimeError, match=f"^experts: {name}: 10.00% of its shape"):
            layer.quant_method.process_weights_after_loading(layer)
    for layer in (loaded(rest=False), loaded()):
        if layer.w13_scales.data[0, 0, 0] == stored["w13_scales"][0, 0, 0]:
            layer.register_parameter("w2_offset", torch.nn.Parameter(torch.zeros(2)))
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.runs_on_vllm
    layer = loaded()
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "runs_on_vllm")


def takeover_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about layers that were left, and none of earlier ones afterwards."""
    messages = [r.message for r in caplog.records if "leaves" in r.message]
    caplog.clear()
    return messages


def test_experts_that_cannot_be_packed_are_given_back(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from w4gemm.checkpoints.packed_numbers import PackedNumbers

    def refused(numbers: PackedNumbers) -> None:
        raise ValueError("scales: the weights of 1 groups would not be finite")

    monkeypatch.setattr(PackedNumbers, "check_range", refused)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = mixture(CASES[0]).layer
    assert layer.runs_on_vllm and type(layer.quant_method).__mro__[1].__name__ == "FusedMoEMethodBase"
    assert "would not be finite" in takeover_lines(caplog)[0]
    with pytest.raises(ValueError, match="would not be finite"):
        mixture(CASES[0], enable_eplb=True)


def test_a_parameter_of_the_router_in_the_layer_of_experts(experts: ModuleType) -> None:
    """vLLM hands in DeepSeek's, Kimi's, GLM's and MiniMax's."""
    layer = mixture(CASES[0], packed=False).layer
    layer.e_score_correction_bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"


@pytest.mark.parametrize("loaded", [False, True])
def test_biases_that_gptqs_method_makes_for_every_model(experts: ModuleType, loaded: bool) -> None:
    """vLLM 0.33 loads them from checkpoints that have some. Where none are loaded, memory may hold anything: after
    weights were loaded anew they are not zero."""
    made = mixture(CASES[0], packed=False)
    for product, n in (("w13", 2 * WIDTH), ("w2", HIDDEN)):
        biases = torch.full((EXPERTS, n), math.nan, dtype=CASES[0].dtype)
        made.layer.register_parameter(f"{product}_bias", torch.nn.Parameter(biases, requires_grad=False))
    made.layer._loaded_expert_biases = {"w13_bias"} if loaded else set()
    made.layer.quant_method.process_weights_after_loading(made.layer)
    if loaded:  # rows of our first product are in pairs, and biases are not
        assert made.layer.runs_on_vllm and type(made.layer.quant_method).__mro__[1].__name__ == "FusedMoEMethodBase"
        return
    assert not [name for name, _ in made.layer.named_parameters() if name.endswith("bias")]
    x, weights, ids = inputs(CASES[0].dtype)
    assert_near(made.layer.forward_modular(x, weights, ids), made.expected(x, weights, ids), CASES[0])


def test_everything_is_ready_once_the_last_layer_is_loaded(
    experts: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    from w4gemm.choice import plan_cache

    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        made = mixture(Case("compressed-tensors", 32, torch.float16))
    assert any("1 layers of 4-bit experts" in r.message for r in caplog.records)
    known = set(plan_cache._plans)
    for tokens in (1, 3, 8):
        made.layer.forward_modular(*inputs(torch.float16, tokens))
    assert set(plan_cache._plans) == known
