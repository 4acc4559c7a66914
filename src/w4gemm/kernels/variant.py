"""Compile-time parameters of a GPU kernel, and what follows from them for host and device: :class:`GpuVariant`.

Each kernel's variant.py adds what follows for its own warps and shared memory. Nothing of the DSL is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import BLOCK_K, BLOCK_N, HALF_K, Block
from w4gemm.packing.codecs import PAIR_TABLE_BYTES, Pairs, WeightOperand, weight_operand

HOPPER_SHARED_MEMORY = 232448
"""Bytes that one CTA may use on SM90."""
RESERVED_SHARED_MEMORY = 1024
"""Bytes of shared memory that the system takes for each CTA, besides those that the CTA may use."""
EXPERT_MAPS = (512, 1024)
"""Sizes of the expert map, in experts: a launch takes the smaller one that is enough, which leaves the pipeline more
shared memory."""
MOST_EXPERTS = EXPERT_MAPS[-1]
"""Experts of a weight, of a layer in one launch, of a choice and of a routing, at most."""

_OUT_KIND = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def registers_of(threads: int) -> int:
    """Return the registers of a thread if so many share a multiprocessor evenly. A thread can use 255."""
    return 65536 // threads


def adds_zeros_by_block(block: Block, strips: int) -> bool:
    """True if zero points of two levels are multiplied by the sums of x of a block's groups in one matrix instruction,
    not of each group. That is for several strips of 16 rows, which share those sums, and is another order of additions.
    """
    return block.factors == 2 and block.scale_group == 32 and strips > 1


@dataclass(frozen=True)
class GpuVariant:
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
    def adds_zeros(self) -> bool:
        """True if float zero points meet the sums of x over each scale group, because no e4m3 number holds a weight."""
        return self.kind == "e4m3" and self.weight.zero == "float"

    @property
    def takes_x_sums(self) -> bool:
        """True if those sums come with the launch; else the kernel adds them up."""
        return False

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
        return PAIR_TABLE_BYTES if self.pairs is not None else self.weight.codec.table_bytes

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
            weight_operand(problem.format, problem.dtype),
            epilogue=problem.epilogue._replace(out_dtype=problem.out_dtype),
            vector=problem.epilogue.columns(problem.n) * problem.out_dtype.itemsize % 16 == 0,
            expert_map=next((size for size in (0, *EXPERT_MAPS) if problem.experts <= size), EXPERT_MAPS[-1]),
            gathered=problem.gathered,
        )


def shared_memory_of_each(alone: int, ctas: int) -> int:
    """Return the bytes of shared memory that each of several CTAs of a multiprocessor may use. alone: those that one
    CTA may use if it is the only one."""
    return (alone + RESERVED_SHARED_MEMORY) // ctas - RESERVED_SHARED_MEMORY


@dataclass(frozen=True)
class KSliceVariant(GpuVariant):
    """A variant of a kernel whose stages hold k-slices: tile_k columns of tile_n features and of tile_m tokens."""

    @property
    def blocks_n(self) -> int:
        """Number of weight blocks along the features of a tile."""
        return self.config.tile_n // BLOCK_N

    @property
    def blocks_k(self) -> int:
        """Number of weight blocks along k in a stage."""
        return max(1, self.config.tile_k // BLOCK_K)

    @property
    def half_block_stages(self) -> bool:
        """True if a stage holds half a block along k: 64 columns and their scales."""
        return self.config.tile_k == HALF_K

    @property
    def stage_block(self) -> Block:
        """The part of a block that a stage holds: all of it, or half if ``half_block_stages``."""
        return self.block.sub_block(columns=min(self.config.tile_k, BLOCK_K))

    @property
    def stream_k(self) -> bool:
        """True if CTAs divide the k range of tiles, see device/stream_k.py."""
        return self.config.schedule == "stream"

    @property
    def chained(self) -> bool:
        """True if the CTAs of a cluster, in a row, share one tile fewer than they are."""
        return self.config.schedule == "chain"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights per stage."""
        return self.blocks_n * self.blocks_k * self.stage_block.bytes

    @property
    def x_bytes(self) -> int:
        """Bytes of x per stage."""
        return self.config.tile_m * self.config.tile_k * self.itemsize
