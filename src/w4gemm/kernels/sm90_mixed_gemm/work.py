"""How the warps of a CTA divide a tile, and the MMA batches that they multiply, from the compile-time parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.variant import KSliceVariant, registers_of
from w4gemm.packing.block import BLOCK_K, BLOCK_N
from w4gemm.packing.codecs import Pairs

WGMMA_TOKENS = 256
"""The most tokens of a WGMMA."""
_OTHER_REGISTERS = 77
"""Registers besides the accumulators: fragments, packed words, addresses."""
_TOKENS_OF_PAIRS = {Pairs.HALVES: 96, Pairs.FLOATS: 64}
"""The largest tile_m of which decoding decides the time, by what a table holds."""
_MOST_TOKENS_BY_DOTS = 64
"""The largest tile_m of which the ALU bounds decoding scales of two levels, not the matrix instructions."""
_MOST_TOKENS_OF_SUMS = {1: 96, 2: 64}
"""The largest tile_m whose sums are faster to scale than weights, by the scale groups of a k chunk."""
_MOST_TOKENS_OF_FACTORS, _SETS_OF_SUMS = 128, 2
"""The largest tile_m whose sums are faster to scale by the factors of a packed block, and the most ranges of tokens
whose sums stay in registers meanwhile."""


@dataclass(frozen=True)
class Sm90MixedWork(KSliceVariant):
    """Compile-time parameters of the kernel, as far as they decide how a CTA works."""

    scales_weights: bool = False
    """True if scales multiply weights where others multiply the sums of few tokens, because bits must not depend on
    tile_m."""
    widths: int = 1
    """2 if this is one of the two variants of a launch of tiles of two widths, see two_widths.py."""

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Any:
        variant = super().of(problem, config)
        weight = variant.weight
        return replace(variant, scales_weights=problem.batch_invariant and weight.codec.may_scale_sums(weight))

    # --- warps

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" and config.tile_m <= 128 else 1

    @property
    def m64_atoms(self) -> int:
        """Number of 64-row blocks of the weight that one warpgroup owns: two if four warpgroups would have too few
        registers each."""
        return 2 if self.config.tile_n == 256 and self.config.tile_m > 64 else 1

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
        """Registers per producer thread; more if it copies x itself or has tiles of two widths, as far as the consumers
        leave any."""
        if not self.gathered and self.widths == 1:
            return 24
        return 40 if self.consumer_registers == 232 else 32

    @property
    def in_one_launch(self) -> bool:
        """True if tiles of two widths run in one launch: if both have the same warps, with the same registers."""
        tail = self.config.tail
        if tail is None or not self.grouped:
            return False
        widths = [replace(self, config=config) for config in (replace(self.config, tail=None), tail)]
        first, second = ((v.warpgroups, v.consumer_registers, v.occupancy) for v in widths)
        return first == second and first[1] > 0 and all(v.config.cluster_m * v.config.cluster_n == 1 for v in widths)

    # --- work tiles

    @property
    def persistent(self) -> bool:
        """True if a CTA loops over output tiles.

        A dense CTA cannot if sums pass through the drained pipeline's memory. A grouped CTA must, because the host does
        not know the number of tiles; its k sets then reduce through memory of their own.
        """
        return self.grouped or (self.k_sets == 1 and self.config.split_k == 1)

    @property
    def short(self) -> bool:
        """True if a launch can be so short that its first microsecond counts."""
        return self.config.tile_m <= 128 and self.config.cluster_m == 1

    @property
    def stages_per_iteration(self) -> int:
        """Stages per main-loop iteration: all of a superblock if ``by_superblock``; 2 if a stage holds half a block
        (tile_k = 64) or a single MMA batch (tile_k * m64_atoms == chunk_k), so that both fragment buffers are used;
        else 1."""
        if self.by_superblock:
            return self.block.factor_blocks * BLOCK_K // self.config.tile_k
        return 2 if self.half_block_stages or self.config.tile_k * self.m64_atoms == self.chunk_k else 1

    @property
    def by_superblock(self) -> bool:
        """True if a main-loop iteration multiplies all columns that share factors, which are loaded once: of codecs
        that gain by it, in the tile that many tokens take. Streams would be divided in steps of so many columns."""
        c = self.config
        usual = (c.tile_m, c.tile_n, c.cluster_m, c.cluster_n, c.split_k) == (WGMMA_TOKENS, 2 * BLOCK_N, 1, 1, 1)
        several = self.half_block_stages and self.block.factor_blocks > 1 and self.shares_levels
        return self.weight.codec.by_superblock and c.schedule == "coop" and usual and several

    @property
    def blocks_k_per_iteration(self) -> int:
        """Number of weight blocks along k in one main-loop iteration."""
        return max(1, self.stages_per_iteration * self.config.tile_k // BLOCK_K)

    # --- scales and MMA batches

    @property
    def scales_on_sums(self) -> bool:
        """True too for few tokens if the codec may: of codebooks with scales of another dtype than x, where a weight
        would take a product in float32 and its part of a conversion, and of codes whose factors a block shares.

        Not in more than three ranges of tokens: small instructions of the tensor cores cost more than that saves (H200,
        2026-11-26). Experts' rows and the scales of several groups leave no registers for a second range.
        """
        if super().scales_on_sums:
            return True
        if self.scales_weights or not self.weight.codec.may_scale_sums(self.weight):
            return False
        most = _MOST_TOKENS_OF_SUMS.get(self._groups_of_chunk, 0)
        if self.weight.codec.factors_on_sums:
            most = _MOST_TOKENS_OF_FACTORS if self.m64_atoms == 1 and self._ranges_of_sums <= _SETS_OF_SUMS else 0
        if self.half_block_stages or self.config.tile_m > most:
            return False
        return self._ranges_of_sums <= (1 if self.grouped and self._groups_of_chunk > 1 else 3)

    @property
    def _groups_of_chunk(self) -> int:
        """Scale groups of a k chunk whose sums are scaled apart."""
        if self.weight.codec.factors_on_sums:
            return 1
        return max(1, self.chunk_k // self.stage_block.scale_group)

    @property
    def promotions(self) -> int:
        """Ranges of columns of a k chunk whose sums are promoted: one for each group of scales that are on sums."""
        return self._groups_of_chunk if self.scales_on_sums else 1

    @property
    def chunks_of_sums(self) -> int:
        """K chunks that are added up before their sums are promoted: those of a packed block with one factor a row."""
        return BLOCK_K // self.chunk_k if self.scales_on_sums and self.weight.codec.factors_on_sums else 1

    @property
    def one_set_of_sums(self) -> bool:
        """True if sums that are promoted have one set of registers, for all tokens of a tile: if a stage is one k
        chunk. Its tensor cores wait while sums are added, and work for another warpgroup meanwhile."""
        return self.promotes and self.config.tile_k == self.chunk_k

    @property
    def one_factor_a_sum(self) -> bool:
        """True if a sum is multiplied by one factor of its token: the scale of x times that of the weights, which a
        thread's rows share."""
        return self.block_scales and self.scales_on_sums and self.weight.codec.rows_share_scale

    @property
    def token_splits(self) -> int:
        """Number of ranges of tokens, of a multiple of eight each, that are multiplied one after the other. If sums are
        promoted and have two sets, as many as leave room for both sets of one range beside the accumulators; else two
        if a tile has more tokens than a WGMMA."""
        if self.promotes and not self.one_set_of_sums:
            return self._ranges_of_sums
        return 2 if self.config.tile_m > WGMMA_TOKENS else 1

    @property
    def _ranges_of_sums(self) -> int:
        registers = self.consumer_registers or min(255, registers_of(self.threads * self.occupancy))
        room = registers - _OTHER_REGISTERS - self.config.tile_m // 2
        eights, most = self.config.tile_m // 8, max(room // 8, 1)
        return next(splits for splits in range(1, eights + 1) if eights % splits == 0 and eights // splits <= most)

    @property
    def batches_per_chunk(self) -> int:
        """MMA batches of a k chunk if sums are promoted: one for each range of columns and of tokens."""
        return self.promotions * self.token_splits

    @property
    def takes_x_sums(self) -> bool:
        return self.adds_zeros

    @property
    def pairs(self) -> Pairs | None:
        """The table of codebooks, and of other weights that are formed in float32, where decoding decides the time.
        With more tokens the tensor cores do, and a table would take the memory of a stage."""
        pairs = self.weight.codec.pairs(self.weight, self.scales_on_sums)
        return pairs if pairs is not None and self.config.tile_m <= _TOKENS_OF_PAIRS[pairs] else None

    @property
    def shares_levels(self) -> bool:
        """True if the lanes of a warp prepare scales of two levels for one another (shared_levels.py). With two CTAs on
        a multiprocessor that is not done for eight groups at once: Q6_K and Q3_K then take 1.02 to 1.04 of the time at
        64 tokens (H200)."""
        several = self.block.groups_per_word == 2 and self.weight.codec.shares_levels
        late = self.occupancy == 2 and self.stage_block.groups > 4
        return several and not late and self.pairs is None and not self.promotes

    @property
    def holds_words(self) -> bool:
        """True if registers hold what loads and scales of two levels need in each block. Beside a table of pairs too
        few are left, and with four consumer warpgroups, unless lanes share scales."""
        return self.block.factors > 0 and self.pairs is None and (self.warpgroups < 4 or self.shares_levels)

    @property
    def moves_codes_by_dots(self) -> bool:
        """True for scales of two levels in tiles of few tokens: 0.966 of the time with 32 and 64 (H200), where with 256
        and more it would be 1.013."""
        return self.block.factors > 0 and self.config.tile_m <= _MOST_TOKENS_BY_DOTS
