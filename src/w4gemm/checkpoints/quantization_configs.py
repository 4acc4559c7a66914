"""What a quantization_config says: the format that reads its folder (:func:`method_of`), whether products are more than
x times the weight, and the modules that it names, one by one or by regular expressions (:class:`Patterns`,
:class:`ExtraConfig`). A folder may lack some of these modules (:func:`warn_of_missing`).

A folder whose numbers are known is loaded, so such a name is no error: a model may be stored without its vision tower,
and its config is kept. But a setting that holds for no module may have been meant for one of another name, so it is
told once. Names of modules that stay dense (``ignore``, ``exclude_modules``, ``-:``) are never told: configs list what
only the model had from which the folder was made.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import regex


def method_of(config: Mapping[str, Any]) -> str | None:
    """Name of the format of a quantization_config: the method that it names, except for

    - AutoRound's integers: the method whose packing they have;
    - fp8 with experts in 4 bits: "deepseek-v4"; fp8 by another name: "fp8";
    - ModelOpt's MIXED_PRECISION without layers: "w4afp8";
    - bitsandbytes' settings without a name, as transformers before 4.35 wrote them: "bitsandbytes".
    """
    method = config.get("quant_method", config.get("method"))
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"
    if method in _FP8:
        return "fp8"
    if method == "fp8" and config.get("expert_dtype") == "fp4":
        return "deepseek-v4"
    if method == "modelopt" and config.get("quant_algo") == "MIXED_PRECISION" and not config.get("quantized_layers"):
        return "w4afp8"
    if (packing := auto_round_packing(config)) is None:
        return method
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        return "awq"
    integers = packing in GPTQ_ZEROS and not str(config.get("data_type")).startswith("mx_")
    return "gptq" if integers else "auto-round"


_FP8 = ("fbgemm_fp8", "mxfp8")
"""Methods whose folders hold fp8 and scales as those of the method fp8 do."""
GPTQ_ZEROS = {"auto_round:auto_gptq": -1, "auto_round:gptq": -1, "auto": -1, "auto_round": 0, "auto_round:gptqmodel": 0}
"""The number that AutoRound's GPTQ packings add to a zero point before they store it."""
_KERNEL = re.compile(r":(exllama|triton|marlin)\w*$")
"""End of a packing's name that says which kernel it was meant for."""


def auto_round_packing(config: Mapping[str, Any]) -> str | None:
    """Return AutoRound's name of a packing: ``packing_format``, or ``backend`` from before there was one; None if the
    config is another method's."""
    if config.get("quant_method", config.get("method")) not in ("auto-round", "auto_round", "intel/auto-round"):
        return None
    name = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
    return _KERNEL.sub("", str(name))  # what is no name has no packing


_TRANSFORMS = "transform_config"
_ROTATES = re.compile(rf"{_TRANSFORMS}|.*(?:rotation|hadamard|spinquant).*")
"""Keys of compressed-tensors, of GPTQModel (rotation), and of AutoRound: rotation_config, spinquant_config, and
hadamard_config of its version 0.12."""
_IN_WEIGHTS = ("weight_input", "weight_output")
"""Locations of compressed-tensors' transforms that are part of the stored weights (SpinQuant's R1 and R2)."""


def check_plain_products(config: Mapping[str, Any]) -> None:
    """Raise ValueError if some products are more than x times the weight: if activations have to be rotated (by a
    Hadamard matrix) in front of it, or an adapter's product of low rank is added."""
    keys = (key for key, value in config.items() if value and _ROTATES.fullmatch(key))
    if key := next((key for key in keys if not _is_in_weights(config[key])), None):
        within = ", or with rotations of weights alone (SpinQuant's R1 and R2)" if key == _TRANSFORMS else ""
        raise ValueError(
            f"{key} rotates activations while the model runs, which cannot be done; quantize the dense model again "
            f"without it{within}"
        )
    adapter = config.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("path"):  # GPTQModel's EoRA
        raise ValueError(
            f"adapter is {adapter['path']!r}, whose product of low rank GPTQModel adds beside the weights, which is "
            "not done here; take it out of the config to load the weights without it"
        )


