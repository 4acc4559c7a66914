"""Mixtures of experts of GPTQ, AWQ, compressed-tensors (W4A16, W4AFP8, NVFP4), W4AFP8, ModelOpt (NVFP4) and gpt-oss
(MXFP4) models.

A method of SGLang's makes the parameters of a layer's experts, loads them, and makes a runner. :func:`choose` asks for
a runner of ours beside it, :func:`convert` packs the experts, and :func:`apply` runs them: SGLang dispatches tokens,
:class:`W4gemmRunner` routes, multiplies and adds up in launches that are the same whatever the router chose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, resolve_moe_runner_backend

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.choice import BOUNDS
from w4gemm.integrations.engines.adapters import beside_adapters
from w4gemm.integrations.engines.formats import PRODUCTS, ExpertsSettings
from w4gemm.integrations.engines.loading import NOTHING_LOADED, check_known, check_loaded, mark
from w4gemm.integrations.engines.warmup import ExpertsCall, Need, experts_need, token_counts
from w4gemm.integrations.sglang.experts_formats import METHODS, Method, fused_activation, in_pairs
from w4gemm.integrations.sglang.experts_lora import why_not as why_no_adapters
from w4gemm.integrations.sglang.experts_lora import with_adapters
from w4gemm.integrations.sglang.takeover import (
    QUANTIZATION,
    SGLANG,
    WARMUP,
    Hook,
    adapters,
    deterministic,
    dummy,
    exchange,
    experts_elsewhere,
    hook,
    hook_loading,
    packed_before,
    why_not_here,
)
from w4gemm.integrations.sglang.updates import QuantizedUpdate, end_updates, open_updates
from w4gemm.weights.weight import QuantizedWeight

RUNNER = "w4gemm"
"""Our name among SGLang's runners."""
_RUNNER = "w4gemm_runner"
"""Attribute of a layer whose experts shall be taken over."""
_EXPERTS = "w4gemm_experts"
"""Attribute of a layer whose experts were taken over."""
_ORDER = "their ups do not lie behind their gates"


@dataclass
class W4gemmQuantInfo(MoeQuantInfo):  # type: ignore[misc, unused-ignore]
    """The value that SGLang hands from a layer to its runner: the experts."""

    experts: W4Experts
    first: W4GroupedLinear | None = None
    """The first product without activation, where adapters may be loaded."""
    factor: float = 1.0
    """What the router's weights are multiplied by."""
    first_expert: int = 0
    """Number of the first one, among those of all ranks of expert parallelism."""

    @property
    def w13_weight(self) -> torch.Tensor:
        """Numbers on the experts' device, where SGLang puts its adapters' buffers for CUDA graphs."""
        return self.experts.gate_up.weight.tensors[0]


class W4gemmRunner(DispatchMoeRunnerCore):  # type: ignore[misc, unused-ignore]
    """Runner of dispatched tokens: x (tokens, features), and for each the experts on this GPU, -1 for others."""

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(RUNNER)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: W4gemmQuantInfo, runner_config: Any, hooks: Any = None
    ) -> Any:
        x = dispatch_output.hidden_states
        if not len(x):
            return StandardCombineInput(hidden_states=x)
        ids, expert_weights = _choices(dispatch_output.topk_output, quant_info.first_expert)
        if quant_info.factor != 1.0:
            expert_weights = expert_weights * quant_info.factor
        experts, first = quant_info.experts, quant_info.first
        if hooks is None or first is None:
            return StandardCombineInput(hidden_states=experts(x, ids, expert_weights))
        d = with_adapters(experts, first, x, ids, expert_weights, hooks, in_pairs(runner_config))
        return StandardCombineInput(hidden_states=d)


