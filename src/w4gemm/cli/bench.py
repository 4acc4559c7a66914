"""``w4gemm bench``: measure layers beside the peers, and report; the ``bench`` folder of a checkout does the work."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

_CHECKOUT = Path(__file__).resolve().parents[3]
NO_GPU = "measures on a GPU, and PyTorch sees none here"
_WITHOUT_A_GPU = {"-h", "--help", "--dry", "--compile-only"}


def run(args: argparse.Namespace) -> int:
    """Run the module's ``main`` with ``args.rest``, because it has a parser of its own."""
    tool = module(args.action)
    if measures(args):
        import torch

        from w4gemm.core.errors import UnsupportedError

        if not torch.cuda.is_available():
            raise UnsupportedError(f"bench {args.action} {NO_GPU}")
    tool.main(args.rest)
    return 0


def measures(args: argparse.Namespace) -> bool:
    """True if an action with these options needs a GPU."""
    options = {option.partition("=")[0] for option in args.rest}
    return args.action in ("run", "grouped", "unknown") and not _WITHOUT_A_GPU & options


def require_checkout(name: str) -> None:
    """Raise FileNotFoundError if there is no ``bench.<name>``, because the package is installed without a checkout."""
    if not (_CHECKOUT / "bench" / f"{name}.py").is_file():
        raise FileNotFoundError("bench is not part of the installed package: run w4gemm from a checkout")


def module(name: str) -> ModuleType:
    """Import ``bench.<name>`` of the checkout that this package is used from.

    Raises:
        FileNotFoundError: if it is installed without one.
    """
    require_checkout(name)
    if str(_CHECKOUT) not in sys.path:  # where processes that bench spawns look, too
        sys.path.append(str(_CHECKOUT))
    tool = importlib.import_module(f"bench.{name}")
    if Path(tool.__file__ or "").parents[1] != _CHECKOUT:
        raise FileNotFoundError(f"bench is taken from {tool.__file__}, wanted {_CHECKOUT / 'bench'}")
    return tool
