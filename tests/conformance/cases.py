"""The conformance suite's kernels (by registration), formats, weights, and its bound on errors."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

import w4gemm
from reference import dense_reference
from w4gemm.choice.model import ranked
from w4gemm.core.config import GemmConfig
from w4gemm.core.elements import codebook
from w4gemm.core.epilogue import PLAIN, Epilogue, EpilogueOperands, default_out_dtype
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import KERNELS, Kernel, config_named
from w4gemm.packing.codecs import scales_on_sums
from w4gemm.packing.layouts import LAYOUTS, layout_named
from w4gemm.tuning import random_weight as random_numbers
from w4gemm.weights.weight import QuantizedWeight

FORMATS = [
    WeightFormat(group_size, zero, scale)
    for group_size in (32, 64, 96, 128, 256, -1)
    for zero in ("none", "int", "float")
    for scale in ("bf16", "fp16")
]
FORMATS += [WeightFormat(group_size, "none", "e4m3") for group_size in (32, 128, -1)]
FORMATS += [WeightFormat.parse(name) for name in ("iq4_g32_fp16", "iq4_g128", "iq4_g32_fp32", "nf4", "nf4_col_fp16")]
FORMATS += [
    WeightFormat.parse(name) for name in ("e2m1_g64", "e2m1_col_fp16", "int4_g16", "int4_g16_zint", "nf4_g16_fp16")
]
FORMATS += [WeightFormat.parse("nf4_g64_fp32"), WeightFormat(256, element=codebook([*range(-9, 0), *range(1, 8)]))]
FORMATS += [WeightFormat(96, element=codebook([-(1 + i / 99) for i in range(8)] + [2.0**-i for i in range(8)]))]
FORMATS += [WeightFormat.parse(name) for name in ("iq4_g32_s8x256", "nf4_g16_s8x128", "e2m1_g64_s8x256")]
FORMATS += [WeightFormat(16, "none", "s8x256", codebook([*(-i / 8 for i in range(1, 9)), *(i / 8 for i in range(8))]))]
FORMATS += [WeightFormat.parse(f"int4_{rest}") for rest in ("g32_zfloat_fp32", "g96_zint_fp32", "col_fp32")]
FORMATS += [WeightFormat.parse(name) for name in ("q4_k", "int4_g64_zfloat_u8x128")]
FORMATS += [WeightFormat.parse(name) for name in ("mxfp4", "nvfp4", "e2m1_g96_e8m0", "e2m1_col_e4m3_row")]
FORMATS += [WeightFormat.parse(name) for name in ("e2m1_g16_e4m3", "e2m1_g96_e4m3")]
WIDTHS = (
    *("int8_g128", "int8_g32_zint_fp16", "int8_g64_zfloat", "int8_col_fp32", "int8_g16_s8x256"),
    *("int8_g32_zfloat_u4x256", "int6_g128_zint", "int6_g96_fp16", "int6_g32_zfloat_fp32", "q6_k"),
    *("int6_g64_zfloat_u4x256", "int5_g32_fp16", "int5_g64_zfloat", "int5_col_fp32", "q5_k", "int5_g32_s8x128"),
    *("int5_g16_zfloat_u4x256", "int4_g16_s8x256", "int4_g32_zfloat_u4x256", "int3_g128", "int3_g32_zint_fp16"),
    *("int3_g64_fp32", "q3_k", "int3_g64_zfloat_u8x128", "int3_g16_zfloat_u4x256", "int2_g128", "int2_g64_zint"),
    *("int2_g32_zfloat_fp32", "q2_k", "int2_g32_zfloat_u8x256", "int2_g16_s8x128", "e4m3_g64_fp32", "e4m3_col_fp32"),
    *("e4m3_g128_b128", "mxfp8", "int3_g16_s8x256", "int3_g32_s6x128", "e5m2_g128_b128", "e5m2_col_fp32"),
    *("e5m2_g32_e8m0", "mxfp6", "e3m2_g32_e8m0", "int8_g16_zint_fp16", "int3_g16_zfloat", "int5_g16_zfloat_fp32"),
)
"""Other widths than four bits, and scales of two levels with signs or of four bits: each codec, and each scale rule of
each kind of codec."""
FORMATS += [WeightFormat.parse(name) for name in WIDTHS]
FORMATS += [
    WeightFormat.parse(name)
    for name in (
        *("int8_g64_zint_fp16", "int6_g32_zfloat_fp16", "int3_g128_zint", "int2_g64_fp16", "int6_g32_s8x128"),
        *(
            "int3_g64_zfloat_fp32",
            "int3_g64_zfloat",
            "int2_g32_zfloat_fp16",
            "e4m3_g128",
            "e4m3_g128_fp32",
            "e4m3_col_b128",
            "e5m2_g128_fp32",
            "e5m2_g64_fp32",
        ),
    )
]
FEW_FORMATS = [
    WeightFormat.parse(name)
    for name in ("int4_g32_zfloat_fp16", "int4_g128", "int4_g96_zint", "int4_col_zfloat", "int4_g64_e4m3", "mxfp4")
]
FEW_FORMATS += [WeightFormat.parse(name) for name in ("nvfp4", "q4_k", "int8_g128", "q6_k", "int3_g64_zint")]
CONFIG_FORMATS = [WeightFormat.parse(name) for name in ("int4_g64_zint_fp16", "int4_g64_e4m3")]
"""Every config runs with the first of these that it is legal for."""
FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)


PARTIAL = ("dequantize_gemm",)
"""Kernels that may refuse some formats, sizes and epilogues; all others take all but some smallest groups."""
FP8_SUM = 2**-16
"""Relative error that a k step of 32 may add on average: Hopper's tensor cores add fp8 products with about 14 bits."""


