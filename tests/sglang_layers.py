"""Layers of SGLang's with random weights, for tests of its plugin, and fixtures under which that takes them.

They are of a stub of SGLang (sglang_stub/); with ``SGLANG_SOURCES`` of its sources (sglang_sources.py).
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_stub
from engine_tensors import AWQ_ORDER, words

SOURCES = os.environ.get("SGLANG_SOURCES", "")
if SOURCES:
    import sglang_sources

    sglang_sources.install(SOURCES.split(os.pathsep))
else:
    sglang_stub.SGLANG.install()

from w4gemm.core.activation import parse  # noqa: E402
from w4gemm.integrations import sglang as plugin  # noqa: E402
from w4gemm.integrations.engines import engine, warmup  # noqa: E402
from w4gemm.integrations.sglang import dense, experts, takeover  # noqa: E402

QUANTIZATION = "sglang.srt.layers.quantization"
SCHEMES = {
    "gptq": f"{QUANTIZATION}.gptq.schemes.GPTQMarlinLinearScheme",
    "gptq other": f"{QUANTIZATION}.gptq.schemes.GPTQLinearScheme",
    "awq": f"{QUANTIZATION}.awq.schemes.AWQMarlinLinearScheme",
    "awq other": f"{QUANTIZATION}.awq.schemes.AWQLinearScheme",
    "ct": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16",
    "gptq experts": f"{QUANTIZATION}.gptq.schemes.GPTQMarlinMoEScheme",
    "awq experts": f"{QUANTIZATION}.awq.schemes.AWQMoEScheme",
    "ct experts": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16MoE",
    "ct fp8 experts": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4AFP8MoE",
    "w4afp8 experts": f"{QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
}
N, K, GROUP = 192, 256, 64
EXPERTS, HIDDEN, WIDTH = 4, 128, 192


def resolved(name: str) -> Any:
    return pkgutil.resolve_name(name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    resolved(f"{QUANTIZATION}.w4afp8")
    plugin.register()
    resolved("sglang.srt.plugins.hook_registry.HookRegistry").apply_hooks()


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin takes the CPU for a Hopper GPU; SGLang checks nothing of a GPU that is not there."""
    waiting, model = warmup.Warmup(takeover.SGLANG), torch.nn.Module()
    waiting.expect(model)
    monkeypatch.delenv("W4GEMM_SGLANG", raising=False)
    for part in (takeover, dense, experts):  # waits for a model that no test loads
        monkeypatch.setattr(part, "WARMUP", waiting)
    for part in (takeover, dense):
        monkeypatch.setattr(part, "capability", lambda device=None: (9, 0))
    named = SimpleNamespace(value="none", is_none=lambda: True, is_deepep_v2=lambda: False)
    auto = SimpleNamespace(value="auto", is_auto=lambda: True, is_hpc_ops=lambda: False)
    everywhere(monkeypatch, "get_moe_a2a_backend", lambda: named)
    started_with(monkeypatch)
    if SOURCES:
        everywhere(monkeypatch, "get_moe_runner_backend", lambda: auto)
        for name in ("verify_marlin_supported", "verify_marlin_supports_shape"):
            everywhere(monkeypatch, name, lambda **shapes: None)
    yield
    del model


def everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace a function in every module that has imported it."""
    for module in list(sys.modules.values()):
        at = getattr(module, "__name__", "")
        if (at.startswith("sglang.") or at == experts.__name__) and name in vars(module):
            monkeypatch.setattr(module, name, value)


def started_with(
    monkeypatch: pytest.MonkeyPatch,
    enable_deterministic_inference: bool = False,
    cpu_offload_gb: int = 0,
    offload_group_size: int = -1,
    enable_lora: bool = False,
    speculative_algorithm: str | None = None,
    dwdp_size: int = 1,
    moe: Any = None,
) -> None:
    """Have SGLang's options be these."""
    context = resolved("sglang.srt.runtime_context")
    bag = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=enable_deterministic_inference),
        offload=SimpleNamespace(cpu_offload_gb=cpu_offload_gb, offload_group_size=offload_group_size),
        moe=SimpleNamespace(**({"enable_paged_experts": False, "kt_weight_path": None} | (moe or {}))),
    )
    monkeypatch.setattr(context, "get_exec", lambda: bag)
    lora = SimpleNamespace(enable_lora=enable_lora, lora_paths=None)
    monkeypatch.setattr(context, "get_lora", lambda: lora)
    draft = SimpleNamespace(speculative_algorithm=speculative_algorithm)
    monkeypatch.setattr(context, "get_spec", lambda: draft)
    parallel = SimpleNamespace(dwdp_size=dwdp_size)
    monkeypatch.setattr(context, "get_parallel", lambda: parallel)


