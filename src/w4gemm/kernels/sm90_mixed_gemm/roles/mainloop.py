"""What a consumer warpgroup does with the slots of a tile: decode, multiply, release."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.ptx import fence_proxy_async, fma
from w4gemm.kernels.sm90_mixed_gemm.roles.work import Work


class MainLoop(Work):
    decoder: Any
    reader: BlockReader
    part_k: int
    """Columns of a block, or of half of it, that a thread holds packed at a time, in part_chunks chunks: as code_words
    words and the scales of so many groups."""
    part_chunks: int
    code_words: int
    groups: int

    def x_operands(self, mma, thr, s_x):
        """x as operand B, by parts of the tokens."""
        v = self.v
        part = (v.config.tile_m // v.token_parts, v.chunk_k)
        tiles = [cute.local_tile(s_x, part, (i, 0, None)) for i in range(v.token_parts)]
        return [mma.make_fragment_B(thr.partition_B(t)) for t in tiles]

    def by_row_block(self, acc, flat):
        """The accumulators, those of each 64 rows as one operand: parts of ``flat``, one after the other."""
        count = self.v.row_blocks
        if count == 1:
            return [acc]
        layout = cute.make_layout((*acc.shape[:1], 1, 1))
        return [cute.make_tensor(flat.iterator + r * (cute.size(flat) // count), layout) for r in range(count)]

    @cute.jit
    def multiply_slot(self, mma, ring, operands, state, who, part):
        """acc += this slot's weights @ x.T, as far as this k set does it, and the first packed part of the next slot
        into registers. Leaves the last unit's wgmma in flight. A unit of work is a chunk of k for a row block: all
        chunks of a packed part, then those of the next row block, then of the next block along k. part: which slot of
        the main loop's step this is, so that the two sets of fragment registers take turns over all its units."""
        v = self.v
        full, empty, _, _ = ring
        accumulators, fragment, x_fragments, packed, table = operands
        stage, next_stage, next_phase, previous, has_previous, has_next = state
        k_set, rank = who[1], who[3]
        registers = cute.recast_tensor(fragment, Int32)
        chunks = self.chunks // v.k_sets
        x_chunk = stage * self.chunks + k_set * chunks
        units = chunks * v.row_blocks
        for unit in cutlass.range_constexpr(units):
            fragments = (part * units + unit) % 2
            packed_part, piece = divmod(unit, self.part_chunks)
            block, row_block = divmod(packed_part, v.row_blocks)
            acc = accumulators[row_block]
            self.decode_chunk(packed, registers, piece, fragments, table)
            if const_expr(piece == self.part_chunks - 1 and unit < units - 1):
                self.load_part(packed, ring, stage, packed_part + 1, who)
            warpgroup.fence()
            for step in cutlass.range_constexpr(4):
                cute.gemm(
                    mma,
                    acc,
                    fragment[(None, None, fragments * 4 + step)],
                    x_fragments[(None, None, step, x_chunk + block * self.part_chunks + piece)],
                    acc,
                )
            warpgroup.commit_group()
            if const_expr(unit == units - 1):
                if has_next:  # its latency passes while the tensor cores work
                    self.wait_full(full + next_stage, next_phase)
                    self.load_part(packed, ring, next_stage, 0, who)
            warpgroup.wait_group(1)
            if const_expr(unit == 0):
                if has_previous:
                    self.release(empty, previous, rank)

    @cute.jit
    def multiply_groups(self, mma, ring, operands, sums, state, who):
        """acc += this slot's weights @ x.T, as far as this k set does it, with scales that are applied to the sums of a
        group. ``begin_groups`` has been there. A unit of work is a group and a part of the tokens; two sets of sums
        take turns, so that one unit is multiplied while the one before is scaled and added to acc, and the next chunk
        decoded. Nothing is in flight at the end: ptxas would serialize all of it."""
        v = self.v
        full, empty, _, _ = ring
        acc, fragment, x_fragments, packed, _ = operands
        stage, next_stage, next_phase, _, _, has_next = state
        k_set, rank = who[1], who[3]
        chunks, steps = self.chunks // v.k_sets, 4 // self.groups
        x_chunk = stage * self.chunks + k_set * chunks
        units = chunks * self.groups * v.token_parts
        for unit in cutlass.range_constexpr(units):
            chunk, rest = divmod(unit, self.groups * v.token_parts)
            group, part = divmod(rest, v.token_parts)
            group_sums = sums[unit % 2][0]
            warpgroup.fence()
            for step in cutlass.range_constexpr(group * steps, (group + 1) * steps):
                mma.set(warpgroup.Field.ACCUMULATE, step > group * steps)
                cute.gemm(
                    mma,
                    group_sums,
                    fragment[(None, None, chunk % 2 * 4 + step)],
                    x_fragments[part][(None, None, step, x_chunk + chunk)],
                    group_sums,
                )
            warpgroup.commit_group()
            if const_expr(unit > 0):
                warpgroup.wait_group(1)
                self.promote(acc, sums, unit - 1)
            for row in cutlass.range_constexpr(2):
                sums[unit % 2][1][row] = sums[2][2 * group + row]
            if const_expr(rest == self.groups * v.token_parts - 1 and chunk < chunks - 1):
                self.decode_group(operands, sums[2], (chunk + 1) % 2)
                if const_expr(chunk + 2 < chunks):
                    self.load_part(packed, ring, stage, chunk + 2, who)
        if has_next:
            self.wait_full(full + next_stage, next_phase)
            self.begin_groups(operands, ring, sums, next_stage, who)
        warpgroup.wait_group(0)
        self.promote(acc, sums, units - 1)
        self.release(empty, stage, rank)

    @cute.jit
    def begin_groups(self, operands, ring, sums, stage, who):
        """Decode a slot's first chunk, and bring its second into registers."""
        self.load_part(operands[3], ring, stage, 0, who)
        self.decode_group(operands, sums[2], 0)
        self.load_part(operands[3], ring, stage, 1, who)

    def decode_group(self, operands, scales, fragments):
        """What is packed into a set of fragment registers, and its scales, of rows g and g + 8 of each group."""
        _, fragment, _, packed, table = operands
        self.decode_chunk(packed, cute.recast_tensor(fragment, Int32), 0, fragments, table)
        for group in range(self.groups):
            first = self.code_words + group * self.v.block.words_per_scale
            for row, scale in enumerate(self.decoder.scales((packed[first],))):
                scales[2 * group + row] = scale

    def promote(self, acc, sums, unit):
        """acc += what a unit of work summed up, by the scales of rows g and g + 8."""
        group_sums, factors = sums[unit % 2]
        flat = cute.make_tensor(group_sums.iterator, cute.make_layout(cute.size(group_sums)))
        first = unit % self.v.token_parts * cute.size(flat)
        for i in range(cute.size(flat)):
            acc[first + i] = fma(flat[i], factors[i // 2 % 2], acc[first + i])

    def wait_full(self, barrier, phase):
        """Until a slot is there, for WGMMA too: what cp.async wrote is not, by the barrier alone."""
        cute.arch.mbarrier_wait(barrier, phase)
        if self.v.gathered:
            fence_proxy_async()

    def load_part(self, packed, ring, stage, part, who):
        """One of this k set's packed blocks, or half a block, into registers: code words, then scale words. part: which
        of the warpgroup's blocks in the slot, counted over its row blocks first, then along k."""
        v = self.v
        wg, k_set, t, _ = who
        block, row_block = divmod(part, v.row_blocks)
        index = (wg * v.row_blocks + row_block) * v.blocks + k_set * (v.blocks // v.k_sets) + block
        address = ring[3] + stage * v.weight_bytes + index * v.part.bytes
        pair = t // 32 * 8 + t % 32 // 4
        words = []
        for half in range(self.part_k // 64):
            words += self.reader.codes(address, half, lane=t)
        for group in range(self.groups):
            words += self.reader.scales(address + v.part.scales_at(group), pair=pair)
        for i, word in enumerate(words):
            packed[i] = word

    def decode_chunk(self, packed, registers, piece, fragments, table):
        """A chunk of what is packed, 128 bytes of x long, into one of the two sets of fragment registers."""
        width, words = self.v.block.words_per_scale, self.decoder.words_per_step
        prepared: Any = None
        step_k = self.v.chunk_k // 4
        for step in range(4):
            group, rest = divmod(piece * self.v.chunk_k + step * step_k, self.v.block.scale_group)
            if step == 0 or rest == 0:
                first = self.code_words + group * width
                prepared = self.decoder.prepare(tuple(packed[first + i] for i in range(width)), table)
            first = (piece * 4 + step) * words
            values = self.decoder.decode(tuple(packed[first + i] for i in range(words)), prepared)
            for r, value in enumerate(values):
                registers[(0, r % 2, r // 2), 0, fragments * 4 + step] = value

    @cute.jit
    def release(self, empty, stage, rank):
        """Every lane arrives for its own reads, at every CTA that this slot's x or weights came from. One lane for its
        warp would need a barrier of the warp first, and measured 1 to 5 % slower."""
        c = self.v.config
        if const_expr(self.v.sharers == 1):
            cute.arch.mbarrier_arrive(empty + stage)
        else:
            rank_m, rank_n = self.place_in_cluster(rank)
            for i in cutlass.range_constexpr(c.cluster_n):
                cute.arch.mbarrier_arrive(empty + stage, Int32(rank_m * c.cluster_n + i))
            for i in cutlass.range_constexpr(1, c.cluster_m):
                other = (rank_m + i) % c.cluster_m
                cute.arch.mbarrier_arrive(empty + stage, Int32(other * c.cluster_n + rank_n))
