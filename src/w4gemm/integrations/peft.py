"""PEFT's LoRA for quantized layers, in every program that imports both PEFT and w4gemm, in any order: :func:`enable`.

The quantized weight stays as it is; the adapter's two matrices are trained. Gradients reach them through
:func:`w4gemm.linear`. Adapters are saved and loaded as PEFT does. PEFT 0.21 is tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraConfig, LoraModel
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils.other import ModulesToSaveWrapper

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.integrations.wrapping import wrap
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

_INITS = (True, False, "gaussian", "eva")
"""Values of ``init_lora_weights`` that do not change the base weight."""
_WITHOUT_EMBEDDINGS = ("PREFIX_TUNING", "CARTRIDGE")
"""Methods whose prompts are keys and values."""


class W4LoraLinear(Linear):
    """PEFT's LoRA layer around a :class:`w4gemm.W4Linear`: base(x) + scaling * B(A(dropout(x))).

    Merging rounds the sum of weight and adapter to the layer's format, with a warning, because it loses bits of the
    adapter; unmerging brings back the weight that was there, bit for bit.

    Raises:
        ValueError: for an initialization or a variant of LoRA that changes or reads the dense weight; for a layer with
            an activation, which would have to come after the sum; for a process's shard of a layer.
    """

    def __init__(self, base_layer: torch.nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        if config.init_lora_weights not in _INITS:
            raise ValueError(
                f"init_lora_weights: wanted one of {_INITS} beside quantized weights, got {config.init_lora_weights!r}"
            )
        layer = base_layer.get_base_layer() if isinstance(base_layer, BaseTunerLayer) else base_layer
        if layer.activation is not None:
            raise ValueError(f"activation: wanted None in a layer with an adapter, got {layer.activation!r}")
        if (size := (layer.out_features, layer.in_features)) != (layer.weight.n, layer.weight.k):
            raise ValueError(
                f"target_modules: wanted whole layers, got {config.target_modules} of which one is a process's shard "
                f"{(layer.weight.n, layer.weight.k)} of {size}; an adapter's sums would stay apart, so load the model "
                "without tensor parallelism"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self._before_merge: QuantizedWeight | None = None

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        """Those of the layer, of whose class PEFT would warn."""
        layer: W4Linear = self.get_base_layer()
        return layer.in_features, layer.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """No variant but LoRA itself; the others work on dense weights."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        layer = self.get_base_layer()
        if not isinstance(layer, W4Linear):  # it was dequantized since
            super().merge(safe_merge, adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        if any(self.lora_bias[name] for name in names):
            raise ValueError("lora_bias: an adapter with a bias cannot be merged into a quantized layer")
        before = layer.weight
        delta = sum(self.get_delta_weight(name).float() for name in names)
        if (scale := layer.pre_quant_scale) is not None:  # the weight meets x * scale, the adapter x
            if not scale.all():
                raise ValueError("pre_quant_scale: an adapter cannot be merged into a layer that ignores columns of x")
            delta = delta / scale.float()
        merged = before.dequantize() + delta
        if safe_merge and not torch.isfinite(merged).all():
            raise ValueError(f"adapters {names} make a weight that is not finite")
        exact = "apart, or merged after the model's dequantize(), it stays exact"
        warnings.warn(f"merging rounds the adapter to {before.format}; {exact}", stacklevel=2)
        layer.weight = quantize(merged, before.format).repack(activations=before.activations)
        if not self.merged:
            self._before_merge = before
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        if not isinstance(self.get_base_layer(), W4Linear):
            super().unmerge()
            return
        if self._before_merge is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        layer: W4Linear = self.get_base_layer()
        layer.weight = self._before_merge.to(layer.weight.device)  # the model may have been moved since
        self._before_merge = None
        self.merged_adapters.clear()


def enable() -> None:
    """Let PEFT add LoRA to :class:`w4gemm.W4Linear` layers, also with ``target_modules="all-linear"``. A second call
    has no effect. In programs that import w4gemm, importing PEFT calls it, and so does importing this module.

    From then on PEFT refuses experts as targets, also in ``target_parameters`` and in adapters that it loads. It also
    refuses quantized layers in ``modules_to_save``, methods other than LoRA on them, and what trains or reads the rows
    of a packed embedding. None of these would train the parameters that it names."""
    wrap(LoraModel, "_create_new_module", _create_new_module)
    wrap(tuners_utils, "_maybe_include_all_linear_layers", _include_all_linear_layers)
    wrap(ModulesToSaveWrapper, "check_module", _check_module)
    wrap(BaseTuner, "inject_adapter", _inject_adapter)
    wrap(LoraModel, "_prepare_model", _prepare_model)
    wrap(peft.PeftModel, "_setup_prompt_encoder", _setup_prompt_encoder)
    wrap(peft.PeftModel, "get_nb_trainable_parameters", _count_parameters)
    for module in (peft, peft.peft_model):
        wrap(module, "set_peft_model_state_dict", _set_state_dict)


def _count_parameters(own: Callable[..., tuple[int, int]], model: peft.PeftModel) -> tuple[int, int]:
    """Count the numbers of packed weights, which are no parameters, as PEFT counts those of bitsandbytes."""
    from w4gemm.integrations.pretrained_model import packed_numbers

    trainable, total = own(model)
    return trainable, total + packed_numbers(model)


def _create_new_module(
    own: Callable[..., torch.nn.Module],
    lora_config: LoraConfig,
    adapter_name: str,
    target: torch.nn.Module,
    **kwargs: Any,
) -> torch.nn.Module:
    """Put our layer with an adapter around a quantized one."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, W4GroupedLinear):
        raise ValueError(
            f"target_modules: wanted layers of one weight, got {kwargs.get('target_name')} with "
            f"{base.weight.experts} experts; leave it out by its name, or by exclude_modules"
        )
    if isinstance(base, W4Linear) and not isinstance(target, LoraLayer):
        return W4LoraLinear(target, adapter_name, lora_config, **kwargs)
    return own(lora_config, adapter_name, target, **kwargs)


def _inject_adapter(
    own: Callable[..., Any], tuner: Any, model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Refuse methods other than LoRA for quantized layers, and packed embeddings. One that reads the weight of a head
    with an adapter gets its own, because merging changes the head's."""
    config = tuner.peft_config[adapter_name]
    if getattr(config, "trainable_token_indices", None):
        _refuse_packed_embedding(model, "trainable_token_indices")
    targets = getattr(config, "target_modules", None)
    tuner.all_linear = isinstance(targets, str) and targets.lower() == "all-linear"  # PEFT replaces it by names
    if targets:
        _refuse_packed_embedding(model, "target_modules", partial(tuner._check_target_module_exists, config))
    if not isinstance(tuner, LoraModel) and targets:
        for name, module in model.named_modules():
            if isinstance(module, PackedModule) and tuner._check_target_module_exists(config, name):
                kind = f"{getattr(config.peft_type, 'value', config.peft_type)} by {type(tuner).__name__}"
                raise ValueError(f"target_modules: wanted LoRA alone for the quantized layer {name}, got {kind}")
    elif targets:
        from w4gemm.integrations.transformers.dequantize import part_embeddings

        part_embeddings(model, partial(tuner._check_target_module_exists, config))
    return own(tuner, model, adapter_name, *args, **kwargs)


def _setup_prompt_encoder(own: Callable[..., None], model: Any, adapter_name: str) -> None:
    """Refuse prompts that read the rows of a packed embedding."""
    if model.peft_config[adapter_name].peft_type not in _WITHOUT_EMBEDDINGS:
        _refuse_packed_embedding(model.base_model, "prompt tuning")
    own(model, adapter_name)


def _refuse_packed_embedding(
    model: torch.nn.Module, argument: str, is_meant: Callable[[str], object] = lambda name: True
) -> None:
    """Raise ValueError if a model has a packed embedding that is meant, of which PEFT reads or trains dense rows."""
    from w4gemm.integrations.transformers.embeddings import TiedEmbedding

    for name, module in model.named_modules():
        if isinstance(module, (W4Embedding, TiedEmbedding)) and is_meant(name):
            raise ValueError(
                f"{argument}: wanted a dense embedding, got {name}, which is packed; "
                "w4gemm.integrations.transformers.dequantize_embedding(model) makes it dense"
            )


def _prepare_model(own: Callable[..., None], tuner: Any, config: LoraConfig, model: torch.nn.Module) -> None:
    """Refuse ``target_parameters`` that are packed; leave them out if PEFT made them of all linear layers."""
    targets = getattr(config, "target_parameters", None) or ()  # X-LoRA's config has none
    packed = {target: holder for target in targets if (holder := _packed_in(model, target))}
    if packed and tuner.all_linear:  # of which experts are no part
        config.target_parameters = set(config.target_parameters) - set(packed)
    elif packed:
        target, holder = next(iter(packed.items()))
        raise ValueError(
            f"target_parameters: wanted dense parameters, got {target}, which {holder} holds packed; leave it "
            "out (PEFT makes it of target_modules that name experts: name other layers there), or make the "
            "experts dense by w4gemm.integrations.transformers.dequantize_layers"
        )
    own(tuner, config, model)


_PACKED_PARAMETERS = {W4Experts: ("gate_up_proj", "up_proj", "down_proj"), PackedModule: ("weight",)}
"""The parameters of dense modules that their quantized ones hold packed, by transformers' names."""


def _packed_in(model: torch.nn.Module, target: str) -> str | None:
    """Return the name of the first module that holds ``target``, of ``target_parameters``, packed, or None. PEFT
    would pass it over."""
    owner, _, leaf = target.rpartition(".")
    for name, module in model.named_modules():
        leaves = next((leaves for kind, leaves in _PACKED_PARAMETERS.items() if isinstance(module, kind)), None)
        if leaves is None or leaf in module._parameters:
            continue
        if f".{name}".replace(".base_layer", "").endswith(f".{owner}") if owner else leaf in leaves:
            return name
    return None


def _set_state_dict(own: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Refuse to load adapters of quantized layers that have none."""
    result = own(model, *args, **kwargs)
    packed = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, tuple(_PACKED_PARAMETERS)))
    lost = [key for key in result.unexpected_keys if key.startswith(packed)]
    if lost:
        raise ValueError(
            f"adapter: wanted none for quantized layers that its config does not name, nor for experts, got "
            f"{lost[0]} and {len(lost) - 1} more; load the model with these layers dense"
        )
    return result


def _check_module(own: Callable[..., None], wrapper: Any) -> None:
    """Refuse quantized layers in ``modules_to_save``."""
    own(wrapper)
    from w4gemm.integrations.transformers.embeddings import TiedEmbedding

    layers = [m for m in wrapper.original_module.modules() if isinstance(m, (PackedModule, TiedEmbedding))]
    if layers:  # PEFT would train a copy of the bias alone, and save the frozen weight with it
        raise ValueError(
            f"modules_to_save: wanted layers with dense weights, which train, got {layers[0]}; keep it dense by "
            "skip (an embedding by dequantize_embedding), or put an adapter beside it by target_modules"
        )


def _include_all_linear_layers(own: Callable[..., Any], peft_config: Any, model: torch.nn.Module) -> Any:
    """Let "all-linear" name quantized layers too."""
    targets = getattr(peft_config, "target_modules", None)
    config = own(peft_config, model)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        layers = (
            name
            for name, m in model.named_modules()
            if isinstance(m, W4Linear) and m is not head  # nor are experts of dense models found
        )
        config.target_modules = {*config.target_modules, *layers}
    return config


enable()
