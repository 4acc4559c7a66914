"""Kernels that quantize for W4A8, fused with what they read: a pass over the graphs that vLLM compiles.

Where :func:`w4gemm.quantize_activations` reads

- silu(gate) * up, it computes that too: the compiler's kernel would read a row twice and give it to a single CTA;
- something else that the compiler computes, as an RMSNorm, PyTorch's operators replace it, because the compiler makes
  one kernel of both.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

from w4gemm.api.activations import in_pytorch
from w4gemm.integrations.vllm import takeover

_Function = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_Check = Callable[[Match], bool]
_quantize = torch.ops.w4gemm.quantize_activations
_EPS = 1e-6
"""The operator's default, which is of its norms only."""
_VIEWS = {operator.getitem, torch.ops.aten.view.default, torch.ops.aten.reshape.default}


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
            _gated(), _computed()  # which cannot be made while a graph is compiled
            source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # part of the key of vLLM's cache
            passes[current_platform.pass_key] = CallableInductorPass(fuse, source)
    except (ImportError, AttributeError) as e:
        takeover.log().info("w4gemm: quantization is fused with nothing; this vLLM is not known: %s", e)


def fuse(graph: fx.Graph) -> int:
    """Fuse the quantizations of a graph of ATen operators with what they read; return how many were fused."""
    return _gated().apply(graph) + _computed().apply(graph)


@functools.cache
def _gated() -> PatternMatcherPass:
    """Pass for silu(gate) * up."""

    def apart(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = gate_up.shape[-1] // 2
        return _quantize(silu(gate_up[..., :half]) * gate_up[..., half:], None, _EPS, False)

    def together(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _quantize(gate_up, None, _EPS, True)

    return _replacing(apart, together, (torch.bfloat16, torch.float16))


@functools.cache
def _computed() -> PatternMatcherPass:
    """Pass for everything else that the compiler computes."""

    def operator_alone(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _quantize(x, None, _EPS, False)

    def in_operators(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return in_pytorch(x, None, _EPS, False)

    def is_computed(match: Match) -> bool:
        return _is_computed(match.kwargs["x"])

    return _replacing(operator_alone, in_operators, (torch.bfloat16,), is_computed)


def _replacing(
    search: _Function, replacement: _Function, dtypes: Sequence[torch.dtype], check: _Check = lambda match: True
) -> PatternMatcherPass:
    """Return a pass that replaces one function of a tensor by another, if ``check`` is true.

    Args:
        dtypes: those that the operators of ``search`` have as arguments; any one if they have none.
    """
    patterns = PatternMatcherPass(pass_name=f"w4gemm_{search.__name__}")
    with FakeTensorMode():
        for dtype in dtypes:
            example = torch.empty(6, 64, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
            register_replacement(search, replacement, [example], fwd_only, patterns, check)
    return patterns


def _is_computed(x: Any) -> bool:
    """True if x comes from a kernel that the compiler makes, as one of the norm before a product; false if from
    attention or another product."""
    while x.target in _VIEWS:
        x = x.args[0]
    if not isinstance(x.target, torch._ops.OpOverload):
        return False
    # vllm_ir: norms, which vLLM replaces by ATen operators after this pass
    return x.target.namespace in ("prims", "vllm_ir") or torch.Tag.pointwise in x.target.tags
