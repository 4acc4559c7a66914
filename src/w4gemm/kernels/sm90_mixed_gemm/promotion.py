"""The main loop if sums of ranges of columns are scaled before they are added to the accumulators (variant.promotes):
:class:`PromotingMainloop`. kernel.py has the facts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.sm90_mixed_gemm.mainloop import Mainloop
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import Pipeline, TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.values import ConsumerCoord, GroupSums, MmaOperands, StageState, flattened
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.ptx.arithmetic import fma, to_float
from w4gemm.ptx.memory import load_shared


class PromotingMainloop(Mainloop):
    """Multiplies stages, for one variant whose scales, or those of x, multiply sums."""

    def __init__(self, variant: Sm90MixedVariant, scheduler: TileScheduler, decoder: Any):
        super().__init__(variant, scheduler, decoder)
        self.sum_groups = 1 if variant.weight.codec.factors_on_sums else self.groups
        """Groups of a packed block whose sums are scaled apart."""
        self.steps_per_group = 4 * self.chunks_per_block // self.sum_groups
        """Matrix instructions of such a group."""

    def accumulators(self, acc: cute.Tensor) -> cute.Tensor:
        """The accumulators, flat."""
        return flattened(acc)

    def group_sums(self, thr_mma: Any) -> GroupSums:
        """Registers for the sums."""
        variant = self.variant
        shape = thr_mma.partition_shape_C((variant.config.tile_n, variant.config.tile_m // variant.token_splits))
        factors = 4 if variant.takes_x_sums else 2
        sets = [
            (cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor((factors,), Float32))
            for _ in range(1 if variant.one_set_of_sums else 2)
        ]
        return GroupSums(sets, cute.make_rmem_tensor((factors * self.sum_groups,), Float32))

    def take_scales(self, packed: cute.Tensor, scales: cute.Tensor) -> None:
        """Copy the scales of rows g and g + 8 of each group to ``scales``, as factors of the group's sums; with the
        zero points, if these are factors of the sums of x."""
        for group in range(self.sum_groups):
            field, words = group % self.block.groups_per_word, self.scale_words(packed, group)
            factors = list(self.decoder.scales(words, field))
            if self.variant.takes_x_sums:
                factors += self.decoder.zeros(words)
            for i, factor in enumerate(factors):
                scales[len(factors) * group + i] = factor

    def multiply_stage(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums,
        state: StageState,
        consumer: ConsumerCoord,
        stage_in_iteration: int,
    ) -> None:
        """Add this k set's share of one stage to the accumulators. :meth:`begin` or the stage before has decoded its
        first chunk."""
        if self.variant.one_set_of_sums:
            self.multiply_chunk(mma, pipeline, operands, sums, state, consumer, stage_in_iteration)
        else:
            self.multiply_groups(mma, pipeline, operands, sums, state, consumer)

    @cute.jit
    def multiply_groups(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums,
        state: StageState,
        consumer: ConsumerCoord,
    ):
        """Add this k set's share of one stage to the accumulators, with scales that are applied to the sums of a group.
        :meth:`begin` has run for the stage.

        An MMA batch is one scale group and one range of tokens. Two sets of sums alternate, so that one batch is
        multiplied while the previous one is scaled and added to acc, and the next chunk decoded. If a packed block has
        one factor, the batches of its chunks add to one set for each range of tokens. No batch is in flight at the end,
        because ptxas would serialize all of them.
        """
        variant = self.variant
        acc = operands.accumulators
        chunks, steps = self.k_chunks // variant.k_sets, 4 // variant.promotions
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches_per_chunk, together = variant.batches_per_chunk, variant.chunks_of_sums
        scales_of_x = pipeline.scales + state.stage * variant.block_scale_bytes
        for batch in cutlass.range_constexpr(chunks * batches_per_chunk):
            chunk, batch_in_chunk = divmod(batch, batches_per_chunk)
            group, tokens = divmod(batch_in_chunk, variant.token_splits)
            number, begins = chunk // together * batches_per_chunk + batch_in_chunk, chunk % together == 0
            batch_sums, batch_scales = sums.batch(number)
            own = range(group * steps, (group + 1) * steps)
            self.multiply_group(mma, batch_sums, operands, chunk % 2, own, tokens, x_chunk + chunk, begins)
            if const_expr(batch > 0):
                warpgroup.wait_group(1)
            before, in_chunk = divmod(batch - 1, batches_per_chunk)
            if const_expr(batch > 0 and before % together == together - 1):
                block, done = consumer.k_set * chunks + before, before // together * batches_per_chunk + in_chunk
                self.add_zeros(acc, sums, scales_of_x, block, done, consumer)
                self.add_scaled_sums(acc, sums, done, self.token_factors(scales_of_x, block, done, sums, consumer))
            if const_expr(variant.scales_on_sums and begins):
                place = chunk % self.chunks_per_block * 4 + group * steps
                for i in cutlass.range_constexpr(sums.factors):
                    batch_scales[i] = sums.scales[place // self.steps_per_group * sums.factors + i]
            if const_expr(batch_in_chunk == batches_per_chunk - 1 and chunk < chunks - 1):
                self.decode_group_chunk(operands, sums, (chunk + 1) % 2, (chunk + 1) % self.chunks_per_block)
                next_load, chunk_of_load = divmod(chunk + 2, self.chunks_per_load)
                if const_expr(chunk_of_load == 0 and chunk + 2 < chunks):
                    self.load_packed(operands, pipeline, state.stage, next_load, consumer)
        if state.has_next:
            self.wait_full(pipeline, state.next)
            self.begin(operands, sums, pipeline, state.next.stage, consumer)
        warpgroup.wait_group(0)
        last = chunks * batches_per_chunk // together - 1
        block = consumer.k_set * chunks + chunks - 1
        self.add_zeros(acc, sums, scales_of_x, block, last, consumer)
        self.add_scaled_sums(acc, sums, last, self.token_factors(scales_of_x, block, last, sums, consumer))
        self.scheduler.release(pipeline, state.stage, consumer.cta_rank)

    @cute.jit
    def multiply_chunk(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums,
        state: StageState,
        consumer: ConsumerCoord,
        stage_in_iteration: int,
    ):
        """Add a stage of one k chunk, which is one scale group, to the accumulators, with one set of sums.
        :meth:`begin` or the stage before has decoded it.

        The next chunk is decoded while this one is multiplied: in a branch, behind which ptxas leaves the wait. While
        the sums are added, the tensor cores work for the other warpgroup. Factors of tokens are loaded behind the wait:
        in front of it their registers and loads cost 4 to 7 %.
        """
        buffer = stage_in_iteration % 2
        batch_sums, batch_scales = sums.batch(0)
        self.multiply_group(mma, batch_sums, operands, buffer, range(4), 0, state.stage)
        for i in cutlass.range_constexpr(sums.factors):
            batch_scales[i] = sums.scales[i]
        if state.has_next:
            self.wait_full(pipeline, state.next)
            self.load_packed(operands, pipeline, state.next.stage, 0, consumer)
            self.decode_group_chunk(operands, sums, 1 - buffer)
        warpgroup.wait_group(0)
        scales_of_x = pipeline.scales + state.stage * self.variant.block_scale_bytes
        factors = self.token_factors(scales_of_x, 0, 0, sums, consumer)
        self.add_zeros(operands.accumulators, sums, scales_of_x, 0, 0, consumer)
        self.scheduler.release(pipeline, state.stage, consumer.cta_rank)
        self.add_scaled_sums(operands.accumulators, sums, 0, factors)

    def multiply_group(
        self,
        mma: cute.TiledMma,
        sums: cute.Tensor,
        operands: MmaOperands,
        buffer: int,
        steps: range,
        tokens: int,
        chunk: Int32,
        begins: bool = True,
    ) -> None:
        """Issue the MMA batch of a scale group. steps: of the k chunk. tokens: their range. begins: if so, its sums are
        new."""
        warpgroup.fence()
        for step in steps:
            mma.set(warpgroup.Field.ACCUMULATE, step > steps.start or not begins)
            weight, x = operands.fragment[(None, None, buffer * 4 + step)], operands.x[tokens]
            cute.gemm(mma, sums, weight, x[(None, None, step, chunk)], sums)
        warpgroup.commit_group()

    @cute.jit
    def begin(self, operands: MmaOperands, sums: GroupSums, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord):
        """Decode a stage's first chunk, and bring its second into registers if it has one."""
        self.load_packed(operands, pipeline, stage, 0, consumer)
        self.decode_group_chunk(operands, sums, 0)
        if const_expr(not self.variant.one_set_of_sums and self.chunks_per_load == 1):
            self.load_packed(operands, pipeline, stage, 1, consumer)

    def decode_group_chunk(self, operands: MmaOperands, sums: GroupSums, buffer: int, number: int = 0) -> None:
        """Decode a chunk of what is packed into a fragment buffer; with the first one take the scales of all, if they
        are applied to sums."""
        self.decode_chunk(operands.packed, operands.fragment, number, buffer, operands.register)
        if self.variant.scales_on_sums and number == 0:
            self.take_scales(operands.packed, sums.scales)

    def add_scaled_sums(self, acc: cute.Tensor, sums: GroupSums, batch: int, of_tokens: list[Float32]) -> None:
        """Add the sums of an MMA batch to acc, times the factors of tokens if there are any. If scales are applied to
        sums and are no part of these factors, times those of rows g and g + 8 too."""
        batch_sums, scales = sums.batch(batch)
        flat = flattened(batch_sums)
        first = batch % self.variant.token_splits * cute.size(flat)
        for i in range(cute.size(flat)):
            factors = [of_tokens[i // 4 * 2 + i % 2]] if of_tokens else []
            if self.variant.scales_on_sums and not self.variant.one_factor_a_sum:
                factors.append(scales[i // 2 % 2])
            value = flat[i] if len(factors) == 1 else flat[i] * factors[0]
            acc[first + i] = fma(value, factors[-1], acc[first + i])

    def token_factors(
        self, address: Int32, block: Int32 | int, batch: int, sums: GroupSums, consumer: ConsumerCoord
    ) -> list[Float32]:
        """The scales of x for the sums of an MMA batch that a thread holds, two for each eight tokens. They are
        multiplied by the scale of the weights if a thread's rows share it. None if rows of x have no scales of 128
        columns.

        Args:
            address: of the first token's scale in the stage.
            block: the k block in the stage.
        """
        variant = self.variant
        if not variant.block_scales:
            return []
        factors = self.numbers_of_tokens(address, block, batch, consumer)
        if variant.one_factor_a_sum:
            scale = sums.batch(batch)[1][0]
            factors = [factor * scale for factor in factors]
        return factors

    def add_zeros(
        self,
        acc: cute.Tensor,
        sums: GroupSums,
        address: Int32,
        block: Int32 | int,
        batch: int,
        consumer: ConsumerCoord,
    ) -> None:
        """Add the sums of x over the scale group of an MMA batch, times the zero points of rows g and g + 8, to acc; if
        there are any. Arguments as of :meth:`token_factors`."""
        variant = self.variant
        if not variant.takes_x_sums:
            return
        (batch_sums, factors), splits = sums.batch(batch), variant.token_splits
        column = block * self.groups + batch // splits % self.groups
        of_tokens = self.numbers_of_tokens(address, column, batch, consumer)
        first = batch % splits * cute.size(batch_sums)
        for i in range(cute.size(batch_sums)):
            acc[first + i] = fma(of_tokens[i // 4 * 2 + i % 2], factors[2 + i // 2 % 2], acc[first + i])

    def numbers_of_tokens(
        self, address: Int32, column: Int32 | int, batch: int, consumer: ConsumerCoord
    ) -> list[Float32]:
        """The scales or sums of x that a thread's sums of an MMA batch belong to, two for each eight tokens. column:
        which of a token's numbers in the stage."""
        variant = self.variant
        tokens = variant.config.tile_m // variant.token_splits
        first = batch % variant.token_splits * tokens + consumer.thread % 4 * 2
        at = address + (column * variant.scale_tokens + first) * 4
        together = 1 if variant.grouped else 2  # an expert's first number may be at an odd place
        starts = [at + eight * 32 + word * 4 for eight in range(tokens // 8) for word in range(0, 2, together)]
        return [to_float("f32", word) for start in starts for word in load_shared(start, together)]
