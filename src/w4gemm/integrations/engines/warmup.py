"""Kernels that are ready before an engine measures its memory, captures graphs or serves: :class:`Warmup`."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from w4gemm.api.expert_layer import LayerKey, one_launch_now
from w4gemm.api.ops import linear
from w4gemm.api.step import between_products
from w4gemm.choice import BOUNDS, PlanKey, first_rows, plan_m, plan_rows, prepare, tokens_of_all_plans
from w4gemm.core import environment
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import Device
from w4gemm.integrations.engines.engine import Engine
from w4gemm.jit import Unit
from w4gemm.kernels import HELPERS
from w4gemm.kernels.expert_layer.spec import MOST_TOKENS, TOKENS
from w4gemm.kernels.helpers.base import LayerFacts
from w4gemm.weights.weight import QuantizedWeight


class Need(NamedTuple):
    """Launches of layers of one kind and shape."""

    what: str
    """The kind, for the log."""
    keys: tuple[PlanKey, ...]
    helpers: tuple[Unit, ...]
    """Small kernels around the products."""
    run: Callable[[], None] | None
    """Launches each plan once."""

    @property
    def kind(self) -> Hashable:
        """Equal for layers that launch the same."""
        return self.keys, self.helpers


class ExpertsCall(NamedTuple):
    """How a layer's experts are called."""

    dtype: torch.dtype
    """dtype of the model's activations."""
    top_k: Sequence[int]
    """Numbers of experts that a token may have."""
    rows: Sequence[int]
    """Numbers of rows of all experts, one of each interval."""
    gathered: bool = True
    """True if rows of x are read through indices."""
    bias: bool = False
    """True if both products have one."""
    block_scale: bool = False
    """True if rows of x come in fp8 with a scale for each 128 columns."""
    mapped: bool = False
    """True if ids name global experts, of which a map says which are here."""
    batch_invariant: bool = False


class Warmup:
    """The preparation of an engine's layers in this process.

    A layer announces itself when it is made (:meth:`expect`) and hands in what it needs when its weights are loaded
    (:meth:`loaded`). When the last one has, plans for every number of tokens that the engine can meet are chosen,
    compiled or loaded in parallel, and launched once each, because machine code whose first launch is captured in a
    graph would be loaded during the capture. Later layers, of a draft model for example, are prepared when they come.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._expected: weakref.WeakSet[object] = weakref.WeakSet()
        """Layers that were made, and whose weights are not loaded yet."""
        self._needs: dict[Hashable, Need] = {}
        """Needs of loaded layers, one for each kind and shape."""
        self._layers: dict[str, int] = {}
        """Number of loaded layers by ``Need.what``."""
        self._ready: set[Hashable] = set()

    def expect(self, layer: object) -> None:
        """Wait with the preparation for this layer, as long as it lives."""
        self._expected.add(layer)

    def loaded(self, layer: object, need: Need) -> None:
        """Take what a layer needs; prepare everything if it is the last one.

        Raises:
            UnsupportedError: if a kernel cannot be compiled.
        """
        self._layers[need.what] = self._layers.get(need.what, 0) + 1
        if need.kind not in self._ready:
            self._needs.setdefault(need.kind, need)
        self.settle(layer)

    def settle(self, layer: object) -> None:
        """Wait no longer for a layer that the engine's own kernels run after all, or for a whole model that was
        expected; prepare everything if it was the last.

        Raises:
            UnsupportedError: if a kernel cannot be compiled.
        """
        self._expected.discard(layer)
        if not self._expected:
            self._prepare()

    def finish(self) -> None:
        """Wait for no layer any longer, because the engine has loaded a whole model, and prepare what was loaded. An
        engine may keep layers that it made and never loads.

        Raises:
            UnsupportedError: if a kernel cannot be compiled.
        """
        if self._expected:
            self._expected.clear()
            self._prepare()

    def _prepare(self) -> None:
        needs, layers = list(self._needs.values()), dict(self._layers)
        self._needs.clear()
        self._layers.clear()
        if not needs:  # weights were loaded anew
            return
        keys = [key for need in needs for key in need.keys]
        helpers = list(dict.fromkeys(unit for need in needs for unit in need.helpers))
        begun = time.perf_counter()
        try:
            done = prepare(keys, helpers, *_rank())
        except UnsupportedError as e:
            engine = self._engine
            raise UnsupportedError(
                f"{e}\n{engine.variable}=off leaves these layers to {engine.name}'s own kernels"
            ) from e
        for need in needs:
            if need.run is not None:
                need.run()
            self._ready.add(need.kind)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a launch that fails shall fail here
        ran = ", ".join(f"{count} {what}" for what, count in layers.items())
        self._engine.log().info(
            "w4gemm runs %s; %d kernels ready in %.1f s: %d compiled, the others from %s",
            *(ran, done.units, time.perf_counter() - begun, done.compiled, environment.cache_dir() or "memory"),
        )


class LinearUse(NamedTuple):
    """How an engine calls a linear layer."""

    dtype: torch.dtype
    """16-bit dtype of the model."""
    call: Callable[[torch.Tensor, torch.Tensor | None], object] | None = None
    """Called with x of this dtype and a bias or None; None for :func:`w4gemm.linear` with one weight."""
    most_tokens: int = BOUNDS[-1] + 1
    batch_invariant: bool = False
    fused: bool = False
    """True if compiled graphs have what lies between products in w4gemm's kernels."""


