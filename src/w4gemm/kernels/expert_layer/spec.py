"""Host side of the layer of experts in one launch; ``w4gemm.api.expert_layer`` launches it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from w4gemm.core.activation import is_gated
from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import Helper
from w4gemm.kernels.helpers.experts import ExpertChoice
from w4gemm.kernels.requirements import hopper_refusal, missing_for_dsl
from w4gemm.kernels.stand_ins import DTYPES, contiguous
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY, MOST_EXPERTS
from w4gemm.kernels.workspace import FLAG_BYTES
from w4gemm.packing.block import BLOCK_K, BLOCK_N, STRIP_N, Block
from w4gemm.packing.codecs import INT4_MMA16, MXFP4_MMA16, NVFP4_MMA16, PAIR_TABLE_BYTES, Pairs, WeightOperand

MOST_TOKENS = 8
"""Columns of operand B of the matrix instruction: a token each."""
TOKENS = (1, 2, 4, MOST_TOKENS)
"""Tokens that kernels are compiled for."""
MOST_CHOICES = 128
"""Choices of all tokens."""
_FEW_CHOICES = 16
"""Choices that each warp tallies by itself: of four times as many it takes longer than all warps do together."""
_ROUND = 16
"""Most units that a CTA multiplies before it adds up."""
SLOT_ROW = STRIP_N + 4
"""Floats of a token's partial sums in a slot: with a gap, so that a warp's stores fall into different banks."""
_MOST_CTAS = FLAG_BYTES // 4 // 2
"""A flag and an epoch of each, 4 bytes each."""
EPOCHS_AT = _MOST_CTAS
"""Index of the first epoch behind the flags."""
_SPLIT_BYTES = 32 * 1024
"""Bytes of down by which the largest share of whole strips exceeds the mean one, from which on strips are split. Adding
up parts took 0.8 to 1.7 us, in which a multiprocessor of an H200 reads 30 to 60 KB (2026-11-28). By an exchange it
takes about 1 us less (2026-11-30); the bound is as it was."""
STRIPS = BLOCK_N // STRIP_N
"""Strips of a packed block."""
_MOST_STAGES = 3
"""Stages of a warp. With 13, 200 KB of a multiprocessor's weights on their way, launches took up to 25 % longer (H100,
2026-11-28): requests for down then delay those for gate_up of other CTAs, which all wait for."""
_WARPS = 16
"""Warps of a CTA. Eight were as fast for small int4 layers, and up to 14 % slower for MXFP4 and for large layers (H100,
2026-11-28)."""
_FEWER_WARPS = 12
"""Warps of a CTA where threads of 16 spill up to 104 bytes of registers, some that loads ahead fill: of blocks that
share factors in pairs (Q4_K), and of those with several groups of zero points, but integer ones where numbers of blocks
along k are odd. Qwen3 in Q4_K with 1 and 8 tokens took 0.88 and 0.79 of the time of 16 (H200, 2026-11-29), in
int4_g32_zint with 1 to 8 0.80, 0.97, 0.99, 0.98; gpt-oss-120b, which spills nothing, 1.00 to 1.02 (2026-11-30)."""
_FLOATS = MXFP4_MMA16, NVFP4_MMA16
"""Codecs whose steps have two blocks whatever the number of blocks along k."""
_IN_ORDER = INT4_MMA16, MXFP4_MMA16
"""Codecs whose weights are rounded to x's dtype as those of four launches are."""
_ALIGNMENT = 640
"""Bytes that alignment of the parts of shared memory takes at most: of four to 128 bytes, of two to 16."""