@dataclass(frozen=True)
class Target:
    """A kernel, where it runs, and a layout and dtype that it takes."""

    kernel: Kernel
    device: str
    layout: str
    dtype: torch.dtype

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of a result by default."""
        return default_out_dtype(self.dtype)

    @property
    def format(self) -> WeightFormat:
        """The first of FEW_FORMATS that this kernel takes; beside fp8 x one that takes rows of x by their indices."""
        formats = (f for f in FEW_FORMATS if self.dtype != FP8 or f.zero != "float")
        return next(f for f in formats if self.kernel.supports(self.problem(16, 128, 128, f)))

    def problem(self, m: int, n: int, k: int, format: WeightFormat, epilogue: Epilogue = PLAIN) -> GemmProblem:
        device = H200 if self.device == "cuda" and not torch.cuda.is_available() else Device.of(self.device)
        return GemmProblem(m, n, k, self.dtype, format, self.layout, epilogue, device)

    def configs(self, n: int, k: int, format: WeightFormat, m: int = 64, epilogue: Epilogue = PLAIN) -> list[str]:
        """Every legal config in the form that ``linear`` takes, best guess for m first."""
        problem = self.problem(m, n, k, format, epilogue)
        return [f"{self.kernel.name}/{c}" for _, _, c in ranked([self.kernel], problem)]

    def every_config(
        self, shapes: Iterable[tuple[int, int]], m: int = 64, experts: int = 0, gathered: bool = False
    ) -> dict[str, WeightFormat]:
        """Every config that is legal for one of the shapes (n, k), with its format of CONFIG_FORMATS. Those for experts
        are legal for one of them alone, unless their rows are gathered."""
        actual: dict[str, WeightFormat] = {}
        for format in CONFIG_FORMATS:
            for n, k in shapes:
                alone = self.problem(m, n, k, format)
                legal = {*self.kernel.configs(alone)} if self.kernel.supports(alone) else set()
                for _, _, c in ranked([self.kernel], replace(alone, experts=experts, gathered=gathered)):
                    if gathered or {replace(c, tail=None), c.tail or c} <= legal:
                        actual.setdefault(f"{self.kernel.name}/{c}", format)
        return actual

    def few_configs(self, n: int, k: int, format: WeightFormat) -> list[str]:
        """Every config on the CPU; on a GPU one, equal for as many shapes as possible, because each is compiled."""
        legal = self.configs(n, k, format)
        if self.device == "cpu" or not legal:
            return legal
        usual = self.configs(208, 768, format)[:1]
        return usual if usual and usual[0] in legal else legal[:1]

    def weight(self, format: WeightFormat, n: int, k: int, seed: int = 0) -> QuantizedWeight:
        self.takes(format)
        return random_weight(format, n, k, seed).to(self.device).repack(self.layout)

    def takes(self, format: WeightFormat) -> None:
        """Skip if the layout cannot hold the format, or if the kernel may refuse some formats and refuses this one."""
        status = self.kernel.supports(self.problem(16, 128, 128, format))
        if reason := layout_named(self.layout).supports(format):
            assert reason in status.reason
            pytest.skip(reason)
        if not status:
            assert self.kernel.name in PARTIAL or format.group_size in (16, 48), status.reason
            pytest.skip(status.reason)

    def randn(self, *shape: int, seed: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random tensor; dtype None for x's."""
        random = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return random.to(self.device, dtype or self.dtype)

    def one_hot(self, columns: torch.Tensor, k: int, value: float = 1) -> torch.Tensor:
        """x (len(columns), k) with ``value`` in one column of each row."""
        x = torch.zeros(len(columns), k, device=self.device)
        x[torch.arange(len(columns), device=self.device), columns.to(self.device)] = value
        return x.to(self.dtype)

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.layout}-{str(self.dtype).removeprefix('torch.')}"


