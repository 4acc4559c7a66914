"""Mixtures of experts of GPTQ, AWQ, compressed-tensors (W4A16, W4AFP8) and W4AFP8 models.

A method of SGLang's makes the parameters of a layer's experts, loads them, and makes a runner. :func:`choose` asks for
a runner of ours beside it, :func:`convert` packs the experts, and :func:`apply` runs them: SGLang dispatches tokens,
:class:`W4gemmRunner` routes, multiplies and adds up in launches that are the same whatever the router chose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, resolve_moe_runner_backend

from w4gemm.api.experts import W4Experts
from w4gemm.integrations.engines import weights
from w4gemm.integrations.engines.supports import product, why_no_kernel
from w4gemm.integrations.sglang.takeover import SGLANG, Hook, capability, exchange, hook

TAKES = "mixtures of 4-bit experts (GPTQ, AWQ, compressed-tensors W4A16 and W4AFP8, W4AFP8)"

RUNNER = "w4gemm"
"""Our name among SGLang's runners."""
_QUANTIZATION = "sglang.srt.layers.quantization"
_RUNNER = "w4gemm_runner"
"""Attribute of a layer whose experts shall be taken over."""
_EXPERTS = "w4gemm_experts"
"""Attribute of a layer whose experts were taken over."""


@dataclass
class W4gemmQuantInfo(MoeQuantInfo):  # type: ignore[misc, unused-ignore]
    """The value that SGLang hands from a layer to its runner: the experts."""

    experts: W4Experts


class W4gemmRunner(DispatchMoeRunnerCore):  # type: ignore[misc, unused-ignore]
    """Runner of dispatched tokens: x (tokens, features), and for each the experts on this GPU, -1 for others."""

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(RUNNER)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: W4gemmQuantInfo, runner_config: Any, hooks: Any = None
    ) -> Any:
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        if not len(x):
            return StandardCombineInput(hidden_states=x)
        factor = runner_config.routed_scaling_factor
        expert_weights = chosen.topk_weights if factor in (None, 1.0) else chosen.topk_weights * factor
        return StandardCombineInput(hidden_states=quant_info.experts(x, chosen.topk_ids, expert_weights))


class Facts(NamedTuple):
    """Facts that a method says of its experts."""

    bits: int
    group_size: int
    activations: str | None = None
    refused: str = ""
    """Why they cannot be taken, or the empty string."""


class Method(NamedTuple):
    """A class of SGLang's for layers of experts."""

    kind: str
    """Its layers, in sentences."""
    target: str
    """Dotted name of the class."""
    apply: str
    """Name of the method that multiplies."""
    facts: Callable[[Any], Facts]
    numbers: Callable[[Facts, Any, str, int], weights.Numbers]
    """Read the numbers of an expert from a layer: of the product "w13" (gates, then ups) or "w2"."""


def install() -> None:
    """Register our runner and put hooks around the methods.

    Raises:
        ImportError, AttributeError: if this SGLang has other methods.
    """
    hooks = []
    for method in METHODS:
        asked, converted = functools.partial(choose, method), functools.partial(convert, method)
        hooks.append(Hook(f"{method.target}.create_moe_runner", ("self", "layer", "moe_runner_config"), asked))
        hooks.append(Hook(f"{method.target}.process_weights_after_loading", ("self", "layer"), converted))
        hooks.append(Hook(f"{method.target}.{method.apply}", ("self", "layer", "dispatch_output"), apply))
    hook(hooks)
    register_moe_runner_core(RUNNER, W4gemmRunner)


def choose(method: Method, own: Callable[..., Any], self: Any, layer: Any, moe_runner_config: Any) -> Any:
    """Let SGLang make its runner, which its other parts ask for, and ours if this layer can be taken over."""
    made = own(self, layer, moe_runner_config)
    try:
        reason = _why_not(method, self, layer, moe_runner_config)
    except AttributeError as e:
        reason = f"this version of SGLang is not known: {e}"
    if reason:
        SGLANG.refuse(method.kind, reason)
    else:
        setattr(layer, _RUNNER, MoeRunner(resolve_moe_runner_backend(RUNNER), moe_runner_config))
    return made


def _why_not(method: Method, self: Any, layer: Any, config: Any) -> str:
    facts = method.facts(self)
    if reason := SGLANG.why_not_here(capability(), facts.activations == "fp8"):
        return reason
    if facts.bits != 4:
        return f"they have {facts.bits} bits"
    if facts.refused:
        return facts.refused
    if not get_moe_a2a_backend().is_none():
        return f"tokens come in the form of {get_moe_a2a_backend().value}"
    if config.activation != "silu" or not config.is_gated:
        return f"their activation is {config.activation}{'' if config.is_gated else ' without gates'}"
    if any(limit is not None for limit in (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)):
        return "their activation has an alpha or a limit"
    if config.apply_router_weight_on_input or config.no_combine:
        return "the router's weights are applied on the input, or the sum is left to others"
    if layer.with_bias:
        return "they have biases"
    return ""


def convert(method: Method, own: Callable[..., None], self: Any, layer: Any) -> None:
    """Pack what a layer has loaded; or let SGLang's own method do its work, and log why."""
    if hasattr(layer, _EXPERTS):  # called again
        return
    if not hasattr(layer, _RUNNER):
        own(self, layer)
        return
    try:
        reason = _pack(method, self, layer)
    except (AttributeError, TypeError, ValueError) as e:
        reason = str(e)
    if reason:
        SGLANG.refuse(method.kind, reason)
        delattr(layer, _RUNNER)
        own(self, layer)


