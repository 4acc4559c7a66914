"""transformers' ``from_pretrained`` with quantized layers of w4gemm: :class:`W4GemmQuantizer`.

transformers makes the model on the meta device, loads the dense tensors, and moves and shards what it loads. The
quantizer reserves the places of the quantized layers before, and fills them after, from the checkpoint's own reader; so
a weight is taken over losslessly, whatever its packing, and split into lossless shards. A dense folder's weights come
through transformers, and are quantized one at a time on the device that they are loaded to.

Importing this file registers it for the method "w4gemm". transformers 5.17 to 5.24 are tested.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantizer

from w4gemm.api.experts import W4Experts
from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule, check_dtype
from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.account import folder_model
from w4gemm.checkpoints.dense import SKIP, is_skipped
from w4gemm.checkpoints.experts import DOWN, GATE_UP, UP
from w4gemm.checkpoints.hugging_face import (
    check_index,
    check_layers,
    making,
    part_tied,
    quantization_config,
)
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.checkpoints.w4gemm import METHOD, settings
from w4gemm.core.errors import require_pretrained
from w4gemm.core.problem import Device
from w4gemm.core.words import listed
from w4gemm.integrations.decoder import decode_by_graph
from w4gemm.integrations.transformers.awaited import (
    AwaitedDense,
    AwaitedDenseExperts,
    AwaitedLinear,
    finish,
)
from w4gemm.integrations.transformers.config import W4GemmConfig
from w4gemm.integrations.transformers.dequantize import DenseExperts, dequantize_layers
from w4gemm.integrations.transformers.embeddings import Packed, tied_to_heads
from w4gemm.integrations.transformers.places import Placement, dtype_of, untie
from w4gemm.integrations.transformers.rounding import Rounding
from w4gemm.integrations.transformers.saving import (
    alarm_of,
    compressed_tensors,
    only_tied_here,
    refuse_to_fuse,
    refuse_what_no_folder_holds,
    with_own_memory,
)
from w4gemm.integrations.transformers.sharding import fill, whole_tensors
from w4gemm.integrations.wrapping import wrap
from w4gemm.weights.weight import QuantizedWeight

_log = logging.getLogger("w4gemm")


class _Quantize(ConversionOps):
    """Rounds one dense weight, on the device that it was loaded to, and leaves out what the quantizer fills."""

    def __init__(self, filled_later: Collection[str]) -> None:
        self._filled_later = filled_later

    def convert(self, input_dict: dict[str, Any], **facts: Any) -> dict[str, torch.Tensor]:
        others = {}
        for name, loaded in input_dict.items():
            owner, _, leaf = name.rpartition(".")
            layer = facts["model"].get_submodule(owner)
            tensor = loaded[0] if isinstance(loaded, list) else loaded
            if isinstance(layer, (AwaitedDense, AwaitedDenseExperts)) and leaf in ("weight", GATE_UP, UP, DOWN):
                layer.take(leaf, tensor)
                facts["missing_keys"].discard(name)
            elif name not in self._filled_later:
                others[name] = tensor
        return others


class _Hidden(WeightRenaming):
    """A rule by which transformers does not find tensors that are merged with some that it cannot read."""

    __slots__ = ("names",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("w4gemm", "w4gemm")
        self.names = names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return ("w4gemm", "w4gemm") if source_key in self.names else (source_key, None)


@register_quantizer(METHOD)
class W4GemmQuantizer(HfQuantizer):
    """Lets transformers load, train beside, and save models with :class:`w4gemm.W4Linear` layers."""

    quantization_config: W4GemmConfig

    def __init__(self, quantization_config: W4GemmConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # transformers loads nothing but dense tensors, in both cases: in the model's dtype, whatever their names were
        self.pre_quantized = False
        self._model: PreTrainedModel | None = None
        """The model that transformers has made, until its layers are replaced."""
        self._files: list[str] = []
        self._device = torch.device("cpu")
        """Where the model is to run."""
        self._alone = True
        """True if the model is to run in one process on one device."""
        self._placement: Placement | None = None
        self._rounding: Rounding | None = None
        self._rounded: set[str] = set()
        self._ignored: tuple[Any, Any] = (None, None)
        self._sharded = False
        self.unsaved: tuple[str, ...] = ()
        """Buffers of the loaded model that no folder has a place for, so that it cannot be saved."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = {str(d) for d in device_map.values()} if isinstance(device_map, dict) else set()
        if "meta" in devices:
            raise ValueError(f"device_map: wanted devices that hold numbers, such as cpu, got {sorted(devices)}")
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            came = sorted(devices)
            raise ValueError(f"device_map: wanted every quantized layer on a GPU, or all on the CPU, got {came}")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        check_dtype(dtype)
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        # transformers calls this with the config before it reads the index and makes the layers, and nothing else
        check_layers(config.to_dict(), "config")
        check_index(Path(config.name_or_path))
        return config

    # --- loading ----------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError(
                "state_dict: wanted None beside a W4GemmConfig, since each tensor's place is checked by the files of a "
                "folder; load the state dict into a dense model, then call quantize_layers"
            )
        self._model, self._files, self._device = model, checkpoint_files, _device_of(device_map)
        self._alone = _on_one_device(device_map) and not (dist.is_initialized() and dist.get_world_size() > 1)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Give the tensors their places, now that transformers' rules of names are known with those of
        ``key_mapping``, and let it find none of those that it cannot read."""
        if (made := self._model) is None:
            return super().update_weight_conversions(weight_conversions, *model)
        self._model = None
        self._reserve(made, Path(self._files[0]).parent, weight_conversions)
        if hasattr(HfQuantizer, "update_parallel_plan"):  # not in transformers 5.17
            for plan in (made.tp_plan, made.ep_plan):
                self.update_parallel_plan(made, plan)
        recipes = self._placement.made if self._placement is not None else []
        hidden = {name for recipe in recipes if recipe.converter is not None for name in recipe.names}
        return super().update_weight_conversions([_Hidden(hidden), *weight_conversions], *model)

    def _reserve(self, model: PreTrainedModel, folder: Path, rules: list[Any]) -> None:
        """Replace the layers whose weights are to come, once each tensor of the folder has its place."""
        if quantization_config(folder) is None:
            self._rounding = Rounding(model, self.quantization_config, folder, self._files, rules)
            self._rounded = self._rounding.parameters
            return
        checkpoint = open_checkpoint(folder)
        check_files(checkpoint, [Path(file).name for file in self._files])
        self._placement = placement = Placement(
            model,
            checkpoint,
            Device.of(self._device),
            rules,
            lambda: folder_model(folder),
            fp8=self.quantization_config.activations == "fp8",
            embeddings=self._alone,
        )
        placement.log()
        self._rounded = {target for recipe in placement.made for target in recipe.targets}
        # the account is whole: what transformers does not know is packed, a scale, or left out for a reason
        self._ignored = model._keys_to_ignore_on_load_unexpected, model._keys_to_ignore_on_load_missing
        not_missing = {f"^{re.escape(name)}$" for name in self._rounded}
        model._keys_to_ignore_on_load_unexpected = {""}
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *not_missing}
        for name in self._rounded:  # transformers minds the dtype of what it loads alone
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype_of(model, name, parameter))

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Leave out the rules of experts' dense parameters, which are not there: what their module's rule says holds
        for what stands in their place."""
        for name in [name for name in plan if name.rpartition(".")[2] in (GATE_UP, UP, DOWN) and "experts" in name]:
            experts = name.rpartition(".")[0].replace("*", r"\d+")
            if any(re.fullmatch(experts, n) for n, m in model.named_modules() if isinstance(m, W4Experts)):
                del plan[name]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._rounded

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._rounded if self._placement is not None else ())

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes of the packed weight per element of ``param``, by which transformers plans a device_map."""
        owner, _, leaf = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        if isinstance(layer, AwaitedDenseExperts) and leaf in layer.products:
            return layer.awaited(leaf).nbytes / param.numel()
        if isinstance(layer, AwaitedLinear) and leaf == ("weight" if isinstance(layer, AwaitedDense) else "place"):
            experts = model.get_submodule(owner.rpartition(".")[0])
            return 1 if isinstance(experts, AwaitedDenseExperts) else layer.nbytes / param.numel()
        return param.element_size()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._sharded = (getattr(model, "tp_size", None) or 1) > 1
        activations, placement = self.quantization_config.activations, self._placement
        if self._rounding is not None:
            self._rounding.finish()
        if placement is not None:
            for recipe in placement.filled_here:  # dense parameters that the folder has packed, or in fp8
                device = model.get_parameter_or_buffer(recipe.targets[0]).device
                for name, value in placement.values(recipe, device).items():
                    fill(model.get_parameter_or_buffer(name), value)
            for name in placement.packed:
                placement.fill(name, None, activations)
            model._keys_to_ignore_on_load_unexpected, model._keys_to_ignore_on_load_missing = self._ignored
            asked, own = self.quantization_config.format, settings(_own_layers(model))["format"]
            if asked not in (None, own):
                said = "%s: its layers stay in %s; the format %s of W4GemmConfig is for dense models"
                _log.warning(said, model.name_or_path, own, asked)
            skip, packed = {*self.quantization_config.skip} - {*SKIP}, [*_packed_names(model)]
            if without_effect := sorted(one for one in skip if any(is_skipped(name, [one]) for name in packed)):
                said = "%s: %s stay as the folder has them; skip of W4GemmConfig is for dense models"
                _log.warning(said, model.name_or_path, listed(without_effect))
        self._placement = self._rounding = None
        finish(model)
        describe(model)
        decode_by_graph(model)
        return model

    # --- what transformers asks of a quantized model ----------------------------------------------------------------

    def is_serializable(self, **kwargs: Any) -> bool:
        """False for one shard of a model under tensor parallelism, which is not the whole model."""
        return not self._sharded

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.unsaved:
            raise ValueError(
                f"{self.unsaved[0]} of the model is its file's own, and a saved folder has no place for it: "
                "wanted a model whose config makes it"
            )
        if _has_dense_experts(model):
            raise ValueError(
                "the model has experts that dequantize_layers made, which no folder has a place for (Llama 4's, or "
                "split ones): save the model with its quantized experts"
            )
        refuse_what_no_folder_holds(model)
        config, now = self.quantization_config, settings(_own_layers(model))
        config.tied = tied_to_heads(model)
        if (config.format, config.modules) != (now["format"], now["modules"]):
            raise ValueError(
                "the model's quantized layers are not those of its config: call "
                "w4gemm.integrations.transformers.describe(model), then save"
            )
        refuse_to_fuse(model)
        packed = compressed_tensors(model)
        config.stored = None if packed is None else packed[1]
        state = model.state_dict() | alarm_of(model) if packed is None else packed[0]
        return with_own_memory(model, whole_tensors(state)), {}

    @property
    def is_trainable(self) -> bool:
        """True: adapters beside the quantized layers can be trained, because gradients go through to x."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> nn.Module:
        return dequantize_layers(model, dtype or model.dtype)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> nn.Module:
        super().dequantize(model, dtype or model.dtype)  # which a saved model's config says by a name
        for name in only_tied_here(model):  # a dense model is saved by transformers itself
            part_tied(model, name)
        if _has_dense_experts(model):
            describe(model)  # for transformers has removed this quantizer, which refuses to save them
        return model