def targets() -> list[object]:
    """A pytest parameter for each kernel, layout and dtype that it supports on the CPU or on Hopper."""
    actual = []
    for kernel in KERNELS:
        for device, facts in (("cpu", Device("cpu")), ("cuda", H200)):
            for layout in LAYOUTS:
                for dtype in DTYPES:
                    problems = [GemmProblem(16, 128, 128, dtype, f, layout, device=facts) for f in FEW_FORMATS]
                    if not any(map(kernel.supports, problems)) or (dtype == FP8 and layout == "canonical"):
                        continue  # fp8 on the CPU is float32 after a conversion: one layout will do
                    target = Target(kernel, device, layout, dtype)
                    actual.append(
                        pytest.param(target, id=str(target), marks=pytest.mark.gpu if device == "cuda" else ())
                    )
    return actual


def supported_here(target: Target) -> None:
    """Skip if the kernel is not for this GPU; on Hopper a refusal is a failure."""
    status, *others = (target.kernel.supports(target.problem(16, 128, 128, format)) for format in FEW_FORMATS)
    if any(others):
        return
    if not status:
        assert target.device == "cuda" and torch.cuda.get_device_capability() != (9, 0), status.reason
        pytest.skip(status.reason)


@functools.lru_cache(maxsize=64)
def random_weight(format: WeightFormat, n: int, k: int, seed: int = 0) -> QuantizedWeight:
    """A weight with every code, scales of both signs and some 0, and zero points over their whole range."""
    return random_numbers.random_weight(format, n, k, seed, signed=True)


