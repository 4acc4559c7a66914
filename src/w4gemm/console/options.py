"""Options that several commands share: counts, dtypes, a device, numbers of tokens."""

from __future__ import annotations

import argparse
import re

import torch

from w4gemm import choice
from w4gemm.core.problem import Device

WIDE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""dtypes of a model's activations, by name."""
DTYPES = WIDE_DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
_RANGE = re.compile(r"(\d+)(\.\.(\d*))?")


def positive(text: str) -> int:
    """Parse the value of an option that counts something: an integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer >= 1, got {text}")
    return value


def add_device_arguments(parser: argparse.ArgumentParser, simulated: bool = False) -> None:
    """Add --device and --dtype. simulated: True if the device may be one that is not there."""
    also = ", or h200, which need not be there" if simulated else ""
    parser.add_argument("--device", help=f"cpu, cuda or cuda:N{also} (default: cuda if a kernel runs there, else cpu)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the activations (default: bfloat16 on a GPU, float32 on the CPU)"
    )


def chosen_dtype(name: str | None, device: Device) -> torch.dtype:
    """Return the dtype of the activations; without a name float32 on the CPU, bfloat16 elsewhere."""
    return DTYPES[name or ("float32" if device.kind == "cpu" else "bfloat16")]


def parse_tokens(text: str) -> list[int]:
    """Return the numbers of tokens that stand for the intervals of ``1..64,512``, or ``4096..`` without an end.

    Raises:
        ValueError: for anything else.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        if match is None or first < 1:
            raise ValueError(f"--m: wanted numbers from 1 and ranges like 1..64,512 or 1.., got {text!r}")
        last = first if match[2] is None else int(match[3]) if match[3] else choice.BOUNDS[-1] + 1
        if last < first:
            raise ValueError(f"--m: wanted ranges that go up, got {part!r}")
        intervals = range(choice.interval(first), choice.interval(last) + 1)
        found |= {choice.representative(choice.BOUNDS[i - 1] + 1 if i else 1) for i in intervals}
    return sorted(found)
