"""What a launch of the layer of experts reads and writes, and what its parts hand to one another."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.ptx.memory import shared_address


class Tensors(NamedTuple):
    """What a launch reads and writes."""

    x: cute.Tensor
    """(m, features), m at most ``tokens``."""
    ids: cute.Tensor | None
    """int32 or int64 (m * top k,), or None if the launch chooses."""
    weights: cute.Tensor | None
    """float32 (m * top k,), or None."""
    logits: cute.Tensor | None
    """(m, global experts), or None if it is given ids and weights."""
    router_bias: cute.Tensor | None
    """float32 (global experts,), or None."""
    expert_map: cute.Tensor | None
    """int32 (global experts,): the expert here; None if ids are those of experts here."""
    gate_up: cute.Tensor
    down: cute.Tensor
    """int32, the packed blocks of all experts."""
    gate_up_bias: cute.Tensor | None
    down_bias: cute.Tensor | None
    """(experts, n), or None."""
    gate_up_scale: cute.Tensor | None
    down_scale: cute.Tensor | None
    """float32 (experts,), or None."""
    gate_up_channels: cute.Tensor | None
    down_channels: cute.Tensor | None
    """float32 (experts, n): scales of the weights' rows; None if the format has none."""
    scratch: cute.Tensor
    """int32 (scratch_bytes / 4,): activated rows, see :meth:`ExpertLayerKernel.hidden_at`, and parts of strips, see
    :meth:`ExpertLayerKernel.meeting_at`."""
    flags: cute.Tensor
    """int32: a flag for each CTA; from ``EPOCHS_AT`` on its epoch."""
    out: cute.Tensor
    """(m, features)."""


class Choices(NamedTuple):
    """The chosen experts, in ascending order, in shared memory. A slot is an expert's place among them."""

    ids: cute.Tensor
    """int32 (choices, up to a multiple of 4): the expert of each choice; -1 if it is elsewhere or there is none."""
    weights: cute.Tensor
    """float32 (choices,)."""
    present: cute.Tensor
    """int32 (experts / 32,): a bit for each expert, 1 if it was chosen."""
    experts: cute.Tensor
    """int32 (choices,): the expert of each slot; of this warp, where each tallies by itself."""
    masks: cute.Tensor
    """int32 (choices,): bit t is 1 if token t chose the slot's expert."""
    factors: cute.Tensor
    """float32 (choices * tokens,): the sum of a token's weights for a slot's expert; none if sums are in order."""
    places: cute.Tensor
    """int32 (choices * tokens,) in place of factors if sums are in order: a token's first choice of a slot's expert."""
    firsts: cute.Tensor
    """int32 (choices,), if sums are in order: the first choice of the same token and expert; -1 if there is none."""
    scaled: cute.Tensor
    """The same times the expert's scale of down; the same memory if there is none."""
    biases: cute.Tensor
    """float32 (columns_per_cta * tokens * 16,): weighted sums of down's biases."""
    shares: cute.Tensor
    """int32 (pollers,): which share a warp that waits prefers to begin, see :meth:`ExpertLayerKernel.await_flags`."""
    owned: cute.Tensor
    """int32 (1,): of thread 0, the epoch if the CTA has begun the share that it computes, and no other one has."""


class GivenChoice(NamedTuple):
    """A thread's choice, as it was given."""

    expert: Int32
    """-1 if it is elsewhere or there is none."""
    weight: Float32


class OwnChoice(NamedTuple):
    """A lane's choice, where each warp tallies the choices by itself."""

    expert: Int32
    """-1 if it is elsewhere or there is none."""
    weight: Float32
    slot: Int32


class PlaceOfExperts(NamedTuple):
    """From which a lane computes slots, where all warps tally together, see :meth:`.tally.Tally.slot_of`."""

    present: Int32
    """Bits of 32 experts, 1 if they were chosen."""
    before: Int32
    """Chosen experts below them."""


