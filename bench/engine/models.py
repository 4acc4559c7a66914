"""Models to serve: config.json as their publishers have it, and the tensors of a layer. No weights.

Every number of a layer is read from the config, so that :func:`tiny` gives the same model in small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.engine.modules import Matrix, Module, layer_modules, outer_modules


@dataclass(frozen=True)
class Model:
    """A model of a published shape."""

    name: str
    config: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def own_format(self) -> str:
        """The one format that a model's maker publishes it in, which no other model has; empty if there is none."""
        return {"gpt_oss": "mxfp4", "deepseek_v4": "deepseek-v4"}.get(self.config["model_type"], "")

    @property
    def prefix(self) -> str:
        """What names of decoder layers begin with."""
        return "layers." if self.config["model_type"] == "deepseek_v4" else "model.layers."

    @property
    def experts(self) -> bool:
        """True for a mixture of experts."""
        return any(key in self.config for key in ("num_experts", "num_local_experts", "n_routed_experts"))

    @property
    def quantized_matrices(self) -> bool:
        """True if linear layers outside the experts are quantized as well."""
        matrices = (module for module in self.layer(0) if isinstance(module, Matrix))
        return any(m.quantized and ".experts." not in m.name for m in matrices)

    def outer(self) -> Iterator[Module]:
        """Modules outside the layers, by their whole names."""
        return outer_modules(self.config)

    def layer(self, index: int) -> Iterator[Module]:
        """Modules of layer ``index``, by their names within it."""
        return layer_modules(self.config, index)


def _read() -> tuple[dict[str, Model], dict[str, Any]]:
    """Return the models of published.json by name, those with "of" with another one's other sizes, and the sizes of a
    model in small."""
    models: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    common, small = models.pop("common"), models.pop("tiny")
    whole = {name: {**common, **models.get(own.pop("of", ""), {}), **own} for name, own in models.items()}
    return {name: Model(name, config) for name, config in whole.items()}, small


MODELS, _TINY = _read()
"""config.json of published models, as far as engines read it; prompts of 8k tokens and their answers have room, without
scaling of RoPE, which costs no time. deepseek-v3-5-layers: one dense layer and four of the mixture's 58, so that one
GPU holds it. kimi-k3-quarter and deepseek-v4-flash-quarter: 224 of 896 and 64 of 256 experts, as one of four GPUs has
them. glm-5-dense-attention: GLM-5's sizes in DeepSeek-V3's model, without the index of its sparse attention, and with
one dense layer, not three."""


def tiny(model: Model) -> Model:
    """Return the same model with two small layers, to try everything else."""
    small = {key: value for key, value in _TINY.items() if key in model.config}
    return replace(model, name=f"tiny-{model.name}", config={**cut(model, 2).config, **small})


def cut(model: Model, layers: int) -> Model:
    """Return the same model with its first layers only."""
    by_layer = [key for key in ("layer_types", "hybrid_override_pattern") if key in model.config]
    changed = {"num_hidden_layers": layers} | {key: model.config[key][:layers] for key in by_layer}
    return replace(model, name=f"{model.name}-{layers}-layers", config={**model.config, **changed})


def model_named(name: str) -> Model:
    """Return one of ``MODELS``.

    Raises:
        ValueError: for a name that there is not.
    """
    if name not in MODELS:
        raise ValueError(f"model: wanted one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
