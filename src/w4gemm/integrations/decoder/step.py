"""One token of each sequence through a model, captured in a CUDA graph: :class:`DecodeStep`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from w4gemm.choice import Prepared
from w4gemm.integrations.decoder.attention import NotFusable, StepPlace, current
from w4gemm.integrations.decoder.fusion import Fusion, fused
from w4gemm.integrations.decoder.requirements import cache_argument, log_once, takes
from w4gemm.kernels.workspace import capturing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_ERROR = 0.1
"""Largest relative difference of the logits of a fused step: 16-bit roundings of many layers make some percent."""
_OF_LIBRARIES = ("torch.", "transformers.", "w4gemm.api.", "w4gemm.integrations.transformers.embeddings")
"""Packages whose modules do the same as long as their tensors, hooks and settings are. Adapters are not: some may be
switched off."""


class StepLayer(StaticLayer):
    """Keys and values of a layer. In a fused step the kernel writes them, and not ``update``."""

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        place = current.get()
        if place is None:
            return super().update(k, v, *args, **kwargs)
        place.keep(self)
        return k, v


class Prompt(NamedTuple):
    """Tokens (batch, m), which of them are no padding, and their positions, (batch, m) or (planes, batch, m), None for
    those that follow from that."""

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def planes(self) -> int:
        """See :class:`DecodeStep`."""
        return self.positions.shape[0] if self.positions is not None and self.positions.dim() == 3 else 0

    def logits(self, model: PreTrainedModel, cache: Any, positions: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (batch, vocabulary) behind the prompt, whose keys and values go into a cache."""
        options: dict[str, Any] = {"logits_to_keep": 1} if takes(model.forward, "logits_to_keep") else {}
        options |= {cache_argument(model): cache, "position_ids": positions, "use_cache": True}
        logits: torch.Tensor = model(self.ids, attention_mask=self.mask, **options).logits
        return logits[:, -1]