class Memory(NamedTuple):
    """Shared memory of a thread's warp and CTA."""

    x: Int32
    partials: Int32
    stages: Int32
    """Of this warp."""
    rows: Int32
    """Of this warp: what lanes share of an activated row."""
    table: Int32
    """The decoder's table; once it is filled, this thread's copies."""
    choices: Choices

    @classmethod
    def allocated(cls, layer: ExpertLayer, warp: Int32) -> Memory:
        """Divide the CTA's shared memory, whose bytes ``layer`` counts."""
        smem, count = cutlass.memory.SmemAllocator(), layer.choices

        def bytes_of(size: int) -> Int32:
            return shared_address(smem.allocate_array(Int32, size // 4, byte_alignment=128))

        def tensor(dtype: Any, size: int, align: int = 4) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(size), byte_alignment=align)

        x, partials = bytes_of(layer.tokens * layer.x_row_bytes), bytes_of(layer.partial_bytes)
        stages = bytes_of(layer.warps * layer.warp_bytes)
        table = Int32(0) if layer.pairs is None else bytes_of(layer.decode_table_bytes)
        numbers = tensor(Int32 if layer.in_order else Float32, count * layer.tokens)
        experts = tensor(Int32, layer.tallies * count)
        if layer.tallies > 1:
            experts = cute.make_tensor(experts.iterator + warp * count, cute.make_layout(count))
        choices = Choices(
            ids=tensor(Int32, -(-count // 4) * 4, 16),
            weights=tensor(Float32, count),
            present=tensor(Int32, -(-layer.experts // 32)),
            experts=experts,
            masks=tensor(Int32, count),
            factors=numbers,
            places=numbers,
            firsts=tensor(Int32, count) if layer.in_order else experts,
            scaled=tensor(Float32, count * layer.tokens) if layer.down_scale and not layer.in_order else numbers,
            biases=tensor(Float32, layer.bias_floats, 16) if layer.bias_floats else numbers,
            shares=tensor(Int32, layer.pollers),
            owned=tensor(Int32, 1),
        )
        stages += warp * layer.warp_bytes
        rows = stages + layer.num_stages * layer.stage_bytes if layer.shares_rows else Int32(0)
        return cls(x, partials, stages, rows, table, choices)


class Division(NamedTuple):
    whole: Int32
    """The quotient, rounded down."""
    rest: Int32


class Share(NamedTuple):
    """What a CTA computes: consecutive units of gate_up, and its strips of down."""

    first: Int32
    units: Int32
    chunk: Int32
    """Units of a round."""
    rounds: Int32
    """Rounds of gate_up; that of down follows."""
    column: Int32
    """The first strip of down; the others follow at distances of ``column_stride``."""
    columns: Int32
    """Strips of down, whole or in part."""
    skipped: Int32
    """Steps of the first strip that other CTAs have."""
    steps: Int32
    """Steps of down, or of nothing if no expert was chosen."""
    active: Int32
    """Chosen experts."""


class Steps(NamedTuple):
    """The steps of one warp in a round."""

    first: Int32
    count: Int32
    dealt: Int32
    """Steps of all warps, one for each at least."""


class Groups(NamedTuple):
    """Consecutive groups of :attr:`ExpertLayer.neighbours` CTAs."""

    first: Int32
    last: Int32


class PlaceOfSums(NamedTuple):
    """Which four sums of a round a thread adds up."""

    unit: Int32
    quad: Int32
    """Four consecutive rows of the unit."""
    token: Int32


class PartialSums(NamedTuple):
    """Where the partial sums of a round are that a thread adds up, see :meth:`ExpertLayerKernel.place_of`. Computed
    before the round's barrier, because after it one warp may be all that a CTA waits for."""

    partials: Int32
    """Address of the first warp's partial sums."""
    warps: Int32
    """Warps that have partial sums; 0 if the thread adds up nothing."""


class ActivatedRows(NamedTuple):
    """The rows of gate_up that a thread adds up, and what it needs to activate and store them."""

    own: PartialSums
    at: Int64
    """Address of the activated rows."""
    scale: Float32
    """Of the expert; 1 if there are no scales."""
    biases: tuple[Int32, Int32]
    """Of the four rows, in x's dtype; 0 if there are none."""
    channels: tuple[Int32, ...]
    """Scales of the four rows, float32; empty if the format has none."""


class Down(NamedTuple):
    """A warp's steps of down and a thread's sums, computed while the first weights are on their way."""

    count: Int32
    """Steps."""
    column: Int32
    slot: Int32
    k_block: Int32
    """Of the first step, with the two above."""
    own: PartialSums


class HiddenRows(NamedTuple):
    """What a lane loads of a k block of a slot's activated rows."""

    at: Int64
    """Address of its first fragments."""
    left: Int32
    """Columns of the row from the block on; 0 if the lane's token did not choose the slot's expert."""


class Cursor(NamedTuple):
    """The step that a warp requests next."""

    codes: Int64
    """Address of the first 16 bytes of codes that this lane copies."""
    scales: Int64
    """Address of the 16 bytes of scales that this lane copies, if it does."""
    k_left: Int32
    """k blocks left of the expert's strip, this one included."""
    slot: Int32
    strip: Int32
    left: Int32
    """Steps left of the warp's in this round, this one included; 0 if there is none in any round."""
    round: Int32