def linear_need(weights: Sequence[QuantizedWeight], bias: torch.Tensor | None, use: LinearUse) -> Need:
    """Return the launches of a layer with 1 to ``use.most_tokens`` tokens, without and with its bias if it has
    one.

    Args:
        weights: one, or several with the same x whose results ``use.call`` joins.
    """
    first = weights[0]
    fp8, device = first.activations == "fp8", first.device
    epilogues = [Epilogue(bias=biased) for biased in ((False,) if bias is None else (False, True))]
    kinds = [PlanKey.of_layer(w, 1, use.dtype, e, use.batch_invariant) for w in weights for e in epilogues]
    tokens = sorted({m for kind in kinds for m in tokens_of_all_plans(kind, use.most_tokens)})
    keys = tuple(kind._replace(m=plan_m(m)) for kind in kinds for m in tokens)
    facts = LayerFacts(first.k, use.dtype, fp8, act_order=first.perm is not None, format=first.format)
    described = Device.of(device)
    helpers = [helper for kind in HELPERS for helper in kind.needed(described, facts)]
    if use.fused:
        helpers += filter(None, between_products(described, use.dtype, first.k, fp8))
    call = use.call or functools.partial(_linear, first, use.batch_invariant)

    @torch.inference_mode()
    def run() -> None:
        x = torch.zeros(tokens[-1], first.k, dtype=use.dtype, device=device)
        for m in tokens:
            for one in (None, bias)[: len(epilogues)]:
                call(x[:m], one)

    return Need("linear layers", keys, tuple(helper.unit() for helper in helpers), run)


def _linear(w: QuantizedWeight, batch_invariant: bool, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, w, bias, batch_invariant=batch_invariant)


def experts_need(
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    activation: str | None,
    call: ExpertsCall,
    run: Callable[[], None] | None,
) -> Need:
    """Return the launches of the products of experts, and of the small kernels around them."""
    device, plain = Device.of(gate_up.device), Epilogue(bias=call.bias)
    keys: list[PlanKey] = []
    helpers: dict[Unit, None] = {}
    for w, fused in ((gate_up, activation), (down, None)):
        fp8, epilogue = w.activations == "fp8", plain._replace(activation=fused)
        product = PlanKey.of_layer(w, 1, call.dtype, epilogue, call.batch_invariant, call.gathered and w is gate_up)
        if call.block_scale and w is gate_up:
            product = product._replace(epilogue=product.epilogue._replace(token_scale=False, block_scale=True))
        keys += [product._replace(m=plan_rows(rows, w.experts)) for rows in call.rows]
        for top_k in call.top_k:
            facts = LayerFacts(w.k, call.dtype, fp8, top_k=top_k, experts=w.experts, format=w.format)
            helpers |= {helper.unit(): None for kind in HELPERS for helper in kind.needed(device, facts)}
    if call.gathered and activation is not None:
        operands = call.bias, call.bias, False, False
        for top_k, tokens in itertools.product(call.top_k, range(1, MOST_TOKENS + 1)):
            call_facts = call.dtype, activation, top_k, torch.int32, call.mapped, operands
            key = LayerKey(tokens, gate_up.packed, down.packed, *call_facts, in_order=call.batch_invariant)
            if (layer := one_launch_now(key, device).chosen) is not None:
                helpers[layer.unit()] = None
    return Need("layers of 4-bit experts", tuple(keys), tuple(helpers), run)


def token_counts(most: int, top_k: int, experts: int) -> list[int]:
    """Return numbers of tokens within 1 .. most whose rows, ``top_k`` each, meet every interval that such rows can, and
    which meet every kernel of a layer in one launch."""
    tokens = {-(-rows // top_k) for rows in first_rows(most * top_k, experts)}
    return sorted(tokens | {m for m in TOKENS if m <= most})


def _rank() -> tuple[int, int]:
    """Return which of how many processes of the engine this one is."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
