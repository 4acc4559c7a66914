"""The texts of activations."""

from __future__ import annotations

import pytest
import torch

import w4gemm
from w4gemm.core.activation import ACTIVATIONS, canonical, is_gated, parse
from w4gemm.core.function_names import ACTIVATION_NAMES


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, None),
        ("gelu", "gelu"),
        ("swiglu_oai(limit=7.0)", "swiglu_oai"),
        ("swiglu_oai(limit=10, alpha=1.702)", "swiglu_oai(limit=10)"),
        ("swiglu_oai(limit=none)", "swiglu_oai(limit=none)"),
        ("swiglu_oai(beta=1.0,alpha=1.702)", "swiglu_oai"),
        ("swiglu_oai(beta=none)", "swiglu_oai(beta=none)"),
        ("silu_mul(limit=none)", "silu_mul"),
        ("silu_mul(limit=1e1)", "silu_mul(limit=10)"),
        ("situ_mul(linear_beta=25,beta=0.1)", "situ_mul(beta=0.1)"),
    ],
)
def test_one_text_of_each(text, expected):
    assert canonical(text) == expected == canonical(expected)


@pytest.mark.parametrize(
    "text, message",
    [
        ("swiglu", r"wanted one of relu, .*\(constants as in .*\) or None, got 'swiglu'; nearest is 'silu_mul'"),
        ("silu_mul(", "wanted one of"),
        ("silu_mul()", "wanted one of"),
        ("SILU", "got 'SILU'; nearest is 'silu'"),
        ("entirely other", "got 'entirely other'$"),
        ("silu(limit=3)", "silu: it has no constants, got 'limit=3'"),
        ("silu_mul(alpha=3)", "silu_mul: wanted limit=NUMBER, got 'alpha=3'"),
        ("silu_mul(limit)", "limit: wanted a number above 0 or none, got ''"),
        ("silu_mul(limit=-1)", "limit: wanted a number above 0 or none, got '-1'"),
        ("silu_mul(limit=nan)", "wanted a number above 0"),
        ("silu_mul(limit=inf)", "wanted a number above 0"),
        ("situ_mul(beta=none)", "beta: wanted a number above 0, got 'none'"),
        (torch.nn.functional.silu, "nearest is 'silu'"),
        (torch.nn.GELU(), "nearest is 'gelu'"),
    ],
)
def test_what_is_none(text, message):
    with pytest.raises(ValueError, match=f"activation: .*{message}"):
        canonical(text)


def test_equal_texts_share_a_plan():
    """However a limit is written, there is one epilogue, so one compiled kernel."""
    x, w = torch.randn(3, 64), w4gemm.quantize(torch.randn(32, 64), "int4_g32").repack()
    called = [w4gemm.linear(x, w, activation=text) for text in ("swiglu_oai", "swiglu_oai(limit=7)")]
    assert torch.equal(*called)
    layer = w4gemm.W4Linear(64, 32, activation="swiglu_oai(limit=7)")
    assert layer.activation == "swiglu_oai"


def test_gated_ones_take_pairs():
    assert [name for name in ACTIVATIONS if is_gated(name)] == [n for n in ACTIVATIONS if "_mul" in n or "swiglu" in n]
    y = torch.randn(3, 8)
    for name in ACTIVATIONS:
        assert parse(name).apply(y).shape == ((3, 4) if is_gated(name) else (3, 8))


@pytest.mark.parametrize(
    "text", [*ACTIVATIONS, "silu_mul(limit=2)", "swiglu_oai(limit=2,alpha=1,beta=3)", "swiglu_oai(beta=none)"]
)
def test_device_code_is_the_formula(text, monkeypatch):
    """The device's function, with the instructions that it is made of in float64, beside the formula in PyTorch."""
    device = pytest.importorskip("w4gemm.kernels.device.activation")
    instructions = {
        "Float32": lambda number: torch.tensor(number, dtype=torch.float64),
        "fma": lambda x, y, z: x * y + z,
        "exp2": torch.exp2,
        "reciprocal": torch.reciprocal,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "select_near": lambda x, limit, near, far: torch.where(x.abs() < limit, near, far),
        "capped_magnitude": lambda x, limit: torch.minimum(x.abs(), limit),
    }
    for name, instruction in instructions.items():
        monkeypatch.setattr(device, name, instruction)
    activation = parse(text)
    y = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    both = torch.stack((y, y.flip(0) * 0.7 + 0.1), -1)  # gates and ups
    actual = (
        device.activated(activation, *both.unbind(-1)) if activation.formula.gated else device.activated(activation, y)
    )
    expected = activation.apply(both.flatten() if activation.formula.gated else y)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_names_are_those_of_the_formulas():
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES
