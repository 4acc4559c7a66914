"""Faults of device code that an emulator of the GPU runs."""

from __future__ import annotations

from planted_faults.fault import Fault

_SM90 = "src/w4gemm/kernels/sm90_mixed_gemm/"
_DEVICE = "src/w4gemm/kernels/device/"
_CODECS = "src/w4gemm/packing/codecs/"
_EMULATED = "tests/test_emulated_kernels.py -k "

FAULTS = (
    Fault(
        "a second scale group in a k chunk takes the first one's scale",
        _SM90 + "mainloop.py",
        "if step == 0 or column == 0:",
        "if step == 0:",
        _EMULATED + "sm90_mixed_gemm/16x128",
    ),
    Fault(
        "every k set reads the first one's blocks",
        _SM90 + "mainloop.py",
        "index = row + consumer.k_set * (variant.blocks_k // variant.k_sets) + block",
        "index = row + block",
        _EMULATED + "coop_k2",
    ),
    Fault(
        "a stage is released before its last WGMMA is waited for",
        _SM90 + "mainloop.py",
        """            warpgroup.wait_group(1)
            if const_expr(batch == 0):
                if state.has_previous:
                    self.scheduler.release(pipeline, state.previous, consumer.cta_rank)
""",
        """            if const_expr(batch == 0):
                if state.has_previous:
                    self.scheduler.release(pipeline, state.previous, consumer.cta_rank)
            warpgroup.wait_group(1)
""",
        _EMULATED + "sm90_mixed_gemm/16x128",
    ),
    Fault(
        "CTAs of a stream wait for those that begin after them",
        _SM90 + "kernel.py",
        "params = SchedulerParams(cluster, clusters,",
        "params = SchedulerParams(clusters - 1 - cluster, clusters,",
        _EMULATED + "streams_want",
    ),
    Fault(
        "block scales of the next 128 columns",
        _SM90 + "mainloop.py",
        "block, done = consumer.k_set * chunks + before,",
        "block, done = consumer.k_set * chunks + chunk,",
        _EMULATED + "sm90_fp8",
    ),
    Fault(
        "the second k chunk of a block with one factor begins new sums",
        _SM90 + "mainloop.py",
        "chunk % together == 0",
        "True",
        _EMULATED + "q3_k",
    ),
    Fault(
        "zero points times the sums of x over a block's first group",
        _SM90 + "mainloop.py",
        "column = block * self.groups + batch // splits % self.groups",
        "column = block * self.groups",
        _EMULATED + "zfloat",
    ),
    Fault(
        "sums of x over twice the columns of a group",
        "src/w4gemm/kernels/helpers/device/row_sums.py",
        "if lanes * _LANE_COLUMNS < self.group:",
        "if lanes * _LANE_COLUMNS <= self.group:",
        _EMULATED + "row_sums",
    ),
    Fault(
        "row 8 of a strip is taken for row 0",
        "src/w4gemm/kernels/helpers/device/embedding_rows.py",
        "row % STRIP_N >= 8",
        "row % STRIP_N > 8",
        _EMULATED + "embedding_rows",
    ),
    Fault(
        "an expert's block scales begin at an even row",
        _SM90 + "consumer.py",
        "scales=pipeline.scales + rows.first % 4 * 4)",
        "scales=pipeline.scales + rows.first % 4 // 2 * 8)",
        _EMULATED + "sm90_fp8",
    ),
    Fault(
        "residuals of the first round in every round",
        _SM90 + "epilogue.py",
        "residuals.append(math.load_residual(operands, token + 8 * (b + ahead), feature))",
        "residuals.append(math.load_residual(operands, token + 8 * b, feature))",
        _EMULATED + "sm90_fp8",
    ),
    Fault(
        "alpha multiplies the bias too",
        _DEVICE + "epilogue_math.py",
        "return value + bias if alpha is None else fma(value, alpha, bias)",
        "return value + bias if alpha is None else (value + bias) * alpha",
        _EMULATED + "sm80_mixed_gemm/8x64",
    ),
    Fault(
        "a row is stored past the last one",
        _DEVICE + "epilogue_math.py",
        "store_global(address, words, (token < m) & (column < columns))",
        "store_global(address, words, (token <= m) & (column < columns))",
        _EMULATED + "sm90_mixed_gemm/128x64",
    ),
    Fault(
        "an expert's last row is not computed",
        _DEVICE + "expert_tiles.py",
        "return TileRows(expert, start + (m_tile - before) * self.tile_m, end)",
        "return TileRows(expert, start + (m_tile - before) * self.tile_m, end - 1)",
        _EMULATED + "sm89_fp8",
    ),
    Fault(
        "k sets store their sums while those of the last tile are read",
        _SM90 + "consumer.py",
        "        self.consumer_barrier()  # the pipeline is drained, and the last tile's sums have been read\n",
        "",
        _EMULATED + "no_race_in_shared_memory",
    ),
    Fault(
        "token scales of gathered rows by their place in d",
        _DEVICE + "expert_tiles.py",
        "return operands._replace(token_scale=IndexedScales(operands.token_scale, indices))",
        "return operands",
        _EMULATED + "sm89_fp8",
    ),
    Fault(
        "boxes of d reach into the next expert's rows",
        _SM90 + "epilogue.py",
        "needed = self.tokens_per_round if self.grouped else 1",
        "needed = 1",
        _EMULATED + "sm90_mixed_gemm/128x64",
    ),
    Fault(
        "the owner of a tile waits for no flag",
        _DEVICE + "stream_k.py",
        "        while raised == 0:\n",
        "        while raised == 2:\n",
        _EMULATED + "stream",
    ),
    Fault(
        "flags of stream-k stay set",
        _DEVICE + "stream_k.py",
        "        store_relaxed(flag, Int32(0))\n",
        "",
        _EMULATED + "stream",
    ),
    Fault(
        "the last CTA's part of a split k is lost",
        _SM90 + "consumer.py",
        "for place in places]",
        "for place in places[:-1]]",
        _EMULATED + "sm90_mixed_gemm/24x64",
    ),
    Fault(
        "a CTA hands over sums in the memory of stages that another still multiplies",
        _SM90 + "consumer.py",
        "cute.arch.cluster_arrive()",
        "pass",
        _EMULATED + "sm90_mixed_gemm/128x64x128_1x1x1_pingpong",
    ),
    Fault(
        "sums of x without the columns of a step's latter half",
        _DEVICE + "warp_product.py",
        "sums.append(halves[0] + halves[2])",
        "sums.append(halves[0])",
        _EMULATED + "sm90_decode/8x48x128_1x1x1_coop",
    ),
    Fault(
        "few tokens: a lane scales each of its columns by the other's scale",
        _DEVICE + "warp_product.py",
        "return (lane % 4 * 2 + column) // self.tokens",
        "return (lane % 4 * 2 + 1 - column) // self.tokens",
        _EMULATED + "sm90_decode",
    ),
    Fault(
        "few tokens: what other groups' columns hold of x is not zero",
        _DEVICE + "warp_product.py",
        "own = (group % self.slots == column // self.tokens) & (token < tokens)",
        "own = token < tokens",
        _EMULATED + "sm90_decode",
    ),
    Fault(
        "the second of two blocks that share factors takes those of the pair behind",
        "src/w4gemm/packing/block.py",
        "return at - k_block % 2 * (at + self.lead) if self.lead else at",
        "return at",
        _EMULATED + "dequantized",
    ),
    Fault(
        "scales of rows g + 8 take the power of two of rows g",
        _CODECS + "integers_decode_wide.py",
        "for exponent in reversed(exponents)",
        "for exponent in exponents[:1] * 2",
        _EMULATED + "128x64x64_1x1x1_coop-q6_k --every-case",
    ),
    Fault(
        "scales of six bits are as much too large as those of eight would be",
        _CODECS + "integers_decode_wide.py",
        "_SMALL_BIAS = 2.0**15 + 32",
        "_SMALL_BIAS = 2.0**15",
        _EMULATED + "dequantized",
    ),
    Fault(
        "k blocks that do not divide among the warps are lost",
        "src/w4gemm/kernels/sm90_decode/kernel.py",
        "k_blocks_per_warp = (end - first + variant.warps - 1) // variant.warps",
        "k_blocks_per_warp = (end - first) // variant.warps",
        _EMULATED + "sm90_decode",
    ),
    Fault(
        "a stage is refilled before its loads have read it",
        "src/w4gemm/kernels/sm90_decode/kernel.py",
        "cursor._replace(k_block=cursor.k_block + loaded)",
        "cursor._replace(k_block=cursor.k_block)",
        _EMULATED + "sm90_decode",
    ),
    Fault(
        "a CTA overwrites partials that others still read",
        "src/w4gemm/kernels/sm90_decode/kernel.py",
        "            self.tile_barrier()  # the partials have been read, by the CTAs of the cluster too\n",
        "",
        _EMULATED + "sm90_decode",
    ),
    Fault(
        "cp.async is waited for one stage late",
        "src/w4gemm/kernels/sm80_mixed_gemm/kernel.py",
        "cute.arch.cp_async_wait_group(variant.num_stages - 2)",
        "cute.arch.cp_async_wait_group(variant.num_stages - 1)",
        _EMULATED + "sm80_mixed_gemm/8x64",
    ),
    Fault(
        "silu of the device leaves out its factor x",
        _DEVICE + "activation.py",
        "return x * sigmoid(x)",
        "return sigmoid(x)",
        "tests/test_activation.py",
    ),
    Fault(
        "relu makes a 0 of a NaN",
        "src/w4gemm/ptx/arithmetic.py",
        "max.NaN.f32 $0, $1, $2;",
        "max.f32 $0, $1, $2;",
        _EMULATED + "nan",
    ),
    Fault(
        "the top of a quantized row leaves out the last warp",
        "src/w4gemm/kernels/helpers/device/activation_quantize.py",
        "bits = warp_maximum(tops[lane] if lane < self.threads // 32 else Int32(0))",
        "bits = warp_maximum(tops[lane] if lane < self.threads // 32 - 1 else Int32(0))",
        _EMULATED + "quantize",
    ),
    Fault(
        "the normal distribution's tail is cut off too early",
        _DEVICE + "activation.py",
        "_FAR = 20.0",
        "_FAR = 6.0",
        _EMULATED + "gate",
    ),
    Fault(
        "biases are read as if they had 32 bits",
        _DEVICE + "epilogue_math.py",
        "return load_global_half(bias.iterator.toint() + Int64(feature) * 2, feature < bias.shape[0])",
        "return load_global_half(bias.iterator.toint() + Int64(feature) * 4, feature < bias.shape[0])",
        _EMULATED + "sm80_mixed_gemm/8x64",
    ),
    Fault(
        "partials of a CTA's warpgroups lie over those of the next CTA",
        _DEVICE + "stream_k.py",
        "offset = (cta * self.warpgroups + own.warpgroup) * size + own.thread * 16",
        "offset = (cta + own.warpgroup) * size + own.thread * 16",
        _EMULATED + "sm90_mixed_gemm/16x128",
    ),
    Fault(
        "a share of a split k reaches past the tile's last block",
        _SM90 + "consumer.py",
        "block = cutlass.min(block, self.blocks - 1 - rank * self.share)",
        "block = cutlass.min(block, self.blocks - rank * self.share)",
        _EMULATED + "sm90_mixed_gemm/24x64",
    ),
    Fault(
        "scales that lanes prepare for one another: those of a row are the other row's",
        _SM90 + "shared_levels.py",
        "level_units(held, row == 1)",
        "level_units(held, row == 0)",
        _EMULATED + "q6_k",
    ),
    Fault(
        "scales that lanes prepare for one another, for sums: those of a row are the other row's",
        _DEVICE + "quad_levels.py",
        "target = pair + row * of_row",
        "target = pair + (1 - row) * of_row",
        _EMULATED + "sm90_decode/8x48x128_1x1x1_coop-q4_k",
    ),
    Fault(
        "beside one token, lanes of zero points multiply scales",
        _DEVICE + "warp_product.py",
        "return lane % 4 * 2 // (self.slots * self.tokens) % 2",
        "return lane % 4 * 2 // (self.slots * self.tokens) * 0",
        _EMULATED + "int4_g64_zfloat_u8x256",
    ),
    Fault(
        "the norm leaves out its epsilon",
        "src/w4gemm/kernels/helpers/device/rms_norm.py",
        "square_root(mean + eps)",
        "square_root(mean)",
        _EMULATED + "rms_norm",
    ),
    Fault(
        "ups of adapters lie behind eight gates, not behind all",
        "src/w4gemm/kernels/helpers/device/adapted_rows.py",
        "(1, n) if halves",
        "(1, _VECTOR) if halves",
        _EMULATED + "adapted_rows",
    ),
)
