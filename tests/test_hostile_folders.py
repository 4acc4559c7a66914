"""Folders that were made to do harm: nothing hangs, no memory is taken by a file's word, nothing outside is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import samples
from w4gemm import FormatError
from w4gemm.checkpoints import named_modules, open_checkpoint
from w4gemm.checkpoints.named_modules import ExtraConfig, Patterns


def changed(folder: Path, **settings: Any) -> None:
    """Put settings into a folder's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


# --- regular expressions

ENDLESS = r"(?:.*?.*?.*?.*?.*?.*?){12}[#$]"
"""Takes years to match no name of seven letters, even for an engine that remembers what it has tried."""
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": samples.GROUP, "symmetric": False}
PLACES: dict[str, tuple[str, Any]] = {
    "ignore": ("compressed-tensors", lambda text: {"ignore": [f"re:{text}"]}),
    "targets": (
        "compressed-tensors",
        lambda text: {"config_groups": {"group_0": {"targets": [f"re:{text}"], "weights": WEIGHTS}}},
    ),
    "dynamic": ("gptq", lambda text: {"dynamic": {f"-:{text}": {}}}),
    "extra_config": ("awq", lambda text: {"extra_config": {text: {"bits": 4}}}),
}


@pytest.mark.parametrize("argument", PLACES)
def test_an_expression_that_would_take_years(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_modules, "_SECONDS", 0.3)
    kind, settings = PLACES[argument]
    folder = samples.FORMATS[kind](tmp_path)
    changed(folder, **settings(ENDLESS))
    with pytest.raises(FormatError, match=rf"{argument}.*: '.*' and the expressions before it take longer than"):
        open_checkpoint(folder)


@pytest.mark.parametrize("argument", PLACES)
def test_an_expression_that_is_too_long(argument: str, tmp_path: Path) -> None:
    kind, settings = PLACES[argument]
    folder = samples.FORMATS[kind](tmp_path)
    changed(folder, **settings("(" * 10_001))
    with pytest.raises(FormatError, match=f"{argument}.*: wanted regular expressions of at most 10000 characters, got"):
        open_checkpoint(folder)


def test_a_hundred_thousand_expressions(tmp_path: Path) -> None:
    folder = samples.FORMATS["compressed-tensors"](tmp_path)
    changed(folder, ignore=[f"re:layer.{i}" for i in range(100_000)])
    with pytest.raises(FormatError, match=r"ignore, targets: wanted at most 10000 regular expressions, got 100000"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["(", "(?R)", "a**", "(" * 5000, r"\p{L}"])
def test_what_re_does_not_take(text: str) -> None:
    with pytest.raises(ValueError, match="dynamic: '.* is no regular expression: "):
        Patterns("dynamic", {text: text})


REAL = (  # of published configs
    (r".*\.mlp\.gate$", ("model.layers.3.mlp.gate",), ("model.layers.3.mlp.gate_proj",)),
    (r"^(?!.*\.mlp\.experts\.).*$", ("model.layers.0.self_attn.q_proj",), ("model.layers.0.mlp.experts.7.up_proj",)),
    (r".*(?:self_attn|linear_attn)\..*", ("model.layers.0.linear_attn.out_proj",), ("model.layers.0.mlp.up_proj",)),
    (
        r"model\.layers\.(?:[0-9]|1[0-5])\.mlp.*(?<!gate)_proj",
        ("model.layers.12.mlp.up_proj",),
        ("model.layers.16.mlp",),
    ),
    (r"(?i).*VISION.*", ("model.vision.0",), ("model.layers.0",)),
)


@pytest.mark.parametrize(("expression", "meant", "others"), REAL)
def test_expressions_of_published_models(expression: str, meant: tuple[str, ...], others: tuple[str, ...]) -> None:
    patterns = Patterns("ignore", {"re": expression})
    assert all(patterns.match("re", name) for name in meant)
    assert not any(patterns.match("re", name) for name in others)


def test_the_order_of_extra_config() -> None:
    """A name goes before what it is in, that before an expression, and of expressions the first one counts. A name
    means no other that it is the beginning of."""
    config = {
        ".*proj": {"bits": 1},
        "layers.1": {"bits": 2},
        "layers.1.q_proj": {"bits": 3},
        r"layers\.\d+\..*": {"bits": 5},
    }
    extra = ExtraConfig({"extra_config": config})
    bits = {"layers.1.q_proj": 3, "layers.1.k_proj": 2, "layers.11.k_proj": 1, "layers.11.gate": 5}
    assert {name: extra.of(name)["bits"] for name in bits} == bits
    assert extra.of("norm") == {}
