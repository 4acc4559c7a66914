"""Mixtures of experts: vLLM's methods for 4-bit experts, with our products.

vLLM makes a method for each layer of experts, which :func:`taken_over` replaces if its weights, its layer and this GPU
allow. A method that is taken over loads a checkpoint as before, packs the experts for our kernels, and runs them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from w4gemm.core.activation import is_gated
from w4gemm.integrations.engines.formats import PRODUCTS, ExpertsFormat
from w4gemm.integrations.engines.loading import NOTHING_LOADED, check_known, check_loaded, draw, mark
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.configs import add_hook
from w4gemm.integrations.vllm.experts_formats import LEFT, METHODS, fused_activation, in_pairs
from w4gemm.integrations.vllm.experts_kernel import BatchedW4gemmExperts, ExpertsProduct, W4gemmExperts
from w4gemm.integrations.vllm.experts_support import multiplied, no_kernel, read, why_not
from w4gemm.integrations.vllm.moving import moving, note_balancers
from w4gemm.integrations.vllm.updates import ExpertsUpdate, ReloadedUpdate, end_reload
from w4gemm.integrations.wrapping import wrap
from w4gemm.packing.repack import rows_in_pairs
from w4gemm.weights.weight import QuantizedWeight

CONFIGS = (
    *("gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq"),
    *("compressed-tensors", "moe_wna16", "inc", "mxfp4", "gpt_oss_mxfp4"),
    *("modelopt_fp4", "modelopt_mixed", "quark", "deepseek_v4_fp8", "fp8"),
)
"""Names of vLLM's quantization configs whose experts may have 4 bits."""
_OF_ROUTER = {"e_score_correction_bias", "hash_indices_table"}
"""Parameters of a router that vLLM registers a second time, in the layer of experts."""
_LAST = "w4gemm_last"
"""A parameter that nothing is loaded into. With expert parallelism, when weights are loaded anew, vLLM would process a
layer as soon as all experts that are here have come, and find no parameters for the others, which come later."""


def install() -> None:
    """Have vLLM's quantization configs ask :func:`taken_over`."""
    add_hook(taken_over, CONFIGS)
    note_balancers()
    with contextlib.suppress(ImportError):  # a config whose linear layers load as vLLM has them load
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        wrap(OnlineQuantizationConfig, "get_quant_method", _online)


