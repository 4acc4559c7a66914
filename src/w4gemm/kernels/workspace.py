"""Device memory of stream-k launches: partials in global memory, and flags that say which are stored.

Flags are 0 before and after each launch, so they are zeroed once. Launches that may overlap must not share flags: each
stream has its own, and each CUDA graph, because its replays may overlap other work on any stream. Partials are
allocated per launch, in the order of its stream or in its graph's own pool. Flags, 2 KiB each, are never freed, because
neither a stream nor a graph says when it is gone. A graph that is captured when the pool of flags is used up allocates
flags for each of its launches and zeroes them in every replay. So the pool is filled up before, by launches outside of
captures, which engines make before they capture the graphs of a step. Graphs are captured by one thread at a time
(:func:`capturing`), and other threads may go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from w4gemm.kernels.arguments import StreamWorkspace

MOST_SMS = 256
"""Multiprocessors of the largest GPU that stream-k has flags for."""
FLAG_BYTES = MOST_SMS * 2 * 4
"""Bytes of a launch's flags: two of 4 bytes for each multiprocessor."""
_POOL = 2048
"""Number of overlapping launches that one allocation serves."""
_LEAST = _POOL // 2
"""Number of flags below which a launch outside of a capture fills the pool up. So many graphs may be captured in a row;
an engine captures one for each piece of a model, some hundred at most."""

_flags: dict[tuple[int, int, int, str], torch.Tensor] = {}
_pools: dict[int, list[torch.Tensor]] = {}
_allocations: list[torch.Tensor] = []
"""All that flags and pools are parts of."""
_lock = threading.Lock()


def divided(workspace: torch.Tensor) -> StreamWorkspace:
    """Views of a caller's workspace, contiguous and of any dtype."""
    raw = workspace.view(-1).view(torch.uint8)
    return StreamWorkspace(raw[FLAG_BYTES:].view(torch.float32), raw[:FLAG_BYTES].view(torch.int32))


def allocated(device: torch.device, size: int) -> StreamWorkspace:
    """Return partials (uninitialized) and flags (0), together ``size`` bytes, for a launch on the current stream of the
    current CUDA device."""
    flags = flags_for(device, "stream-k")
    return StreamWorkspace(torch.empty((size - FLAG_BYTES) // 4, dtype=torch.float32, device=device), flags)


def flags_for(device: torch.device, purpose: str) -> torch.Tensor:
    """Return int32 flags for a launch on the current stream of the current CUDA device: those of the stream's, or the
    graph's, other launches for the same purpose; 0 for the first of them."""
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = device.index or 0, stream, capture, purpose
    pool = _pools.setdefault(key[0], [])
    if not capture and len(pool) < _LEAST:
        _fill(device, pool)
    flags = _flags.get(key)
    return _take(device, key, pool) if flags is None else flags


@torch.inference_mode()  # because flags that an engine's inference mode made may be written in that mode alone
def clear() -> None:
    """Zero all flags anew, also those of captured graphs, while nothing is launched: for an engine that had the memory
    of a loaded model taken away and given back as it happened to be, as vLLM's sleep mode of level 2 does."""
    with _lock:
        for flags in _allocations:
            flags.zero_()
            if flags.is_cuda:
                torch.cuda.current_stream(flags.device).synchronize()  # launches come on other streams too


def _fill(device: torch.device, pool: list[torch.Tensor]) -> None:
    """Add the flags of one allocation to a pool that has few, outside of a capture."""
    with _lock:
        if len(pool) < _LEAST:
            _allocations.append(torch.zeros(_POOL * FLAG_BYTES // 4, dtype=torch.int32, device=device))
            pool.extend(_allocations[-1].split(FLAG_BYTES // 4))
            torch.cuda.current_stream(device).synchronize()  # other streams take from it too


def _take(device: torch.device, key: tuple[int, int, int, str], pool: list[torch.Tensor]) -> torch.Tensor:
    """Return permanent flags; without any left, flags for one launch that its stream, or its graph, zeroes."""
    with _lock:
        if not pool:
            return torch.zeros(FLAG_BYTES // 4, dtype=torch.int32, device=device)
        return _flags.setdefault(key, pool.pop())


def _capture(stream: int) -> int:
    """Return the number of the capture that a stream is part of; numbers are not reused."""
    from cuda.bindings import runtime  # a requirement of the DSL

    status, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaStreamGetCaptureInfo: {status}")
    return int(number)


# --- CUDA graphs ----------------------------------------------------------------------------------------------------

exclusive = threading.RLock()
"""Held by the thread that captures a graph. Also to be held where a graph is deleted: PyTorch waits for the whole GPU
then, as it does before a capture, and CUDA lets no thread do so while another captures."""


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what this thread launches in the block; yields the graph.

    Other threads may launch, allocate and wait for their own streams: by default CUDA makes that an error for them and
    ends the capture ("global" mode). What they still may not do meanwhile is wait for the whole GPU, or draw from
    PyTorch's own CUDA generator, which every capture of PyTorch takes over.
    """
    graph = torch.cuda.CUDAGraph()
    with exclusive, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph
