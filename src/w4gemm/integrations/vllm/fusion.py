"""Small operations between products, in w4gemm's kernels: a pass over the graphs that vLLM compiles.

vLLM's compiler makes a kernel of what lies between two products; neither it nor the product behind it starts before
what comes first has ended. w4gemm's kernels start early (programmatic dependent launch), so that a product reads its
first weights while they run. Where only 4-bit layers read the result, the pass replaces

- silu(gate) * up with a quantization behind it, for any number of tokens;
- for few tokens, for which vLLM then compiles a graph of their own, residual add and RMSNorm, also with a quantization
  behind them, and silu(gate) * up alone. With many tokens the compiler's kernels are the faster ones.

Where a quantization then still reads something that the compiler computes, PyTorch's operators replace it, because the
compiler makes one kernel of both. docs/measured.md has the times.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import operator
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

import w4gemm.api.packed  # defines an operator
import w4gemm.api.step  # noqa: F401 (defines operators)
from w4gemm.api.activations import quantize_in_pytorch
from w4gemm.integrations.vllm import takeover

_ops = torch.ops.w4gemm
_NORM_EPS, _EPS = 0.125, 1e-6
"""Epsilon of norms in patterns, which stands for any number, and the one that a quantization without a norm has."""
_FEW = 64
"""Most tokens of a step for which vLLM's norms and gates are replaced."""
_VIEWS = {operator.getitem, torch.ops.aten.view.default, torch.ops.aten.reshape.default}
_ROWS, _COLUMNS = 6, 64


def install() -> None:
    """Let vLLM run the pass on every graph that it compiles for the model that is being built, unless the user has
    set a pass, or asks for results that do not depend on the batch: graphs for few tokens have other kernels."""
    try:
        from vllm import envs
        from vllm.compilation.passes.inductor_pass import CallableInductorPass
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform

        engine = get_current_vllm_config_or_none()
        if engine is None or envs.VLLM_BATCH_INVARIANT:
            return
        passes = engine.compilation_config.inductor_compile_config
        ends = engine.compilation_config.compile_ranges_endpoints
        if current_platform.pass_key not in passes:
            if ends and _FEW not in ends and max(ends) > _FEW:
                ends[:] = sorted((*ends, _FEW))
            with suppress(ImportError):
                importlib.import_module("vllm.ir.ops")  # defines vLLM's operators
            _passes()  # which cannot be made while a graph is compiled
            source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # part of the key of vLLM's cache
            passes[current_platform.pass_key] = CallableInductorPass(fuse, source)
    except (ImportError, AttributeError) as e:
        takeover.log().info("w4gemm: nothing is fused between products; this vLLM is not known: %s", e)


def fuse(graph: fx.Graph) -> int:
    """Make the replacements in a graph of ATen operators and of vLLM's own; return how many. In the modes in which
    PyTorch compiles one graph for all numbers of tokens, vLLM says none: then those for many."""
    from vllm.compilation.passes.inductor_pass import get_pass_context

    try:
        few = get_pass_context().compile_range.end <= _FEW
    except AssertionError:
        few = False
    return sum(each.apply(graph) for each in _passes()[few])


@functools.cache
def _passes() -> tuple[tuple[PatternMatcherPass, ...], tuple[PatternMatcherPass, ...]]:
    """Passes for many and for few tokens in the order in which they run: a pattern of a later one is part of one of the
    first."""
    gated, normed, computed, alone = (PatternMatcherPass(pass_name=f"w4gemm_{i}") for i in range(4))
    with FakeTensorMode():
        x, residual = (_example(torch.bfloat16, _ROWS, _COLUMNS) for _ in range(2))
        norm = [x, residual, _example(torch.bfloat16, _COLUMNS)]
        for dtype in (torch.bfloat16, torch.float16):  # which silu's operators have among their arguments
            both = [_example(dtype, _ROWS, _COLUMNS)]
            _add(gated, _Rule(_quantize_gated, _gated_quantize, both))
            _add(alone, _Rule(_gated, _gate_halves, both, _is_between_products))
        if hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):
            _add(normed, _Rule(_quantize_normed, _norm_quantize, norm, _has_rows))
            _add(alone, _Rule(_normed, _norm, norm, _is_between_products))
        _add(computed, _Rule(_quantize, _quantize_in_operators, [x], _reads_what_is_computed))
    return (gated, computed), (gated, normed, computed, alone)


class _Rule(NamedTuple):
    """A function of tensors, and one that replaces it where ``check`` is true."""

    search: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: list[torch.Tensor]
    check: Callable[[Match], bool] = lambda match: True


def _add(patterns: PatternMatcherPass, rule: _Rule) -> None:
    number = {"eps": _NORM_EPS} if "eps" in inspect.signature(rule.search).parameters else {}
    register_replacement(
        rule.search, rule.replacement, rule.examples, fwd_only, patterns, rule.check, scalar_workaround=number
    )


def _example(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


# --- what is searched, each before what replaces it ------------------------------------------------------------------


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    half = gate_up.shape[-1] // 2
    return silu(gate_up[..., :half]) * gate_up[..., half:]


def _gate_halves(gate_up: torch.Tensor) -> torch.Tensor:
    return _ops.gate_halves(gate_up, "silu_mul")


def _quantize_gated(gate_up: torch.Tensor) -> Any:
    return _ops.quantize_activations(_gated(gate_up), None, _EPS, False)


def _gated_quantize(gate_up: torch.Tensor) -> Any:
    return _ops.quantize_activations(gate_up, None, _EPS, True)


def _normed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, eps)


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return _ops.add_rms_norm(x, residual, weight, eps)


def _quantize_normed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, eps)
    return *_ops.quantize_activations(y, None, _EPS, False), total


def _norm_quantize(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return _ops.add_rms_norm_quantize(x, residual, weight, eps)


def _quantize(x: torch.Tensor) -> Any:
    return _ops.quantize_activations(x, None, _EPS, False)


def _quantize_in_operators(x: torch.Tensor) -> Any:
    return quantize_in_pytorch(x, None, _EPS, False)


# --- where it is replaced --------------------------------------------------------------------------------------------


def _only_products_read(match: Match) -> bool:
    """True if the first result goes to products with 4-bit weights alone."""
    result: Any = match.output_nodes()[0]
    readers = list(result.users)
    while views := [node for node in readers if node.target in _VIEWS]:
        readers = [node for node in readers if node not in views] + [user for view in views for user in view.users]
    return all(node.target is _ops.packed_linear.default for node in readers)


def _has_rows(match: Match) -> bool:
    """True if operands are matrices in 16 bits, or vectors of the same dtype; Gemma's norms have others."""
    operands = [node for name, node in match.kwargs.items() if name != "eps"]
    if not all(isinstance(node, fx.Node) for node in operands):
        return False  # a norm without a weight
    tensors = [node.meta["val"] for node in operands]
    dtype = tensors[0].dtype
    return dtype in (torch.float16, torch.bfloat16) and all(t.dtype == dtype and t.dim() <= 2 for t in tensors)


def _is_between_products(match: Match) -> bool:
    return _has_rows(match) and _only_products_read(match)


def _reads_what_is_computed(match: Match) -> bool:
    """True if x comes from a kernel that the compiler makes, as one of a norm; false if from attention or a product."""
    x: Any = match.kwargs["x"]
    while x.target in _VIEWS:
        x = x.args[0]
    if not isinstance(x.target, torch._ops.OpOverload):
        return False
    # vllm_ir: vLLM's own operators, which it replaces by ATen's after this pass
    return x.target.namespace in ("prims", "vllm_ir") or torch.Tag.pointwise in x.target.tags
