"""Whether the steps' commands parse, without running them: what ``--dry-run`` looks at."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from bench.gpu_steps.process import PATHS, ROOT, words
from bench.gpu_steps.steps import Step

from w4gemm.tuning import record


class _Parsed(Exception):
    """Raised where a command would begin its work."""


def problem_of(step: Step) -> str:
    """Return why a step's command would not start, or the empty string. Imports its module into this process."""
    _, *arguments = words(step, Path("folder"))
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(arguments[2:])
        arguments = [given.training_script, *given.training_script_args]
    if missing := [word for word in arguments if word.endswith(".py") and not (ROOT / word).is_file()]:
        return f"there is no {missing[0]}"
    if arguments[:2] == ["-m", "pytest"]:
        return _problem_of_pytest(arguments)
    return _problem_of_parser(arguments)


def _problem_of_pytest(arguments: list[str]) -> str:
    import pytest

    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        # --markers: pytest reads all options, and collects nothing
        status = pytest.main([*arguments[2:], "--rootdir", str(ROOT), "--markers", "-p", "no:cacheprovider"])
    return "" if status == 0 else f"exit status {int(status)}: {said.getvalue().strip()[-400:]}"


def _problem_of_parser(arguments: list[str]) -> str:
    said = io.StringIO()
    try:
        with _stopped_before_work(arguments), contextlib.redirect_stderr(said):
            script = arguments[0] != "-m"
            path = [*([str(ROOT / Path(arguments[0]).parent)] if script else []), *PATHS, *sys.path]
            given = arguments if script else arguments[1:]
            with mock.patch.object(sys, "argv", given), mock.patch.object(sys, "path", path):
                if script:
                    runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
                else:
                    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    except _Parsed:
        return ""
    except SystemExit:
        return re.sub(r"\s+", " ", said.getvalue())[-400:]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it ended without reading its arguments"


@contextlib.contextmanager
def _stopped_before_work(arguments: list[str]) -> Iterator[None]:
    """Stop a command when its arguments are parsed. Those of bench.engine read names of models and formats after that,
    and then ask for the facts of the machine: there they are stopped."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: object, **named: object) -> None:
        parse(self, *given, **named)  # type: ignore[call-overload]
        raise _Parsed

    def facts(*given: object) -> None:
        raise _Parsed

    if arguments[0] == "-m" and arguments[1].startswith("bench.engine"):
        with mock.patch.object(record, "facts", facts):
            yield
    else:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
            yield
