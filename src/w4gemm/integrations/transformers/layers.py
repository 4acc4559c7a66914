"""The linear layers of a model: counted, and quantized. ``dequantize.py`` has the way back."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.dense import (
    SKIP,
    checked_skip,
    default_format,
    has_forward_set,
    is_skipped,
    layers_to_quantize,
)
from w4gemm.checkpoints.model_experts import are_experts, dense_experts
from w4gemm.core.errors import require_bool, require_module, require_progress
from w4gemm.core.formats import WeightFormat
from w4gemm.core.words import listed, nearest
from w4gemm.integrations.transformers.dequantize import DenseExperts, Products
from w4gemm.integrations.transformers.replace import compute_weight, hand_over, names_of, replace

_log = logging.getLogger("w4gemm")
Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""
PROGRESS_ARGUMENTS = "two ints and a string"


@dataclass(frozen=True)
class Summary:
    """Which linear layers of a model are quantized."""

    formats: dict[str, int]
    """Number of quantized layers by format."""
    nbytes: int
    """Bytes of all packed weights."""
    dense: tuple[str, ...]
    """Names of the linear layers that stayed dense."""

    @property
    def quantized(self) -> int:
        """Number of quantized layers."""
        return sum(self.formats.values())

    def __str__(self) -> str:
        formats = ", ".join(f"{count} x {name}" for name, count in self.formats.items()) or "none"
        dense = f"; dense: {listed(self.dense)}" if self.dense else ""
        total = self.quantized + len(self.dense)
        return f"{self.quantized} of {total} linear layers quantized ({formats}, {self.nbytes / 2**20:.1f} MiB){dense}"


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model, by format and dense ones.

    Raises:
        TypeError: for what is no module.
    """
    require_module(model)
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    formats = Counter(str(m.format) for m in packed if not isinstance(m, W4Embedding))
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in packed), dense)


