"""The warps of a CTA, their registers, and the work tiles that they take: all that follows from a variant before its
shared memory is divided."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.core.config import GemmConfig
from w4gemm.kernels.space import Sizes
from w4gemm.kernels.variant import KSliceVariant


@dataclass(frozen=True)
class WarpsVariant(KSliceVariant):
    """Base of :class:`w4gemm.kernels.sm90_mixed_gemm.variant.Variant`, with all that is about warps and work tiles."""

    # --- warps

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" and config.tile_m <= 128 else 1

    @staticmethod
    def m64_atoms_of(config: GemmConfig | Sizes) -> int:
        """Number of 64-row blocks of the weight that one warpgroup owns: two if four warpgroups would have too few
        registers each."""
        return 2 if config.tile_n == 256 and config.tile_m > 64 else 1

    @property
    def m64_atoms(self) -> int:
        """:meth:`m64_atoms_of` this one's config."""
        return self.m64_atoms_of(self.config)

    @property
    def warpgroups_n(self) -> int:
        """Number of consumer warpgroups along the features of a tile."""
        return self.blocks_n // self.m64_atoms

    @property
    def k_sets(self) -> int:
        """Number of sets of consumer warpgroups that divide the k blocks of a stage: as many as there are registers
        for, because with few tokens one set cannot keep the tensor cores busy while it decodes."""
        limit = 4 if self.occupancy == 1 and self.config.tile_m <= 64 else 2
        if self.kind == "e4m3":  # both fragment buffers are used within a stage
            return max(1, min(self.blocks_k // 2, limit // self.warpgroups_n))
        return min(self.blocks_k, max(1, limit // self.warpgroups_n)) if self.config.tile_m <= 128 else 1

    @property
    def pingpong_warpgroups(self) -> int:
        """Number of consumer warpgroups of one CTA that alternate between its tiles, so that one multiplies while
        another stores: two if schedule is pingpong and a tile is too large for two CTAs per multiprocessor."""
        return 2 if self.config.schedule == "pingpong" and self.occupancy == 1 else 1

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups."""
        return self.warpgroups_n * self.k_sets * self.pingpong_warpgroups

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.warpgroups + 1)

    @property
    def stage_readers(self) -> int:
        """Number of consumer threads that read a stage."""
        return 128 * self.warpgroups_n * self.k_sets

    @property
    def gather_threads(self) -> int:
        """Number of producer threads that copy x by cp.async."""
        return 128 if self.gathered else 0

    @property
    def multicast_peers(self) -> int:
        """Number of CTAs of a cluster that share x or weights with one CTA, itself included."""
        return self.config.cluster_m + self.config.cluster_n - 1

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread; 0 if an equal share of the register file is enough."""
        if self.occupancy == 2:
            return {1: 0, 2: 104}[self.warpgroups]
        return {1: 0, 2: 232 if self.gathered else 240, 3: 160, 4: 112}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        """Registers per producer thread; more if it copies x itself, as far as the consumers leave any."""
        if not self.gathered:
            return 24
        return 40 if self.consumer_registers == 232 else 32

    # --- work tiles

    @property
    def persistent(self) -> bool:
        """True if a CTA loops over output tiles.

        A dense CTA cannot if sums pass through the drained pipeline's memory. A grouped CTA must, because the host does
        not know the number of tiles; its k sets then reduce through memory of their own.
        """
        return self.grouped or (self.k_sets == 1 and self.config.split_k == 1)

    @property
    def stream_k(self) -> bool:
        """True if CTAs divide tiles along k, see device/stream_k.py."""
        return self.config.schedule == "stream"

    @property
    def short(self) -> bool:
        """True if a launch can be so short that its first microsecond counts."""
        return self.config.tile_m <= 128 and self.config.cluster_m == 1
