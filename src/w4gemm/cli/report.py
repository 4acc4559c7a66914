"""What the commands print besides their result: all of it on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from w4gemm import choice
from w4gemm.epilogue import Epilogue, default_out_dtype
from w4gemm.formats import WeightFormat
from w4gemm.nn import W4Linear
from w4gemm.packing.layouts import FP8_LAYOUT, layout_for
from w4gemm.problem import Device, GemmProblem

_FP8 = torch.float8_e4m3fn


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[int, int, str], None]]:
    """A function ``(done, total, what)`` that keeps one line on a terminal up to date, and is silent elsewhere."""
    shown = 0.0

    def progress(done: int, total: int, what: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and (now - shown > 0.1 or done in (0, total)):
            shown = now
            count = f" {done}/{total}" if total else ""
            print(f"\r\x1b[K{what}{count} ...", end="", file=sys.stderr, flush=True)

    try:
        yield progress
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """As :func:`progress_line`, as a bar with an estimate of the time left."""
    started = time.monotonic()
    with progress_line() as line:

        def progress(done: int, total: int, what: str) -> None:
            left = (time.monotonic() - started) / max(done, 1) * (total - done)
            full = 24 * done // max(total, 1)
            line(0, 0, f"[{'#' * full}{'.' * (24 - full)}] {done}/{total}, {left:.0f} s left: {what}")

        yield progress


def quiet_transformers() -> None:
    """No progress bars and no advice from Hugging Face's libraries; their errors still show.

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        from huggingface_hub.utils import disable_progress_bars
        from transformers.utils import logging
    except ImportError as e:
        raise ImportError(f"this command needs transformers and gguf: pip install 'w4gemm[hf]' ({e})") from e
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="transformers")


def plans(model: nn.Module, m: int, dtype: torch.dtype) -> Counter[str]:
    """``kernel/config`` of every 4-bit layer for m tokens, counted: the plans that ``linear`` keeps and uses."""
    layers = [layer for layer in model.modules() if isinstance(layer, W4Linear)]
    return Counter(str(choice.plan_for(_call(layer, m, dtype))) for layer in layers)


def _call(layer: W4Linear, m: int, dtype: torch.dtype) -> choice.PlanKey:
    w, epilogue = layer.weight, Epilogue(layer.activation, bias=layer.bias is not None)
    if w.layout == FP8_LAYOUT:  # linear quantizes x, and gives its dtype back
        out_dtype = None if dtype == default_out_dtype(_FP8) else dtype
        dtype, epilogue = _FP8, epilogue._replace(token_scale=True, out_dtype=out_dtype)
    return choice.PlanKey.of(w, m, dtype, epilogue, layer.batch_invariant)


def typical_problem(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> GemmProblem:
    """What to ask the kernels about when there is no weight at hand."""
    described = Device.of(device)
    layout = layout_for(described, WeightFormat(), dtype)
    return GemmProblem(16, 4096, 4096, dtype, WeightFormat(), layout, device=described)


def refusals(device: torch.device | str) -> str:
    """Every kernel's reason for not running on a device; empty if one runs there."""
    status = choice.explain(typical_problem(device)).status
    return "" if any(status.values()) else "; ".join(f"{name}: {answer.reason}" for name, answer in status.items())
