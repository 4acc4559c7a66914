"""The loop of ``generate`` over steps, in place of transformers' ``_sample``: :func:`sample_by_step`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.generation import GenerationMixin

from w4gemm.api.experts import W4Experts
from w4gemm.choice import PlanKey, Prepared, prepare
from w4gemm.console.errors import memory_for
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import Device
from w4gemm.integrations.decoder.attention import NotFusable
from w4gemm.integrations.decoder.compiled_step import CompiledStep
from w4gemm.integrations.decoder.fusion import Fusion
from w4gemm.integrations.decoder.requirements import LEFT_TO_TRANSFORMERS, Otherwise, broken, cache_argument, log_once
from w4gemm.integrations.decoder.step import DecodeStep, Prompt, static_cache
from w4gemm.integrations.generation import expert_keys, plan_keys
from w4gemm.integrations.wrapping import wrap
from w4gemm.jit import Unit
from w4gemm.kernels.helpers.base import Helper, on_device
from w4gemm.kernels.helpers.experts import ExpertRoute, RowCombine

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

DEVICES = ("cuda",)
"""Kinds of devices that replay a CUDA graph; CPUs run a list of calls."""
_ROUND = 256
"""Lengths of caches are multiples of it, so that calls of about the same length share a graph."""
_ROOM = 4096
"""Tokens behind a prompt that a GPU's cache has room for at first; it doubles where more come."""
_HANDLED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
"""Arguments of a model's forward that a step gives it, beside the cache; with any others transformers decodes."""
_ATTENTION = ("sdpa", "eager")
"""Implementations whose masks say which slots of a cache are filled."""


def enable(model: PreTrainedModel, fuse: bool) -> None:
    """See :func:`w4gemm.integrations.decoder.decode_by_graph`."""
    wrap(GenerationMixin, "_sample", _sample)
    _steps[model] = _Kept(fuse)


@dataclass
class _Kept:
    """The step that is kept of a model from call to call: one, since its cache and graph take memory."""

    fuse: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a call decodes."""
    step: DecodeStep | CompiledStep | None = None


_steps: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
"""The models that decode step by step."""


def step_for(
    model: PreTrainedModel, batch: int, length: int, padded: bool, planes: int = 0
) -> DecodeStep | CompiledStep:
    """Return a step of a model for these sizes, the last one if it serves.

    Raises:
        NotFusable: on a CPU, if the model or the sizes have no compiled step, or memory has no room for it.
    """
    kept = _steps[model]
    if kept.step is None or not kept.step.serves(model, batch, length, padded, planes):
        if model.device.type not in DEVICES:
            kept.step = None
            if (batch, padded, planes) != (1, False, 0):
                raise NotFusable("a compiled step has one sequence, without padding")
            with _room_for(length):
                kept.step = CompiledStep(model, -(-length // _ROUND) * _ROUND)
            return kept.step
        last = kept.step
        fusion = last.fusion if isinstance(last, DecodeStep) and last.knows(model) else None
        kept.step = None  # its memory may be needed for the next
        if kept.fuse and fusion is None:
            fusion = Fusion.of(model)
        kept.step = DecodeStep(model, batch, -(-length // _ROUND) * _ROUND, padded, fusion, planes)
    return kept.step


@contextlib.contextmanager
def _room_for(length: int) -> Iterator[None]:
    """Raise NotFusable if memory has no room for what the block allocates, caches of ``length`` tokens: transformers'
    own grow with the text."""
    try:
        with memory_for(f"memory has no room for caches of {length} tokens"):
            yield
    except MemoryError as e:
        raise NotFusable(str(e)) from e


def step_of(model: PreTrainedModel) -> DecodeStep | CompiledStep | None:
    """Return the step that a model keeps; None before its first call, and if it does not decode step by step."""
    return _steps[model].step if model in _steps else None


_signature = functools.cache(inspect.signature)


def _sample(own: Callable[..., Any], self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Decode step by step with a model that does; else do what transformers' ``_sample`` does."""
    if self not in _steps or self.device.type not in (*DEVICES, "cpu"):
        return own(self, input_ids, *args, **kwargs)
    arguments = _signature(own).bind(self, input_ids, *args, **kwargs).arguments
    options = arguments.pop("model_kwargs", {})

    def left(reason: str) -> Any:
        log_once(logging.INFO, f"{type(self).__name__}: generate runs transformers' own loop, because {reason}")
        return own(self, input_ids, *args, **kwargs)

    if reason := refusal(self, arguments, options):
        return left(reason)
    mask = options.get("attention_mask")
    if mask is not None and bool((mask == 1).all()):  # which newer versions of transformers leave out themselves
        mask = None
    prompt = Prompt(input_ids, mask, options.get("position_ids"))
    processor, criteria = arguments["logits_processor"], arguments["stopping_criteria"]
    config, streamer = arguments["generation_config"], arguments.get("streamer")
    lock = _steps[self].lock
    if not lock.acquire(blocking=False):
        return left("another call decodes with this model")
    try:
        with on_device(self.device):  # a graph captures streams of the current GPU alone
            batch, start = input_ids.shape
            length = criteria.max_length if self.device.type not in DEVICES else min(criteria.max_length, start + _ROOM)
            step = step_for(self, batch, length, mask is not None, prompt.planes)
            return sample_by_step(self, step, prompt, processor, criteria, config, streamer)
    except NotFusable as e:  # before the first token
        reason, step, _steps[self].step = str(e), None, None  # whose memory transformers' loop may need
    finally:
        lock.release()
    return left(reason)


