"""``save_pretrained`` of a model with quantized layers: it writes compressed-tensors if that holds every bit, else
w4gemm's own format, as for every model with quantized experts, because transformers renames what it splits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.base import Module, Pack, Pretrained
from w4gemm.checkpoints.compressed_tensors_writer import CompressedTensorsWriter, in_files, transformers_refusal
from w4gemm.checkpoints.model_experts import activation_of, dense_experts
from w4gemm.checkpoints.numbers import Numbers, WeightNumbers
from w4gemm.checkpoints.quantized_folder import alarmed
from w4gemm.checkpoints.w4gemm import OwnPacking, alarm, alarm_name
from w4gemm.checkpoints.writing import refusal
from w4gemm.core.activation import is_gated
from w4gemm.integrations.transformers.embeddings import Packed
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("w4gemm")


class _LoadedModel:
    """A model without quantized experts as a :class:`w4gemm.checkpoints.Checkpoint`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.path = Path(model.name_or_path)
        modules = model.named_modules(remove_duplicate=False)  # what has several names is saved under each
        self._layers = {name: layer for name, layer in modules if isinstance(layer, W4Linear)}
        self.modules = {name: _module(layer) for name, layer in self._layers.items()}
        state, embeddings = model.state_dict(), {n: m for n, m in model.named_modules() if isinstance(m, Packed)}
        packed = {f"{name}.{leaf}" for name in (*self.modules, *embeddings) for leaf in OwnPacking.marks}
        self.state = {name: t for name, t in state.items() if name not in packed}
        # engines read dense ones alone
        self.state |= {f"{name}.weight": m.weight.dequantize(m.dtype) for name, m in embeddings.items()}
        self.tensors = {name: tuple(t.shape) for name, t in self.state.items()}

    def stored_type(self, name: str) -> str:
        return ""

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        w = self._layers[name].weight
        return pack(WeightNumbers(w.repack("canonical")), w.activations)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.state[name].to(dtype)

    def pretrained(self) -> Pretrained:
        return Pretrained(self.path)


def _module(layer: W4Linear) -> Module:
    w, scaled = layer.weight, layer.pre_quant_scale is not None
    return Module(w.n, w.k, w.format, layer.bias is not None, activations=w.activations, pre_quant_scale=scaled)