@dataclass(frozen=True)
class ExpertLayer(Helper):
    """A layer of experts for at most ``tokens`` tokens, on SM90: both products, the activation and the weighted sum.

    Args:
        weight: facts of the format of both weights, beside 16-bit x.
        activation: with gates, gate_up has a gate and an up for each column of the activated row; else one row.
        experts: number of experts here.
        features: features of x and of the result.
        width: features of an expert's activated row.
        top_k: choices of a token.
        tokens: of ``TOKENS``.
        ids: of ``IDS`` of helpers/experts.py.
        mapped: True if ids name global experts, of which a map says which are here.
        gate_up_bias, down_bias: True if there is a bias for each expert.
        gate_up_scale, down_scale: True if there is a scale for each expert.
        choice: how the launch chooses experts by logits; None if it is given ids and weights.
        split: True if strips of down are divided among CTAs, which then have equally many steps of down.
        ctas: number of multiprocessors.
        warps: of a CTA.
        most_stages: of a warp, if there is room for so many.
        step_blocks: blocks along k of a step, 1 or 2.
        in_order: True if bits are those of four launches that are batch invariant: a warp adds up all of a unit along
            k, and rows of down are rounded and added in the order of a token's choices.
    """

    weight: WeightOperand
    activation: str
    experts: int
    features: int
    width: int
    top_k: int
    tokens: int
    ids: torch.dtype
    mapped: bool
    gate_up_bias: bool
    down_bias: bool
    gate_up_scale: bool
    down_scale: bool
    choice: ExpertChoice | None
    split: bool
    ctas: int
    warps: int = _WARPS
    most_stages: int = _MOST_STAGES
    step_blocks: int = 1
    in_order: bool = False

    name: ClassVar[str] = "expert_layer"

    @classmethod
    def of(cls, device: Device, tokens: int, weight: WeightOperand, *parameters: Any) -> ExpertLayer | None:
        """Return the kernel for a number of tokens; None where it does not run. parameters: from ``activation`` to
        ``choice``, without ``tokens``, and ``in_order``."""
        if not 0 < tokens <= MOST_TOKENS:
            return None
        layer = cls.form(device, tokens, weight, *parameters)
        return None if layer.refusal(device) else layer

    @classmethod
    def form(cls, device: Device, tokens: int, weight: WeightOperand, *parameters: Any) -> ExpertLayer:
        """Return the parameters of the kernel for 1 to ``MOST_TOKENS`` tokens, also where it does not run."""
        most = next(count for count in TOKENS if tokens <= count)
        *facts, in_order = parameters
        whole = replace(cls(*(weight, *facts[:5], most, *facts[5:], False, device.sms)), in_order=in_order)
        active = min(whole.choices, whole.experts)
        strips = whole.columns_per_cta - whole.columns / whole.ctas
        more = strips * active * whole.k_blocks_down * whole.stage_block.bytes
        one = replace(whole, split=more > _SPLIT_BYTES and not in_order)
        two = replace(one, step_blocks=2)
        ragged, zeros = two.ragged_up or two.ragged_down, weight.block.has_zero and weight.block.groups > 1
        if weight.block.lead or (zeros and (weight.zero == "float" or not ragged)):
            one, two = (replace(each, warps=_FEWER_WARPS) for each in (one, two))
        # int4 with an odd number of blocks, 1, 2, 4, 8 tokens: GLM-4.5-Air took 1.03, 0.99, 0.97, 0.925 of the time,
        # Nemotron 3 Nano 1.04, 1.02, 1.00, 0.96; NVFP4, 1, 2 tokens: GLM-4.5-Air 1.00, 0.96, gpt-oss-120b 0.99, 0.97
        # (H200, 2026-11-30)
        faster = not ragged or weight.codec in _FLOATS or most >= 4
        return two if faster and two.two_blocks and two.has_room else one

    # --- sizes

    @property
    def kind(self) -> str:
        """dtype of x and of the result: "f16" or "bf16"."""
        return self.weight.kind

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def choices(self) -> int:
        """Most choices of a launch."""
        return self.tokens * self.top_k

    @property
    def alone(self) -> bool:
        """True if there is one token: it chose every expert that is multiplied, so down needs no masks, beside which
        ptxas spills rows in MXFP4."""
        return self.tokens == 1

    @property
    def tallies(self) -> int:
        """Warps that tally the choices, each by itself, before any barrier; 1 if all do it together."""
        return self.warps if self.choice is None and self.choices <= _FEW_CHOICES else 1

    @property
    def pollers(self) -> int:
        """Warps that wait for the flags of all CTAs."""
        return -(-self.ctas // 32)

    @property
    def gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def rows_up(self) -> int:
        """Rows of one expert's gate_up."""
        return 2 * self.width if self.gated else self.width

    @property
    def k_blocks_up(self) -> int:
        """128-column blocks of gate_up."""
        return -(-self.features // BLOCK_K)

    @property
    def k_blocks_down(self) -> int:
        """128-column blocks of down."""
        return -(-self.width // BLOCK_K)

    @property
    def two_blocks(self) -> bool:
        """True if a step may have two blocks: the lanes of a warp then copy the scales of both."""
        return not self.weight.block.lead and 2 * self.scale_lanes <= 32

    @property
    def scale_lanes(self) -> int:
        """Lanes that copy the scales of a strip's block, 16 bytes each."""
        return self.stage_block.scale_bytes // 16

    @property
    def ragged_up(self) -> bool:
        """True if the last step of a strip of gate_up has one block instead of two."""
        return self.k_blocks_up % self.step_blocks != 0

    @property
    def ragged_down(self) -> bool:
        """The same of down."""
        return self.k_blocks_down % self.step_blocks != 0

    @property
    def refills_first(self) -> bool:
        """True if a stage is refilled before the next rows of down are loaded. Behind them ptxas spills, in these
        forms, half of the rows that are on their way, and so waits for them."""
        return self.weight.codec == MXFP4_MMA16 and not self.ragged_down

    @property
    def steps_up(self) -> int:
        """Steps of a strip of gate_up."""
        return -(-self.k_blocks_up // self.step_blocks)

    @property
    def steps_down(self) -> int:
        """Steps of a strip of down of one expert."""
        return -(-self.k_blocks_down // self.step_blocks)

    @property
    def blocks_up(self) -> int:
        """64-row blocks of one expert's gate_up."""
        return -(-self.rows_up // BLOCK_N)

    @property
    def blocks_down(self) -> int:
        """64-row blocks of one expert's down."""
        return -(-self.features // BLOCK_N)

    @property
    def strips_up(self) -> int:
        """16-row strips of one expert's gate_up."""
        return self.rows_up // STRIP_N

    @property
    def columns(self) -> int:
        """16-row strips of down, that is, of 16 columns of the result."""
        return self.features // STRIP_N

    @property
    def columns_per_cta(self) -> int:
        """Most strips of down that a CTA has, whole or in part."""
        return -(-self.columns // self.ctas) + self.split

    @property
    def expert_bytes(self) -> int:
        """Bytes of both weights of an expert."""
        blocks = self.blocks_up * self.k_blocks_up + self.blocks_down * self.k_blocks_down
        return blocks * self.weight.block.stride

    @property
    def pairs(self) -> Pairs | None:
        """The table of numbers without scales, because scales multiply sums."""
        return self.weight.codec.pairs(self.weight, on_sums=True)

    # --- shared memory

    @property
    def stage_block(self) -> Block:
        """A strip of a packed block, as a stage holds it."""
        return self.weight.block.sub_block(rows=STRIP_N)

    @property
    def stage_bytes(self) -> int:
        return self.step_blocks * self.stage_block.bytes

    @property
    def x_row_bytes(self) -> int:
        """Bytes from one token's x to the next one's: 16 more than x has, so that ldmatrix meets all banks."""
        return self.k_blocks_up * BLOCK_K * 2 + 16

    @property
    def shares_rows(self) -> bool:
        """True if the lanes of a warp load the row of a step of down for one another, two steps ahead: if there is one
        token, of which 28 lanes of 32 have none of a fragment. In the forms that refill first ptxas spills up to 40
        bytes beside it, which the wait for flags drives out of L1: 256 experts in MXFP4 took 1.19 of the time. With two
        tokens it took 0.98 to 1.005 (H200, 2026-12-01)."""
        return self.alone and not self.refills_first

    @property
    def step_row_bytes(self) -> int:
        """Bytes of a step's part of the activated row, if lanes share it."""
        return self.step_blocks * BLOCK_K * 2 if self.shares_rows else 0

    @property
    def warp_bytes(self) -> int:
        """Bytes of a warp's stages and, behind them, of a row that lanes share."""
        return self.num_stages * self.stage_bytes + self.step_row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a warp's partial sums of a unit."""
        return self.tokens * SLOT_ROW * 4

    @property
    def neighbours(self) -> int:
        """CTAs of a group, which have strips of down that lie side by side in packed blocks, if strips are split."""
        return next(count for count in (STRIPS, 2, 1) if self.ctas % count == 0)

    @property
    def units_of_round(self) -> int:
        """Most units that a CTA multiplies before it adds up, a thread four rows of one token."""
        return min(_ROUND, self.threads // (STRIP_N // 4 * self.tokens))

    @property
    def partial_slots(self) -> int:
        """Slots of partial sums of a round: up to that of the last unit and the last rank."""
        return self.units_of_round + self.warps - 1

    @property
    def down_rows_bytes(self) -> int:
        """Bytes of the rows of down of a CTA's strips, float32 [strip][choice][row], if they are added in order."""
        return self.columns_per_cta * self.choices * STRIP_N * 4

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial sums of two rounds; if sums are in order, of a unit of each warp or, later, of the rows
        of down."""
        if self.in_order:
            return max(self.warps * self.slot_bytes, self.down_rows_bytes)
        return 2 * self.partial_slots * self.slot_bytes

    @property
    def decode_table_bytes(self) -> int:
        return PAIR_TABLE_BYTES if self.pairs is not None else self.weight.codec.table_bytes

    @property
    def bias_floats(self) -> int:
        """Weighted sums of down's biases of a CTA's strips."""
        return self.columns_per_cta * self.tokens * STRIP_N if self.down_bias and not self.in_order else 0

    @property
    def _choice_bytes(self) -> int:
        """Bytes of :class:`.values.Choices`."""
        of_tokens = 1 + (self.down_scale and not self.in_order)
        of_choice = 12 + 4 * self.tallies + 4 * self.tokens * of_tokens + 4 * self.in_order
        of_all = 4 * (-(-self.experts // 32) + self.pollers + 1)
        return 12 + self.choices * of_choice + of_all + 4 * self.bias_floats

    @property
    def _bytes_but_stages(self) -> int:
        x_bytes = self.tokens * self.x_row_bytes
        rows = self.warps * self.step_row_bytes
        return x_bytes + self.partial_bytes + rows + self.decode_table_bytes + self._choice_bytes + _ALIGNMENT

    @property
    def num_stages(self) -> int:
        """Stages of each warp: at most ``most_stages``, as many as there is room for."""
        return min(self.most_stages, (HOPPER_SHARED_MEMORY - self._bytes_but_stages) // (self.warps * self.stage_bytes))

    @property
    def has_room(self) -> bool:
        """True if the stages of a warp hold three blocks at least: three of one, or two of two, which took 0.92 of the
        time (Kimi-K2 and DeepSeek-V3, eight tokens, H200, 2026-11-30)."""
        return self.num_stages * self.step_blocks >= 3

    @property
    def shared_bytes(self) -> int:
        return self._bytes_but_stages + self.warps * self.num_stages * self.stage_bytes

    # --- global memory

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the activated rows."""
        return min(self.choices, self.experts) * self.k_blocks_down * BLOCK_K * 2 * self.tokens

    @property
    def part_bytes(self) -> int:
        """Bytes of the sums of a part of a strip: float32 [token][row]."""
        return self.tokens * STRIP_N * 4

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the activated rows and, behind them, of a part of a strip for each CTA."""
        return self.hidden_bytes + (self.ctas * self.part_bytes if self.split else 0)

    # --- what is compiled

    def refusal(self, device: Device) -> str:
        """Return why the kernel does not run on a device; the empty string if it does."""
        if reason := hopper_refusal(device) or missing_for_dsl():
            return reason
        if self.features % BLOCK_N or self.width % 32:
            return f"features are a multiple of {BLOCK_N} and width is one of 32, got {self.features}, {self.width}"
        if not self.weight.block.scale_bits:
            return "weights whose scales all lie beside their blocks are for the other kernels"
        if self.experts > MOST_EXPERTS or not 0 < self.choices <= MOST_CHOICES:
            return f"takes {MOST_EXPERTS} experts and {MOST_CHOICES} choices, got {self.experts}, {self.choices}"
        if self.choice is not None and (reason := self.choice.refusal()):
            return reason
        if self.choice is not None and not self.mapped and self.choice.experts != self.experts:
            return f"takes a logit for each expert here, {self.experts}, or a map, got {self.choice.experts}"
        if self.in_order and self.weight.codec not in _IN_ORDER:
            return "batch_invariant is True, for which formats other than int4 and MXFP4 are not in one launch"
        if self.columns_per_cta > self.units_of_round or self.ctas > _MOST_CTAS:
            return f"takes {self.units_of_round} strips of down a CTA and {_MOST_CTAS} CTAs"
        if any(count % self.weight.block.factor_blocks for count in (self.k_blocks_up, self.k_blocks_down)):
            return "takes whole pairs of blocks along k, if two share factors"
        if self.stage_block.scale_bytes > 512:
            return "a warp copies at most 512 bytes of scales a step"
        if self.step_blocks == 2 and not self.two_blocks:
            return "blocks with so many scales, or that share factors, are steps of their own"
        if not self.has_room:
            return "there is no room for stages of three blocks"
        steps = self.choices * max(self.strips_up * self.k_blocks_up, self.columns * self.k_blocks_down)
        return "the layer is too large" if self.ctas * (steps + 2 * self.columns) >= 2**31 else ""

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.expert_layer.kernel import ExpertLayerKernel

        m, choices, half = cute.sym_int(), cute.sym_int(), DTYPES[self.kind]
        x, out = (contiguous(half, m, self.features, align=16) for _ in range(2))
        by_ids = contiguous(self.ids, choices), contiguous(torch.float32, choices), None, None
        biases = (self.gate_up_bias, self.rows_up), (self.down_bias, self.features)
        scales = self.gate_up_scale, self.down_scale
        tensors = (
            x,
            *(by_ids if self.choice is None else (None, None, *self.choice.logits_and_bias(m))),
            contiguous(torch.int32, cute.sym_int()) if self.mapped else None,
            *(contiguous(torch.int32, cute.sym_int(), align=16) for _ in range(2)),
            *(contiguous(half, self.experts, n, align=8) if has else None for has, n in biases),
            *(contiguous(torch.float32, self.experts) if has else None for has in scales),
            *(
                contiguous(torch.float32, self.experts, n, align=16) if self.weight.channels else None
                for _, n in biases
            ),
            contiguous(torch.int32, cute.sym_int(), align=16),
            contiguous(torch.int32, cute.sym_int()),
            out,
        )
        return Program(ExpertLayerKernel(self), tensors)
