"""FlashInfer's fused experts of MXFP4 weights on Hopper. They are a whole layer, so a peer of bench.experts alone.

Sizes must be multiples of 128: gpt-oss' 2880 is padded to 2944. FlashInfer's own tuner chooses the kernels, at each
number of tokens that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

_MULTIPLE = 128
_ALPHA, _BETA = 1.702, 1.0
_PIECE = 8
"""Experts whose weights are prepared at once; FlashInfer's function makes 64 bits of every code."""


class Rows(NamedTuple):
    """Packed weights of one product of all experts.

    Attributes:
        codes: (experts, n, k / 2), uint8; the low half of a byte comes first.
        scales: (experts, n, k / 32), e8m0 in uint8.
        bias: (experts, n), bfloat16.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor


def padded(blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, gated: bool) -> Rows:
    """Return a product of a gpt-oss checkpoint as FlashInfer wants it: all ups before all gates, zeros at the ends.

    Args:
        blocks: (experts, n, k / 32, 16), uint8.
        scales: (experts, n, k / 32), uint8.
        bias: (experts, n), bfloat16.
        gated: True if the rows are pairs of a gate and an up.
    """
    experts, n, groups, _ = blocks.shape
    more_groups = -groups % (_MULTIPLE // 32)
    codes = pad(blocks.reshape(experts, n, groups * 16), (0, more_groups * 16))
    scales = pad(scales, (0, more_groups), value=127)

    def ordered(t: torch.Tensor, value: int = 0) -> torch.Tensor:
        parts = (t[:, 1::2], t[:, ::2]) if gated else (t,)
        columns = (0, 0) if t.dim() == 3 else ()
        return torch.cat([pad(p, (*columns, 0, -p.shape[1] % _MULTIPLE), value=value) for p in parts], 1).contiguous()

    return Rows(ordered(codes), ordered(scales, 127), ordered(bias))


class FlashInferLayer:
    """The layer behind the router.

    Args:
        gate_up, down: the products, as :func:`padded` gives them.
        limit: that of SwiGLU.
        top_k: experts of a token.
        work: "w4a16", or "w4a8" with x quantized to fp8 inside.
        tokens: numbers of tokens that it is tuned for.
        hidden: columns of x that count.
    """

    def __init__(
        self, gate_up: Rows, down: Rows, *, limit: float, top_k: int, work: str, tokens: Sequence[int], hidden: int
    ) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size

        self._run, self._tokens, self._hidden = cutlass_fused_moe, tuple(tokens), hidden
        experts, device = gate_up.codes.shape[0], gate_up.codes.device
        self._flags: dict[str, bool] = {"use_w4_group_scaling": True, "use_wfp4afp8_humming": work == "w4a8"}
        first, second = (_prepared(rows, work) for rows in (gate_up, down))
        self._weights = first.codes, second.codes
        one = torch.ones((), device=device)
        self._scales = [*first.scales, *([one] if work == "w4a8" else []), *second.scales]
        each = {"swiglu_alpha": _ALPHA, "swiglu_beta": _BETA, "swiglu_limit": limit}
        self._given: dict[str, Any] = {name: torch.full((experts,), v, device=device) for name, v in each.items()}
        self._given |= {"fc1_expert_biases": gate_up.bias, "fc2_expert_biases": down.bias}
        size = cutlass_fused_moe_workspace_size(
            max(tokens),
            down.codes.shape[1],
            gate_up.codes.shape[1] // 2,
            experts,
            top_k,
            x_dtype=torch.bfloat16,
            weight_dtype=torch.uint8,
            **self._flags,
        )
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def inputs(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, ids and scores in its sizes and dtypes, which an engine would make for it in the first place."""
        return pad(x, (0, -x.shape[1] % _MULTIPLE)), ids.int(), scores.float()

    def tune(self, *inputs: torch.Tensor) -> None:
        """Let FlashInfer choose its kernels for all numbers of tokens; once is enough."""
        from flashinfer import autotune

        with autotune(True, tuning_buckets=self._tokens):
            self._call(*inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, (tokens, hidden). inputs: as :meth:`inputs` returns them."""
        from flashinfer import autotune

        with autotune(False, tuning_buckets=self._tokens):
            return self._call(*inputs)[:, : self._hidden]

    def _call(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._run(
            x,
            ids,
            scores,
            *self._weights,
            torch.bfloat16,
            self._scales,
            output=out,
            workspace_buffer=self._workspace,
            **self._given,
            **self._flags,
        )
        return out


class _Prepared(NamedTuple):
    codes: torch.Tensor
    scales: list[torch.Tensor]


def _prepared(rows: Rows, work: str) -> _Prepared:
    """Weights and scales in the kernels' order."""
    from flashinfer.fused_moe import (
        interleave_moe_scales_for_sm90_mixed_gemm,
        interleave_moe_weights_for_sm90_mixed_gemm,
    )
    from flashinfer.fused_moe.prepare import preprocess_moe_weights_for_sm90_mixed_gemm_humming

    if work == "w4a16":
        codes = interleave_moe_weights_for_sm90_mixed_gemm(rows.codes, "fp4")
        scales = interleave_moe_scales_for_sm90_mixed_gemm(rows.scales, 32)
        return _Prepared(codes, [scales.view(torch.int32)])
    prepare: Callable[..., Any] = preprocess_moe_weights_for_sm90_mixed_gemm_humming
    pieces = zip(rows.codes.split(_PIECE), rows.scales.split(_PIECE), strict=True)
    codes, folded, rest = (torch.cat(parts) for parts in zip(*(prepare(*piece) for piece in pieces), strict=True))
    return _Prepared(codes, [folded.view(torch.int32), (rest * 64).contiguous()])  # 2^6: FlashInfer's own factor
