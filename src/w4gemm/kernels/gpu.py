"""The host side that the kernels in CuTe DSL share: their operands, their limits, their launch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import SCALE_BLOCK, EpilogueOperands
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit.unit import Program, Unit
from w4gemm.kernels import arguments, workspace
from w4gemm.kernels.base import OK, Operands, Resources, Status
from w4gemm.kernels.helpers.row_sums import row_sums
from w4gemm.kernels.requirements import missing_for_dsl
from w4gemm.kernels.space import Exclusion, Space
from w4gemm.kernels.variant import MOST_EXPERTS, GpuVariant, registers_of
from w4gemm.packing.block import BLOCK_K, BLOCK_N
from w4gemm.packing.codecs import weight_operand
from w4gemm.packing.layouts import layout_named

_MIN_SCALE_GROUP = 32
"""The smallest scale group that GPU kernels decode: one step along k of an fp8 matrix instruction, or two of a 16-bit
one. With 16-bit x a kernel decodes groups of one such step, 16, if it holds a group's words."""
MOST_GROUP_WORDS = 4
"""Words of a thread for a scale group of the most bits: scales and zero points of two rows, of 32 bits each."""


def refused_groups(problem: GemmProblem, group_words: int, half_steps: bool = False) -> str:
    """Return why a GPU kernel does not decode the groups of the problem's format, of which there is a codec; the empty
    string if it does.

    Args:
        group_words, half_steps: as of :class:`GpuKernel`.
    """
    weight = weight_operand(problem.format, problem.dtype)
    block, fp8 = weight.block, weight.kind == "e4m3"
    few_words = block.words_per_scale <= group_words * block.groups_per_word
    sixteens = half_steps and weight.codec.half_steps if fp8 else few_words
    if block.scale_group % _MIN_SCALE_GROUP == 0 or (sixteens and block.scale_group == SMALLEST_GROUP):
        return ""
    kinds = "fp8 x" if fp8 else "zero points or scales of 32 bits"
    columns = f"a multiple of {_MIN_SCALE_GROUP} columns with {kinds}, not of {problem.format.group_size}"
    return f"cannot take {problem.format}: decodes groups of {columns}"


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
    group_words = 1
    """The most words of a thread for a group of 16 columns that it decodes, with 16-bit x: one is a scale of 16 bits
    for two rows; zero points and 32 bits take twice as many each, which need registers."""
    half_steps = False
    """True if it decodes groups of half a step along k of an fp8 matrix instruction, where the codec does."""
    variant: type[GpuVariant]
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
        if reason := refused_groups(problem, self.group_words, self.half_steps):
            return Status.no(reason)
        if problem.layout != self.layout:
            return Status.no(
                f"reads the {self.layout} layout, the weight lies in {problem.layout}; call w.repack('{self.layout}')"
            )
        if problem.epilogue.block_scale and (not self.block_scales or problem.gathered):
            which = " that is gathered" if self.block_scales else ""
            return Status.no(f"takes one scale for each row of x{which}, not one for each {SCALE_BLOCK} columns")
        if reason := self.refused_sums(problem):
            return Status.no(reason)
        if problem.gathered and not problem.experts:
            return Status.no("gathers rows of x for a weight of several experts only")
        if problem.experts > MOST_EXPERTS:
            return Status.no(f"takes at most {MOST_EXPERTS} experts, the weight has {problem.experts}")
        reason = missing_for_dsl()
        return Status.no(reason) if reason else OK

    def refused_sums(self, problem: GemmProblem) -> str:
        """Return why the kernel does not multiply float zero points by the sums of x; the empty string if it does, or
        has no need to."""
        blocks = problem.epilogue.block_scale
        if problem.format.zero != "float" or not (blocks or problem.gathered):
            return ""
        which = f"with a scale for each {SCALE_BLOCK} columns" if blocks else "whose rows are gathered"
        taken = not self.any_variant(problem).takes_x_sums
        return "" if taken else f"cannot take {problem.format} beside fp8 x {which}"

    def any_variant(self, problem: GemmProblem) -> Any:
        """Return a variant for the rules of ``space``, with any config: they replace it, and do not look at m."""
        return self.variant.of(problem, GemmConfig(8, BLOCK_N, BLOCK_K))

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        legal = self.space.legal(self.any_variant(problem))
        return [config for config in legal if not _lacks_flags(problem, config)]

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        excluding = self.space.exclusions(self.any_variant(problem), config)
        if _lacks_flags(problem, config):
            reason = f"there are flags for {workspace.MOST_SMS} multiprocessors, the GPU has {problem.device.sms}"
            excluding.insert(0, Exclusion("impossible", "stream-k", reason))
        return excluding

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
        ctas, per_sm = along_m * -(-n_tiles // config.split_tiles) * config.split_k, self.ctas_per_sm(config)
        if config.schedule == "stream":  # as many CTAs as the device holds, each with at least one block of k
            ctas = min(ctas * -(-problem.k // BLOCK_K), problem.device.sms * per_sm)
        even = min(255, registers_of(variant.threads * per_sm) // 8 * 8)
        return Resources(
            variant.shared_bytes,
            ctas,
            round(ctas / (problem.device.sms * per_sm), 2),
            variant.threads,
            variant.consumer_registers or even,
            variant.num_stages,
        )

    def unit(self, problem: GemmProblem, config: GemmConfig) -> Unit:
        variant, arch = self.variant.of(problem, config), self.arch(problem.device)
        return Unit(self.name, variant, arch, functools.partial(self._program, problem, config))

    def _program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        from w4gemm.kernels.device.launch import FlatEntry

        variant = self.variant.of(problem, config)
        launched = arguments.stand_ins(variant, workspace=self.workspace_bytes(problem, config) > 0)
        return Program(FlatEntry(self.entry()(variant)), arguments.flat(*launched))

    def launcher(self, compiled: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        per_cluster = config.cluster_m * config.cluster_n * config.split_k
        clusters = self.ctas_per_sm(config) * problem.device.sms // per_cluster
        size, grouped = self.workspace_bytes(problem, config), problem.experts > 0
        variant = self.variant.of(problem, config)
        sums_of = functools.partial(row_sums, group=variant.block.scale_group) if variant.takes_x_sums else None

        def launch(operands: Operands) -> None:
            x, weight, out, epilogue, rows, buffer = operands
            blocks, memory = weight[0], arguments.NO_WORKSPACE
            if grouped:
                blocks = blocks.flatten(0, 1)
            if len(weight) > 1:
                epilogue = EpilogueOperands(*epilogue[:-1], weight[1])  # its channel_scale
            if size:
                memory = workspace.allocated(x.device, size) if buffer is None else workspace.divided(buffer)
            if epilogue.block_scale is not None:
                epilogue = epilogue._replace(block_scale=_by_columns(epilogue.block_scale))
            residual = epilogue.residual
            if residual is not None and residual.data_ptr() % 16:
                epilogue = epilogue._replace(residual=residual.clone())
            if x.stride()[0] * x.itemsize % 16 or x.data_ptr() % 16 or (sums_of is not None and x.shape[1] % 16):
                x = _tma_readable(x)
            sums = None if sums_of is None else sums_of(x)
            compiled(*arguments.flat(x, blocks, out, epilogue, rows, memory, clusters, sums))

        return launch


def _lacks_flags(problem: GemmProblem, config: GemmConfig) -> bool:
    """True under stream-k if the device has more multiprocessors than a launch has flags for."""
    return config.schedule == "stream" and problem.device.sms > workspace.MOST_SMS


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
