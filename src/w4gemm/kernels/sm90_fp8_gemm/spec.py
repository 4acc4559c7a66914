"""Host side of the W4A8 kernel: its configs. All else is sm90_mixed_gemm's."""

from __future__ import annotations

import torch

from w4gemm.kernels.sm90_fp8_gemm.space import SPACE
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm


class Sm90Fp8Gemm(Sm90MixedGemm):
    """W4A8 on SM90, e4m3 activations: any m, n, k, every format without float zero points. Scales are applied to the
    float32 sums of a group; e4m3 ones to the weights, which are then rounded to e4m3. Scales for each 128 columns of a
    row of x are applied to the sums of these columns."""

    name = "sm90_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 2
    space = SPACE
    block_scales = True
    half_steps = True
    launch_pairs = (
        *(f"{m}x256x256_1x1x1_coop+{m}x192x256_1x1x1_coop" for m in (24, 32, 40, 48, 64)),
        *(f"{m}x128x256_1x1x1_coop+{m}x64x512_1x1x1_coop" for m in (40, 48, 56, 64)),
        "256x128x128_1x1x1_coop+128x64x256_1x1x1_coop",
        "256x128x128_1x1x1_coop+256x64x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+192x64x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+128x192x256_1x1x1_coop",
        "256x128x128_1x1x1_coop+64x64x512_1x1x1_coop",
        "192x128x128_1x1x1_coop+192x64x128_1x1x1_coop",
        "128x192x256_1x1x1_coop+128x128x256_1x1x1_coop",
        "128x192x256_1x1x1_coop+128x64x256_1x1x1_coop",
        "96x256x128_1x1x1_coop+128x192x256_1x1x1_coop",
        "96x256x128_1x1x1_coop+64x64x256_1x1x1_coop",
        "128x128x256_1x1x1_coop+128x64x256_1x1x1_coop",
        "128x128x256_1x1x1_coop+64x64x512_1x1x1_coop",
        # cut along k, where few features are left and k is large
        "256x128x128_1x1x1_coop+256x64x128_1x1x1_coop_k2",
        "256x64x128_1x1x1_coop+128x64x256_1x1x1_coop_k2",
        "192x128x128_1x1x1_coop+192x64x128_1x1x1_coop_k2",
    )
