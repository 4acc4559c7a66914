"""The one list of what a launch takes."""

from __future__ import annotations

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.arguments import Arguments, ExpertRows, StreamWorkspace, flat, nested


def test_flat_values_nest_again():
    arguments = Arguments(
        "x",
        "weight",
        "out",
        EpilogueOperands(bias="bias", channel_scale="channel_scale"),
        ExpertRows("starts", "ends", "indices", 1),
        StreamWorkspace("partials", "flags"),
        132,
    )
    values = flat(*arguments)
    assert not any(isinstance(value, tuple) for value in values)
    assert nested(values) == arguments
