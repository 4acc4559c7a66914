"""The experts of tokens and their weights by the logits of a router: a warp for each token."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from w4gemm.kernels.device.router import RouterMath

_WARPS = 4


class ExpertChoiceKernel:
    """The kernel of a :class:`RouterMath`."""

    def __init__(self, math: RouterMath) -> None:
        self.math = math

    @cute.jit
    def __call__(
        self, logits: cute.Tensor, bias: cute.Tensor | None, ids: cute.Tensor, weights: cute.Tensor, stream: Any
    ) -> None:
        """Launch; logits (tokens, experts), bias float32 (experts,); ids int32 and weights float32 (tokens, top k)."""
        self.kernel(logits, bias, ids, weights).launch(
            grid=[cute.ceil_div(logits.shape[0], _WARPS), 1, 1],
            block=[32 * _WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, bias: cute.Tensor | None, ids: cute.Tensor, weights: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        token = cute.arch.make_warp_uniform(cute.arch.block_idx()[0] * _WARPS + thread // 32)
        lane = thread % 32
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if token < logits.shape[0]:
            expert, weight = self.math.choose(logits, bias, token)
            if lane < self.math.router.top_k:
                ids[token, lane] = expert
                weights[token, lane] = weight