def _is_in_weights(transforms: Any) -> bool:
    """True if all transforms of a transform_config are part of the stored weights."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not isinstance(groups, Mapping):
        return False
    each = [group.get("apply") if isinstance(group, Mapping) else None for group in groups.values()]
    applied = [args for group in each for args in (group if isinstance(group, list) and group else [None])]
    return all(isinstance(args, Mapping) and args.get("location") in _IN_WEIGHTS for args in applied)


# --- the modules that it names --------------------------------------------------------------------------------------

_MOST, _LONGEST, _SECONDS = 10_000, 10_000, 30.0
"""Limits of the expressions of a config: their number, the characters of one, and the time for all of their matches."""
_FULL_NAME = re.compile(r"[\w.-]+")
_WILDCARDS = frozenset("*?[")
_CANDIDATES = 2000
"""Names at most among which the nearest one is looked for, because difflib compares them one by one."""


class Named(NamedTuple):
    """A name or pattern by which a quantization_config speaks of packed modules."""

    argument: str
    """Its place in the config, such as "dynamic"."""
    text: str
    matches: Callable[[str], object] | None = None
    """True for names of modules that a pattern means; None for a name in full, of a module or of what it is in."""


class Patterns:
    """The regular expressions of an argument of a config, in its order, each compiled once.

    They are ``re``'s, but ``re`` may take years for one and cannot be stopped. So the package ``regex`` matches them,
    within a bound on the time of all matches.

    Args:
        argument: their place in the config, as messages call it.
        expressions: by the text that the config has for each, such as "re:.*q_proj".

    Raises:
        ValueError: for too many, for one that is too long or no regular expression.
    """

    def __init__(self, argument: str, expressions: Mapping[str, str]) -> None:
        if len(expressions) > _MOST:
            raise ValueError(f"{argument}: wanted at most {_MOST} regular expressions, got {len(expressions)}")
        self._argument, self._left = argument, _SECONDS
        self._compiled = {text: self._compile(expression) for text, expression in expressions.items()}

    def _compile(self, expression: str) -> regex.Pattern[str]:
        if len(expression) > _LONGEST:
            raise ValueError(
                f"{self._argument}: wanted regular expressions of at most {_LONGEST} characters, got one of "
                f"{len(expression)}, {expression[:40]!r}..."
            )
        try:
            re.compile(expression)  # regex takes more, such as recursion
            return regex.compile(expression)
        except (re.error, regex.error, RecursionError, OverflowError) as e:
            raise ValueError(f"{self._argument}: {expression!r:.200} is no regular expression: {e}") from e

    def match(self, text: str, name: str) -> bool:
        """True if an expression, by its text in the config, matches a name from its beginning.

        Raises:
            ValueError: if the time for all matches is used up.
        """
        return self._matches(self._compiled[text].match, text, name)

    def search(self, text: str, name: str) -> bool:
        """As :meth:`match`, but anywhere in the name."""
        return self._matches(self._compiled[text].search, text, name)

    def _matches(self, find: Callable[..., object], text: str, name: str) -> bool:
        started = time.perf_counter()
        try:
            return find(name, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError:
            raise ValueError(
                f"{self._argument}: {text!r:.200} and the expressions before it take longer than {_SECONDS:.0f} s to "
                "match its modules; wanted simpler ones"
            ) from None
        finally:
            self._left -= time.perf_counter() - started

    def __iter__(self) -> Iterator[str]:
        """Iterate over the texts in the config."""
        return iter(self._compiled)

    def __contains__(self, text: object) -> bool:
        return text in self._compiled


def wildcards(argument: str, names: Iterable[str]) -> Patterns:
    """Return as expressions the names with wildcards, those of a shell; others mean themselves alone. Errors as from
    :class:`Patterns`."""
    return Patterns(argument, {name: fnmatch.translate(name) for name in names if not _WILDCARDS.isdisjoint(name)})


class Excluded:
    """The modules that stay dense, by their names or names with wildcards. Errors as from :class:`Patterns`."""

    def __init__(self, argument: str, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._patterns = wildcards(argument, self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(self._patterns.match(text, name) for text in self._patterns)


class ExtraConfig:
    """AutoRound's extra_config: settings of modules, of what they are in, or of all that a regular expression means.

    Raises:
        ValueError: as from :class:`Patterns`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._settings: Mapping[str, Any] = config.get("extra_config") or {}
        texts = [text for text in self._settings if not _FULL_NAME.fullmatch(text)]
        self._patterns = Patterns("extra_config", dict(zip(texts, texts, strict=True)))

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a module: by its name, else by what it is in, else by the first expression."""
        owner = name
        while owner and owner not in self._settings:
            owner = owner.rpartition(".")[0]
        if owner:
            return self._settings[owner]
        text = next((text for text in self._patterns if self._patterns.search(text, name)), None)
        return {} if text is None else self._settings[text]

    def named(self) -> list[Named]:
        """Return the packed modules that it names."""
        return [
            Named("extra_config", text, partial(self._patterns.search, text) if text in self._patterns else None)
            for text, settings in self._settings.items()
            if settings.get("bits", 4) == 4
        ]


def warn_of_missing(path: Path, named: Iterable[Named], modules: Collection[str]) -> None:
    """Warn once of the names and patterns that mean none of a folder's packed modules."""
    known = {*modules}
    for name in modules:
        while (name := name.rpartition(".")[0]) and name not in known:
            known.add(name)
    missing = [n for n in named if n.text not in known and not (n.matches and any(map(n.matches, modules)))]
    if not missing:
        return
    first, more = missing[0], f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    warnings.warn(
        f"{path}: {first.argument} of its quantization_config names {first.text!r}{more}, but no such module is "
        f"packed, so its settings are not used; the nearest of its {len(modules)} packed modules is "
        f"{_nearest(first.text, modules)!r}",
        stacklevel=2,
    )


def _nearest(text: str, modules: Collection[str]) -> str:
    last = re.findall(r"\w+", text)[-1:]
    alike = [name for name in modules if name.rpartition(".")[2] in last] or list(modules)
    return difflib.get_close_matches(text, alike[:_CANDIDATES], n=1, cutoff=0)[0]