def _choices(chosen: Any, first_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids on this GPU and the weights of each token's experts, (tokens, top k). A router of SGLang's
    (Inkling's) packs both in an int32, the id among all ranks' experts above the bits of a weight in bf16."""
    if hasattr(chosen, "topk_ids"):
        return chosen.topk_ids.int(), chosen.topk_weights
    packed = chosen.packed_topk_ids
    return (packed >> 16) - first_expert, (packed << 16).view(torch.float32)


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
        if method.routes:
            hooks.append(Hook(f"{method.target}.get_moe_runner_backend", ("self", "layer"), runner_backend))
    base = f"{QUANTIZATION}.base_config.FusedMoEMethodBase"
    hooks.append(Hook(f"{base}.get_moe_quant_info", ("self", "layer", "runner_backend"), quant_info))
    hook_loading()
    hook(hooks)
    register_moe_runner_core(RUNNER, W4gemmRunner)


def choose(method: Method, own: Callable[..., Any], self: Any, layer: Any, moe_runner_config: Any) -> Any:
    """Let SGLang make its runner, which its other parts ask for, and ours if this layer can be taken over."""
    made = own(self, layer, moe_runner_config)
    if not SGLANG.asked(method.kind, lambda: _why_not(method, self, layer, moe_runner_config)):
        setattr(layer, _RUNNER, MoeRunner(resolve_moe_runner_backend(RUNNER), moe_runner_config))
        if not moe_runner_config.is_gated:
            _leave_out_gates(method, self, layer)
        if not method.padded and not packed_before() and not dummy():
            mark(layer, method.format.parameters(method.settings(self), layer.with_bias))
    return made


def _leave_out_gates(method: Method, self: Any, layer: Any) -> None:
    """Halve the rows of ``w13``, where SGLang has made them for gates too: its loader could not fill them, as in
    Nemotron 3 with experts of integers."""
    settings, dim = method.settings(self), 2 if method.format.transposed else 1
    if method.format.numbers(layer, "w13", settings).n != 2 * layer.intermediate_size_per_partition:
        return
    for name in method.format.parameters(settings, False):
        if name.startswith("w13_"):
            parameter = getattr(layer, name)
            parameter.data = parameter.data.chunk(2, dim)[0].clone()


def runner_backend(own: Callable[..., Any], self: Any, layer: Any) -> Any:
    """Return what SGLang routes a layer's tokens for: our runner, if it shall run them; else what SGLang's own method
    says."""
    return resolve_moe_runner_backend(RUNNER) if hasattr(layer, _RUNNER) else own(self, layer)


def quant_info(own: Callable[..., Any], self: Any, layer: Any, runner_backend: Any) -> Any:
    """Return what SGLang's layer with adapters hands to a runner: the experts, if that is ours."""
    info = getattr(layer, _EXPERTS, None)
    return own(self, layer, runner_backend) if info is None or runner_backend.value != RUNNER else info


def _why_not(method: Method, self: Any, layer: Any, config: Any) -> str:
    settings = method.settings(self)
    if reason := why_not_here(settings.activations == "fp8") or settings.why_refused:
        return reason
    if adapters() and (reason := why_no_adapters(method.takes_adapters)):
        return reason
    if reason := experts_elsewhere():
        return reason
    if not get_moe_a2a_backend().is_none():
        return f"tokens come in the form of {get_moe_a2a_backend().value}"
    if not fused_activation(config):
        return f"their activation is {config.activation}{'' if config.is_gated else ' without gates'}"
    if config.apply_router_weight_on_input or config.no_combine:
        return "the router's weights are applied on the input, or the sum is left to others"
    if layer.with_bias and not (method.format.biases and in_pairs(config)):  # our rows are in pairs
        return "they have biases"
    if getattr(self, "load_up_proj_weight_first", False):
        return _ORDER
    return _no_kernel(method, layer, settings, config)


def _no_kernel(method: Method, layer: Any, settings: ExpertsSettings, config: Any) -> str:
    """Return why no kernel runs the products of a layer, or the empty string."""
    products = (method.format.numbers(layer, name, settings) for name in PRODUCTS)
    reasons = (SGLANG.why_no_kernel(numbers, settings.activations, config.params_dtype) for numbers in products)
    return next(filter(None, reasons), "")


def convert(method: Method, own: Callable[..., None], self: Any, layer: Any) -> None:
    """Pack what a layer has loaded; or let SGLang's own method do its work, and log why.

    Raises:
        ValueError: for a layer that SGLang's own kernels can no longer run.
    """
    if hasattr(layer, _EXPERTS):  # called again, at the end of an update
        end_updates(layer)
        return
    if not hasattr(layer, _RUNNER):
        own(self, layer)
        return
    try:
        _pack(method, self, layer)
    except (AttributeError, TypeError, ValueError) as e:
        if method.routes:  # for our runner, as SGLang already knows
            raise ValueError(
                f"w4gemm cannot run {method.kind}: {e}\n{SGLANG.variable}=off leaves them to SGLang's own kernels"
            ) from e
        SGLANG.refuse(method.kind, str(e))
        delattr(layer, _RUNNER)
        own(self, layer)


def _pack(method: Method, self: Any, layer: Any) -> None:
    """Take over a layer's experts.

    Raises:
        AttributeError, TypeError, ValueError: if they cannot be packed; the layer is as it was.
    """
    if reason := packed_before():  # one loader knows it only after the layer was made
        raise ValueError(reason)
    if getattr(layer, "inference_moe_w13_interleaved", False):  # which a model says when the layer is made
        raise ValueError(_ORDER)
    settings, config = method.settings(self), layer.moe_runner_config
    names = method.format.parameters(settings, layer.with_bias)
    if not check_loaded(layer, names, f"{method.kind} of layer {layer.layer_id}"):
        raise ValueError(NOTHING_LOADED)
    if method.padded:
        for name in (name for name in names if not name.endswith("bias")):
            if (empty := getattr(layer, name).flatten(1).any(1) == 0).any():
                raise RuntimeError(f"{name}: expert {int(empty.nonzero()[0])} of layer {layer.layer_id} was not loaded")
    check_known(layer, method.format.known(settings))
    gated = {name: name == "w13" and config.is_gated and not in_pairs(config) for name in PRODUCTS}

    def pack() -> list[QuantizedWeight]:
        packers = method.format.packers(layer, settings, SGLANG)
        return [packers.pop(name)(gated[name]) for name in PRODUCTS]

    unused = [name for name, p in layer._parameters.items() if name not in names and hasattr(p, "weight_loader")]
    update = QuantizedUpdate(f"{method.kind} of layer {layer.layer_id}", layer, names, (), pack, unused)
    packers, products, held = method.format.packers(layer, settings, SGLANG), [], {}
    for name in PRODUCTS:
        bias = method.bias(layer, name)
        if bias is not None:  # one that is copied would not be moved with its expert
            bias.data = bias.data.to(config.params_dtype)
        packed = packers.pop(name)(gated[name])
        old = [each for each, p in layer._parameters.items() if each.startswith(f"{name}_") and p is not bias]
        held[f"{name}_weight"] = w = exchange(layer, old, f"{name}_w4gemm", packed)
        products.append(W4GroupedLinear.from_weight(w, bias, dtype=config.params_dtype))
    activation = fused_activation(config)
    experts = W4Experts(*products, activation=activation, batch_invariant=deterministic())
    first: W4GroupedLinear | None = None
    if adapters():
        first = W4GroupedLinear.from_weight(
            experts.gate_up.weight, experts.gate_up._parameters["bias"], dtype=config.params_dtype
        )
        layer.runner = getattr(layer, _RUNNER)  # which SGLang asks for the kind of one with adapters
    # a router's weights may have the factor already, as DeepSeek-V4's do
    in_router = getattr(layer, "should_fuse_routed_scaling_factor_in_topk", False)
    factor = 1.0 if in_router or config.routed_scaling_factor is None else config.routed_scaling_factor
    # beside the module, so that its buffers are not listed twice
    first_expert = getattr(layer, "moe_ep_rank", 0) * experts.gate_up.weight.experts
    object.__setattr__(layer, _EXPERTS, W4gemmQuantInfo(experts, first, factor, first_expert))
    WARMUP.loaded(layer, _need(experts, first, activation, config))
    vars(layer).pop("_original_shapes", None)  # to which SGLang would make empty parameters grow before an update
    sizes = experts.gate_up.weight.k, experts.down.weight.k
    padded = method.padded and sizes != (layer.hidden_size, layer.intermediate_size_per_partition)
    if not (layer.with_bias or padded or in_pairs(config)):  # no tensor brings the zeros of a padded one
        open_updates(layer, update, held, [f"{name}_weight" for name in PRODUCTS if gated[name]], method.flips)


def _need(experts: W4Experts, first: W4GroupedLinear | None, activation: str, config: Any) -> Need:
    """Return what a layer's experts launch for any number of tokens, also with adapters if there is a ``first``."""
    gate_up, down = experts.gate_up.weight, experts.down.weight
    count, top_k = gate_up.experts, config.top_k
    each = token_counts(BOUNDS[-1] + 1, top_k, count)

    @torch.inference_mode()
    def run() -> None:
        for experts.one_launch in (False, None):
            for tokens in each:
                x = torch.zeros(tokens, gate_up.k, dtype=config.params_dtype, device=gate_up.device)
                ids = torch.arange(tokens * top_k, dtype=torch.int32, device=gate_up.device).view(tokens, top_k) % count
                weights = torch.zeros(tokens, top_k, dtype=torch.float32, device=gate_up.device)
                experts(x, ids, weights)
                if first is not None and experts.one_launch is None:
                    with_adapters(experts, first, x, ids, weights, None, in_pairs(config))

    rows = [tokens * top_k for tokens in each]
    facts = {"bias": experts.gate_up.bias is not None, "batch_invariant": experts.batch_invariant}
    call = ExpertsCall(config.params_dtype, [top_k], rows, **facts)
    need = experts_need(gate_up, down, activation, call, run)
    if first is None:
        return need
    return beside_adapters(need, gate_up.device, config.params_dtype, top_k, activation, not in_pairs(config))


def apply(own: Callable[..., Any], self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Return the combined output of a layer that was taken over; else what SGLang's own method does."""
    info = getattr(layer, _EXPERTS, None)
    return own(self, layer, dispatch_output) if info is None else getattr(layer, _RUNNER).run(dispatch_output, info)
