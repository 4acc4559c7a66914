"""The attention of a step in one kernel, inside a model's own code: :func:`fuse_attention`, :func:`step_attention`.

The model calls three things in turn: the rotation, the cache's update, the attention function. The first two keep what
they get, and the third launches ``kernels/helpers/step_attention`` with the unrotated q, k and v.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from w4gemm.core.problem import Device
from w4gemm.integrations.decoder.requirements import Otherwise, attention_files, broken, rotated
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.step_attention import StepAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG2_E = math.log2(math.e)
_EVERYTHING = 2**30
"""A window that no cache fills."""
_NAME = "w4gemm_step"
"""Name of :func:`_attend` among transformers' attention functions."""


class NotFusable(Exception):
    """A model's step computes something else than what is fused."""


class Patches:
    """Attributes that are replaced until the end of a ``with``."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        self.stack.callback(*((own.__setitem__, name, own[name]) if name in own else (own.pop, name)))
        own[name] = value


@dataclass
class StepPlace:
    """Where a fused step writes the new token, and what its model has handed over for the attention of a layer."""

    slot: torch.Tensor
    """int64 (1,): where keys and values are written, the same for all sequences."""
    first: torch.Tensor
    """int32 (batch,): the first slot that a sequence sees."""
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    layer: Any = None
    """The cached keys and values (batch, kv heads, length, dim)."""

    def keep(self, layer: Any) -> None:
        """Note the cached layer that the next attention reads."""
        if self.layer is not None:
            raise NotFusable("an attention that caches twice")
        self.layer = layer


current: contextvars.ContextVar[StepPlace | None] = contextvars.ContextVar("w4gemm_step", default=None)
"""The fused step that this thread computes."""


def fuse_attention(patches: Patches, model: PreTrainedModel, place: StepPlace) -> None:
    """Let a model's code hand its unrotated q, k and v to one kernel, until the end of the patches.

    Raises:
        NotFusable: if it rotates them otherwise; while it runs, if its attention is another one.
    """
    if reason := broken(model, Otherwise.ATTENTION):
        raise NotFusable(reason)
    from transformers.modeling_utils import AttentionInterface  # which the requirements have just shown to be there

    AttentionInterface.register(_NAME, _attend)
    for file in attention_files(model):
        patches.set(file, "apply_rotary_pos_emb", _kept(file.apply_rotary_pos_emb))
    decoder = model.get_decoder()
    patches.stack.callback(decoder.set_attn_implementation, decoder.config._attn_implementation)
    decoder.set_attn_implementation(_NAME)
    patches.stack.callback(current.reset, current.set(place))


def _kept(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """A model's rotation, which a fused step leaves to the kernel."""

    @functools.wraps(rotate)
    def kept(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        place = current.get()
        if place is None:
            return rotate(q, k, cos, sin, *args, **kwargs)
        place.angles = cos, sin
        return q, k

    return kept


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of fused steps. q (batch, heads, 1, dim), k and v (batch, kv heads, 1, dim); returns the
    attention (batch, 1, heads, dim)."""
    unknown = [name for name in ("softcap", "position_bias") if others.get(name) is not None]
    place = current.get()
    if unknown or place is None or place.angles is None or place.layer is None or q.shape[2] != 1:
        raise NotFusable(f"attention with {unknown or 'another order of calls'}")
    (cos, sin), layer, dim = place.angles, place.layer, q.shape[-1]
    place.angles = place.layer = None
    angles = _whole(cos[:, 0], dim), _whole(sin[:, 0], dim)
    cached = CachedLayer(layer.keys, layer.values, place.slot, place.first)
    scale = dim**-0.5 if scaling is None else scaling
    window, sinks = sliding_window or _EVERYTHING, others.get("s_aux")
    return step_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], angles, cached, scale, window, sinks)[:, None], None


def _whole(angles: torch.Tensor, dim: int) -> torch.Tensor:
    """cos or sin (batch, dim) of angles that may be those of half a head."""
    return angles.repeat(1, 2) if 2 * angles.shape[-1] == dim else angles


class CachedLayer(NamedTuple):
    """The cache of a layer, and the slots of it that a step writes and sees."""

    keys: torch.Tensor
    """(batch, kv heads, length, dim)"""
    values: torch.Tensor
    """(batch, kv heads, length, dim)"""
    slot: torch.Tensor
    """int64 (1,): where the new token is written."""
    first: torch.Tensor
    """int32 (batch,): the first slot that a sequence sees."""


def step_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    cached: CachedLayer,
    scale: float,
    window: int = _EVERYTHING,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q (batch, heads, dim) and k (batch, kv heads, dim) by angles, cos and sin (batch, dim), write k and v to
    the cached layer, and return the attention (batch, heads, dim). window: slots that a token sees, its own among them.
    sinks (heads,): a score of each head that no value gets.

    Raises:
        NotFusable: if not all of a head is rotated, or values are not as large as keys.
    """
    batch, heads, dim = q.shape
    (cos, sin), (keys, values, slot, first) = angles, cached
    if cos.shape[-1] != dim or values.shape != keys.shape:
        raise NotFusable(f"heads of {dim} elements, {cos.shape[-1]} of them rotated, and values {tuple(values.shape)}")
    run = None
    if q.is_cuda and q.dtype == keys.dtype == cos.dtype:
        sms = Device.of(q.device).sms
        splits = StepAttention.splits_for(batch * k.shape[1], keys.shape[2], sms)
        run = launcher(StepAttention.of, q.device, q.dtype, dim, heads // k.shape[1], splits, sinks is not None)
    if run is None:
        return attention_in_torch(q, k, v, angles, cached, scale, window, sinks)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    cos, sin = cos.expand(batch, dim), sin.expand(batch, dim)
    scores = None if sinks is None else sinks.detach().to(q.dtype)
    run(q, k, v, cos, sin, keys, values, slot, first, scores, out, scale * _LOG2_E, window)
    return out


def attention_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    cached: CachedLayer,
    scale: float,
    window: int = _EVERYTHING,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`step_attention` by PyTorch's operators."""
    keys, values, slot, first = cached
    cos, sin = (angle.float()[:, None] for angle in angles)
    keys.index_copy_(2, slot, rotated(k.float(), cos, sin).to(keys.dtype)[:, :, None])
    values.index_copy_(2, slot, v[:, :, None])
    slots = torch.arange(keys.shape[2], device=q.device)
    seen = (slots <= slot) & (slots > slot - window) & (slots >= first[:, None])
    grouped = (rotated(q.float(), cos, sin) * scale).unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys.float().mT).masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        ends = sinks.float().view(1, keys.shape[1], -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat((scores, ends), -1)
    shares = scores.softmax(-1)[..., : keys.shape[2]]
    return (shares @ values.float()).flatten(1, 2).to(q.dtype)
