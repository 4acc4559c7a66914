"""The config of models with w4gemm's layers, :class:`W4GemmConfig`, and whether transformers uses it unasked:
:func:`enable`.

Importing this file registers the method "w4gemm"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4gemm.checkpoints import METHODS
from w4gemm.checkpoints.compressed_tensors_writer import METHOD as COMPRESSED_TENSORS
from w4gemm.checkpoints.compressed_tensors_writer import WRITER
from w4gemm.checkpoints.dense import SKIP, checked_skip
from w4gemm.checkpoints.w4gemm import METHOD
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.wrapping import wrap
from w4gemm.weights.file import format_name, parse_format_name
from w4gemm.weights.weight import ACTIVATIONS


@register_quantization_config(METHOD)
class W4GemmConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with w4gemm's layers, for ``from_pretrained``.

    Args:
        format: what the linear layers of a dense model are quantized to; None for groups of 128, or the largest smaller
            group that divides a layer's k. A quantized checkpoint keeps its own formats. Of a loaded model: the most
            common one, by its :func:`w4gemm.weights.file.format_name`.
        activations: "fp8" if every quantized layer quantizes x (W4A8); None for what the checkpoint says.
        skip: names of a dense model's layers and experts that stay dense, as for :func:`quantize_layers`; "lm_head" if
            not given. ``from_pretrained`` raises ValueError for one that nothing has, except "lm_head".
        modules: of a loaded model: the formats of layers with another one.
        tied: of a loaded model: its embeddings that read the packed weight of a head, and the heads.

    Raises:
        TypeError, ValueError: for a wrong argument; the message names it.
    """

    def __init__(
        self,
        format: WeightFormat | str | None = None,
        activations: str | None = None,
        skip: Iterable[str] = SKIP,
        modules: dict[str, str] | None = None,
        tied: dict[str, str] | None = None,
        **ignored: Any,
    ) -> None:
        if unknown := ignored.keys() - {"quant_method"}:
            raise TypeError(f"W4GemmConfig: wanted format, activations, skip or modules, got {min(unknown)!r}")
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: wanted 'fp8' or None, got {activations!r}")
        self.quant_method = METHOD
        self.format = None if format is None else format_name(*parse_format_name(str(format)))
        self.activations, self.skip = activations, list(checked_skip(skip))
        self.modules, self.tied = _texts("modules", modules), _texts("tied", tied)
        self.stored: dict[str, Any] | None = None
        """The quantization_config of the folder that ``save_pretrained`` writes, if it is none of w4gemm's own."""

    def to_dict(self) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        own = super().to_dict()
        if not own["tied"]:
            del own["tied"]
        return own.pop("stored") or own

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config of a folder's quantization_config: nothing is taken from other methods' ones, which their
        readers read."""
        own = config_dict if config_dict.get("quant_method") == METHOD else {}
        config = cls(**own)
        return (config, kwargs) if return_unused_kwargs else config


def _texts(name: str, value: object) -> dict[str, str]:
    """Return an argument of names and texts as a dict of its own."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise TypeError(f"{name}: wanted a dict of strings or None, got {value!r:.80}")
    return dict(value)


def enable() -> None:
    """Let ``from_pretrained`` open folders of every method that w4gemm reads with w4gemm, instead of the method's
    own package, unasked. :func:`disable` undoes it."""
    for key in (key for method in METHODS for key in _KEYS.get(method, (method,))):
        _before.setdefault(key, AUTO_QUANTIZATION_CONFIG_MAPPING.get(key))
        AUTO_QUANTIZATION_CONFIG_MAPPING[key] = _FP8 if key == "fp8" else W4GemmConfig


def disable() -> None:
    """Undo :func:`enable`."""
    for method, config in _before.items():
        if config is None:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        else:
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
    _before.clear()


class _CompressedTensors:
    """The config of the method compressed-tensors: ours for folders that w4gemm wrote, else transformers' own."""

    @staticmethod
    def from_dict(config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return (W4GemmConfig if WRITER in config_dict else _THEIRS).from_dict(config_dict, **kwargs)


_THEIRS = AUTO_QUANTIZATION_CONFIG_MAPPING[COMPRESSED_TENSORS]
AUTO_QUANTIZATION_CONFIG_MAPPING[COMPRESSED_TENSORS] = _CompressedTensors


class _FP8:
    """The config of the method fp8: ours for folders with experts in 4 bits, else transformers' own."""

    @staticmethod
    def from_dict(config_dict: dict[str, Any], **kwargs: Any) -> Any:
        ours = config_dict.get("expert_dtype") == "fp4"
        return (W4GemmConfig if ours else _before["fp8"]).from_dict(config_dict, **kwargs)


_KEYS = {"bitsandbytes": ("bitsandbytes_4bit", "bitsandbytes_8bit"), "deepseek-v4": ("fp8",)}
"""Keys of transformers' table of config classes that are not the method's name."""
_before: dict[str, Any] = {}
"""The config classes that transformers had for the methods that were enabled."""


def _merged(own: Callable[..., Any], quantization_config: Any, from_args: Any) -> Any:
    """Let a W4GemmConfig that is passed to ``from_pretrained`` go before the folder's config, which transformers does
    for none but the same class."""
    return from_args if isinstance(from_args, W4GemmConfig) else own(quantization_config, from_args)


wrap(AutoHfQuantizer, "merge_quantization_configs", _merged)


def _is_supported(own: Callable[..., bool], quantization_config: Any) -> bool:
    """Let a model's config hold a W4GemmConfig, as that of a loaded model does; transformers asks a dict."""
    return isinstance(quantization_config, W4GemmConfig) or own(quantization_config)


wrap(AutoHfQuantizer, "supports_quant_method", _is_supported)
