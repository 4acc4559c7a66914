"""vLLM plugin: the quantized layers of vLLM's models on w4gemm's kernels.

vLLM calls :func:`register`, an entry point of ``vllm.general_plugins``, in each of its processes before it builds a
model. Nothing here imports vLLM earlier, so the package costs nothing where vLLM is not.

Each of ``PARTS`` is a module of this package that takes over one kind of layer. It imports what it needs of vLLM when
it is imported, and ``install()`` puts its kernels where vLLM chooses one. An exception, of the import or of this, says
what this version of vLLM lacks: then vLLM's own kernels run these layers.

Where a part must decide whether it takes a layer, :func:`w4gemm.integrations.vllm.takeover.why_not_here` has the switch
and the GPU, and :func:`w4gemm.integrations.vllm.takeover.refuse` logs the reason once.
"""

from __future__ import annotations

import importlib.util

from w4gemm.integrations.vllm.takeover import VLLM, enter_compile_key

PARTS = {
    "dense": "linear layers of GPTQ, AWQ and compressed-tensors, of 2 to 8 bits",
    "gptq": "linear layers of GPTQ of other widths, and with zero points",
    "floats": "linear layers in NVFP4, MXFP4 and MXFP6",
    "fp8": "linear layers in fp8 and MXFP8 with 16-bit activations",
    "experts": "mixtures of 4-bit experts (GPTQ, AWQ, compressed-tensors W4A16 and W4AFP8, NVFP4, MXFP4)",
}
"""Modules of this package in the order in which they are installed, and the layers that they take over."""

GGUF_PLUGIN, GGUF = "vllm_gguf_plugin", {"gguf": "linear layers and experts of GGUF"}
"""The package with vLLM's GGUF layers, and the part that takes them over where it is installed."""
_installed: list[str] = []
"""Parts that this process has installed."""


def register() -> None:
    """Install every part that ``W4GEMM_VLLM`` and this vLLM allow, once in each process. Called by vLLM."""
    before = len(_installed)
    parts = PARTS | (GGUF if importlib.util.find_spec(GGUF_PLUGIN) else {})
    VLLM.register(__name__, parts, _installed)
    if len(_installed) > before:
        try:
            enter_compile_key()
        except (ImportError, AttributeError) as e:
            VLLM.log().warning(
                "w4gemm: vLLM %s does not say how it keys compiled graphs (%s): set VLLM_DISABLE_COMPILE_CACHE=1 when "
                "you change W4GEMM_VLLM or w4gemm",
                *(VLLM.version(), e),
            )
