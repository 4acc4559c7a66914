"""Layers of experts as a stub of vLLM makes and loads them, and what they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from engine_tensors import AWQ_ORDER, words
from reference import linear_reference
from w4gemm import QuantizedWeight, fold_scales
from w4gemm.core.formats import WeightFormat
from w4gemm.tuning.random_weight import random_components

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 128, 128
FP8_ERROR = 0.06
"""Relative error of two products that round their activations to e4m3."""


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
        activations = SimpleNamespace(num_bits=8, strategy="token") if self.fp8 else None
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

GPT_OSS = Case("gpt_oss_mxfp4", 32, element="mxfp4")
MXFP4, NVFP4 = Case("mxfp4", 32, element="mxfp4"), Case("modelopt_fp4", 16, element="nvfp4")


def stored(case: Case, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> dict[str, Any]:
    """The parameters of a product of all experts, from its numbers (experts, n, columns)."""
    in_bytes, along_n = case.name == "moe_wna16" or bool(case.element), case.name == "awq"
    order = AWQ_ORDER if along_n else tuple(range(8))

    def packed(numbers: torch.Tensor, over_rows: bool) -> torch.Tensor:
        stream = words(numbers.mT if over_rows else numbers, order)
        stream = stream.view(torch.uint8) if in_bytes else stream
        return stream.mT if over_rows else stream

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


def takeover_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about layers that were left, and none of earlier ones afterwards."""
    messages = [r.message for r in caplog.records if "leaves" in r.message]
    caplog.clear()
    return messages