def _pack(method: Method, self: Any, layer: Any) -> str:
    """Return why a layer's experts are not taken over, or the empty string: then they are."""
    facts = method.facts(self)
    if getattr(self, "load_up_proj_weight_first", False):
        return "their ups lie before their gates"
    count, dtype = layer.num_local_experts, layer.moe_runner_config.params_dtype
    weights_of = []
    for name in ("w13", "w2"):
        read = functools.partial(method.numbers, facts, layer, name)
        first = read(0)
        fp8 = facts.activations == "fp8"
        if reason := why_no_kernel(product(first.device, first.format, first.n, first.k, dtype, fp8, count)):
            return reason
        weights_of.append(read)
    packed = [
        weights.packed_experts(count, read, gated=gated, activations=facts.activations)
        for read, gated in zip(weights_of, (True, False), strict=True)
    ]
    names = [name for name in layer._parameters if name.startswith(("w13_", "w2_"))]
    gate_up = exchange(layer, names, "w13_w4gemm", packed[0])
    down = exchange(layer, (), "w2_w4gemm", packed[1])
    # beside the module, so that its buffers are not found a second time
    object.__setattr__(layer, _EXPERTS, W4gemmQuantInfo(W4Experts(gate_up, down, dtype=dtype)))
    return ""


def apply(own: Callable[..., Any], self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Return the combined output of a layer that was taken over; else what SGLang's own method does."""
    info = getattr(layer, _EXPERTS, None)
    return own(self, layer, dispatch_output) if info is None else getattr(layer, _RUNNER).run(dispatch_output, info)


def _gptq(self: Any) -> Facts:
    config = self.quant_config
    act_order = config.desc_act and config.group_size != -1
    refused = "they are in act-order (desc_act), each expert in its own" if act_order else ""
    return Facts(config.weight_bits, config.group_size, refused=refused)


def _gptq_numbers(facts: Facts, layer: Any, product: str, expert: int) -> weights.Numbers:
    qweight, scales = (getattr(layer, f"{product}_{name}").data[expert] for name in ("qweight", "scales"))
    return weights.gptq(qweight, scales, None, facts.group_size)


def _awq(self: Any) -> Facts:
    return Facts(self.quant_config.weight_bits, self.quant_config.group_size)


def _awq_numbers(facts: Facts, layer: Any, product: str, expert: int) -> weights.Numbers:
    names = "qweight", "scales", "qzeros"
    qweight, scales, qzeros = (getattr(layer, f"{product}_{name}").data[expert] for name in names)
    return weights.awq(qweight, scales, qzeros, facts.group_size)


def _compressed_tensors(self: Any) -> Facts:
    act_order = self.actorder is not None and self.actorder not in ("static", "weight")
    refused = f"they are in act-order (actorder {self.actorder}), each expert in its own" if act_order else ""
    group_size = -1 if self.strategy == "channel" else self.group_size
    return Facts(self.num_bits, group_size, refused=refused)


def _compressed_tensors_numbers(facts: Facts, layer: Any, product: str, expert: int) -> weights.Numbers:
    """SGLang loads compressed-tensors' experts transposed, so that they lie as GPTQ's."""
    words, scales = (getattr(layer, f"{product}_{name}").data[expert] for name in ("weight_packed", "weight_scale"))
    zeros = getattr(layer, f"{product}_weight_zero_point", None)
    return weights.gptq(words, scales, None if zeros is None else zeros.data[expert], facts.group_size, added=0)


def _compressed_tensors_fp8(self: Any) -> Facts:
    kind = self.input_quant.type
    refused = "" if kind == "float" else f"their activations are 8-bit {kind}"
    return Facts(self.num_bits, self.group_size, "fp8", refused)


def _rowwise_numbers(codes: str, scales: str, facts: Facts, layer: Any, product: str, expert: int) -> weights.Numbers:
    words, s = (getattr(layer, f"{product}_{name}").data[expert] for name in (codes, scales))
    return weights.rowwise(words, s, None, facts.group_size)


def _w4afp8(self: Any) -> Facts:
    """Activations get a scale for each token, where SGLang's own kernel takes one from the checkpoint for all."""
    return Facts(4, self.quant_config.group_size, "fp8")


METHODS = (
    Method(
        "GPTQ's experts",
        f"{_QUANTIZATION}.gptq.schemes.GPTQMarlinMoEScheme",
        "apply_weights",
        _gptq,
        _gptq_numbers,
    ),
    Method(
        "AWQ's experts",
        f"{_QUANTIZATION}.awq.schemes.AWQMoEScheme",
        "apply_weights",
        _awq,
        _awq_numbers,
    ),
    Method(
        "compressed-tensors' experts",
        f"{_QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16MoE",
        "apply_weights",
        _compressed_tensors,
        _compressed_tensors_numbers,
    ),
    Method(
        "compressed-tensors' experts with fp8 activations",
        f"{_QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4AFP8MoE",
        "apply_weights",
        _compressed_tensors_fp8,
        functools.partial(_rowwise_numbers, "weight_packed", "weight_scale"),
    ),
    Method(
        "W4AFP8's experts",
        f"{_QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
        "apply",
        _w4afp8,
        functools.partial(_rowwise_numbers, "weight", "weight_scale_inv"),
    ),
)