class DecodeStep:
    """One token of each sequence through a model, with a cache of fixed size; on a GPU as a CUDA graph.

    All tensors that a step reads and writes lie here, so that a graph can be replayed for call after call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        length: int,
        padded: bool,
        fusion: Fusion | None = None,
        planes: int = 0,
    ) -> None:
        """
        Args:
            length: tokens of a sequence at most, with those of the prompt.
            padded: whether prompts may have padding.
            planes: numbers that the position of a token is, where models place pictures too: positions are (planes,
                batch, 1) then. 0 for positions (batch, 1).
            fusion: products of the model to compute together; None to capture the model's own code.
        """
        self.batch, self.length, self.padded, self.fusion, self.planes = batch, length, padded, fusion, planes
        self.facts = facts_of(model)
        self.fused_error: float | None = None
        self.prepared: dict[int, Prepared] = {}
        """Kernels compiled beforehand, by the number of tokens of prompts."""
        cache = static_cache(model, length)
        assert cache is not None
        self.cache = cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = model.device.type == "cuda"
        with torch.inference_mode():
            self.token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
            self.position = self.token.expand(planes, batch, 1).clone() if planes else self.token.clone()
            self.mask = torch.ones(batch, length, dtype=torch.int64, device=model.device) if padded else None
            self.slot = torch.zeros(1, dtype=torch.int64, device=model.device)
            self.first = torch.zeros(batch, dtype=torch.int32, device=model.device)
        self.logits = torch.empty(0)

    def serves(self, model: PreTrainedModel, batch: int, length: int, padded: bool, planes: int = 0) -> bool:
        """True if calls of these sizes can use this step, and the model is what it was."""
        sizes = (batch, padded, planes) == (self.batch, self.padded, self.planes) and length <= self.length
        return sizes and self.knows(model)

    def knows(self, model: PreTrainedModel) -> bool:
        """True if nothing of the model changed that a captured step depends on."""
        return self.facts is not None and self.facts == facts_of(model)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        """Give the cache room for more tokens, one layer after the other. The next call captures the step anew."""
        facts, self.facts, self._graph = self.facts, None, None  # it serves no call unless all of it grows
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                setattr(layer, name, nn.functional.pad(getattr(layer, name), (0, 0, 0, length - self.length)))
            layer.max_cache_len = length
        if self.mask is not None:
            self.mask = nn.functional.pad(self.mask, (0, length - self.length), value=1)
        self.length, self.facts = length, facts

    @torch.inference_mode()
    def prefill(self, model: PreTrainedModel, prompt: Prompt) -> torch.Tensor:
        """Return the logits (batch, vocabulary) behind prompts, whose padding is on the left."""
        ids, mask, positions = prompt
        self.cache.reset()
        if positions is None:
            ones = torch.ones_like(ids) if mask is None else mask
            positions = (ones.cumsum(-1) - 1).clamp(min=0)
        if mask is not None:
            assert self.mask is not None
            self.mask.fill_(1)[:, : ids.shape[1]] = mask
            self.first.copy_((mask == 0).sum(1))
        logits = prompt.logits(model, self.cache, positions)
        self.position.copy_(positions[..., -1:])
        self.slot.fill_(ids.shape[1])
        return logits

    @torch.inference_mode()
    def __call__(self, model: PreTrainedModel, token: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, vocabulary) behind one more token (batch,) of each sequence: memory that the next
        call overwrites."""
        self.token.copy_(token[:, None])
        if self._graph is None and self._captures:
            try:
                self._graph = self._capture(model)
            except RuntimeError as e:  # the model's code waits for the device, or PyTorch cannot capture it
                self._captures = False
                warnings.warn(
                    f"{type(model).__name__}: its step cannot be captured, it runs eagerly: {e}", stacklevel=2
                )
        if self._graph is None:
            return self._run(model)
        self._graph.replay()
        return self.logits

    def _run(self, model: PreTrainedModel) -> torch.Tensor:
        self.position.add_(1)
        options = {"attention_mask": self.mask, "position_ids": self.position, cache_argument(model): self.cache}
        inputs = model.prepare_inputs_for_generation(self.token, next_sequence_length=1, use_cache=True, **options)
        logits = model(**inputs, return_dict=True).logits[:, -1]
        self.slot.add_(1)
        return logits

    def _run_fused(self, model: PreTrainedModel) -> torch.Tensor:
        """Compute :meth:`_run` in fewer kernels. Its attention needs no mask."""
        assert self.fusion is not None
        self.position.add_(1)
        options = {"position_ids": self.position, cache_argument(model): self.cache}
        with fused(model, self.fusion, StepPlace(self.slot, self.first)):
            logits = model(self.token, use_cache=True, return_dict=True, **options).logits[:, -1]
        torch._foreach_add_([self.slot, *(layer.cumulative_length for layer in self.cache.layers)], 1)
        return logits

    def _capture(self, model: PreTrainedModel) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run = self.choose(model)  # compiles and sets up what must not be captured
        torch.cuda.current_stream().wait_stream(side)
        with capturing() as graph:
            self.logits = run(model)
        return graph

    def _run_joined(self, model: PreTrainedModel) -> torch.Tensor:
        """Compute :meth:`_run` with the model's own attention and other layers fused, for models whose attention is not
        fused."""
        assert self.fusion is not None
        with fused(model, self.fusion, None):
            return self._run(model)

    def choose(self, model: PreTrainedModel) -> Callable[[PreTrainedModel], torch.Tensor]:
        """Return the step to capture: the first of the fused ones whose logits are those of the model's own code. All
        of them run here; of the step's tensors they change only what the next token writes over."""
        counters = [self.position, self.slot, *(layer.cumulative_length for layer in self.cache.layers)]
        before = [t.clone() for t in counters]

        def logits_of(run: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
            try:
                return run(model).float()
            finally:
                for t, value in zip(counters, before, strict=True):
                    t.copy_(value)

        own, reasons = logits_of(self._run), []
        for run in (self._run_fused, self._run_joined) if self.fusion is not None else ():
            try:
                logits = logits_of(run)
            except (NotFusable, RuntimeError, TypeError, AttributeError) as e:  # modules are not what their names say
                reasons.append(str(e))
                continue
            self.fused_error = float((logits - own).norm() / own.norm())
            if self.fused_error < _MOST_ERROR:
                _tell(model, reasons)
                return run
            reasons.append(f"its logits would be off by {self.fused_error:.2g}")
        _tell(model, reasons)
        return self._run


def _tell(model: nn.Module, reasons: list[str]) -> None:
    """Say why a model's steps are not fused, or not whole."""
    if reasons:
        text = f"{type(model).__name__}: a step launches more kernels than it could: {'; '.join(reasons)}"
        log_once(logging.WARNING, text)


def static_cache(model: PreTrainedModel, length: int) -> StaticCache | None:
    """Return a cache of fixed size in which every layer has all positions; None for models that keep anything else."""
    if not model._can_compile_fullgraph:
        return None
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
    if any(type(layer) not in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers):
        return None
    # a sliding layer counts in Python; the mask of a window hides the same positions of a whole cache
    cache.layers = [StepLayer(max_cache_len=length) for _ in cache.layers]
    return cache


def facts_of(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return all that a captured step depends on besides its own tensors. None if modules of other packages may depend
    on anything: then each call captures anew."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    config = model.config
    facts: list[Any] = [cast, config._attn_implementation, _settings(config), _settings(config.get_text_config())]
    for module in model.modules():
        if not type(module).__module__.startswith(_OF_LIBRARIES):
            return None
        tensors = (t.data_ptr() for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        hooks = (*module._forward_hooks, *module._forward_pre_hooks)  # numbers, each of one hook
        facts.append((id(module), *tensors, hooks, id(getattr(module, "_held", None)), _settings(module)))
    return tuple(facts)


def _settings(owner: Any) -> tuple[Any, ...]:
    """Return the numbers, words and functions among a module's or config's attributes, such as a scale, a mode or a
    forward that was set on it."""
    return tuple(v for v in vars(owner).values() if isinstance(v, (bool, int, float, str)) or callable(v))
