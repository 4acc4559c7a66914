"""transformers' ``from_pretrained`` with 4-bit layers of w4gemm: :class:`W4GemmQuantizer`.

transformers makes the model on the meta device, loads the dense tensors, and moves and shards what it loads. The
quantizer reserves the places of the 4-bit layers before, and fills them after, from the checkpoint's own reader; so a
weight is taken over losslessly, whatever its packing, and split into lossless shards. A dense folder's weights come
through transformers, and are quantized one at a time on the device that they are loaded to.

Importing this file registers it for the method "w4gemm". transformers 5.17 to 5.24 are tested.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.base import get_keys_to_not_convert

from w4gemm.api.experts import W4Experts
from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.dense import SKIP, check_dense, default_format, layers_to_quantize
from w4gemm.checkpoints.experts import DOWN, GATE_UP
from w4gemm.checkpoints.hugging_face import quantization_config
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.checkpoints.w4gemm import METHOD, settings
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers.config import W4GemmConfig
from w4gemm.integrations.transformers.decoding import decode_by_graph
from w4gemm.integrations.transformers.dequantize import dequantize_layers
from w4gemm.integrations.transformers.layers import enable_peft
from w4gemm.integrations.transformers.names import (
    Renaming,
    check_files,
    check_shapes,
    check_whole,
    dtype_of,
    of_modules,
    packed_names,
    unpacked_names,
)
from w4gemm.integrations.transformers.places import AwaitedGrouped, AwaitedLinear, Place, finish, reserve, unpacked
from w4gemm.integrations.transformers.sharding import Local, Split, add_up, fill, local_experts, local_shard
from w4gemm.weights.quantization import quantize
from w4gemm.weights.state import of_words
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("w4gemm")


class _AwaitedDense(AwaitedLinear):
    """A linear layer whose dense weight transformers is to load; :class:`_Quantize` rounds it to ``quantized``."""

    quantized: QuantizedWeight | None

    def __init__(self, linear: nn.Linear, format: WeightFormat) -> None:
        super().__init__(linear, format)
        self.weight, self.quantized = linear.weight, None

    def fill(self, w: QuantizedWeight) -> None:
        del self._parameters["weight"], self.quantized
        super().fill(w)


class _Quantize(ConversionOps):
    """Rounds one dense weight, on the device that it was loaded to."""

    def convert(self, input_dict: dict[str, Any], **facts: Any) -> dict[str, torch.Tensor]:
        for name, found in input_dict.items():
            layer = facts["model"].get_submodule(name.rpartition(".")[0])
            if not isinstance(layer, _AwaitedDense):  # bytes of bitsandbytes, under the name of the weight to unpack
                continue
            layer.quantized = quantize(found[0] if isinstance(found, list) else found, layer.format)
            facts["missing_keys"].discard(name)
        return {}


@register_quantizer(METHOD)
class W4GemmQuantizer(HfQuantizer):
    """Lets transformers load, train beside, and save models with :class:`w4gemm.W4Linear` layers."""

    quantization_config: W4GemmConfig

    def __init__(self, quantization_config: W4GemmConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # transformers loads nothing but dense tensors, in both cases: in the model's dtype, whatever their names were
        self.pre_quantized = False
        self._checkpoint: Checkpoint | None = None
        self._places: dict[str, list[Place]] = {}
        self._sharded = False
        self.unsaved: tuple[str, ...] = ()
        """Buffers of the loaded model that no folder has a place for, so that it cannot be saved."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = {str(d) for d in device_map.values()} if isinstance(device_map, dict) else set()
        if "meta" in devices:
            raise ValueError(f"device_map: wanted devices that hold numbers, such as cpu, got {sorted(devices)}")
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(f"device_map: wanted every 4-bit layer on a GPU, or all on the CPU, got {sorted(devices)}")

    # --- loading ----------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        folder = None if not checkpoint_files else Path(checkpoint_files[0]).parent
        if folder is None or quantization_config(folder) is None:
            if folder is not None:
                check_dense(folder)
            self._await_dense(model)
            return
        self._checkpoint = checkpoint = open_checkpoint(folder)
        check_files(checkpoint, [Path(file).name for file in checkpoint_files or ()])
        renamed = Renaming(model)
        check_shapes(model, checkpoint, renamed)
        self._places = reserve(model, checkpoint, of_modules(checkpoint, renamed))
        check_whole(model, checkpoint, self._places, renamed)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | packed_names(checkpoint, self._places, renamed)
        not_missing = set(model._keys_to_ignore_on_load_missing or ())
        model._keys_to_ignore_on_load_missing = not_missing | unpacked_names(self._places)
        for _, place in self._unpacked():  # transformers minds the dtype of what it loads alone
            weight = model.get_parameter(place.weight_name)
            weight.data = weight.data.to(dtype_of(model, place.weight_name, weight))

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Leave out the rules of experts' dense parameters, which are not there: what their module's rule says holds
        for what stands in their place."""
        for name in [name for name in plan if name.endswith((f".{GATE_UP}", f".{DOWN}")) and "experts" in name]:
            experts = name.rpartition(".")[0].replace("*", r"\d+")
            if any(re.fullmatch(experts, n) for n, m in model.named_modules() if isinstance(m, W4Experts)):
                del plan[name]

    def _await_dense(self, model: PreTrainedModel) -> None:
        config = self.quantization_config
        wanted = None if config.format is None else of_words(config.format)[0]
        kept = {*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())}
        if not set(SKIP) <= set(config.skip) and not model.config.get_text_config().tie_word_embeddings:
            kept -= {name for name, m in model.named_modules() if m is model.get_output_embeddings()}
        for name, layer in layers_to_quantize(model, tuple(config.skip)).items():
            if name not in kept and not kept & set(name.split(".")):
                model.set_submodule(name, _AwaitedDense(layer, wanted or default_format(layer.in_features)))

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        owner, _, leaf = param_name.rpartition(".")
        if any(place.weight_name == param_name for _, place in self._unpacked()):
            return True
        return leaf == "weight" and isinstance(model.get_submodule(owner), _AwaitedDense)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes per element by which transformers plans a device_map: those of the packed weight."""
        owner, _, leaf = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        if isinstance(layer, AwaitedLinear) and leaf == ("weight" if isinstance(layer, _AwaitedDense) else "place"):
            return layer.nbytes / param.numel()
        return param.element_size()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        enable_peft()
        self._sharded = (getattr(model, "tp_size", None) or 1) > 1
        self._fill_fp8(model)
        self._fill_unpacked(model)
        for layer, local in self._weights(model):
            w = local.weight
            if self.quantization_config.activations is not None:
                w = w.repack(activations=self.quantization_config.activations)
            layer.fill(w)
            if local.bias is not None:
                layer.bias = nn.Parameter(local.bias, requires_grad=False)
            if local.pre_quant_scale is not None:
                layer.pre_quant_scale = local.pre_quant_scale
        named, found = self.quantization_config.format, settings(_own_layers(model))["format"]
        if self._checkpoint is not None and named not in (None, found):
            said = "%s: its layers stay in %s; the format %s of W4GemmConfig is for dense models"
            _log.warning(said, model.name_or_path, found, named)
        self._checkpoint, self._places = None, {}
        finish(model)
        describe(model)
        decode_by_graph(model)
        return model

    def _fill_fp8(self, model: PreTrainedModel) -> None:
        """Give the dense weights that the folder has in fp8 their numbers: transformers loads them without scales."""
        if not isinstance(self._checkpoint, QuantizedFolder) or not self._checkpoint.in_fp8:
            return
        renamed, parameters = Renaming(model), dict(model.named_parameters())
        for name in self._checkpoint.in_fp8:
            if (parameter := parameters.get(renamed(name))) is not None:
                fill(parameter, self._checkpoint.dense(name, parameter.dtype))

    def _fill_unpacked(self, model: PreTrainedModel) -> None:
        """Give layers that read a dense weight their numbers, which the folder has in 4 bits."""
        for name, place in self._unpacked():
            assert self._checkpoint is not None
            layer = model.get_submodule(place.layer)
            weight = layer.get_parameter("weight")
            fill(weight, unpacked(layer, self._checkpoint.weight(name, weight.device), weight.dtype))

    def _unpacked(self) -> Iterator[tuple[str, Place]]:
        return ((name, place) for name, places in self._places.items() for place in places if place.unpacked)

    def _weights(self, model: PreTrainedModel) -> Iterator[tuple[AwaitedLinear, Local]]:
        """Each layer that is awaited, with its weight, or this process's shard of it, on the layer's device; of experts
        also what transformers does not load."""
        for name, layer in list(model.named_modules()):
            if isinstance(layer, _AwaitedDense):
                if (w := layer.quantized) is None:
                    raise FormatError(f"{model.name_or_path}: no tensor for {name}.weight")
                wanted = layer.out_features, layer.in_features
                if (w.n, w.k) != wanted and not self._sharded:
                    came = f"tensor {name}.weight has shape {(w.n, w.k)}"
                    raise FormatError(f"{model.name_or_path}: {came}, its config wants {wanted}")
                yield layer, Local(w)
        for name, places in self._places.items():
            assert self._checkpoint is not None
            w = None
            for place in (place for place in places if not place.unpacked):
                layer = model.get_submodule(place.layer)
                assert isinstance(layer, AwaitedLinear)
                w = self._checkpoint.weight(name, layer.place.device) if w is None else w
                if isinstance(layer, AwaitedGrouped):
                    whole = Local(w, *(self._beside(name, layer, leaf) for leaf in ("bias", "pre_quant_scale")))
                    yield layer, self._local_experts(model, place.layer, whole).to(layer.place.device)
                else:
                    yield layer, Local(local_shard(model, place.layer, place.weight_of(w))).to(layer.place.device)

    def _beside(self, name: str, layer: AwaitedGrouped, leaf: str) -> torch.Tensor | None:
        """A dense tensor of a module of experts, or None if there is none or the layer has no place for it."""
        assert self._checkpoint is not None
        stored = f"{name}.{leaf}"
        if stored not in self._checkpoint.tensors or (leaf == "bias" and not layer.has_bias):
            return None
        return self._checkpoint.dense(stored, layer.dtype)

    @staticmethod
    def _local_experts(model: PreTrainedModel, name: str, whole: Local) -> Local:
        owner, _, product = name.rpartition(".")
        split = Split.of(model, owner)
        if split is not None and product == "down":
            add_up(model, model.get_submodule(owner))
        try:
            return local_experts(whole, split, product == "down")
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e

    # --- what transformers asks of a quantized model ----------------------------------------------------------------

    def is_serializable(self, **kwargs: Any) -> bool:
        """False for one shard of a model under tensor parallelism, which is not the whole model."""
        return not self._sharded

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, Any]]:
        if self.unsaved:
            raise ValueError(
                f"{self.unsaved[0]} of the model is its file's own, and a saved folder has no place for it: "
                "wanted a model whose config makes it"
            )
        config, now = self.quantization_config, settings(_own_layers(model))
        if (config.format, config.modules) != (now["format"], now["modules"]):
            raise ValueError(
                "the model's 4-bit layers are not those of its config: call "
                "w4gemm.integrations.transformers.describe(model), then save"
            )
        return None, {}

    @property
    def is_trainable(self) -> bool:
        """True: adapters beside the 4-bit layers can be trained, because gradients go through to x."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> nn.Module:
        return dequantize_layers(model, dtype or model.dtype)


def describe(model: PreTrainedModel) -> W4GemmQuantizer:
    """Let a model know of its W4Linear layers: its config names their formats, so that ``save_pretrained`` writes a
    folder that ``from_pretrained`` and :func:`load` read, and adapters may be trained beside them. Return the model's
    ``hf_quantizer``."""
    found = settings(_own_layers(model))
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, W4GemmQuantizer):
        quantizer = W4GemmQuantizer(W4GemmConfig())
    config = quantizer.quantization_config
    config.format, config.modules, config.activations = found["format"], found["modules"], None
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    model.config.quantization_config = config
    return quantizer


def refuse_to_save_undescribed(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` of a model whose layers were replaced ask for :func:`describe`. Its folder would not say
    that it holds 4-bit layers, and transformers would load it with random ones."""
    if not isinstance(getattr(model, "hf_quantizer", None), W4GemmQuantizer):
        model.hf_quantizer = W4GemmQuantizer(W4GemmConfig())


def _own_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    return ((name, layer.weight) for name, layer in model.named_modules() if isinstance(layer, W4Linear))
