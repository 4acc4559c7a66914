"""The host side that the kernels in CuTe DSL share: their operands, their limits, their launch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import SCALE_BLOCK, Epilogue
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit.unit import Program, Unit
from w4gemm.kernels import arguments, workspace
from w4gemm.kernels.base import OK, Operands, Resources, Status
from w4gemm.kernels.requirements import missing_for_dsl
from w4gemm.kernels.space import Exclusion, Space
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.packing.codecs import WeightOperand
from w4gemm.packing.codecs.pairs import TABLE_BYTES, Pairs
from w4gemm.packing.layouts import layout_named

HOPPER_SHARED_MEMORY = 232448
"""Bytes that one CTA may use on SM90."""

EXPERT_MAPS = (512, 1024)
"""Sizes of the expert map, in experts: a launch takes the smaller one that is enough, which leaves the pipeline more
shared memory."""

_OUT_KIND = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_MIN_SCALE_GROUP = 32
"""Columns of a step of an fp8 matrix instruction, or of two steps of a 16-bit one. Of one such step, 16, only 8-bit
scales can be decoded: the registers have no room for 16-bit ones."""
MIN_DRIVER = (12, 0)
"""CUDA version that the driver must support."""


@dataclass(frozen=True)
class Variant:
    """All compile-time parameters of a kernel. Equal variants share one compiled object, which serves all m, n and k.

    Args:
        config: tile, cluster, schedule, split_k, tail.
        weight: facts of the weight's format: codec, dtypes, geometry of a packed block.
        epilogue: the operations on the sums, with out_dtype given.
        vector: True if rows of d can be stored 16 bytes at a time.
        expert_map: of :data:`EXPERT_MAPS` if there are several weights, experts, each for some rows of x; else 0.
        gathered: True if a row of d is computed from the row of x that an index says.
    """

    config: GemmConfig
    weight: WeightOperand
    epilogue: Epilogue
    vector: bool
    expert_map: int = 0
    gathered: bool = False

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        """Number of CTAs of a launch that one multiprocessor holds at once."""
        return 1

    @property
    def occupancy(self) -> int:
        """:meth:`ctas_per_sm` of this one's config."""
        return self.ctas_per_sm(self.config)

    @property
    def grouped(self) -> bool:
        """True if there are several weights, experts, each for some rows of x."""
        return self.expert_map > 0

    @property
    def expert_map_bytes(self) -> int:
        """Bytes of shared memory of the experts' tiles, see kernels/device/expert_tiles.py."""
        return 4 * self.expert_map

    @property
    def out_kind(self) -> str:
        """dtype of d: "f16", "bf16" or "f32"."""
        return _OUT_KIND[self.epilogue.out_dtype or torch.float32]

    @property
    def kind(self) -> str:
        """dtype of x and of decoded weights: "f16", "bf16" or "e4m3"."""
        return self.weight.kind

    @property
    def block(self) -> Block:
        """Sizes and offsets of one 64 x 128 block of the packed weight."""
        return self.weight.block

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return 1 if self.kind == "e4m3" else 2

    @property
    def chunk_k(self) -> int:
        """Columns of a k chunk, 128 bytes of x: what is decoded at a time."""
        return 128 // self.itemsize

    @property
    def scales_on_sums(self) -> bool:
        """True if scales multiply the sums of each group, not its weights."""
        return self.weight.codec.scales_on_sums

    @property
    def block_scales(self) -> bool:
        """True if each 128 columns of a row of x have a scale."""
        return self.epilogue.block_scale

    @property
    def promotes(self) -> bool:
        """True if sums of ranges of columns are scaled before they are added to the accumulators."""
        return self.scales_on_sums or self.block_scales

    @property
    def pairs(self) -> Pairs | None:
        """Form of the numbers in the table by which two codes are decoded at a time; None without one."""
        return None

    @property
    def decode_table_bytes(self) -> int:
        """Bytes of shared memory of the decoder's table."""
        return TABLE_BYTES if self.pairs is not None else self.weight.codec.table_bytes

    @property
    def channel_scales(self) -> bool:
        """True if a float32 scale for each output channel multiplies the sums."""
        return self.weight.channels

    @property
    def bias_kind(self) -> str:
        """dtype of the bias."""
        if self.kind != "e4m3":
            return self.kind
        return "bf16" if self.out_kind == "f32" else self.out_kind

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread; 0 if an equal share of the register file is enough."""
        return 0

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Any:
        return cls(
            config,
            WeightOperand.of(problem.format, problem.dtype),
            epilogue=problem.epilogue._replace(out_dtype=problem.out_dtype),
            vector=problem.epilogue.columns(problem.n) * problem.out_dtype.itemsize % 16 == 0,
            expert_map=next((size for size in (0, *EXPERT_MAPS) if problem.experts <= size), EXPERT_MAPS[-1]),
            gathered=problem.gathered,
        )


def refused_groups(problem: GemmProblem) -> str:
    """Return why no GPU kernel decodes the groups of the problem's format, of which there is a codec; the empty string
    if one does."""
    weight = WeightOperand.of(problem.format, problem.dtype)
    block, short = weight.block, weight.kind != "e4m3" and weight.block.scale_bits == 8 and not weight.block.factors
    group = block.scale_group
    least = _MIN_SCALE_GROUP // 2 if short else _MIN_SCALE_GROUP
    if group % least == 0:
        return ""
    return f"cannot take {problem.format}: decodes groups of a multiple of {least} columns, scales are for each {group}"


def m_tiles(problem: GemmProblem, tile_m: int) -> int:
    """Return the number of m tiles; of a grouped problem as if every expert had equally many tokens."""
    experts = min(max(1, problem.experts), problem.m)
    return experts * -(-problem.m // (experts * tile_m))


class GpuKernel(ABC):
    """A Kernel in CuTe DSL. A subclass adds where it runs, configs, rank and its device code."""

    name: str
    layout = "mma16"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    """dtypes of x."""
    block_scales = False
    """True if it takes a scale for each 128 columns of a row of x."""
    variant: type[Variant]
    space: Space
    """Which configs are legal, and why others are not."""

    @abstractmethod
    def entry(self) -> Callable[[Any], Callable[..., None]]:
        """Return a function from a variant to what launches it, given (Arguments, stream). Imports the DSL."""

    @abstractmethod
    def refusal(self, device: Device) -> str:
        """Return why the kernel cannot run on a device, and what could; the empty string if it can."""

    @abstractmethod
    def arch(self, device: Device) -> str:
        """Return the target that a device's code is compiled for, such as ``"sm_90a"``."""

    def supports(self, problem: GemmProblem) -> Status:
        if reason := self.refusal(problem.device):
            return Status.no(reason)
        if problem.dtype not in self.dtypes:
            return Status.no(f"needs {' or '.join(map(str, self.dtypes))} activations, got {problem.dtype}")
        if reason := layout_named(self.layout).supports(problem.format):
            return Status.no(f"cannot take {problem.format}: {reason}")
        if reason := refused_groups(problem):
            return Status.no(reason)
        if problem.layout != self.layout:
            return Status.no(
                f"reads the {self.layout} layout, the weight lies in {problem.layout}; call w.repack('{self.layout}')"
            )
        if problem.epilogue.block_scale and (not self.block_scales or problem.gathered):
            which = " that is gathered" if self.block_scales else ""
            return Status.no(f"takes one scale for each row of x{which}, not one for each {SCALE_BLOCK} columns")
        if problem.gathered and not problem.experts:
            return Status.no("gathers rows of x for a weight of several experts only")
        if problem.experts > EXPERT_MAPS[-1]:
            return Status.no(f"takes at most {EXPERT_MAPS[-1]} experts, the weight has {problem.experts}")
        reason = missing_for_dsl(MIN_DRIVER)
        return Status.no(reason) if reason else OK

    def like(self, problem: GemmProblem) -> Any:
        """A variant for the rules of ``space``, whatever its config: legality does not depend on m."""
        return self.variant.of(problem, GemmConfig(8, BLOCK_N, BLOCK_K))

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        return list(self.space.legal(self.like(problem)))

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        return self.space.exclusions(self.like(problem), config)

    def ctas_per_sm(self, config: GemmConfig) -> int:
        return self.variant.ctas_per_sm(config)

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        """Bytes of flags and of the partials that every CTA may have to store under stream-k."""
        if config.schedule != "stream":
            return 0
        ctas = self.ctas_per_sm(config) * problem.device.sms
        return workspace.FLAG_BYTES + ctas * config.tile_m * config.tile_n * 4

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        variant = self.variant.of(problem, config)
        along_m = m_tiles(problem, config.tile_m * config.cluster_m) * config.cluster_m
        n_tiles = -(-problem.n // (config.tile_n * config.cluster_n)) * config.cluster_n
        ctas, per_sm = along_m * n_tiles * config.split_k, self.ctas_per_sm(config)
        if config.schedule == "stream":  # of as many CTAs as there is room for, each has a part of a tile at least
            ctas = min(ctas * -(-problem.k // BLOCK_K), problem.device.sms * per_sm)
        even = min(255, 65536 // (variant.threads * per_sm) // 8 * 8)
        return Resources(
            variant.shared_bytes,
            ctas,
            round(ctas / (problem.device.sms * per_sm), 2),
            variant.threads,
            variant.consumer_registers or even,
            variant.stages,
        )

    def unit(self, problem: GemmProblem, config: GemmConfig) -> Unit:
        variant, arch = self.variant.of(problem, config), self.arch(problem.device)
        return Unit(self.name, variant, arch, functools.partial(self._program, problem, config))

    def _program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        from cutlass.cute.runtime import make_fake_stream

        from w4gemm.kernels.device.entry import FlatEntry

        variant = self.variant.of(problem, config)
        given = arguments.stand_ins(variant, workspace=self.workspace_bytes(problem, config) > 0)
        values = (*arguments.flat(*given), make_fake_stream(use_tvm_ffi_env_stream=True))
        return Program(FlatEntry(self.entry()(variant)), values)

    def launcher(self, compiled: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        per_cluster = config.cluster_m * config.cluster_n * config.split_k
        clusters = self.ctas_per_sm(config) * problem.device.sms // per_cluster
        size, grouped = self.workspace_bytes(problem, config), problem.experts > 0

        def launch(operands: Operands) -> None:
            x, weight, out, epilogue, rows, given = operands
            blocks, memory = weight[0], arguments.NO_WORKSPACE
            if grouped:
                blocks = blocks.flatten(0, 1)
            if len(weight) > 1:
                epilogue = epilogue.with_channel_scale(weight[1])
            if size:
                memory = workspace.allocated(x.device, size) if given is None else workspace.divided(given)
            if epilogue.block_scale is not None:
                epilogue = epilogue._replace(block_scale=_by_columns(epilogue.block_scale))
            residual = epilogue.residual
            if residual is not None and residual.data_ptr() % 16:
                epilogue = epilogue._replace(residual=residual.clone())
            if x.stride()[0] * x.itemsize % 16 or x.data_ptr() % 16:
                x = _tma_readable(x)
            compiled(*arguments.flat(x, blocks, out, epilogue, rows, memory, clusters))

        return launch


def takes_rows(x: torch.Tensor) -> bool:
    """True if a kernel can gather rows of x itself, 16 bytes at a time."""
    return x.stride(0) * x.itemsize % 16 == x.shape[1] * x.itemsize % 16 == x.data_ptr() % 16 == 0


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    """Return scales (m, blocks) with contiguous tokens at multiples of 16 bytes, which TMA can read: themselves, as
    DeepEP gives them, or a copy."""
    if scales.stride(0) == 1 and scales.stride(1) % 4 == scales.data_ptr() % 16 == 0 and scales.stride(1) > 0:
        return scales
    m, blocks = scales.shape
    return scales.new_empty(blocks, -(-m // 4) * 4).T[:m].copy_(scales)


def _tma_readable(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x that TMA can read: k padded with zeros, rows at multiples of 16 bytes."""
    bits = x.view(torch.uint8) if x.itemsize == 1 else x  # fp8 cannot be padded
    return torch.nn.functional.pad(bits, (0, -x.shape[1] % (16 // x.itemsize))).contiguous().view(x.dtype)