def compressed_tensors(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return a model's state dict and quantization_config as compressed-tensors has them; None if that does not hold
    every bit, of which the log then has the reason."""
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, PackedModule) and not isinstance(layer, Packed)
    ]
    if not layers:
        return None
    why = next((f"{name}: it has experts" for name, layer in layers if not isinstance(layer, W4Linear)), "")
    why = why or next((f"{name}: an adapter is beside it" for name, _ in layers if ".base_layer" in name), "")
    why = why or next((f"{name}: it is in act-order" for name, layer in layers if layer.weight.perm is not None), "")
    writer, checkpoint = CompressedTensorsWriter(), _LoadedModel(model)
    if why := why or refusal(checkpoint, writer).partition("; --to")[0]:
        _log.warning("save_pretrained writes w4gemm's own format, which w4gemm alone reads: %s", why)
        return None
    unread = transformers_refusal(checkpoint)
    readers = f"engines read too; transformers reads it with w4gemm alone: without, {unread}"
    _log.info(
        "save_pretrained writes compressed-tensors, which %s",
        readers if unread else "transformers and engines read too",
    )
    state = dict(checkpoint.state)
    for name in checkpoint.modules:
        state |= writer.tensors(checkpoint, name, checkpoint.weight(name))
    return state, writer.config(in_files(checkpoint, outline_of(model)))


def outline_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a dense model of the same config, without numbers: of its parameters' names, also in files."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        outline = type(model)(config)
    # a model saves by the rules that its own files needed: a head that they tie has the model's name then
    if (rules := getattr(model, "_weight_conversions", None)) is not None:
        outline._weight_conversions = rules
    return outline


def refuse_what_no_folder_holds(model: PreTrainedModel) -> None:
    """Raise ValueError for what was set on a quantized layer and has no place in a saved folder: the model of its
    config would compute other numbers."""
    layers = dict(model.named_modules())
    for name, layer in layers.items():
        if isinstance(layer, W4Linear) and layer.activation is not None:
            raise _has_no_place(f"{name}.activation", None, layer.activation)
        if isinstance(layer, W4GroupedLinear) and layer.expert_scale is not None:
            raise _has_no_place(f"{name}.expert_scale", None, tuple(layer.expert_scale.shape))
    if not any(isinstance(layer, PackedModule) for layer in layers.values()):
        return
    outline = outline_of(model)
    for name, own in outline.named_modules():
        if isinstance(layer := layers.get(name), W4Linear):
            bias = getattr(own, "bias", None)
            _check_bias(f"{name}.bias", None if bias is None else tuple(bias.shape), layer.bias)
    for name, products in dense_experts(outline).items():
        if not isinstance(experts := layers.get(name), W4Experts):
            continue
        if (activation := activation_of(outline.get_submodule(name))) != experts.activation:
            raise _has_no_place(f"{name}.activation", activation, experts.activation)
        for leaf, product in zip(("gate_up", "down"), products.values(), strict=True):
            shape = product.sizes[:2] if product.has_bias else None
            _check_bias(f"{name}.{leaf}.bias", shape, getattr(experts, leaf).bias)


def _check_bias(name: str, shape: tuple[int, ...] | None, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless a layer has a bias if its config's model has one, of this shape. One of zeros needs no
    place: it is left out when the folder is loaded."""
    if (shape is None) != (bias is None) and (bias is None or bias.any()):
        raise _has_no_place(name, shape, None if bias is None else tuple(bias.shape))


def _has_no_place(setting: str, expected: object, got: object) -> ValueError:
    return ValueError(f"{setting}: wanted {expected!r}, since a saved folder has no place for another, got {got!r}")


def only_tied_here(model: PreTrainedModel) -> set[str]:
    """Return the parameters that a model ties, but its config does not. transformers saves one of those that share
    their memory, and the model of the config would find no tensor for the others. A quantized head alone makes the
    config tie nothing: neither BERT's bias nor the embeddings of BART's encoder."""
    return model.all_tied_weights_keys.keys() - model.get_expanded_tied_weights_keys(all_submodels=True).keys()


def with_own_memory(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with memory of their own for the parameters of :func:`only_tied_here`."""
    return state | {name: state[name].clone() for name in only_tied_here(model) if name in state}


def refuse_to_fuse(model: PreTrainedModel) -> None:
    """Raise ValueError if transformers would save several quantized layers as one, as files of Sarvam-MoE have queries,
    keys and values: rows of codes can be one tensor, but not what else a layer is saved with."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, W4Linear)]
    try:
        saved = revert_weight_conversion(model, {f"{name}.codes": alarm() for name in names})
    except Exception as e:  # as in alarm_of
        _log.debug("%s: %s", model.name_or_path, e)
        return
    if fused := next((name for name, codes in saved.items() if codes.numel() > 1), None):
        raise ValueError(
            f"transformers saves several quantized layers as {fused.removesuffix('.codes')}, which w4gemm cannot; "
            "wanted another model, or `w4gemm convert` of the dense folder"
        )


def alarm_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a tensor that makes transformers refuse the saved folder without w4gemm. It is named for the first linear
    layer, or else the first experts, whose weight transformers saves under one other name at most, which of experts has
    to tell them."""
    owners = [name.removesuffix(".codes") for name in model.state_dict() if name.endswith(".codes")]
    linear = {name for name, layer in model.named_modules() if isinstance(layer, (W4Linear, W4Embedding))}
    for owner in sorted(owners, key=lambda owner: owner not in linear):
        experts, named = owner not in linear, owner
        if experts and not is_gated(str(model.get_submodule(owner.rpartition(".")[0]).activation)):
            named = owner.replace(".gate_up", ".up")
        tensors = {alarm_name(named, experts): alarm()}
        try:
            saved = [*revert_weight_conversion(model, dict(tensors))]
            (codes,) = revert_weight_conversion(model, {f"{owner}.codes": alarm()})
            if len(saved) == 1 and (not experts or codes.removesuffix(".codes") in alarmed(saved[0])):
                return tensors
        except Exception as e:  # whatever an operation of transformers raises for a tensor of one number
            _log.debug("%s: %s", owner, e)
    return {}
