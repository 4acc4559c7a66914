"""The steps before and after the products of a mixture of experts: :func:`route` and :func:`combine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from w4gemm.api.arguments import check_own_memory, check_rows
from w4gemm.api.modes import any_negated, is_plain, is_watched
from w4gemm.core.epilogue import FLOATS
from w4gemm.core.errors import UnsupportedError, kind_of, require_bool, require_int, require_own_numbers, require_tensor
from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.router import Router
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.experts import ExpertChoice, ExpertRoute, RowCombine

_MOST_EXPERTS = 2**20


class Routing(NamedTuple):
    """The choices of tokens as rows that are sorted by expert. Each token has one row for each expert that it chose.
    All tensors are on the device of the expert ids."""

    m_offsets: torch.Tensor
    """int32 (experts + 1,): expert e has the rows m_offsets[e] .. m_offsets[e + 1] - 1. For :func:`grouped_linear`."""
    tokens: torch.Tensor
    """int32 (tokens * top k,): the token of each row. The first product's ``indices``."""
    row_of_choice: torch.Tensor
    """int32 (tokens, top k): the row of each choice, or -1 if its expert is elsewhere. For :func:`combine`."""


def route(expert_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> Routing:
    """Sort the choices of tokens by expert, stably. The host reads nothing, so that a CUDA graph can capture it.

    On Hopper a kernel of our own does it in one launch, elsewhere PyTorch's operators in more than a dozen; both give
    the same.

    Args:
        expert_ids: int32 or int64 (tokens, top k), the experts that the router chose. An id outside 0 .. experts - 1
            is an expert elsewhere (expert parallelism). Its rows come last and belong to no expert here, and their
            ``tokens`` are any of the tokens.
        experts: number of experts here.
        expert_map: int32 (global experts,) on the ids' device, or None if ids count the experts here. The map has
            the expert here for each global one, or a negative number. An id outside the map is elsewhere.

    Returns:
        :class:`Routing`: ``m_offsets`` and ``tokens`` for :func:`grouped_linear`, ``row_of_choice`` for
        :func:`combine`.

    Raises:
        TypeError, ValueError: for another dtype, shape or device; the message names the argument.

    Examples:
        >>> routing = w4gemm.route(torch.tensor([[2, 0], [2, 1]]), 3)
        >>> routing.m_offsets.tolist(), routing.tokens.tolist()
        ([0, 1, 2, 4], [0, 1, 0, 1])
    """
    check_ids(expert_ids)
    require_int("experts", experts, 1, _MOST_EXPERTS)
    if expert_map is not None:
        expected = torch.int32, ("global experts",), expert_ids.device
        require_tensor("expert_map", expert_map, *expected, whose="expert_ids' device", contiguous=False)
    return routed(expert_ids, experts, expert_map)


def routed(expert_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> Routing:
    """Return :func:`route` of checked arguments."""
    expert_ids = expert_ids.contiguous()  # its rows are the order of everything below
    device = expert_ids.device
    if device.type == "cuda" and is_plain(expert_ids) and not is_watched():
        form = expert_ids.dtype, experts, expert_map is not None, expert_ids.numel()
        sort = launcher(ExpertRoute.of, device, *form)
        if sort is not None:
            return sorted_by(sort, expert_ids, experts, None if expert_map is None else expert_map.contiguous())
    return _route_in_pytorch(expert_ids, experts, expert_map)


def choose_experts(
    logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts by the logits of a router.

    On Hopper a kernel of our own does it in one launch. Elsewhere PyTorch's operators do it, and where
    ``W4GEMM_COMPILE=off`` forbids compiling it; scores of both differ in their last bits.

    Args:
        logits: float32, float16 or bfloat16 (tokens, experts).
        router: the rule.
        bias: float32 (experts,) on the logits' device, or None: added to the scores that are compared, not to weights
            (``e_score_correction_bias``).

    Returns:
        Experts int32 and weights float32, both (tokens, top k). Gradients flow from weights to logits.

    Raises:
        TypeError, ValueError: for another dtype, shape or device; the message names the argument.

    Examples:
        >>> ids, weights = w4gemm.choose_experts(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), w4gemm.Router(2))
        >>> ids.tolist(), weights.tolist()
        ([[1, 3]], [[0.5, 0.5]])
    """
    check_logits(logits, router, bias)
    plain = is_plain(logits) and (bias is None or is_plain(bias)) and not is_watched()
    plain = plain and not any_negated(logits, bias)
    if logits.is_cuda and plain and not (torch.is_grad_enabled() and logits.requires_grad):
        try:
            choose = launcher(ExpertChoice.of, logits.device, router, logits.shape[1], logits.dtype, bias is not None)
        except UnsupportedError:  # W4GEMM_COMPILE=off, and nobody compiled it
            choose = None
        if choose is not None:
            shape = len(logits), router.top_k
            ids, weights = (logits.new_empty(shape, dtype=dtype) for dtype in (torch.int32, torch.float32))
            if len(logits):
                choose(logits.contiguous(), bias, ids, weights)
            return ids, weights
    return router.choose(logits, bias)


def check_logits(logits: torch.Tensor, router: Router, bias: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError unless :func:`choose_experts` takes these."""
    require_tensor("logits", logits, FLOATS, ("tokens", "experts"), contiguous=False)
    if not isinstance(router, Router):
        raise TypeError(f"router: wanted a Router, got {kind_of(router)}")
    if bias is not None:
        require_tensor("bias", bias, torch.float32, (logits.shape[1],), logits.device)
    if reason := router.refusal(logits.shape[1], bias is not None):
        raise ValueError(f"logits: {reason}")


def check_ids(expert_ids: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless ``expert_ids`` are int32 or int64 (tokens, top k)."""
    require_tensor("expert_ids", expert_ids, (torch.int32, torch.int64), ("tokens", "top k"), contiguous=False)


def _route_in_pytorch(expert_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> Routing:
    """Return the routing of contiguous ids, which PyTorch's operators compute."""
    if expert_map is not None:
        padded = torch.nn.functional.pad(expert_map, (1, 1), value=-1)  # what is outside takes the first or the last
        expert_ids = padded[expert_ids.clamp(-1, len(expert_map)).long() + 1]
    here = (expert_ids >= 0) & (expert_ids < experts)
    ids, order = torch.where(here, expert_ids, experts).flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    m_offsets = torch.searchsorted(ids, bounds, out_int32=True)
    row_of_choice = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    row_of_choice[order] = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    row_of_choice = torch.where(here, row_of_choice.view(expert_ids.shape), -1)
    tokens = torch.empty_like(row_of_choice).view(-1)  # int32 as kernels read it: the division converts in one launch
    torch.div(order, max(1, expert_ids.shape[1]), rounding_mode="floor", out=tokens)
    return Routing(m_offsets, tokens, row_of_choice)


def sorted_by(
    sort: Callable[..., None], expert_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> Routing:
    """Return the routing of contiguous ids, which a kernel computes."""
    choices, device = expert_ids.numel(), expert_ids.device
    m_offsets, tokens = (torch.empty(size, dtype=torch.int32, device=device) for size in (experts + 1, choices))
    row_of_choice = torch.empty(expert_ids.shape, dtype=torch.int32, device=device)
    flat = expert_ids.view(-1), expert_map, m_offsets, tokens, row_of_choice.view(-1)
    sort(*flat, expert_ids.shape[1])
    return Routing(m_offsets, tokens, row_of_choice)


def combine(
    d: torch.Tensor,
    row_of_choice: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """Add up the experts' outputs of each token, weighted by the router.

    Row t of the result is the sum over j of weights[t, j] * d[row_of_choice[t, j]], added in float32 in the order of j
    and rounded once.

    Args:
        d: floating point (rows, n), the experts' outputs.
        row_of_choice: int32 (tokens, top k), rows of d as :func:`route` returns them. A negative one adds nothing.
        weights: floating point (tokens, top k), the router's weight of each choice.
        out: tensor to write the result to: (tokens, n) of d's dtype, contiguous, in memory of its own. Or None.
        settled: True if another launch, such as the product that d comes from, comes between this launch and the one
            that wrote ``row_of_choice`` and ``weights``. On Hopper the kernel then reads them while that launch still
            runs (programmatic dependent launch). Which launches may come between, :func:`w4gemm.grouped_linear` says.

    Returns:
        (tokens, n) in d's dtype; ``out`` if given. Gradients flow to d and weights.

    Raises:
        TypeError, ValueError: for another dtype, shape or device; the message names the argument.

    Examples:
        >>> routing = w4gemm.route(torch.tensor([[2, 0], [2, 1]]), 3)
        >>> d = torch.tensor([[1.0], [2.0], [3.0], [4.0]])  # rows of experts 0, 1, 2 and 2
        >>> w4gemm.combine(d, routing.row_of_choice, torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
        [[2.0], [4.0]]
    """
    _check_terms(d, row_of_choice, weights)
    require_bool("settled", settled)
    if out is not None:
        require_tensor("out", out, d.dtype, (row_of_choice.shape[0], d.shape[1]), d.device)
        require_own_numbers("out", out)
        if torch.is_grad_enabled() and (d.requires_grad or weights.requires_grad or out.requires_grad):
            raise ValueError("out: wanted None where gradients are needed, got a tensor")
        check_own_memory(out, {"d": d, "row_of_choice": row_of_choice, "weights": weights})
    return combined(d, row_of_choice, weights, out, settled)


def combined(
    d: torch.Tensor,
    row_of_choice: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None,
    settled: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`combine` of checked arguments. added: (tokens * top k, n) of d's dtype, added as it is, or None; no
    gradients flow to it."""
    tokens, terms = row_of_choice.shape
    differentiated = torch.is_grad_enabled() and (d.requires_grad or weights.requires_grad)
    eager = is_plain(d) and is_plain(weights) and not differentiated and not is_watched()
    eager = eager and not any_negated(d, weights)
    takes = RowCombine.takes
    if eager and d.device.type == "cuda" and tokens and d.shape[0] and takes(d):
        add_up = launcher(RowCombine.of, d.device, d.dtype, terms, added is not None)
        if add_up is not None and (out is None or takes(out)) and (added is None or takes(added)):
            out = torch.empty((tokens, d.shape[1]), dtype=d.dtype, device=d.device) if out is None else out
            rows, factors = row_of_choice.contiguous(), weights.float().contiguous()
            add_up(d, rows, factors, added, out, int(settled and rows is row_of_choice and factors is weights))
            return out
    total = _added_up(d, row_of_choice, weights)
    if added is not None:
        total = total + added.view(tokens, terms, -1).float().sum(1)
    if differentiated and not (terms and d.shape[0]):  # nothing was added, and yet a backward pass may begin here
        total = total + d[:0].sum() + weights[:, :0].sum()
    return total.to(d.dtype) if out is None else out.copy_(total)


def _check_terms(d: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor) -> None:
    anyhow: dict[str, Any] = {"contiguous": False, "whose": "d's device"}
    require_tensor("d", d, (), ("rows", "n"), **anyhow)
    require_tensor("row_of_choice", row_of_choice, torch.int32, ("tokens", "top k"), d.device, **anyhow)
    require_tensor("weights", weights, (), row_of_choice.shape, d.device, size=" like row_of_choice", **anyhow)
    if d.shape[0]:
        check_rows("row_of_choice", row_of_choice, -LARGEST_SIZE, d.shape[0])


def _added_up(d: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sums in float32, by PyTorch's operators."""
    tokens, terms = row_of_choice.shape
    total = torch.zeros((tokens, d.shape[1]), dtype=torch.float32, device=d.device)
    for j in range(terms if d.shape[0] else 0):
        here = row_of_choice[:, j, None] >= 0
        row = d.index_select(0, row_of_choice[:, j].clamp(min=0)).float()
        # both before they are multiplied: what is elsewhere may hold NaN, and so may its weight
        row, weight = torch.where(here, row, 0.0), torch.where(here, weights[:, j, None].float(), 0.0)
        total = total + weight * row
    return total
