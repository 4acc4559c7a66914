"""The attention of a step in one kernel, inside a model's own code: :func:`fuse_attention`, :func:`step_attention`.

The model calls three things in turn: the rotation, the cache's update, the attention function. The first two keep what
they get, and the third launches ``kernels/step_attention`` with the unrotated q, k and v.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w4gemm.core.problem import Device
from w4gemm.kernels import launcher
from w4gemm.kernels.step_attention.spec import StepAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG2_E = math.log2(math.e)
_EVERYTHING = 2**30
"""A window that no cache fills."""


class NotFusable(Exception):
    """A model's step computes something else than what is fused."""


@dataclass
class Cached:
    """Where the new token goes, on the device."""

    cache: Any
    slot: torch.Tensor
    """int64 (1,): where it is written, the same for all sequences."""
    first: torch.Tensor
    """int32 (batch,): the first slot that a sequence sees."""


class Patches:
    """Attributes that are replaced until the end of a ``with``."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        self.stack.callback(*((own.__setitem__, name, own[name]) if name in own else (own.pop, name)))
        own[name] = value


def fuse_attention(patches: Patches, model: PreTrainedModel, cached: Cached) -> None:
    """Let a model's code hand its unrotated q, k and v to one kernel.

    Raises:
        NotFusable: if it rotates them otherwise; while it runs, if its attention is another one.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    angles: list[torch.Tensor] = []
    layers: list[Any] = []

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
        angles[:] = cos, sin
        return q, k

    def update(layer: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def keep(k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            layers.append(layer)
            return k, v

        return keep

    def attend(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = [name for name in ("softcap", "position_bias") if others.get(name) is not None]
        if unknown or len(angles) != 2 or len(layers) != 1 or q.shape[2] != 1:
            raise NotFusable(f"attention with {unknown or 'another order of calls'}")
        layer, (cos, sin) = layers.pop(), angles
        angles.clear()
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        heads = (q[:, :, 0], k[:, :, 0], v[:, :, 0])
        cos, sin = (_whole(t[:, 0], q.shape[-1]) for t in (cos, sin))
        seen = scale, sliding_window or _EVERYTHING, others.get("s_aux")
        out = step_attention(*heads, cos, sin, layer, cached, *seen)
        return out[:, None], None

    modules = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "q_proj")}
    if not modules or not all(_rotates(module) for module in modules):
        raise NotFusable("another rotation of q and k")
    for module in modules:
        patches.set(module, "apply_rotary_pos_emb", rotate)
    for layer in cached.cache.layers:
        patches.set(layer, "update", update(layer))
    patches.stack.callback(ALL_ATTENTION_FUNCTIONS._local_mapping.update, dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
    patches.stack.callback(ALL_ATTENTION_FUNCTIONS._local_mapping.clear)
    ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation] = attend


def _rotates(module: Any) -> bool:
    """True if a file's rotation is the one that is fused: over all of a head, its halves against each other."""
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        return False
    g, shapes = torch.Generator().manual_seed(0), ((2, 3, 1, 8), (2, 1, 1, 8), (2, 1, 4))
    q, k, half = (torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for shape in shapes)
    angle = half.repeat(1, 1, 2)
    wanted = [rotated(x, angle.cos()[:, None], angle.sin()[:, None]) for x in (q, k)]
    for given in (angle, half):  # gpt-oss has the angles once for both halves
        try:
            found = rotate(q, k, given.cos(), given.sin())
        except Exception:
            continue
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True)):
            return True
    return False


def _whole(angles: torch.Tensor, dim: int) -> torch.Tensor:
    """cos or sin (batch, dim) of angles that may be those of half a head."""
    return angles.repeat(1, 2) if 2 * angles.shape[-1] == dim else angles


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def step_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: Any,
    cached: Cached,
    scale: float,
    window: int = _EVERYTHING,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q (batch, heads, dim) and k (batch, kv heads, dim) by cos and sin (batch, dim), write k and v to a cache
    layer, and return the attention (batch, heads, dim). sinks (heads,): a score of each head that no value gets."""
    batch, heads, dim = q.shape
    keys, values = layer.keys, layer.values
    if cos.shape[-1] != dim or values.shape != keys.shape:
        raise NotFusable(f"heads of {dim} elements, {cos.shape[-1]} of them rotated, and values {tuple(values.shape)}")
    run = None
    if q.is_cuda and q.dtype == keys.dtype == cos.dtype:
        sms = Device.of(q.device).sms
        splits = StepAttention.splits_for(batch * k.shape[1], keys.shape[2], sms)
        facts = q.dtype, dim, heads // k.shape[1], splits, sinks is not None
        run = launcher(StepAttention.of, q.device, *facts)
    if run is None:
        return attention_in_torch(q, k, v, cos, sin, keys, values, cached, scale, window, sinks)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    angles = (cos.expand(batch, dim), sin.expand(batch, dim))
    scores = None if sinks is None else sinks.detach().to(q.dtype)
    run(q, k, v, *angles, keys, values, cached.slot, cached.first, scores, out, scale * _LOG2_E, window)
    return out


def attention_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cached: Cached,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by PyTorch's operators."""
    angles = cos.float()[:, None], sin.float()[:, None]
    keys.index_copy_(2, cached.slot, rotated(k.float(), *angles).to(keys.dtype)[:, :, None])
    values.index_copy_(2, cached.slot, v[:, :, None])
    slots = torch.arange(keys.shape[2], device=q.device)
    seen = (slots <= cached.slot) & (slots > cached.slot - window) & (slots >= cached.first[:, None])
    grouped = (rotated(q.float(), *angles) * scale).unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys.float().mT).masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        ends = sinks.float().view(1, keys.shape[1], -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat((scores, ends), -1)
    shares = scores.softmax(-1)[..., : keys.shape[2]]
    return (shares @ values.float()).flatten(1, 2).to(q.dtype)