def _online(own: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    return taken_over(own(config, layer, prefix), layer)


def taken_over(method: Any, layer: Any) -> Any:
    """Return a method for a layer of experts that runs our products; vLLM's own ``method`` if that cannot be, after
    logging why, and for other layers."""
    if not isinstance(layer, RoutedExperts):
        return method
    name = type(method).__name__
    if name not in METHODS:
        own = [base.__name__ for base in type(method).__mro__ if base.__name__ in METHODS]
        if reason := LEFT.get(name) or (own and f"they are a model's own kind of {own[0]}"):
            takeover.refuse(f"experts of {name}", str(reason))
        return method
    if takeover.VLLM.asked(f"experts of {name}", lambda: why_not(method, layer)):
        return method
    base: type = type(method)
    cls: Any = _method_class(base)
    ours = cls.__new__(cls)
    tokens = takeover.most_tokens() * layer.moe_config.moe_parallel_config.dp_size
    vars(ours).update(vars(method), vllm_method=method, most_tokens=tokens)
    # models ask for it before weights are loaded, and expect of some of vLLM's that they leave a step to the model
    ours.experts_cls = W4gemmExperts
    takeover.expect(ours)
    return ours


@functools.cache
def _method_class(base: type) -> type:
    """Return the class of a method that is taken over. It has the name of vLLM's, by which RoutedExperts decides how it
    loads tensors."""
    return type(base.__name__, (_Method, base), {"__module__": __name__})


class _Method:
    """Our side of a class of both, before one of vLLM's methods, which has made the layer's parameters."""

    moe: Any
    moe_kernel: Any
    vllm_method: Any
    """vLLM's own, as it was before it was taken over."""
    most_tokens: int
    """Most tokens of a step, from all ranks that send theirs here."""
    products: tuple[ExpertsProduct, ExpertsProduct] | None = None
    """The products of ``moe_kernel``; None until weights are loaded."""
    updates: Sequence[ReloadedUpdate] = ()
    """Updates of ``products`` with dense numbers."""
    is_drawn = False
    """True if vLLM loads random numbers (--load-format dummy)."""
    supports_pre_processed_weights = False
    """Whether vLLM's cache of weights (--load-format ipc_cache) may hand in experts as they were packed; it refuses
    the model then."""

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        """True: an expert is its rows of the layer's parameters, and nothing else."""
        return True

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the sizes that tokens are sent in; our products need no padding of their own, as vLLM's MXFP4 does."""
        return FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        settings, format = read(self, layer)
        self.is_drawn = takeover.is_dummy()
        if not self.is_drawn:
            mark(layer, format.parameters(settings, self.moe.has_bias))
        if settings.bits:  # GGUF's, of which some models have rows in another order, take none
            self.updates = self.dense_updates(layer.layer_name)
        for update in self.updates:
            update.open(layer)
        if is_gated(fused_activation(self.moe)) and "ModelOpt" not in type(self).__name__:  # which has a column each
            _count_twice(layer)
        if self.moe.moe_parallel_config.use_ep:
            layer.register_parameter(_LAST, torch.nn.Parameter(torch.empty(1), requires_grad=False))

    def dense_updates(self, what: str) -> list[ReloadedUpdate]:
        """Return what takes dense numbers of either product. what: the layer, for errors."""
        return [
            ExpertsUpdate(
                f"{product}_weight",
                what,
                functools.partial(self._weight, i),
                self._in_halves(product),
                functools.partial(_padding, self.moe, product),
                moves=self.moe.moe_parallel_config.enable_eplb,
                stacked=in_pairs(self.moe),
            )
            for i, product in enumerate(PRODUCTS)
        ]

    def _in_halves(self, product: str) -> bool:
        """True if vLLM's rows of a product are all gates and then all ups, which are pairs in ours."""
        return product == "w13" and is_gated(fused_activation(self.moe)) and not in_pairs(self.moe)

    def _weight(self, index: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the packed weight of a product; raises ValueError if dense numbers cannot take its place."""
        if self.products is None:
            raise ValueError("it holds no packed weight")
        if self.moe.has_bias and not in_pairs(self.moe):
            raise ValueError("its experts have biases, kept in another order: they are loaded quantized alone")
        return self.products[index].weight

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts. If they cannot be packed, vLLM's own method goes on with them.

        Weights that are loaded anew are packed into the tensors that the first ones were packed into, because the
        kernel, CUDA graphs and vLLM hold these: others would be a second copy of all experts, which EPLB does not move.
        """
        settings, format = read(self, layer)
        if end_reload(layer, self.updates, format.parameters(settings, False)):
            return
        if self.products is not None and layer._parameters.get("w13_weight") is self.products[0].weight.tensors[0]:
            for update in self.updates:  # called again, by who has loaded dense numbers
                update.end()
            return
        for update in self.updates:
            update.close(layer)
        if _LAST in layer._parameters:
            delattr(layer, _LAST)
        _clear_padding(layer, self.moe, format)
        names = format.parameters(settings, self.moe.has_bias)
        if self.is_drawn:
            draw(layer, names)
        loaded_any = self.is_drawn or check_loaded(layer, names, layer.layer_name)
        try:
            if not loaded_any:
                raise ValueError(NOTHING_LOADED)
            check_known(layer, format.known(settings) | _OF_ROUTER)
            if not format.biases and getattr(layer, "_loaded_expert_biases", None):  # whatever the model's config says
                raise ValueError("they have biases")
            packers = format.packers(layer, settings, takeover.VLLM)
        except (TypeError, ValueError) as e:
            if self.moe.moe_parallel_config.enable_eplb or self._vllm_pads(layer):
                raise  # vLLM's own method may not support EPLB, and needs the sizes that it asks for
            takeover.refuse(f"experts of {type(self).__name__}", str(e))
            vars(self.vllm_method).update((name, value) for name, value in vars(self).items() if name != "experts_cls")
            layer.quant_method = self.vllm_method
            self.vllm_method.process_weights_after_loading(layer)
            takeover.WARMUP.settle(self)
            return
        weights = []
        earlier = self.products or (None, None)
        for product, held in zip(PRODUCTS, earlier, strict=True):
            gated = self._in_halves(product)
            packed = packers.pop(product)(gated)
            if gated and format.biases and self.moe.has_bias:
                bias = getattr(layer, f"{product}_bias")
                bias.data = rows_in_pairs(bias.data)
            for name in [name for name in layer._parameters if name.startswith(f"{product}_")]:
                if name != f"{product}_bias" or not format.biases:  # GPTQ's may have biases that nobody has loaded
                    delattr(layer, name)
            weights.append(_as_parameters(layer, product, packed, held))
        if self.products is None:
            self._make_kernel(layer, *weights)
        elif (moved := moving(layer)) is not None:
            moved.look_at_start()
        for update in self.updates:
            update.open(layer)
        takeover.WARMUP.loaded(self, self.moe_kernel.fused_experts.need(self.most_tokens))

    def _vllm_pads(self, layer: Any) -> bool:
        """True if vLLM's own method wants other sizes than the layer's parameters have."""
        sizes = layer.hidden_size, self.moe.intermediate_size_per_partition
        parallel = self.moe.moe_parallel_config
        return bool(self.vllm_method.maybe_roundup_sizes(*sizes, self.moe.in_dtype, parallel) != sizes)

    def _make_kernel(self, layer: Any, gate_up: QuantizedWeight, down: QuantizedWeight) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        tables = layer._expert_routing_tables()
        prepare = maybe_make_prepare_finalize(self.moe, self.moe_quant_config, tables, allow_new_interface=True)
        options: dict[str, Any] = {"moe_config": self.moe, "quant_config": self.moe_quant_config}
        self.experts_cls: type = W4gemmExperts
        if self.moe.is_lora_enabled:
            from w4gemm.integrations.vllm.experts_lora import LoraExperts

            self.experts_cls = LoraExperts
        if prepare.activation_format == mk.FusedMoEActivationFormat.BatchedExperts:
            self.experts_cls = BatchedW4gemmExperts
            options["max_num_tokens"] = prepare.max_num_tokens_per_rank()
            options["num_dispatchers"] = prepare.num_dispatchers()
        dtype, activation = self.moe.in_dtype, fused_activation(self.moe)
        first = ExpertsProduct.of(gate_up, getattr(layer, "w13_bias", None), dtype, activation)
        if self.moe_quant_config.block_shape is not None:
            first = first.with_block_scales()
        second = ExpertsProduct.of(down, getattr(layer, "w2_bias", None), dtype, None)
        self.products = first, second
        experts = self.experts_cls(first, second, **options)
        self.moe_kernel = mk.FusedMoEKernel(prepare, experts)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Return how vLLM's prepare step quantizes activations; it asks for nothing else. DeepEP's low latency sends
        fp8 with a scale for each 128 columns, where others are quantized with one for each token."""
        settings, _ = read(self, layer)
        if settings.activations != "fp8":
            return FusedMoEQuantConfig.make(None, weight_dtype="int4")
        if self.moe.moe_parallel_config.use_deepep_ll_kernels:
            sizes = layer.hidden_size, self.moe.intermediate_size_per_partition
            if not no_kernel(self.moe, *sizes, multiplied(settings, layer), True, block_scale=True):
                return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128], weight_dtype="int4")
        return FusedMoEQuantConfig.make(torch.float8_e4m3fn, per_act_token_quant=True, weight_dtype="int4")

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


def _count_twice(layer: torch.nn.Module) -> None:
    """Have vLLM count what a checkpoint has of gates and of ups, and vLLM loads into one row of a parameter. It
    processes a layer that is loaded anew when as many numbers have come as it has. What comes later has no parameter
    any more: an error of vLLM's experts, or nobody reads it."""
    for name, parameter in layer._parameters.items():
        if name == "w13_weight_shape" or name.startswith("w13_input_scale"):
            counted: Any = parameter
            counted.weight_loader_numel = 2 * counted.numel()


def _unpadded(moe: Any) -> int:
    """Return how many of a GPU's intermediate features the checkpoint has."""
    unpadded: int | None = getattr(moe, "intermediate_size_per_partition_unpadded", None)
    return unpadded or int(moe.intermediate_size_per_partition)


def _clear_padding(layer: torch.nn.Module, moe: Any, format: ExpertsFormat) -> None:
    """Make the features zero that a model of vLLM's (Kimi-K3) adds to the checkpoint's, and loads nothing into.

    Raises:
        RuntimeError: for numbers that are not floats, whose features no model of vLLM's pads.
    """
    width, loaded = moe.intermediate_size_per_partition, _unpadded(moe)
    if loaded != width and format.packing != "floats":
        raise RuntimeError(f"the experts' {loaded} features are padded to {width}, wanted that of 4-bit floats alone")
    for product in PRODUCTS:
        for leaf in (format.codes, format.scales):
            for part in _padding(moe, product, getattr(layer, f"{product}_{leaf}").data):
                part.zero_()


def _padding(moe: Any, product: str, t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Generate the views of a product's tensor (experts, n, k) in which a model's padding lies, if it has any."""
    width, loaded = moe.intermediate_size_per_partition, _unpadded(moe)
    if loaded == width:
        return
    dim, shards = (1, 2 if is_gated(fused_activation(moe)) else 1) if product == "w13" else (2, 1)
    for part in t.chunk(shards, dim):
        size = part.shape[dim]
        yield part.narrow(dim, size * loaded // width, size - size * loaded // width)


def _as_parameters(
    layer: torch.nn.Module, product: str, w: QuantizedWeight, held: ExpertsProduct | None
) -> QuantizedWeight:
    """Make the tensors of a weight parameters of a layer, and return the weight that they are.

    Args:
        held: the product of weights that were loaded earlier, whose tensors and bias take the new numbers; or None.
    """
    if held is None:
        kept = tuple(torch.nn.Parameter(t, requires_grad=False) for t in w.tensors)
        w = replace(w, tensors=kept)
    else:
        for parameter, t in zip(held.weight.tensors, w.tensors, strict=True):
            parameter.data.copy_(t)
        w = held.weight
        if held.bias is not None:
            held.bias.data.copy_(getattr(layer, f"{product}_bias"))
            setattr(layer, f"{product}_bias", held.bias)
    for i, parameter in enumerate(w.tensors):
        setattr(layer, f"{product}_weight" + (f"_{i}" if i else ""), parameter)
    return w
