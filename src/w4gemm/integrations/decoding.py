"""Decoding as replays of one CUDA graph: :func:`decode_by_graph`, which ``generate`` of transformers then does.

A step of ``generate`` launches some 1,500 kernels for 32 layers, from Python: the GPU waits for the host. Here the
whole step, from the token to its logits, is captured once and replayed for each token. It needs a cache of fixed size,
and positions that lie on the device. transformers' own way, ``torch.compile``, compiles for long before it starts.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w4gemm.integrations.fused_step import Cached, Fusion, NotFusable, fused

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.cache_utils import Cache

DEVICES = ("cuda",)
"""Kinds of devices on which models decode step by step; elsewhere the host does not wait."""
_ROUND = 256
"""Lengths of caches are multiples of it, so that calls of about the same length share a graph."""
_HANDLED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""Arguments of a model's forward that a step gives it; with any others transformers decodes."""
_MOST_ERROR = 0.1
"""Largest relative difference of the logits of a fused step: 16-bit roundings of many layers make some percent."""
_OF_LIBRARIES = ("torch.", "transformers.", "w4gemm.")
"""Packages whose modules do the same as long as their tensors and hooks are the same ones."""


class DecodeStep:
    """One token of each sequence through a model, with a cache of fixed size; on a GPU as a CUDA graph.

    All tensors that a step reads and writes lie here, so that a graph can be replayed for call after call.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, length: int, padded: bool, fusion: Fusion | None = None
    ) -> None:
        """
        Args:
            length: tokens of a sequence at most, with those of the prompt.
            padded: whether prompts may have padding.
            fusion: products of the model to compute together; None to capture the model's own code.
        """
        self.batch, self.length, self.padded, self.fusion = batch, length, padded, fusion
        self.facts = _facts(model)
        self.fused_error: float | None = None
        cache = _static_cache(model, length)
        assert cache is not None
        self.cache = cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = model.device.type == "cuda"
        with torch.inference_mode():
            self.token, self.position = (torch.zeros(batch, 1, dtype=torch.int64, device=model.device) for _ in "tp")
            self.mask = torch.ones(batch, length, dtype=torch.int64, device=model.device) if padded else None
            self.slot = torch.zeros(1, dtype=torch.int64, device=model.device)
            self.first = torch.zeros(batch, dtype=torch.int32, device=model.device)
            self._no_mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=model.device)
        self.logits = torch.empty(0)

    def serves(self, model: PreTrainedModel, batch: int, length: int, padded: bool) -> bool:
        """True if calls of these sizes can use this step, and the model is what it was."""
        sizes = (batch, padded) == (self.batch, self.padded) and length <= self.length
        return sizes and self.knows(model)

    def knows(self, model: PreTrainedModel) -> bool:
        """True if the model is what it was."""
        return self.facts is not None and self.facts == _facts(model)

    @torch.inference_mode()
    def prefill(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (batch, vocabulary) behind prompts (batch, m), whose padding on the left ``mask`` marks."""
        self.cache.reset()
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        if mask is not None:
            assert self.mask is not None
            self.mask.fill_(1)[:, : ids.shape[1]] = mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            self.first.copy_((mask == 0).sum(1))
        options = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
        given = {"past_key_values": self.cache, "position_ids": positions, "use_cache": True, **options}
        logits = model(ids, attention_mask=mask, **given).logits[:, -1]
        self.position.copy_(positions[:, -1:])
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
        given = {"attention_mask": self.mask, "position_ids": self.position, "past_key_values": self.cache}
        inputs = model.prepare_inputs_for_generation(self.token, next_sequence_length=1, use_cache=True, **given)
        logits = model(**inputs, return_dict=True).logits[:, -1]
        self.slot.add_(1)
        return logits

    def _run_fused(self, model: PreTrainedModel) -> torch.Tensor:
        """The same in fewer kernels. Its attention needs no mask, so that of all positions is given, which models take
        as it is."""
        assert self.fusion is not None
        self.position.add_(1)
        given = {"attention_mask": self._no_mask, "position_ids": self.position, "past_key_values": self.cache}
        with fused(model, self.fusion, Cached(self.cache, self.slot, self.first)):
            logits = model(self.token, use_cache=True, return_dict=True, **given).logits[:, -1]
        torch._foreach_add_([self.slot, *(layer.cumulative_length for layer in self.cache.layers)], 1)
        return logits

    def _capture(self, model: PreTrainedModel) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run = self.choose(model)  # compiles and sets up what must not be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = run(model)
        return graph

    def choose(self, model: PreTrainedModel) -> Callable[[PreTrainedModel], torch.Tensor]:
        """Return what to capture: the fused step if it gives the logits of the model's own code, which both compute
        here, without a trace of it in the step's tensors but what the next token writes over."""
        counters = [self.position, self.slot, *(layer.cumulative_length for layer in self.cache.layers)]
        before = [t.clone() for t in counters]

        def tried(run: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
            try:
                return run(model).float()
            finally:
                for t, value in zip(counters, before, strict=True):
                    t.copy_(value)

        wanted = tried(self._run)
        if self.fusion is None:
            return self._run
        try:
            found = tried(self._run_fused)
        except (NotFusable, RuntimeError, TypeError, AttributeError):  # its modules are not what their names say
            return self._run
        self.fused_error = float((found - wanted).norm() / wanted.norm())
        return self._run_fused if self.fused_error < _MOST_ERROR else self._run


def decode_by_graph(model: PreTrainedModel, fuse: bool = True) -> PreTrainedModel:
    """Let ``model.generate`` on a GPU replay a CUDA graph for each token, where the call and the model allow it: greedy
    or with sampling, for a decoder on one GPU with attention alone. ``disable_compile=True`` in a call's
    generation config turns it off for the call.

    Args:
        fuse: False to capture the model's own code, whose kernels :mod:`w4gemm.integrations.fused_step` fuses.
    """
    _patch()
    _steps[model] = _Kept(fuse)
    return model


@dataclass
class _Kept:
    """The step that is kept of a model from call to call: one, since its cache and graph take memory."""

    fuse: bool
    step: DecodeStep | None = None


_steps: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
"""The models that decode by graph."""


def step_for(model: PreTrainedModel, batch: int, length: int, padded: bool) -> DecodeStep:
    """Return a step of a model for these sizes, the last one if it serves."""
    kept = _steps[model]
    if kept.step is None or not kept.step.serves(model, batch, length, padded):
        fusion = kept.step.fusion if kept.step is not None and kept.step.knows(model) else None
        kept.step = None  # its memory may be needed for the next
        if kept.fuse and fusion is None:
            fusion = Fusion.of(model)
        kept.step = DecodeStep(model, batch, -(-length // _ROUND) * _ROUND, padded, fusion)
    return kept.step


def _patch() -> None:
    from transformers.generation import GenerationMixin

    if not hasattr(GenerationMixin._sample, "__wrapped__"):
        GenerationMixin._sample = _by_graph(GenerationMixin._sample)


def _by_graph(sample: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sample)
    def wrapped(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(sample).bind(self, input_ids, *args, **kwargs).arguments
        options = given.pop("model_kwargs", {})
        if self not in _steps or self.device.type not in DEVICES or not allowed(self, given, options):
            return sample(self, input_ids, *args, **kwargs)
        wanted = given["logits_processor"], given["stopping_criteria"], given["generation_config"]
        return sample_by_step(self, input_ids, options.get("attention_mask"), *wanted, given.get("streamer"))

    return wrapped


def allowed(model: PreTrainedModel, given: dict[str, Any], options: dict[str, Any]) -> bool:
    """True if a call of ``_sample`` asks for nothing but tokens, from a prompt alone, and the model can be captured."""
    config: GenerationConfig = given["generation_config"]
    cache = options.get("past_key_values")
    wanted_else = (
        config.disable_compile
        or config.return_dict_in_generate
        or config.cache_implementation is not None
        or config.prefill_chunk_size is not None
        or given.get("synced_gpus")
        or not options.get("use_cache", True)
        or (cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()))
        or any(value is not None for name, value in options.items() if name not in _HANDLED)
    )
    devices = set(getattr(model, "hf_device_map", {}).values())
    several = len(devices) > 1 or (getattr(model, "tp_size", None) or 1) > 1
    return not (wanted_else or several or model.config.is_encoder_decoder) and _static_cache(model, 1) is not None


def sample_by_step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    logits_processor: Callable[..., torch.Tensor],
    stopping_criteria: Any,
    config: GenerationConfig,
    streamer: Any = None,
) -> torch.Tensor:
    """Return ``ids`` and the tokens that follow, as transformers' ``_sample`` does.

    Whether to stop is known one step late, so that the host never waits for the step that it has just launched; the
    token too many is dropped.
    """
    batch, start = ids.shape
    end = stopping_criteria.max_length
    step = step_for(model, batch, end, mask is not None)
    pad = config._pad_token_tensor if any(hasattr(c, "eos_token_id") for c in stopping_criteria) else None
    found = torch.cat((ids, ids.new_zeros(batch, end - start)), dim=1)
    unfinished = torch.ones(batch, dtype=torch.bool, device=ids.device)
    logits = step.prefill(model, ids, mask)
    late = _Late(streamer)
    for length in range(start, end):
        scores = logits_processor(found[:, :length], logits.to(torch.float32, copy=True))
        token = _drawn(scores) if config.do_sample else scores.argmax(-1)
        if pad is not None:
            token = torch.where(unfinished, token, pad.to(token.device))
        found[:, length] = token
        unfinished = unfinished & ~stopping_criteria(found[:, : length + 1], None)
        if late.stops(~unfinished.any(), token):
            found = found[:, :length]
            break
        if length + 1 < end:
            logits = step(model, token)
    late.finish()
    return found


def _drawn(scores: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(scores.softmax(-1), 1).squeeze(1)


class _Late:
    """Values of a step that the host reads while the device computes the next one."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None

    def stops(self, finished: torch.Tensor, token: torch.Tensor) -> bool:
        """True if the step before this one was the last; its token goes to the streamer now, this one's at the next
        call."""
        before, self._waiting = self._waiting, self._copied(finished, token)
        stopped = before is not None and self._read(before)
        if stopped:
            self._waiting = None
        return stopped

    def finish(self) -> None:
        """Hand the last token to the streamer."""
        if self._waiting is not None:
            self._read(self._waiting)
        if self.streamer is not None:
            self.streamer.end()

    def _copied(
        self, finished: torch.Tensor, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
        if not token.is_cuda:
            return finished, token, None
        copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in (finished, token)
        ]
        event = torch.cuda.Event()
        event.record()
        return copies[0], copies[1], event

    def _read(self, copied: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]) -> bool:
        finished, token, event = copied
        if event is not None:
            event.synchronize()
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        return bool(finished)


def _static_cache(model: PreTrainedModel, length: int) -> Cache | None:
    """A cache of fixed size in which every layer has all positions; None for models that keep anything else."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if not model._can_compile_fullgraph:
        return None
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
    if any(type(layer) not in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers):
        return None
    # a sliding layer counts in Python; the mask of a window hides the same positions of a whole cache
    cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]
    return cache


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _facts(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """All that a captured step depends on besides its own tensors; None if that cannot be told, because there are
    modules of other packages: then each call captures anew."""
    found: list[Any] = [model.config._attn_implementation]
    for module in model.modules():
        if not type(module).__module__.startswith(_OF_LIBRARIES):
            return None
        tensors = (t.data_ptr() for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        own = (
            getattr(module, "activation", None),
            getattr(module, "batch_invariant", None),
            id(getattr(module, "_weight", None)),
        )
        found.append((id(module), *tensors, hooks, *own, "forward" in module.__dict__))
    return tuple(found)