def nothing_to_quantize(model: nn.Module) -> ValueError:
    """Return the error of a model without a layer to quantize, which names GPT-2's and PyTorch's layers that are like
    linear ones, but whose weights the code around them reads."""
    others = Counter(type(m).__name__ for m in model.modules() if type(m).__name__ in ("Conv1D", "MultiheadAttention"))
    kept = "".join(f"; {count} {kind} stay dense, because code reads their weights" for kind, count in others.items())
    return ValueError(f"model: wanted one with dense linear layers to quantize, got {summarize(model)}{kept}")


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    search: bool = False,
    skip: tuple[str, ...] = SKIP,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by quantized ones, in place, one at a time. A layer with a forward of
    its own, set on it or by a subclass of torch.nn.Linear, stays dense, because a quantized one would not compute what
    that does. Hooks of a layer and its training mode are its successor's. A weight that PyTorch prunes or normalizes
    before each call is quantized as the next call would have it.

    Of a model that reads images or sounds too, the layers of the language model are meant. Experts of transformers'
    mixtures, and those that :func:`dequantize_layers` made, become :class:`w4gemm.W4Experts`. Experts stay dense, with
    a warning, if it does not compute them, if a forward is set on them, or if the model is split over processes.

    Args:
        format: see :func:`load`.
        search: as for :func:`w4gemm.quantize`.
        skip: names of layers and experts that stay dense, or of modules that they are in: whole ("model.layers.0"),
            last parts ("down_proj", "mlp.down_proj"), or regular expressions of these. Each has to be one of some layer
            or experts, except "lm_head", which is a language model's head, whatever its name. Experts stay dense as a
            whole if it names them ("experts") or a product ("down_proj"). Without "lm_head" a head is quantized too;
            if it is tied to the embedding, that stays dense, and the two are tied no more.
        progress: called as ``progress(layers done, layers, "quantizing")``.

    Returns:
        The model itself.

    Raises:
        TypeError, ValueError: for an argument that is none, for a name in ``skip`` that nothing has,
            for a model without a layer to quantize or with PEFT's adapters, and for a weight that is not finite or too
            large, naming its layer; layers before it are quantized then.
    """
    names, skip = names_of(model), checked_skip(skip)
    require_bool("search", search)
    require_progress(progress, PROGRESS_ARGUMENTS)
    _refuse_adapters(model)
    one_format = None if format is None else WeightFormat.of(format)
    layers, experts = to_quantize(model, skip)
    total = len(layers) + len(experts)
    if not total:
        raise nothing_to_quantize(model)
    for done, name in enumerate([*layers], 1):  # nothing else holds a layer then, so that its memory is free
        layer = layers.pop(name)
        compute_weight(layer)
        try:
            made = W4Linear.from_linear(layer, one_format or default_format(layer.in_features), search)
        except (TypeError, ValueError) as e:
            raise type(e)(f"{name}: {e}") from e
        replace(model, names.pop(layer), layer, made)
        if progress is not None:
            progress(done, total, "quantizing")
    for done, (name, products) in enumerate(experts.items(), total - len(experts) + 1):
        _quantize_experts(model, names.pop(model.get_submodule(name)), products, one_format, search)
        if progress is not None:
            progress(done, total, "quantizing")
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else PyTorch's fused operator reads the weights of its layers
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # of tokens behind a mask of padding
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from w4gemm.integrations.transformers.quantizer import refuse_to_save_undescribed

        refuse_to_save_undescribed(model)
    return model


def _quantize_experts(
    model: nn.Module, places: list[str], products: Products, format: WeightFormat | None, search: bool
) -> None:
    """Replace dense experts, by all of their names, by quantized ones."""
    from w4gemm.integrations.transformers.awaited import AwaitedDenseExperts, finish, put_experts

    experts = model.get_submodule(places[0])
    if isinstance(experts, DenseExperts):
        replace(model, places, experts, experts.quantized(format, search))
        return
    made = AwaitedDenseExperts(experts, getattr(model, "config", None), products, format)
    for leaf in products:
        try:
            made.take(leaf, experts.get_parameter(leaf).detach(), search)
        except ValueError as e:
            raise ValueError(f"{places[0]}.{leaf}: {e}") from e
    made.fill(None)
    hand_over(experts, made)
    for place in places:
        put_experts(model, place, made)
    finish(made)


def to_quantize(model: nn.Module, skip: tuple[str, ...]) -> tuple[dict[str, nn.Linear], dict[str, Products]]:
    """Return the layers and experts of a dense model that are to be quantized. Say which experts stay dense, although
    ``skip`` does not name them.

    Raises:
        ValueError: for a name in ``skip`` that neither a linear layer nor experts have, unless it is one of
            :data:`SKIP`.
    """
    computed: dict[str, Products] = {**dense_experts(model)}
    computed |= {name: {} for name, module in model.named_modules() if isinstance(module, DenseExperts)}
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts: dict[str, Products] = {}
    stay = []
    for name, module in model.named_modules():
        if name not in computed and not are_experts(module):
            continue
        own = {name, *(f"{name}.{leaf}" for leaf in module._parameters)}
        names |= own
        if any(is_skipped(one, skip) for one in own):
            continue
        if name in computed and not has_forward_set(module):
            experts[name] = computed[name]
        else:
            stay.append(name)
    if wrong := [one for one in skip if one not in SKIP and not any(is_skipped(name, [one]) for name in names)]:
        parts = {name.rpartition(".")[2] for name in names}
        last = wrong[0].removesuffix(".weight").rpartition(".")[2]
        close = nearest(last, parts) or (f"; there are {listed(sorted(parts))}" if parts else "")
        raise ValueError(f"skip: wanted names of the model's linear layers and experts, got {wrong[0]!r}{close}")
    if stay:
        said = "%s: experts stay dense: w4gemm has no layer that computes the same, or they are split: %s"
        _log.warning(said, getattr(model, "name_or_path", "") or type(model).__name__, listed(stay))
    return layers_to_quantize(model, skip), experts


def _refuse_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model that PEFT has wrapped: its adapters are linear layers too, and would be frozen."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            raise ValueError(
                f"model: wanted one without adapters, got PEFT's at {name!r}; quantize first and add adapters then, "
                "or merge them into their layers before (merge_and_unload)"
            )