def config(**facts: Any) -> SimpleNamespace:
    """A quantization config of SGLang's, as far as schemes read it."""
    defaults = {
        "weight_bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "pack_factor": Fraction(32, facts.get("weight_bits", 4)),
        "quant_type": None,
        "quant_format": "pack-quantized",
        "zero_point": True,
        "checkpoint_format": "",
    }
    return SimpleNamespace(**{**defaults, **facts})


class Drawn:
    """Random numbers of a weight (n, k), and their meaning."""

    def __init__(
        self, seed: int, n: int, k: int, zero: bool, group: int = GROUP, act_order: bool = False, bits: int = 4
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        group = k if group == -1 else group
        self.bits = bits
        self.codes = torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8)
        self.scales = (torch.rand(n, k // group, generator=g) / 50 + 0.001).bfloat16()
        self.zeros = torch.randint(1, 2**bits, (n, k // group), generator=g, dtype=torch.uint8)
        self.zeros = self.zeros if zero else torch.full_like(self.zeros, 2**bits // 2)
        order = torch.randperm(k, generator=g) if act_order else torch.arange(k)
        self.g_idx = (torch.arange(k) // group)[order]
        s, z = (t.double()[:, self.g_idx] for t in (self.scales, self.zeros))
        self.dense = (self.codes.double() - z) * s

    def gptq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.codes, bits=self.bits).T,
            "scales": self.scales.T,
            "qzeros": words(self.zeros.T - 1, bits=self.bits),
            "g_idx": self.g_idx.int(),
        }

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.codes.T, AWQ_ORDER),
            "scales": self.scales.T,
            "qzeros": words(self.zeros.T, AWQ_ORDER),
        }

    def compressed(self) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": words(self.codes, bits=self.bits),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor(self.codes.shape),
            "weight_zero_point": words(self.zeros.T, bits=self.bits).T,
            "weight_g_idx": self.g_idx.int(),
        }

    def pairs(self) -> dict[str, torch.Tensor]:
        q = self.codes.to(torch.int8) - 8
        return {"weight": (q[:, ::2] & 15) | (q[:, 1::2] << 4), "weight_scale_inv": self.scales}


def fill(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load what there is a parameter for, as SGLang's loader would."""
    for name, parameter in layer.named_parameters():
        if name in tensors:
            assert parameter.shape == tensors[name].shape, name
            parameter.data.copy_(tensors[name])


def packed(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A layer's parameters without the empty ones, which new weights are loaded through."""
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.numel()}


def created(scheme: Any, full_k: int = K, kind: str = "") -> torch.nn.Module:
    """A layer with a scheme's parameters. kind: "ParallelLMHead" or "VocabParallelEmbedding"."""
    layer = torch.nn.Module()
    if kind:
        cls = resolved(f"sglang.srt.layers.vocab_parallel_embedding.{kind}")
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
    layer.scheme, layer.tp_group = scheme, None
    scheme.create_weights(
        layer=layer,
        input_size_per_partition=K,
        output_partition_sizes=[N // 3, N - N // 3],
        input_size=full_k,
        output_size=N,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *args: None,
    )
    return layer


def refused(scheme: Any, layer: Any, caplog: pytest.LogCaptureFixture, part: Any = dense) -> str:
    """Convert a layer, see that SGLang's own method was asked, and return what was logged."""
    asked: list[Any] = []
    (which,) = (s for s in (dense.SCHEMES if part is dense else experts.METHODS) if resolved(s.target) is type(scheme))
    before = dict(layer._parameters)
    engine.why_no_kernel.cache_clear()
    engine._refuse.cache_clear()
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        part.convert(which, lambda *args: asked.append(args), scheme, layer)
    assert asked == [(scheme, layer)] and layer._parameters == before
    return caplog.text


def quantized(**facts: Any) -> SimpleNamespace:
    defaults = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    return SimpleNamespace(**{**defaults, "dynamic": False, "actorder": None, **facts})


def moe_config(**facts: Any) -> SimpleNamespace:
    defaults = {
        "activation": "silu",
        "is_gated": True,
        "params_dtype": torch.bfloat16,
        "routed_scaling_factor": None,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "gate_up_interleaved": True,
        "swiglu_limit": None,
        "silu_mul_keep_fp32": False,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "num_experts": EXPERTS,
        "top_k": 2,
    }
    return SimpleNamespace(**{**defaults, **facts})


def experts_layer(method: Any, width: int = WIDTH, with_bias: bool = False, **facts: Any) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.scheme, layer.moe_tp_size, layer.with_bias, layer.layer_id = method, 1, with_bias, 0
    layer.num_experts = layer.num_local_experts = EXPERTS
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, width
    layer.moe_runner_config = moe_config(**facts)
    biases = {"with_bias": True} if with_bias else {}
    method.create_weights(layer, EXPERTS, HIDDEN, width, torch.bfloat16, weight_loader=None, **biases)
    return layer


def compressed_experts(**facts: Any) -> Any:
    return resolved(SCHEMES["ct experts"])(config(), quantized(**facts))


def fp8_experts() -> Any:
    weight = quantized()
    return resolved(SCHEMES["ct fp8 experts"])(
        config(target_scheme_map={"Linear": {"weights": weight}}), weight, quantized(num_bits=8, type="float")
    )


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("weight_packed", "weight_scale", "weight_zero_point")
    return {name: tensors[name].T for name in names}


MIXTURES = {
    "gptq": (lambda: resolved(SCHEMES["gptq experts"])(config()), False, Drawn.gptq, None),
    "awq": (lambda: resolved(SCHEMES["awq experts"])(config()), True, Drawn.awq, None),
    "ct": (compressed_experts, False, lambda drawn: transposed(drawn.compressed()), None),
    "ct asymmetric": (
        lambda: compressed_experts(symmetric=False),
        True,
        lambda drawn: transposed(drawn.compressed()),
        None,
    ),
    "ct fp8": (fp8_experts, False, Drawn.compressed, "fp8"),
    "w4afp8": (lambda: resolved(SCHEMES["w4afp8 experts"])(config()), False, Drawn.pairs, "fp8"),
}


def loaded(name: str, **facts: Any) -> tuple[Any, torch.nn.Module, list[tuple[Drawn, Drawn]]]:
    """A method that has loaded random experts, its layer and their numbers (w13, w2)."""
    make, zero, stored, _ = MIXTURES[name]
    method = make()
    layer = experts_layer(method, **facts)
    method.create_moe_runner(layer, layer.moe_runner_config)
    drawn = [(Drawn(20 + e, 2 * WIDTH, HIDDEN, zero), Drawn(40 + e, HIDDEN, WIDTH, zero)) for e in range(EXPERTS)]
    fill_experts(layer, drawn, stored)
    return method, layer, drawn


def fill_experts(layer: torch.nn.Module, drawn: Any, stored: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    """Load what there is a parameter for of each expert's numbers (w13, w2)."""
    for e, pair in enumerate(drawn):
        for product, numbers in zip(("w13", "w2"), pair, strict=True):
            for key, tensor in stored(numbers).items():
                parameter = layer._parameters.get(f"{product}_{key}")
                if parameter is not None and parameter[e].numel() == tensor.numel():
                    parameter.data[e].copy_(tensor.view(parameter[e].shape))


def exact(
    x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor, drawn: Any, activation: str = "silu_mul"
) -> torch.Tensor:
    """What experts with these numbers (w13, w2) compute, in float64; all gates lie before all ups."""
    d, formula = torch.zeros(x.shape, dtype=torch.float64), parse(activation)
    for t, j in torch.nonzero(ids >= 0).tolist():
        w13, w2 = drawn[ids[t, j]]
        rows = w13.dense @ x[t].double()
        rows = rows.view(2, -1).T.flatten() if formula.formula.gated else rows
        d[t] += router[t, j] * (w2.dense @ formula.apply(rows))
    return d


def dispatched(x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> Any:
    output = resolved("sglang.srt.layers.moe.token_dispatcher.StandardDispatchOutput")
    chosen = resolved("sglang.srt.layers.moe.topk.StandardTopKOutput")
    return output(x, None, chosen(router, ids, router))
