"""The units that a model needs compiled: every problem and helper that the library may launch for its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from w4gemm import choice
from w4gemm.api.expert_layer import LayerKey, one_launch
from w4gemm.api.step import between_products
from w4gemm.checkpoints import Module
from w4gemm.choice.table import Record
from w4gemm.cli.problems import problems
from w4gemm.core.activation import is_gated
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.core.router import Router
from w4gemm.jit import Unit
from w4gemm.kernels import HELPERS, kernel_named
from w4gemm.kernels.expert_layer.spec import MOST_TOKENS
from w4gemm.kernels.helpers.base import LayerFacts
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.kernels.helpers.experts import IDS, ExpertChoice
from w4gemm.packing.layouts import layout_for
from w4gemm.packing.packed_shape import packed_shape


class Use(NamedTuple):
    """How the layers of a model are called."""

    device: Device
    dtype: torch.dtype
    """16-bit dtype of the model's activations."""
    fp8: bool = False
    """True if every layer quantizes x; a layer can also say so itself."""
    epilogue_activations: tuple[str, ...] = ()
    """Activations that layers may have in the epilogue."""
    residual: bool = False
    """True if layers also add a residual."""
    expert_scale: bool = False
    """True if layers of experts also have a scale for each expert."""
    act_order: bool = False
    """True if weights may have a perm."""
    top_k: int = 0
    """Number of experts of a token; 0 if the sum over their results is not needed."""
    router: tuple[Router, bool] | None = None
    """Rule of a router whose logits choose experts, and whether it has a bias."""
    batch_invariant: bool = False
    fused: bool = False
    """True if w4gemm's kernels also compute the operations between linear layers."""


def problems_of(layer: Module, tokens: list[int], use: Use) -> Iterator[GemmProblem]:
    """Yield every problem that ``linear``, ``grouped_linear`` and ``masked_linear`` may make of a layer.

    A layer of experts may be called with rows of x that are sorted by expert or gathered, and with silu_mul.

    Args:
        tokens: the m of each interval; for experts, the average m of an expert. 1 includes fewer rows than experts.
    """
    fp8 = use.fp8 or layer.activations == "fp8"
    if fp8:
        layer = replace(layer, activations="fp8")
    grouped = layer.experts > 0
    fused = dict.fromkeys((None, *(("silu_mul",) if grouped else ()), *use.epilogue_activations))
    activations = [name for name in fused if layer.n % 2 == 0 or not is_gated(name)]
    if odd := [name for name in use.epilogue_activations if name not in activations]:
        raise ValueError(f"--activation: {odd[0]} wants an even number of features, got {layer.n}")
    plain = problems([layer], tokens, use.device, use.dtype, use.batch_invariant)
    if grouped and 1 in tokens:
        (one,) = problems([layer], [1], use.device, use.dtype, use.batch_invariant)
        firsts = choice.first_rows(layer.experts - 1, layer.experts)
        few = (choice.plan_rows(m, layer.experts) for m in firsts)
        plain += [replace(one, m=m) for m in few if m < layer.experts]
    residuals = (False, True) if use.residual else (False,)
    scales = (False, True) if use.expert_scale and grouped else (False,)
    gathers = (False, True) if grouped else (False,)
    for activation, residual, scale, gathered in product(activations, residuals, scales, gathers):
        for problem in plain:
            # a layer that quantizes x gives d the dtype that x had
            epilogue = problem.epilogue._replace(
                activation=activation, residual=residual, out_dtype=use.dtype if fp8 else None, expert_scale=scale
            )
            yield replace(problem, epilogue=epilogue, gathered=gathered)


def helpers_of(layer: Module, use: Use) -> Iterator[Unit]:
    """Yield the unit of every small kernel that may run before or after a layer."""
    fp8 = use.fp8 or layer.activations == "fp8"
    facts = LayerFacts(layer.k, use.dtype, fp8, use.act_order, use.top_k if layer.experts else 0, layer.experts)
    facts = facts._replace(format=layer.format)
    helpers = [helper for kind in HELPERS for helper in kind.needed(use.device, facts)]
    if use.fused and not layer.experts:
        helpers += filter(None, between_products(use.device, use.dtype, layer.k, fp8))
    helpers += choices_of(layer, use)
    return (helper.unit() for helper in helpers)