class Expected:
    """The result of a product in float64, and the bound on a kernel's error: twice that of a plain matmul of the
    dequantized weights in x's dtype (float32: four times, because only the order of additions differs), plus a margin
    for small numbers of results.

    ``fused``: alpha, activation and residual. With them or an out_dtype the plain matmul is one in float32, and its
    result is rounded once.
    """

    def __init__(
        self,
        x: torch.Tensor,
        w: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        **fused,
    ) -> None:
        self.dtype = out_dtype or default_out_dtype(x.dtype)
        alpha, residual, scale = (fused.get(name) for name in ("alpha", "residual", "token_scale"))
        operands, activation = EpilogueOperands(alpha, bias, residual, scale), fused.get("activation")
        weight = dense(w, torch.float64)
        self.exact = dense_reference(x, weight, activation, operands)
        size = (x.double().square() @ weight.square().T).mean().sqrt()
        tensor_cores = 0.0
        if fused or out_dtype or x.dtype == FP8:
            rounded = dense(w, torch.float32 if x.dtype == FP8 else x.dtype)
            sums = torch.nn.functional.linear(x.float(), rounded.float())
            plain = Epilogue(activation).apply(sums, operands).to(self.dtype)
            size = size * (1 if alpha is None else float(alpha)) + rms(self.exact)
            if x.dtype == FP8:  # scales that are applied to sums start anew with each group
                length = min(w.k, 128) if scales_on_sums(w.format) else w.k
                tensor_cores = FP8_SUM * max(8, length / 32) * size
        else:
            plain = torch.nn.functional.linear(x.contiguous(), dense(w, x.dtype), bias)  # see cpu/kernel.py on AMX
        # of a few results plain's may happen to be exact, and others' errors add up to more than those of many in the
        # mean
        several = 4 + 8 / max(plain.numel(), 1) ** 0.5
        times, part = (4, several) if self.dtype == torch.float32 else (2, 0.25)
        self.plain = rms(plain - self.exact)
        self.bound = times * self.plain + part * torch.finfo(self.dtype).eps * size + tensor_cores

    def check(self, d: torch.Tensor) -> None:
        """Assert that a kernel's result has the dtype, is finite, and errs within the bound."""
        assert d.dtype == self.dtype and torch.isfinite(d).all()
        if d.numel():
            error = rms(d - self.exact)
            assert error <= self.bound, f"errs {error:.3g}, bound {self.bound:.3g}, plain {self.plain:.3g}"


def assert_close(
    d: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None = None, **options
) -> None:
    """Check a kernel's result against what :class:`Expected` makes of the other arguments."""
    Expected(x, w, bias, **options).check(d)


@functools.lru_cache(maxsize=4)
def dense(w: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a weight, in float64 those of float32."""
    return w.dequantize(torch.float32).double() if dtype == torch.float64 else w.dequantize(dtype)


def rms(t: torch.Tensor) -> float:
    return t.double().square().mean().sqrt().item()


def linear_poisoned(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, config: str | None, **fused
) -> torch.Tensor:
    """Call ``linear`` with an out of NaN; assert that all of it is written and nothing around it."""
    guard, m, n = 1024, x.shape[0], Epilogue(fused.get("activation")).columns(w.n)
    dtype = fused.get("out_dtype") or default_out_dtype(x.dtype)
    buffer = torch.full((m * n + 2 * guard,), float("nan"), dtype=dtype, device=x.device)
    out = buffer[guard : guard + m * n].view(m, n)
    assert w4gemm.linear(x, w, bias, out=out, config=config, **fused) is out
    assert not out.isnan().any(), "a part of out was not written"
    assert buffer[:guard].isnan().all() and buffer[guard + m * n :].isnan().all(), "memory around out was written"
    return out


Job = tuple[Kernel, GemmProblem, GemmConfig]


def job(target: Target, n: int, k: int, format: WeightFormat, config: str, epilogue: Epilogue = PLAIN) -> Job:
    """Job for :func:`compile_ahead`."""
    return target.kernel, target.problem(64, n, k, format, epilogue), config_named(config)[1]


def runs_beside_others(config: pytest.Config) -> bool:
    """True if several processes run tests at once (``-n``, ``--shard``)."""
    return hasattr(config, "workerinput") or config.getoption("--shard") is not None


def compile_ahead(jobs: Iterable[Job], config: pytest.Config) -> None:
    """Fill the disk cache from all cores, since one process compiles one kernel at a time. ``jobs`` are not looked at
    where several processes run tests: each compiles what its tests launch."""
    if runs_beside_others(config):
        return
    todo = {unit: None for kernel, problem, config in jobs if (unit := kernel.unit(problem, config)) is not None}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(object_code, todo, chunksize=1))
