"""SGLang plugin: the quantized layers of SGLang's models on w4gemm's kernels.

SGLang calls :func:`register`, an entry point of ``sglang.srt.plugins``, in each of its processes before it builds a
model. Nothing here imports SGLang earlier, so the package costs nothing where SGLang is not.

SGLang has a class for each scheme, which makes a layer's parameters, changes them after loading, and multiplies.
``PARTS`` are modules of this package that put hooks around the last two: what a scheme has loaded becomes a packed
weight, and SGLang's own kernels run what they leave. :mod:`w4gemm.integrations.engines.engine` says how parts are
installed.
"""

from __future__ import annotations

from w4gemm.integrations.sglang.takeover import SGLANG

PARTS = {
    "dense": "linear layers of GPTQ, AWQ, compressed-tensors (weight-only, W4AFP8), NVFP4 and GGUF",
    "shards": "merged linear layers whose parts have different formats (GPTQ's dynamic, config groups)",
    "experts": "mixtures of 4-bit experts (GPTQ, AWQ, compressed-tensors W4A16 and W4AFP8, W4AFP8, NVFP4, gpt-oss)",
}
"""Modules of this package in the order in which they are installed, and the layers that they take over."""

_installed: list[str] = []
"""Parts that this process has installed."""


def register() -> None:
    """Install every part that ``W4GEMM_SGLANG`` and this SGLang allow, once in each process. Called by SGLang."""
    SGLANG.register(__name__, PARTS, _installed)
