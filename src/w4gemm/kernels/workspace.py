"""Device memory of launches whose CTAs sum through global memory: partial sums, and flags that say which are there.

Flags are down (0) before and after each launch, so they are zeroed once. Two launches that may run at the same time
must not share them: each stream has its own, and each CUDA graph, whose replays may meet other work on any stream.
Partial sums need no such care: they are allocated for a launch, in the order of its stream or in its graph's own pool.
Neither a stream nor a graph says when it is gone, so their flags, 2 KiB each, are kept for good; graphs that are
captured when a pool is used up zero flags of their own instead, in every replay.
"""

from __future__ import annotations

import threading

import torch

from w4gemm.kernels.arguments import StreamWorkspace

FLAG_BYTES = 2048
"""Bytes of a launch's flags: two for each of 256 SMs."""
_POOL = 2048
"""Launches at a time that one allocation serves."""

_flags: dict[tuple[int, int, int], torch.Tensor] = {}
_pools: dict[int, list[torch.Tensor]] = {}
_lock = threading.Lock()


def divided(workspace: torch.Tensor) -> StreamWorkspace:
    """Views of a caller's workspace, contiguous and of any dtype."""
    raw = workspace.view(-1).view(torch.uint8)
    return StreamWorkspace(raw[FLAG_BYTES:].view(torch.float32), raw[:FLAG_BYTES].view(torch.int32))


def allocated(device: torch.device, size: int) -> StreamWorkspace:
    """Uninitialized partial sums and flags that are 0, together ``size`` bytes, for a launch on the current stream of
    the current CUDA device."""
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = device.index or 0, stream, capture
    flags = _flags.get(key)
    if flags is None:
        flags = _take(device, key)
    return StreamWorkspace(torch.empty((size - FLAG_BYTES) // 4, dtype=torch.float32, device=device), flags)


def _take(device: torch.device, key: tuple[int, int, int]) -> torch.Tensor:
    """Flags for good; or, of a capture where there are none left, for one launch, zeroed as part of the graph."""
    index, _, capture = key
    with _lock:
        pool = _pools.setdefault(index, [])
        if not pool and capture:
            return torch.zeros(FLAG_BYTES // 4, dtype=torch.int32, device=device)
        if not pool:
            pool.extend(torch.zeros(_POOL * FLAG_BYTES // 4, dtype=torch.int32, device=device).split(FLAG_BYTES // 4))
            torch.cuda.current_stream(device).synchronize()  # other streams take from it too
        return _flags.setdefault(key, pool.pop())


def _capture(stream: int) -> int:
    """The number of the capture that a stream is part of; none is used twice."""
    from cuda.bindings import runtime  # a requirement of the DSL

    status, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaStreamGetCaptureInfo: {status}")
    return int(number)