def _device_of(device_map: Any) -> torch.device:
    """Return where the packed layers of a device_map are to run: on a GPU, or all on the CPU. By a name such as "auto"
    transformers fills GPUs first."""
    if device_map is None:
        return torch.device("cpu")
    if not isinstance(device_map, dict):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first = next(iter(device_map.values()), "cpu")
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def _on_one_device(device_map: Any) -> bool:
    """True if a device_map, or transformers by its name, puts all of the model on one device."""
    if isinstance(device_map, dict):
        return len({str(device) for device in device_map.values()}) == 1
    return device_map is None or torch.cuda.device_count() < 2


def check_files(checkpoint: Checkpoint, chosen: Sequence[str]) -> None:
    """Raise ValueError if transformers chose other files for the dense tensors than the packed ones are read from: a
    variant's files would make one model of two."""
    assert isinstance(checkpoint, QuantizedFolder)
    if other := sorted(set(chosen) ^ checkpoint.files):
        raise ValueError(
            f"variant, use_safetensors: wanted neither, because packed tensors of {checkpoint.path} are read from "
            f"{min(checkpoint.files)}; got files that differ by {listed(other)}; a variant in a folder of its own, "
            "under the usual names, can be loaded"
        )


def describe(model: PreTrainedModel) -> W4GemmQuantizer:
    """Let a model know of its W4Linear layers and experts: its config names their formats, so that ``save_pretrained``
    writes a folder that ``from_pretrained`` and :func:`load` read, and adapters may be trained beside them. A model
    without any, as :func:`dequantize_layers` leaves it, is saved as a dense one. Return the model's ``hf_quantizer``.

    Raises:
        TypeError: for what is no model of transformers.
    """
    require_pretrained(model)
    layers = dict(_own_layers(model))
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, W4GemmQuantizer):
        quantizer = W4GemmQuantizer(W4GemmConfig())
    config, own = quantizer.quantization_config, settings(layers.items())
    config.format, config.modules, config.activations = own["format"], own["modules"], None
    _untie_packed(model)
    model.hf_quantizer, model.is_quantized = quantizer, bool(layers)
    if layers:
        model.quantization_method, model.config.quantization_config = METHOD, config
    else:
        model.config.__dict__.pop("quantization_config", None)
    return quantizer


