"""The options that several commands share: sizes, counts, dtypes, a device, numbers of tokens."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from w4gemm import choice
from w4gemm.core.errors import LARGEST_SIZE
from w4gemm.core.problem import Device

WIDE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that a model's activations may have, by name."""
DTYPES = WIDE_DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
_RANGE = re.compile(r"(\d+)(\.\.(\d*))?")
_LONGEST_RANGE = 80
"""Characters."""


def positive(text: str) -> int:
    """Return the value of an option that counts something, an integer from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer >= 1, got {text}")
    return value


def named_path(text: str) -> Path:
    """Return the file or folder that an option names. ``~`` is the home folder, because a shell does not replace it in
    quotes or in a container's list of arguments. The empty string, as from a script's unset variable, is refused,
    because Path("") is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("wanted a path, got an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"wanted a path, got {text!r}, and there is no such home folder") from None


_SIZES = {"m": "number of tokens, the rows of x", "n": "output features", "k": "input features"}


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add m, n and k, by position and as options. :func:`sizes_of` reads them."""
    parser.add_argument("sizes", nargs="*", metavar="M N K", type=int, help="the sizes by position instead of options")
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), type=int, help=what)


def sizes_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return m, n and k.

    Raises:
        ValueError: unless all three are there, in one of both ways, and are sizes of a product.
    """
    options = [size for size in (args.m, args.n, args.k) if size is not None]
    if len(args.sizes) + len(options) != 3 or (args.sizes and options):
        raise ValueError("M, N, K: wanted three sizes, as in `512 4096 4096` or `--m 512 --n 4096 --k 4096`")
    m, n, k = args.sizes or options
    if not all(1 <= size <= LARGEST_SIZE for size in (m, n, k)):
        raise ValueError(f"M, N, K: wanted numbers from 1 to {LARGEST_SIZE}, got {m}, {n}, {k}")
    return m, n, k


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add --format for the weight of one product."""
    parser.add_argument(
        "--format", default="int4_g128", help="the weight's, such as int4_g64_zint, mxfp4 or nf4 (default: %(default)s)"
    )


def add_device_arguments(
    parser: argparse.ArgumentParser, simulated: Iterable[str] = (), device: str = "device to run on"
) -> None:
    """Add --device and --dtype.

    Args:
        simulated: names of devices that need not be there.
        device: what the device is for, in words.
    """
    also = f"; or {' or '.join(simulated)}, of which no GPU is needed" if simulated else ""
    parser.add_argument(
        "--device", help=f"{device}: cpu, cuda or cuda:N{also} (default: cuda if a kernel runs there, else cpu)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the activations (default: bfloat16 on a GPU, float32 on the CPU)"
    )


def chosen_dtype(name: str | None, device: Device) -> torch.dtype:
    """Return the dtype called ``name``; for None, float32 on the CPU and bfloat16 on a GPU."""
    return DTYPES[name or ("float32" if device.kind == "cpu" else "bfloat16")]


def parse_tokens(text: str) -> list[int]:
    """Return the numbers of tokens that stand for the intervals of m in a text.

    Args:
        text: numbers and ranges such as ``1..64,512``; ``4096..`` has no end.

    Raises:
        ValueError: for any other text.
    """
    ends: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        too_long = len(part) > _LONGEST_RANGE  # Python refuses to read thousands of digits, in words of its own
        first = int(match[1]) if match and not too_long else 0
        if match is None or first < 1:
            raise ValueError(f"--m: wanted numbers from 1 and ranges like 1..64,512 or 1.., got {text!r:.80}")
        last = first if match[2] is None else int(match[3]) if match[3] else choice.BOUNDS[-1] + 1
        if last < first:
            raise ValueError(f"--m: wanted ranges that go up, got {part!r}")
        intervals = range(choice.interval(first), choice.interval(last) + 1)
        ends |= {choice.interval_end(choice.BOUNDS[i - 1] + 1 if i else 1) for i in intervals}
    return sorted(ends)
