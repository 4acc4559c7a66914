"""Values of options: sizes, dtypes and numbers of tokens from their texts."""

from __future__ import annotations

import torch

from w4gemm import choice
from w4gemm.console import options
from w4gemm.core.problem import Device
from w4gemm.core.router import Router

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in options.DTYPES}
"""The dtypes that activations may have, by name."""


def chosen_dtype(name: str | None, device: Device) -> torch.dtype:
    """Return the dtype called ``name``; for None, float32 on the CPU and bfloat16 on a GPU."""
    # bfloat16 has the range that models are trained in, where float16 can overflow. On the CPU float32 is exact, and
    # the compiled step of decoding takes it alone (SmolLM2, one core of an EPYC with AVX512_BF16, 2026-11-29,
    # tokens/s: decode 214 against 75 in bfloat16, prefill 112 against 198).
    return DTYPES[name or ("float32" if device.kind == "cpu" else "bfloat16")]


def parse_router(text: str, top_k: int) -> tuple[Router, bool]:
    """Return the router of a text such as ``sigmoid,groups=8,top_groups=4,scale=2.5,bias``, and whether it has a bias.

    Raises:
        ValueError: for any other text.
    """
    fields, biased = options.router_fields(text)
    try:
        return Router(top_k, **fields), biased
    except ValueError as e:
        raise ValueError(f"--router: {e}") from None


def parse_tokens(text: str) -> list[int]:
    """Return the numbers of tokens that stand for the intervals of m in a text, as :func:`options.token_ranges` reads
    it.

    Raises:
        ValueError: for a text that it does not read.
    """
    ends: set[int] = set()
    for first, last in options.token_ranges(text):
        last = choice.BOUNDS[-1] + 1 if last is None else last
        if last < first:
            raise ValueError(f"--m: wanted ranges that go up, got '{first}..{last}'")
        intervals = range(choice.interval(first), choice.interval(last) + 1)
        ends |= {choice.interval_end(choice.BOUNDS[i - 1] + 1 if i else 1) for i in intervals}
    return sorted(ends)
