"""The benchmark's interface to an implementation: :class:`Peer`; what adapters share."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from w4gemm.core.formats import ALIASES, WeightFormat
from w4gemm.jit.toolchain import installed_version
from w4gemm.weights.weight import QuantizedWeight

Tensors = tuple[torch.Tensor, ...]

_ROTATED_BYTES, _MOST_COPIES = 400e6, 512


@dataclass(frozen=True)
class Prepared:
    """A weight in an implementation's own layout, and how to multiply by it."""

    tensors: Tensors
    """Every tensor of the weight that a call reads: the benchmark rotates over copies of them."""
    run: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    """run(weight_of(tensors), x (m, k), out (m, n)) -> d (m, n), in ``out`` if the implementation can write there. It
    runs what users get by default, and works in a CUDA graph."""
    chosen: Callable[[int], str] = lambda m: ""
    """The config that runs for m tokens, or the empty string if the implementation does not say."""
    activations: torch.dtype | None = None
    """dtype of x that ``run`` takes, if the implementation quantizes x itself; else None."""
    most_tokens: int = 2**31
    """Most tokens that are measured: for more it takes so much longer than others that the GPU cools down meanwhile."""
    weight_of: Callable[[Tensors], Any] = lambda tensors: tensors
    """Makes the weight that ``run`` takes from a copy of the tensors, once, because a timed call must do no more than a
    user's."""

    def copies(self) -> list[Any]:
        """Weights of the tensors and of copies that together exceed L2 several times, for calls to rotate over."""
        size = sum(t.numel() * t.element_size() for t in self.tensors)
        count = min(_MOST_COPIES, max(2, math.ceil(_ROTATED_BYTES / size)))
        copies = (tuple(t.clone() for t in self.tensors) for _ in range(count - 1))
        return [self.weight_of(tensors) for tensors in (self.tensors, *copies)]


class Adapter(Protocol):
    """An implementation as benchmarks see it before it multiplies: its name and version, and what it can run."""

    name: str

    def version(self) -> str: ...

    def available(self) -> str:
        """Return why it cannot run on this machine, or the empty string. Imports nothing heavy."""
        ...

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        """Return why it cannot run this problem, or the empty string."""
        ...


AnyAdapter = TypeVar("AnyAdapter", bound=Adapter)


def available(adapters: Iterable[AnyAdapter]) -> list[AnyAdapter]:
    """Return those that can run here; print the version of each, and why the others cannot."""
    peers = []
    for each in adapters:
        reason = each.available()
        print(f"{each.name} {each.version()}{': ' + reason if reason else ''}", flush=True)
        peers += [] if reason else [each]
    return peers


class Peer(Adapter, Protocol):
    """An implementation of d = x @ w.T with a 4-bit weight (or, for comparison, the same weight in 16 bits)."""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        """Repack the weight's codes and scales, bit for bit, for activations of ``dtype``."""
        ...


# --- what adapters share -------------------------------------------------------------------------------------------


def missing_gpu() -> str:
    return "" if torch.cuda.is_available() else "no CUDA GPU"


def missing_package(package: str, module: str) -> str:
    """Return why ``module`` of the package cannot be imported, or the empty string. Does not import it."""
    return "" if importlib.util.find_spec(module) else f"{package} is not installed"


class PackageAdapter:
    """An implementation from a package of its own."""

    package: str
    module: str
    """The module whose absence says that the package is not installed."""

    def version(self) -> str:
        return installed_version(self.package)

    def available(self) -> str:
        return missing_gpu() or missing_package(self.package, self.module)


def unsupported(
    n: int,
    k: int,
    format: WeightFormat,
    dtype: torch.dtype,
    *,
    groups: Sequence[int],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    n_multiple: int = 1,
    k_multiple: int = 1,
    fp4: Sequence[str] = (),
) -> str:
    """Return the usual limit of a symmetric 4-bit kernel that is exceeded, or the empty string. Group -1: per row.
    fp4: which of mxfp4 and nvfp4 it takes."""
    if dtype not in dtypes:
        return f"no activations of {dtype}"
    if format.element != "int4":
        if fp4_name(format) not in fp4:
            return f"this adapter does not cover {format}"
        groups = (format.group_size,)
    elif format.has_channels:
        return "no scales of output channels"
    if format.has_zero:
        return "this adapter covers symmetric formats"
    if format.group_size not in groups:
        return f"groups of {', '.join(map(str, groups))} only"
    if n % n_multiple or k % k_multiple:
        return f"wants n % {n_multiple} == 0 and k % {k_multiple} == 0"
    if format.group_size > 0 and k % format.group_size:
        return "no partial group at the end of k"
    return ""


def fp4_name(format: WeightFormat) -> str:
    """Return "mxfp4" or "nvfp4", or the empty string for other formats."""
    names = (name for name, text in ALIASES.items() if text == str(format))
    return next(names, "") if format.element == "e2m1" else ""


def tensor_scale(weight: QuantizedWeight) -> float:
    """Return the factor of all rows of an NVFP4 weight; 1 for a weight without.

    Raises:
        ValueError: if rows have different ones, which no other library takes.
    """
    channels = weight.parts().channels
    if channels is None:
        return 1.0
    if not bool((channels == channels[0]).all()):
        raise ValueError("one factor for all rows only")
    return float(channels[0])


FP8 = torch.float8_e4m3fn
_MOST_TOKENS = 2**18


@functools.cache
def token_scales() -> torch.Tensor:
    """Ones, float32 (2**18); a call takes the first m."""
    return torch.ones(_MOST_TOKENS, device="cuda")


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes (n, k) into int32 (n, k / 8): eight along k in a word, the first in the lowest bits."""
    n, k = codes.shape
    words = torch.zeros((n, k // 8), dtype=torch.int32, device=codes.device)
    for i in range(8):
        words |= codes[:, i::8].int() << (4 * i)
    return words