def refusal(model: PreTrainedModel, arguments: dict[str, Any], options: dict[str, Any]) -> str:
    """Return why a call of ``_sample`` is left to transformers; the empty string if it asks for nothing but tokens,
    from a prompt alone, and the model can be captured.

    Args:
        arguments: those that ``_sample`` names.
        options: the others, which it hands to the model.
    """
    return next(_refusals(model, arguments, options), "")


def _refusals(model: PreTrainedModel, arguments: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
    if reason := broken(model, Otherwise.CALL):
        yield reason
        return
    config: GenerationConfig = arguments["generation_config"]
    for name in LEFT_TO_TRANSFORMERS:
        if value := getattr(config, name):
            yield f"{name} is {value}"
    if arguments.get("synced_gpus"):
        yield "GPUs are synchronized"
    if arguments["stopping_criteria"].max_length is None:
        yield "no length ends it"
    in_cache = cache_argument(model)
    cache, mask, positions = (options.get(name) for name in (in_cache, "attention_mask", "position_ids"))
    if not options.get("use_cache", True):
        yield "use_cache is False"
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        yield f"{in_cache} is the caller's"
    named = [name for name, value in options.items() if value is not None and not _is_empty(value)]
    if others := [name for name in named if name not in (in_cache, *_HANDLED)]:
        yield f"the call passes {', '.join(others)}"
    if positions is not None and positions.dim() not in (2, 3):
        yield f"position_ids have {positions.dim()} dimensions"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or (getattr(model, "tp_size", None) or 1) > 1:
        yield "the model is on several devices"
    if model.config.is_encoder_decoder:
        yield "the model has an encoder"
    if model.config._attn_implementation not in _ATTENTION:
        yield f"its attention is {model.config._attn_implementation}, not {' or '.join(_ATTENTION)}"
    if static_cache(model, 1) is None:
        yield "its cache has no fixed size"
    if mask is not None and not bool((mask[:, 1:] >= mask[:, :-1]).all()):  # last, because the host waits for it
        yield "attention_mask has padding that is not on the left"


def _is_empty(value: Any) -> bool:
    """True for an empty dict: transformers gives models that read images one for the images of a prompt."""
    return isinstance(value, dict) and not value


def sample_by_step(
    model: PreTrainedModel,
    step: DecodeStep | CompiledStep,
    prompt: Prompt,
    logits_processor: Callable[..., torch.Tensor],
    stopping_criteria: Any,
    config: GenerationConfig,
    streamer: Any = None,
) -> torch.Tensor:
    """Return the prompt's tokens and those that follow, as transformers' ``_sample`` does.

    With a CUDA graph it is known one step late whether to stop, so that the host never waits for the step that it has
    just launched; the token too many is dropped.
    """
    ids = prompt.ids
    batch, start = ids.shape
    end = stopping_criteria.max_length
    if isinstance(step, DecodeStep):
        compile_ahead(model, step, batch * start)
    pad = config._pad_token_tensor if any(hasattr(c, "eos_token_id") for c in stopping_criteria) else None
    tokens = ids.new_zeros(batch, min(end, step.length))
    tokens[:, :start] = ids
    unfinished = torch.ones(batch, dtype=torch.bool, device=ids.device)
    with _room_for(tokens.shape[1]):
        logits = step.prefill(model, prompt)
    results = _Results(streamer, late=isinstance(step, DecodeStep))
    for length in range(start, end):
        if length == tokens.shape[1]:
            assert isinstance(step, DecodeStep)  # a compiled step has room for all
            longer = min(end, 2 * step.length)
            with memory_for(f"memory has no room for caches of {longer} tokens"):
                step.grow(-(-longer // _ROUND) * _ROUND)
            tokens = nn.functional.pad(tokens, (0, longer - length))
        scores = logits_processor(tokens[:, :length], logits.to(torch.float32, copy=True))
        token = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if config.do_sample else scores.argmax(-1)
        if pad is not None:
            token = torch.where(unfinished, token, pad.to(token.device))
        tokens[:, length] = token
        unfinished = unfinished & ~stopping_criteria(tokens[:, : length + 1], None)
        if results.stop(~unfinished.any(), token):
            tokens = tokens[:, : length + 1 - results.late]
            break
        if length + 1 < end:
            logits = step(model, token)
    results.finish()
    return tokens


def compile_ahead(model: PreTrainedModel, step: DecodeStep, rows: int) -> None:
    """Compile what a prompt of ``rows`` tokens in all and the steps behind it launch, in several processes, if it is
    not compiled yet: one after the other takes twice as long, all of it before the first token."""
    if model.device.type != "cuda" or rows in step.prepared:
        return
    step.prepared[rows] = Prepared(0, 0, 0.0)
    keys, helpers = launched(model, step, rows)
    with contextlib.suppress(UnsupportedError):  # the call itself says it, with the reason
        step.prepared[rows] = prepare(keys, helpers)


def launched(model: PreTrainedModel, step: DecodeStep, rows: int) -> tuple[list[PlanKey], list[Unit]]:
    """Return keys of the plans, and small kernels, that a prompt of ``rows`` tokens in all and its steps launch."""
    config, dtype = model.config.get_text_config(decoder=True), model.dtype
    top_k = getattr(config, "num_experts_per_tok", None)
    keys: list[PlanKey] = []
    helpers: list[Helper | None] = []
    for m in (rows, step.batch):
        keys += plan_keys(model, m, dtype) + (expert_keys(model, m, dtype, top_k) if top_k else [])
    if step.fusion is not None:
        keys += step.fusion.plan_keys(step.batch, dtype)
        helpers += step.fusion.helpers(model, step.batch, step.length)
    if top_k:
        device = Device.of(model.device)
        counts = {m.gate_up.weight.experts for m in model.modules() if isinstance(m, W4Experts)}
        helpers += [
            ExpertRoute.of(device, torch.int64, count, False, m * top_k) for count in counts for m in (rows, step.batch)
        ]
        helpers += [RowCombine.of(device, dtype, top_k) for _ in counts]
    return keys, list(dict.fromkeys(helper.unit() for helper in helpers if helper is not None))


class _Copies(NamedTuple):
    """Results of a step that the host reads, and the event behind their copies; no event if it reads them at once."""

    finished: torch.Tensor
    token: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, finished: torch.Tensor, token: torch.Tensor) -> _Copies:
        if not token.is_cuda:
            return cls(finished, token, None)
        copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in (finished, token)
        ]
        event = torch.cuda.Event()
        event.record()
        return cls(copies[0], copies[1], event)


class _Results:
    """What the host reads of each step: whether all sequences ended, and the token for a streamer.

    Args:
        late: True to read it while the device computes the next step.
    """

    def __init__(self, streamer: Any, late: bool) -> None:
        self.streamer, self.late = streamer, late
        self._waiting: _Copies | None = None

    def stop(self, finished: torch.Tensor, token: torch.Tensor) -> bool:
        """True if this step was the last or, if results are late, the one before; its token goes to the streamer."""
        before, own = self._waiting, _Copies.of(finished, token)
        if not self.late:
            return self._read(own)
        self._waiting = own
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

    def _read(self, copies: _Copies) -> bool:
        if copies.event is not None:
            copies.event.synchronize()
        if self.streamer is not None:
            self.streamer.put(copies.token.cpu())
        return bool(copies.finished)