def lookups_of(embeddings: Iterable[Module], use: Use) -> Iterator[Unit]:
    """Yield the unit of the kernel that looks up rows of each packed embedding, by int64 ids."""
    for module in embeddings:
        if (rows := EmbeddingRows.of(use.device, use.dtype, module.format, module.k)) is not None:
            yield rows.unit()


def choices_of(layer: Module, use: Use) -> list[ExpertChoice]:
    """Return the kernels that choose a layer's experts by logits of the model's dtype or float32.

    Raises:
        ValueError: if the rule does not fit the number of experts.
    """
    if use.router is None or not layer.experts:
        return []
    router, biased = use.router
    if reason := router.refusal(layer.experts, biased):
        raise ValueError(f"--router: {reason}")
    choices = (ExpertChoice.of(use.device, router, layer.experts, t, biased) for t in (use.dtype, torch.float32))
    return [choice for choice in choices if choice is not None]


def one_launches_of(layers: list[Module], tokens: list[int], use: Use) -> Iterator[Unit]:
    """Yield the unit of every layer of experts that would run in one launch. Two layers, gate_up and down, are one of
    experts if their sizes match each other.

    Args:
        tokens: as for :func:`problems_of`.
    """
    if use.fp8 or not use.top_k or 1 not in tokens:
        return
    activations = dict.fromkeys(("silu_mul", *filter(None, use.epilogue_activations)))
    scales = (False, True) if use.expert_scale else (False,)
    experts = [layer for layer in layers if layer.experts and layer.activations != "fp8"]
    for pair in product(experts, repeat=2):  # without gates either layer may be the first, and both may be alike
        gate_up, down = pair
        if (gate_up.experts, gate_up.k) != (down.experts, down.n):
            continue
        between = [name for name in activations if gate_up.n == (2 if is_gated(name) else 1) * down.k]
        first, second = (
            packed_shape(e.format, layout_for(use.device, e.format, use.dtype), e.n, e.k, e.experts) for e in pair
        )
        key = LayerKey(0, first, second, use.dtype, "", use.top_k, torch.int64, in_order=use.batch_invariant)
        ways = [*((ids, None) for ids in IDS), *((torch.int32, by_logits) for by_logits in choices_of(gate_up, use))]
        for m, name, (ids, by_logits), scale in product(range(1, MOST_TOKENS + 1), between, ways, scales):
            operands = gate_up.bias, down.bias, scale, scale
            call = key._replace(tokens=m, activation=name, ids=ids, operands=operands, choice=by_logits)
            if (chosen_layer := one_launch(call, use.device).chosen) is not None:
                yield chosen_layer.unit()


def chosen(needed: Iterable[GemmProblem], top: int = 1) -> tuple[dict[Unit, None], list[Record]]:
    """Return the units of the configs that would be chosen, each once, and the user's records that decided.

    Args:
        needed: the problems of a model.
        top: number of configs for each problem: the chosen one and the top - 1 of least predicted time.

    Raises:
        UnsupportedError: if no kernel runs one of the problems.
    """
    units: dict[Unit, None] = {}
    records: dict[Record, None] = {}
    for problem in (problem for one in needed for problem in choice.problems_of_interval(one)):
        explanation = choice.explain(problem)
        if explanation.chosen is None:
            raise UnsupportedError(str(explanation))
        for name, config in (explanation.chosen, *((c.kernel, c.config) for c in explanation.candidates[: top - 1])):
            if (unit := kernel_named(name).unit(explanation.problem, config)) is not None:
                units[unit] = None
        decided = choice.measured_record(explanation.problem)
        if decided is not None and decided[0] == "tuned":
            records[decided[1]] = None
    return units, list(records)
