"""The program ``w4gemm``. A command is a file with NAME, HELP, DESCRIPTION, ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import w4gemm
from w4gemm.cli import bench, cache, compile, convert, explain, gemm, generate, info, inspect, tune
from w4gemm.console.errors import sentence
from w4gemm.core.environment import configure_logging
from w4gemm.core.errors import printable

COMMANDS = (generate, inspect, convert, explain, gemm, tune, compile, cache, bench, info)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it sets ``run``, None without a command, and ``passes_on`` if a command takes
    unknown arguments."""
    parser = argparse.ArgumentParser(
        "w4gemm", description="4-bit-weight matrix multiplication for NVIDIA GPUs and CPUs"
    )
    parser.add_argument("--version", action="version", version=f"w4gemm {w4gemm.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.set_defaults(run=None, passes_on=False)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.DESCRIPTION)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, passes_on=command is bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, or 1 after an error, or 130 after Ctrl-C. Arguments that cannot be
    read exit with status 2."""
    _open_closed()
    _print_anything()
    parser, traceback = make_parser(), False
    format_of_others, warnings.formatwarning = warnings.formatwarning, _in_one_line
    try:
        try:
            args, rest = parser.parse_known_args(argv)
            args.rest, traceback = rest, args.traceback
            if rest and not args.passes_on:
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
            if args.run is None:
                parser.print_help()
                return 0
            configure_logging()
            return args.run(args)
        finally:
            _flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        return 1
    except Exception as e:
        text = sentence(e)
        if text is None or traceback:
            raise
        print(f"w4gemm: error: {printable(text)}", file=sys.stderr)
        return 1
    finally:
        warnings.formatwarning = format_of_others


def _open_closed() -> None:
    """Let output go nowhere that has no file, because whoever started this has closed it. Python's None for it is no
    file, and ``print`` takes None for standard output; and a file that is opened later must not become standard error.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)


def _print_anything() -> None:
    """Let standard output show characters that its encoding does not have as escapes, as standard error does: a name,
    or a model's answer, may be any text."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write what is left of standard output. If that fails, drop it: Python would try again at its end, and print the
    error in its own words.

    Raises:
        OSError: if it cannot be written, as where the disk is full.
    """
    try:
        sys.stdout.flush()
    except OSError as e:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OSError(e.errno, e.strerror, "standard output") from e


def _in_one_line(message: Warning | str, *where: Any, **line: Any) -> str:
    return f"w4gemm: warning: {printable(str(message))}\n"


if __name__ == "__main__":
    sys.exit(main())