def refuse_to_save_undescribed(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` of a model whose layers were replaced ask for :func:`describe`. Its folder would not say
    that it holds quantized layers, and transformers would load it with random ones."""
    if not isinstance(getattr(model, "hf_quantizer", None), W4GemmQuantizer):
        model.hf_quantizer = W4GemmQuantizer(W4GemmConfig())
    _untie_packed(model)


def _untie_packed(model: PreTrainedModel) -> None:
    """Let a quantized head be another weight than the embedding that it was, for ``tie_weights`` and saved folders."""
    packed = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, W4Linear)}
    untie(model, [t for t, source in model.all_tied_weights_keys.items() if {t, source} & packed])


def _resize_token_embeddings(
    own: Callable[..., nn.Embedding],
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> nn.Embedding:
    """Refuse to resize a quantized head, before the embedding has its new size."""
    embedding = model.get_input_embeddings()
    if isinstance(model.get_output_embeddings(), W4Linear) or isinstance(embedding, Packed):
        rows = embedding.weight.shape[0]
        tokens = rows if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            tokens += -tokens % pad_to_multiple_of
        if tokens == rows:
            return embedding
        raise ValueError(
            f"new_num_tokens: wanted {rows}, because a quantized head or embedding cannot get other rows, got "
            f"{tokens}; resize before the model is quantized, or first call dequantize_embedding, and put a "
            "torch.nn.Linear with the numbers of weight.dequantize() in the head's place (set_output_embeddings)"
        )
    return own(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)


wrap(PreTrainedModel, "resize_token_embeddings", _resize_token_embeddings)


@contextlib.contextmanager
def _default_dtype(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Have one thread at a time make a model under a default dtype of its own, because that is PyTorch's for all."""
    with making, own(*args, **kwargs):
        yield


wrap(modeling_utils, "local_torch_dtype", _default_dtype)


def _has_dense_experts(model: nn.Module) -> bool:
    return any(isinstance(module, DenseExperts) for module in model.modules())


def _packed_names(model: nn.Module) -> Iterator[str]:
    """Iterate over the names of a model's quantized layers and experts."""
    return (name for name, module in model.named_modules() if isinstance(module, (PackedModule, W4Experts)))


def _own_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    return ((name, layer.weight) for name, layer in model.named_modules() if isinstance(layer, PackedModule))
