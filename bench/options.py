"""Options of the commands of bench/: a parser that explains the command, and types of options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from bench.shapes import parse_layers

from w4gemm import WeightFormat
from w4gemm.console.values import DTYPES

T = TypeVar("T")


def command(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``python -m MODULE``; its help begins with the module's docstring."""
    return argparse.ArgumentParser(
        f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_out(parser: argparse.ArgumentParser, default: Path) -> None:
    """Add ``--out``."""
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=default, help="file for the rows (default: %(default)s)"
    )


def add_shapes(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--shapes``, whose value is a tuple of (n, k)."""
    parser.add_argument(
        "--shapes",
        type=typed(parse_layers),
        default=default,
        help="sizes like 8192x4096 (n x k) and names of bench/shapes.py (default: %(default)s)",
    )


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add ``--format``, whose value is a tuple of weight formats."""
    parser.add_argument(
        "--format", type=typed(formats), default="int4_g128", help="of the weights, one or more (default: %(default)s)"
    )


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``parse`` as the type of an option: what it refuses ends the command with its reason."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            name, colon, reason = str(error).partition(": ")  # argparse names the option itself
            raise argparse.ArgumentTypeError(reason if colon and name.isidentifier() else str(error)) from None

    return parsed


def counts(text: str) -> tuple[int, ...]:
    """Return comma-separated integers from 1 on.

    Raises:
        ValueError: if a part is none.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"wanted integers from 1 on like 1,16,256, got {text!r}")
    return tuple(map(int, parts))


def some_of(*names: str) -> Callable[[str], tuple[str, ...]]:
    """Return a function that splits comma-separated names, of which it knows ``names``."""

    def split(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"wanted some of {', '.join(names)}, got {', '.join(unknown)}")
        return chosen

    return split


def formats(text: str) -> tuple[WeightFormat, ...]:
    """Return the weight formats of comma-separated names."""
    return tuple(map(WeightFormat.parse, text.split(",")))


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes of comma-separated names."""
    return tuple(DTYPES[name] for name in some_of(*DTYPES)(text))
