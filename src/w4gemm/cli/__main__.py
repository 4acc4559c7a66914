"""The program ``w4gemm``. A command's arguments are in parser.py, its ``run`` in the file of its name."""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from w4gemm.cli.mistakes import require_named
from w4gemm.cli.parser import make_parser
from w4gemm.console.progress import progress_line
from w4gemm.core import environment
from w4gemm.core.files import system_reason
from w4gemm.core.words import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0; 2 if an argument is wrong; 1 after any other error; 130 after
    Ctrl-C. Arguments that the parser refuses exit with status 2."""
    _open_closed()
    _print_anything()
    parser, traceback = make_parser(), False
    format_of_others, warnings.formatwarning = warnings.formatwarning, _in_one_line
    try:
        try:
            words = list(sys.argv[1:] if argv is None else argv)
            if words[:1] == ["help"]:
                words = [*words[1:], "--help"]
            args, rest = parser.parse_known_args(words)
            args.rest, traceback = rest, args.traceback
            if rest and args.command != "bench":  # which has parsers of its own
                is_text = args.command == "generate" and not rest[0].startswith("-")
                hint = "; the prompt is one argument, in quotes, and --model names the model" * is_text
                if args.command and rest[0] in words[: words.index(args.command)]:
                    hint = f"; options of a command stand behind it: w4gemm {args.command} {rest[0]}"
                (args.parser if args.command else parser).error(f"unrecognized arguments: {' '.join(rest)}{hint}")
            if args.command is None:
                parser.print_help()
                return 0
            try:
                environment.check()
                require_named(args)
            except (ValueError, OSError, ImportError) as e:
                if traceback:
                    raise
                text = system_reason(e) if isinstance(e, OSError) else str(e)
                return _print_error(text, 2 if isinstance(e, ValueError) else 1)
            with progress_line() as progress:
                progress(0, 0, "importing PyTorch")
                command = importlib.import_module(f"w4gemm.cli.{args.command}")
            return command.run(args)
        finally:
            _flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        return 1
    except Exception as e:
        return _say_error(e, traceback)
    finally:
        warnings.formatwarning = format_of_others


def _say_error(error: Exception, traceback: bool) -> int:
    """Print an error that a user can mend in a sentence, and return the exit status; raise any other."""
    from w4gemm.console.errors import sentence  # with PyTorch, so only once something is wrong
    from w4gemm.core.errors import FormatError

    text = sentence(error)
    if text is None or traceback:
        raise error
    # the library's ValueErrors and TypeErrors name an argument, but a FormatError a file
    is_usage = isinstance(error, (ValueError, TypeError)) and not isinstance(error, FormatError)
    return _print_error(text, 2 if is_usage else 1)


def _print_error(text: str, status: int) -> int:
    print(f"w4gemm: error: {printable(text)}", file=sys.stderr)
    return status


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
