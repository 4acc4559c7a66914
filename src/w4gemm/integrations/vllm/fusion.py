"""silu(gate) * up within the quantization behind it: a pass over the graphs that vLLM compiles.

For W4A8, vLLM's compiler makes one kernel of both, which reads a row twice and gives it to a single CTA;
:func:`w4gemm.quantize_activations` does both in one pass.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

from w4gemm.integrations.vllm import takeover

_quantize = torch.ops.w4gemm.quantize_activations
_EPS = 1e-6
"""The operator's default, which is of its norms only."""


def install() -> None:
    """Let vLLM run the pass on every graph that it compiles for the model that is being built, unless the user has
    given it a pass."""
    try:
        from vllm.compilation.passes.inductor_pass import CallableInductorPass
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform

        engine = get_current_vllm_config_or_none()
        if engine is None:
            return
        passes = engine.compilation_config.inductor_compile_config
        if current_platform.pass_key not in passes:
            _patterns()  # which cannot be made while a graph is compiled
            passes[current_platform.pass_key] = CallableInductorPass(fuse)
    except (ImportError, AttributeError) as e:
        takeover.log().info("w4gemm: silu(gate) * up is not fused with quantization; this vLLM is not known: %s", e)


def fuse(graph: fx.Graph) -> int:
    """Replace each quantization of silu(gate) * up in a graph of ATen operators; return how many there were."""
    return _patterns().apply(graph)


@functools.cache
def _patterns() -> PatternMatcherPass:
    patterns = PatternMatcherPass(pass_name="w4gemm_silu_mul_quantize")
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16):
            example = torch.empty(6, 64, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
            register_replacement(_apart, _together, [example], fwd_only, patterns)
    return patterns


def _apart(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = gate_up.shape[-1] // 2
    return _quantize(silu(gate_up[..., :half]) * gate_up[..., half:], None, _EPS, False)


def _together(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize(gate_up, None, _EPS, True)
