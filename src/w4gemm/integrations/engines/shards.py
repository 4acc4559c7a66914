"""What engines share of merged linear layers whose shards have different formats: :class:`Shards`.

An engine merges q, k and v, or gate and up, into one layer with one format. A model of GPTQ's ``dynamic``, of several
config groups, or in part dense, may have another one for each of them. Here each shard gets the method and the kernel
that its own name has in the quantization config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

OF_QKV = {"q": 0, "k": 1, "v": 2}
"""Numbers of the shards of a merged layer, by the names that engines' loaders give them."""


def shard_names(merged: Mapping[str, Iterable[str]], name: str) -> list[str]:
    """Return the names of the layers that were merged into the layer ``name``; none if it is no such layer.

    Args:
        merged: last parts of names, such as ``{"gate_up_proj": ["gate_proj", "up_proj"]}``.
    """
    last = name.rpartition(".")[2]
    parts = list(merged.get(last) or ())
    return [name.removesuffix(last) + part for part in parts] if len(parts) > 1 else []


def settings_differ(config: Any, layer: torch.nn.Module, names: list[str], override: Callable[..., Any]) -> bool:
    """Return whether a config has different settings for a merged layer and its shards.

    Args:
        names: of the merged layer and its shards; a config with schemes takes that of one shard for the merged one.
        override: the engine's ``get_dynamic_override``.
    """
    if getattr(config, "dynamic", None):
        settings = [override(config, name) for name in names]
    elif hasattr(config, "get_scheme_dict"):
        settings = [config.get_scheme_dict(layer, name) for name in names[1:]]
    else:
        return False
    return any(each != settings[0] for each in settings)


class Shards:
    """Method of a merged layer whose shards are layers of the engine, each with the method of its own name.

    The merged layer keeps an empty parameter of each name that a shard has, whose loader gives a tensor to its shard.

    Args:
        config: the engine's quantization config.
        names: of the shards.
    """

    column_parallel: ClassVar[Callable[..., Any]]
    """The engine's class of the shards."""

    def __init__(self, config: Any, names: list[str]) -> None:
        self.config, self.names = config, names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the shards modules of the merged layer, and give it the empty parameters."""
        options = {"params_dtype": params_dtype, "quant_config": self.config, **self.division(layer)}
        shards = [
            self.column_parallel(input_size, n, False, prefix=name, **options)
            for name, n in zip(self.names, self.output_sizes(layer, output_partition_sizes), strict=True)
        ]
        layer.w4gemm_shards = torch.nn.ModuleList(shards)
        for name in dict.fromkeys(name for shard in shards for name in shard._parameters if name != "bias"):
            place: Any = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            place.weight_loader = self.loader(layer, name)
            layer.register_parameter(name, place)

    def division(self, layer: Any) -> dict[str, Any]:
        """Return the arguments of a shard by which it is divided among GPUs as the merged layer is."""
        raise NotImplementedError

    def output_sizes(self, layer: Any, on_this_gpu: list[int]) -> list[int]:
        """Return the features of each shard on all GPUs together.

        Raises:
            ValueError: if several GPUs have the same part of a shard, or the parts are not those of the names.
        """
        replicas = getattr(layer, "num_kv_head_replicas", 1)
        if len(on_this_gpu) != len(self.names) or replicas > 1:
            raise ValueError(
                f"{' and '.join(self.names)} have different formats, and {len(on_this_gpu)} parts of which "
                f"{replicas} GPUs have the same; wanted {len(self.names)} that each GPU has alone"
            )
        gpus = sum(layer.output_sizes) // sum(on_this_gpu)
        return [n * gpus for n in on_this_gpu]

    def loader(self, layer: Any, name: str) -> Callable[..., Any]:
        """Return a loader that gives tensors of one name to the shards of a layer."""

        def load_shard(parameter: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | str | None = None) -> Any:
            if not isinstance(shard_id, (int, str)):
                raise ValueError(f"{' and '.join(self.names)}: wanted a {name} of each, got one of {shard_id}")
            index = OF_QKV[shard_id] if isinstance(shard_id, str) else shard_id
            own = getattr(layer.w4gemm_shards[index], name, None)
            if own is None:
                raise ValueError(f"{self.names[index]}.{name}: its format has no such tensor")
            return own.weight_loader(own, loaded_weight)

        return load_shard

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: the engine asks the shards' own methods."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the products of x with all shards, side by side."""
        shards = layer.w4gemm_shards
        sizes = [shard.output_size_per_partition for shard in shards]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = zip(shards, biases, strict=True)
        return torch.cat([shard.quant_method.apply(shard, x, of_shard) for shard, of_shard in parts], -1)
