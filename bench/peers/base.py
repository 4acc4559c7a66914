"""The benchmark's interface to an implementation: :class:`Peer`; what adapters share."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.format_names import ALIASES
from w4gemm.core.formats import PER_COLUMN, WeightFormat
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
    """An implementation of d = x @ w.T with a quantized weight (or, for comparison, the same weight in 16 bits).

    fp8 x is quantized beforehand, with the scales that :func:`epilogue_of` says."""

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
    bits: Sequence[int] = (4,),
    floats: Sequence[str] = (),
) -> str:
    """Return the usual limit of a symmetric kernel that is exceeded, or the empty string. Group -1: per row.

    Args:
        bits: widths of the integers that it takes.
        floats: names of the formats in ``FLOATS`` that it takes.
    """
    if dtype not in dtypes:
        return f"no activations of {dtype}"
    if name := float_name(format):
        groups = (format.group_size,)
    if name not in floats if name else format.element not in {f"int{each}" for each in bits} or format.has_factors:
        return f"this adapter does not cover {format}"
    if format.has_channels and not name:
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


FLOATS = {
    **{name: ALIASES[name] for name in ("mxfp4", "nvfp4", "mxfp8")},
    "fp8": "e4m3_col_fp32",
    "fp8_block": "e4m3_g128_b128",
}
"""Formats of floats that other libraries take, by name."""


def float_name(format: WeightFormat) -> str:
    """Return the name of a format in ``FLOATS``, or the empty string for other formats."""
    return next((name for name, text in FLOATS.items() if text == str(format)), "")


def tensor_scale(weight: QuantizedWeight) -> float:
    """Return the factor of all rows of an NVFP4 weight, or of a weight with one scale for each row; 1 for others.

    Raises:
        ValueError: if rows have different ones, which the library does not take.
    """
    _, scales, _, channels, *_ = weight.parts()
    if channels is None and weight.format.group_size != PER_COLUMN:
        return 1.0
    factors = scales[:, 0] if channels is None else channels
    if not bool((factors == factors[0]).all()):
        raise ValueError("one factor for all rows only")
    return float(factors[0])


FP8 = torch.float8_e4m3fn
_ONES = 2**21


@functools.cache
def token_scales() -> torch.Tensor:
    """Ones, float32 (2**21), the scales of fp8 x; a call takes as many as it needs."""
    return torch.ones(_ONES, device="cuda")


def epilogue_of(format: WeightFormat, dtype: torch.dtype) -> Epilogue:
    """Return w4gemm's epilogue: fp8 x has a scale for each row or, beside weights with scales of blocks, for each 128
    columns of it."""
    in_blocks = format.scale_rule.block_rows > 0
    return PLAIN._replace(token_scale=dtype == FP8 and not in_blocks, block_scale=dtype == FP8 and in_blocks)


def block_scales(m: int, k: int, row_multiple: int = 1) -> torch.Tensor:
    """Ones for each 128 columns of x (m, k): float32 (m, k / 128), those of a block of columns side by side.

    Args:
        row_multiple: the stride between blocks of columns is its next multiple from m on.
    """
    rows, blocks = -(-m // row_multiple) * row_multiple, -(-k // 128)
    return token_scales()[: rows * blocks].view(blocks, rows)[:, :m].T


def words_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the codes of a weight as int32 (n, k * bits / 32): each row a stream of bits, the first code in the lowest
    ones."""
    return weight.repack("canonical").tensors[0].view(torch.int32)


def group_scales(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales of each row and group (n, groups) in ``dtype``."""
    return weight.format.scales_of_rows(weight.parts().scales, weight.n).to(dtype)
