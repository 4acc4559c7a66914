"""The layers of a dense folder's model that are quantized while transformers loads it: :class:`Rounding`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.modeling_utils import load_state_dict

from w4gemm.checkpoints.account import Account, Naming, Stored, folder_model
from w4gemm.checkpoints.dense import check_dense, default_format
from w4gemm.checkpoints.hugging_face import read_header
from w4gemm.checkpoints.numbers import WeightNumbers
from w4gemm.core.errors import FormatError
from w4gemm.integrations.transformers.awaited import AwaitedDense, AwaitedDenseExperts, put_experts
from w4gemm.integrations.transformers.config import W4GemmConfig
from w4gemm.integrations.transformers.layers import nothing_to_quantize, to_quantize
from w4gemm.integrations.transformers.sharding import Local, local_numbers, whole_tensors
from w4gemm.weights.file import parse_format_name
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rounding:
    """Replaces the layers and experts to quantize by awaited ones, once each tensor of the folder has its place.

    Each weight is rounded as it is loaded. One that the model ties to others, such as a head's to the embedding, is
    loaded and tied by transformers' rules and rounded then, so that the others stay dense.

    Args:
        files: those of the folder that transformers loads.
        rules: transformers' rules of names and merging for the model.

    Attributes:
        parameters: names of those that are rounded as they are loaded.

    Raises:
        FormatError: for a folder of packed weights, or one that does not fit the model.
        ValueError: if there is no layer to quantize.
    """

    def __init__(
        self, model: PreTrainedModel, config: W4GemmConfig, folder: Path, files: list[str], rules: list[Any]
    ) -> None:
        check_dense(folder)
        self._model, self._config = model, config
        account = _account(model, folder, files, rules)
        self._replace(set(account.new))
        tied = {*itertools.chain(*model.all_tied_weights_keys.items())}
        rounded = {*self._weights()} - tied
        self.parameters = {r.targets[0] for r in account.recipes if not rounded.isdisjoint(r.targets)}

    def _replace(self, new: set[str]) -> None:
        """Replace the layers to quantize, but those whose weights are ``new``."""
        model, config = self._model, self._config
        format = None if config.format is None else parse_format_name(config.format)[0]
        layers, experts = to_quantize(model, tuple(config.skip))
        layers = {name: layer for name, layer in layers.items() if f"{name}.weight" not in new}
        if not layers and not experts:
            raise nothing_to_quantize(model)
        for name, layer in layers.items():
            model.set_submodule(name, AwaitedDense(layer, format or default_format(layer.in_features)))
        for owner, products in experts.items():
            put_experts(model, owner, AwaitedDenseExperts(model.get_submodule(owner), model.config, products, format))

    def _weights(self) -> Iterator[str]:
        for name, layer in self._model.named_modules():
            if isinstance(layer, AwaitedDense):
                yield f"{name}.weight"
            elif isinstance(layer, AwaitedDenseExperts):
                yield from (f"{name}.{leaf}" for leaf in layer.products)

    def finish(self) -> None:
        """Fill the layers with what was rounded, once transformers has loaded and tied everything.

        Raises:
            FormatError: if a weight was not loaded.
            ValueError: for a tied weight that is not finite or too large, and for one that processes cannot share.
        """
        for name, layer in list(self._model.named_modules()):
            if isinstance(layer, AwaitedDenseExperts):
                layer.fill(self._config.activations)
            elif isinstance(layer, AwaitedDense):
                if layer.quantized is None:
                    layer.quantized = self._tied(name, layer)
                self._check_parts(name, layer, layer.quantized)
                layer.fill(Local(layer.quantized.to(layer.place.device)), self._config.activations)

    def _check_parts(self, name: str, layer: AwaitedDense, w: QuantizedWeight) -> None:
        """Raise ValueError unless this process's part of a layer is as large as each other's."""
        if layer.out_features % w.n or layer.in_features % w.k:
            raise ValueError(
                f"{name}: {layer.out_features} x {layer.in_features} does not split into equal parts for "
                f"{self._model.tp_size} processes; wanted other numbers, or its name in skip"
            )

    def _tied(self, name: str, layer: AwaitedDense) -> QuantizedWeight:
        """Return the rounded weight of a layer that is tied to others, or this process's part of it."""
        if layer.weight.is_meta:
            raise FormatError(f"{self._model.name_or_path}: no tensor for {name}.weight")
        (weight,) = whole_tensors({name: layer.weight.detach()}).values()
        try:
            w = quantize(weight, layer.format)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
        return local_numbers(self._model, name, WeightNumbers(w)).weight()


def _account(model: PreTrainedModel, folder: Path, files: list[str], rules: list[Any]) -> Account:
    """Return where the tensors of a dense folder go, which transformers loads."""
    stored: dict[str, Stored] = {}
    for file in files:
        if file.endswith(".safetensors"):
            stored |= {name: Stored(info.shape, info.dtype) for name, info in read_header(Path(file)).items()}
        else:
            tensors = load_state_dict(file, map_location="meta")
            stored |= {name: Stored(tuple(t.shape)) for name, t in tensors.items()}
    return Account(folder, model, Naming(model, rules), stored, folder_model=lambda: folder_model(folder))
