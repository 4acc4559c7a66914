"""Faults of device code that the CPU can run or read, of tables of pairs, of processes side by side, of other GPUs."""

from __future__ import annotations

from planted_faults.fault import Fault

_SM90 = "src/w4gemm/kernels/sm90_mixed_gemm/"
_CODECS = "src/w4gemm/packing/codecs/"

FAULTS = (
    # --- device code that the CPU can run or read
    Fault(
        "signed codes as two's complements in the fp8 decoder",
        _CODECS + "integers_decode_fp8.py",
        "mad.lo.u32 {1}, s, 129, c; ",
        "mad.lo.u32 {1}, s, 128, c; ",
        "tests/test_decode_fp8.py",
    ),
    Fault(
        "the fp8 table's bytes above 16 without their exponent",
        _CODECS + "integers_decode_fp8.py",
        "byte = cutlass.min(2 * size, size + 8)  # above 16 there is every second number",
        "byte = 2 * size",
        "tests/test_decode_fp8.py",
    ),
    Fault(
        "the decoder subtracts 8 of every width",
        _CODECS + "integers_decode.py",
        'addends = self._pairwise("mul", words[0], _twice("bf16", -self.middle / self._weight_of_one))',
        'addends = self._pairwise("mul", words[0], _twice("bf16", -8 / self._weight_of_one))',
        "tests/test_decode_integers.py",
    ),
    Fault(
        "bytes of both rows are those of rows g",
        _CODECS + "integers_decode.py",
        "number = biased_byte(fields[position % 2], position // 4 * 2 + position // 2 % 2)",
        "number = biased_byte(fields[0], position // 4 * 2 + position // 2 % 2)",
        "tests/test_decode_integers.py",
    ),
    Fault(
        "signed levels are subtracted as unsigned ones",
        _CODECS + "integers_decode.py",
        "SIGNED_BIAS = 2.0**15 + 128",
        "SIGNED_BIAS = 2.0**15",
        "tests/test_emulated_kernels.py -k dequantized",
    ),
    Fault(
        "codebooks have the level of a word's first group",
        _CODECS + "codebook_decode.py",
        "(signed_level(words, row, field), None)",
        "(signed_level(words, row, 0), None)",
        "tests/test_emulated_kernels.py --every-case -k coop-nf4_g16_s8x128",
    ),
    Fault(
        "sums are scaled by the level of a word's first group",
        _SM90 + "promotion.py",
        "factors = list(self.decoder.scales(words, field))",
        "factors = list(self.decoder.scales(words))",
        "tests/test_emulated_kernels.py --every-case -k coop_k2-iq4_g32_s8x256",
    ),
    Fault(
        "a float that is rounded up to the next binade loses it",
        "src/w4gemm/kernels/helpers/device/weight_quantize.py",
        "2 ** (element.mantissa_bits + 2) - 1",
        "2 ** (element.mantissa_bits + 1) - 1",
        "tests/test_update.py -k emulated",
    ),
    Fault(
        "copies of cp.async are whole blocks or parts of one",
        "src/w4gemm/kernels/sm80_mixed_gemm/kernel.py",
        "if const_expr(threads % count and count % threads):  # or parts of several",
        "if const_expr(False):",
        "tests/test_emulated_kernels.py -k 64x128x128",
    ),
    Fault(
        "floats of 8 and 6 bits without their signs",
        _CODECS + "floats_decode.py",
        "{part.mask * 0x10001:#x}",
        "{part.mask % 0x8000 * 0x10001:#x}",
        "tests/test_emulated_kernels.py -k dequantized_weights",
    ),
    Fault(
        "floats of 8 bits: bits of two words are joined, not added up without carries",
        _CODECS + "floats_decode.py",
        "xor.b32 b, {first}",
        "or.b32 b, {first}",
        "tests/test_decode_floats.py",
    ),
    Fault(
        "beside fp16 x small scales of e5m2 are 0",
        _CODECS + "floats_decode.py",
        "return max(0, 8 - self.number.half_power)",
        "return 0",
        "tests/test_decode_floats.py",
    ),
    Fault(
        "floats of 6 bits: the second word is not turned",
        _CODECS + "floats.py",
        "_TURNS = (0, 0, 0, 0), (0, 8, 0, 8)",
        "_TURNS = (0, 0, 0, 0), (0, 0, 0, 0)",
        "tests/test_codecs.py -k lossless",
    ),
    Fault(
        "e4m3 beside fp8 x: columns from 16 on are those of rows g + 8",
        _CODECS + "floats.py",
        "8 * i, 4 * row8 + 2 * step + col16)",
        "8 * i, 4 * col16 + 2 * step + row8)",
        "tests/test_emulated_kernels.py -k one_hot",
    ),
    Fault(
        "e4m3 in shared memory: tokens g + 8 have the factors of tokens g",
        "src/w4gemm/kernels/sm90_fp8_block_gemm/kernel.py",
        "factors[i // (features // 2)][i % 4]",
        "factors[i // (features // 2)][i % 2]",
        "tests/test_emulated_kernels.py -k block_gemm",
    ),
    Fault(
        "e4m3 in shared memory: tokens g + 8 have the scales of rows of tokens g",
        "src/w4gemm/kernels/sm90_fp8_block_gemm/kernel.py",
        "self.tokens[i // 2 : i // 2 + 1]",
        "self.tokens[:1]",
        "tests/test_emulated_kernels.py -k block_gemm",
    ),
    Fault(
        "int3 beside fp8 x: a step's third bits are the other step's",
        _CODECS + "integers_fp8.py",
        "((0, 0), (0, 30)) if bits == 3",
        "((0, 0), (30, 0)) if bits == 3",
        "tests/test_emulated_kernels.py -k one_hot",
    ),
    Fault(
        "int5 beside fp8 x: rows g + 8 have the signs of columns from 16 on",
        _CODECS + "integers_fp8.py",
        "16 * step + 8 * row8 + 4 * col16 + i, row8 + 2 * col16",
        "16 * step + 8 * row8 + 4 * col16 + i, 2 * row8 + col16",
        "tests/test_emulated_kernels.py -k one_hot",
    ),
    Fault(
        "int5 beside fp8 x: sums have the factor of doubled numbers",
        _CODECS + "integers_decode_fp8.py",
        'and that of the signs."""\n\n    factor: ClassVar = 2 * _SUM_SCALE',
        'and that of the signs."""\n\n    factor: ClassVar = _SUM_SCALE',
        "tests/test_decode_fp8.py",
    ),
    Fault(
        "int2 and int3 beside fp8 x: rows g + 8 have the zero points of rows g",
        _CODECS + "integers_decode_fp8.py",
        "places = words[-1] & 0xFFFF, words[-1] >> 16",
        "places = words[-1] & 0xFFFF, words[-1] & 0xFFFF",
        "tests/test_emulated_kernels.py -k one_hot",
    ),
    Fault(
        "int2 and int3 beside fp8 x: columns from 16 on are those before",
        _CODECS + "integers_decode_fp8.py",
        'text += "shr.u32 t, $4, 2; "',
        'text += "shr.u32 t, $4, 0; "',
        "tests/test_decode_fp8.py -k other_widths",
    ),
    Fault(
        "zero points of rows g + 8 are those of rows g",
        _CODECS + "integers_decode.py",
        'return self._pairwise("sub", _twice(self.kind, -bias), broadcast_half(word, high))',
        'return self._pairwise("sub", _twice(self.kind, -bias), broadcast_half(word, False))',
        "tests/test_decode_integers.py",
    ),
    Fault(
        "no proxy fence behind rows that cp.async brought",
        _SM90 + "mainloop.py",
        """        if self.variant.gathered:
            fence_proxy_async()
""",
        "",
        "tests/test_sass.py -k gathered",
    ),
    Fault(
        "a norm's weight is loaded before the launch before has ended",
        "src/w4gemm/kernels/helpers/device/rms_norm.py",
        """        cute.arch.griddepcontrol_wait()
        loaded = [self.load(rows.weight.iterator.toint(), column, k) for column in columns]
""",
        """        loaded = [self.load(rows.weight.iterator.toint(), column, k) for column in columns]
        cute.arch.griddepcontrol_wait()
""",
        "tests/test_dependent_launch.py -k norms",
    ),
    Fault(
        "a product follows the launch that wrote its weight",
        "src/w4gemm/weights/weight.py",
        "            self.tensors[0].new_zeros(1)\n",
        "            pass\n",
        "tests/test_dependent_launch.py -k made",
    ),
    # --- tables of pairs, unpacking on a device, processes side by side, other GPUs
    Fault(
        "a table of pairs has the codes of a byte the other way round",
        _CODECS + "pairs_decode.py",
        "(float_word(Float32(byte % 16)), float_word(Float32(byte // 16)))",
        "(float_word(Float32(byte // 16)), float_word(Float32(byte % 16)))",
        "tests/test_two_levels.py -k decoders",
    ),
    Fault(
        "threads find the two words of a pair as if it had one",
        _CODECS + "pairs_decode.py",
        "(thread % 32 * 4 if pairs is Pairs.HALVES else thread % 16 * 8)",
        "(thread % 32 * 4)",
        "tests/test_codecs.py -k codebook_table",
    ),
    Fault(
        "pairs in float32 take the other row's scale",
        _CODECS + "pairs_decode.py",
        "weights = [number * scales[i // 2 % 2] for i, number",
        "weights = [number * scales[i % 2] for i, number",
        "tests/test_codecs.py -k scale_of_their_row",
    ),
    Fault(
        "pairs in 16 bits take the other row's scale",
        _CODECS + "pairs_decode.py",
        "tuple(self._scaled(n, scales[i % 2], None) for i, n",
        "tuple(self._scaled(n, scales[i // 2], None) for i, n",
        "tests/test_codecs.py -k scale_of_their_row",
    ),
    Fault(
        "the table of pairs is not counted in shared memory",
        "src/w4gemm/kernels/variant.py",
        "return PAIR_TABLE_BYTES if self.pairs is not None else self.weight.codec.table_bytes",
        "return self.weight.codec.table_bytes",
        "tests/test_codecs.py -k room",
    ),
    Fault(
        "a group's columns are counted on the default device",
        "src/w4gemm/checkpoints/bitsandbytes.py",
        "starts = torch.arange(0, n * k, group, device=packed.device)",
        "starts = torch.arange(0, n * k, group)",
        "tests/test_fuzz_files.py -k default_device",
    ),
    Fault(
        "words of a tensor that lies by columns are read as they lie",
        "src/w4gemm/packing/bits.py",
        "stream = packed.clone(memory_format=torch.contiguous_format) if packed.itemsize > 1 else packed",
        "stream = packed.contiguous()",
        "tests/test_layouts.py",
    ),
    Fault(
        "blocks of fp8 weights always have 128 columns",
        "src/w4gemm/checkpoints/fp8_folder.py",
        "factors.repeat_interleave(block.columns, -1)",
        "factors.repeat_interleave(128, -1)",
        "tests/test_deepseek.py tests/test_mixtures.py",
    ),
    Fault(
        "what DistributedDataParallel was told to leave out is forgotten",
        "src/w4gemm/integrations/data_parallel.py",
        'ignored = names | set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))',
        "ignored = names",
        "tests/test_packed_module.py -k left_out",
    ),
    Fault(
        "DistributedDataParallel leaves out packed weights of the outermost module only",
        "src/w4gemm/integrations/data_parallel.py",
        'f"{owner}.{buffer}" if owner else buffer',
        "buffer",
        "tests/test_packed_module.py -k distributed",
    ),
    Fault(
        "every Hopper GPU is ranked by the H200's times",
        "src/w4gemm/choice/cost/constants.py",
        "return reference() if nearest.name == _REFERENCE else read(path_of(nearest.name))",
        "return reference()",
        "tests/test_cost.py -k gpu",
    ),
    Fault(
        "the most similar GPU is found without its multiprocessors",
        "src/w4gemm/choice/cost/constants.py",
        "_ratio(a.bandwidth / a.sms, b.bandwidth / b.sms)",
        "_ratio(a.bandwidth, b.bandwidth)",
        "tests/test_cost.py -k gpu",
    ),
)
