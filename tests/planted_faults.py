"""Faults for tests/planted.py, as data. ``old`` occurs exactly once in the file: tests/test_planted.py."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake in one file."""

    name: str
    file: str
    """Relative to the repository."""
    old: str
    new: str
    by: str
    """Tests that should catch it, as pytest takes them, or ``fuzz`` and options of ``fuzz.run``."""


_SM90 = "src/w4gemm/kernels/sm90_mixed_gemm/"
_DEVICE = "src/w4gemm/kernels/device/"
_CODECS = "src/w4gemm/packing/codecs/"
_EXPERT_LAYER = "src/w4gemm/kernels/expert_layer/kernel.py"
_EMULATED = "tests/test_emulated_kernels.py -k "
_ONE_LAUNCH = "tests/test_expert_layer.py -k "

FAULTS = (
    # --- packing and formats
    Fault(
        "codes of a byte swapped in the canonical layout",
        "src/w4gemm/packing/bits.py",
        "shifts = {i: i * bits - 8 * byte for i in range(first, last + 1)}",
        "shifts = {first + last - i: i * bits - 8 * byte for i in range(first, last + 1)}",
        "tests/test_layouts.py",
    ),
    Fault(
        "even and odd rows of a block change their scales",
        "src/w4gemm/core/formats.py",
        "return pairs.expand(-1, self.scale_rule.block_rows // 2, -1, -1).flatten(0, 2)[:n]",
        "return pairs.flip(2).expand(-1, self.scale_rule.block_rows // 2, -1, -1).flatten(0, 2)[:n]",
        "tests/test_dequantize.py -k b128",
    ),
    Fault(
        "codes of NaN in a file are not looked for",
        "src/w4gemm/weights/weight.py",
        "            if self.format.element_rule.refused_codes:",
        "            if self.experts and self.format.element_rule.refused_codes:",
        "tests/test_widths.py -k no_number",
    ),
    Fault(
        "a shard that divides a superblock keeps its scale rule",
        "src/w4gemm/weights/shards.py",
        'alike if r.factor_columns == shared), "fp32")',
        "alike if r.factor_columns == shared), scale)",
        "tests/test_widths.py -k shards",
    ),
    Fault(
        "codes of the 16-bit fragment in another order",
        "src/w4gemm/packing/codecs/base.py",
        'Fragment("mma16", (4, 2, 8), (2, 4, 2, 4, 2), (0, 4, 5, 1, 3, 8), (6, 9, 7, 2))',
        'Fragment("mma16", (4, 2, 8), (2, 4, 2, 4, 2), (0, 4, 5, 1, 3, 8), (6, 7, 9, 2))',
        "tests/test_layouts.py",
    ),
    Fault(
        "e2m1 has 3.5 in the place of 3",
        "src/w4gemm/core/elements.py",
        "values = tuple(sign * size for sign in (1.0, -1.0) for size in sizes)",
        "values = tuple(sign * (3.5 if size == 3 else size) for sign in (1.0, -1.0) for size in sizes)",
        "tests/test_fp4.py",
    ),
    Fault(
        "an e8m0 scale is stored a power of two too low",
        "src/w4gemm/packing/codecs/e2m1.py",
        "POWER_BIAS = 99",
        "POWER_BIAS = 98",
        "tests/test_fp4.py",
    ),
    Fault(
        "the zero point without one is 7",
        "src/w4gemm/core/elements.py",
        "return codes.float() - self.padding_code",
        "return codes.float() - 7",
        "tests/test_dequantize.py",
    ),
    Fault(
        "products of e4m3 scales are not rounded",
        "src/w4gemm/weights/dequantize.py",
        "return products.clamp(-largest, largest).to(dtype).float()",
        "return products.clamp(-largest, largest)",
        "tests/test_dequantize.py",
    ),
    Fault(
        "16-bit weights are rounded twice",
        "src/w4gemm/weights/dequantize.py",
        "return rounded_sum(u * spread(scales), spread(zeros), dtype)",
        "return (u * spread(scales) + spread(zeros)).to(dtype)",
        "tests/test_dequantize.py",
    ),
    Fault(
        "gate and up rows of two orders of columns become one weight",
        "src/w4gemm/weights/weight.py",
        "or len(perms) == 1 or (perms and not torch.equal(*perms)):",
        "or len(perms) == 1:",
        "tests/test_act_order.py -k in_pairs",
    ),
    Fault(
        "scales of channels are cut where a shard has as many columns as the weight has rows",
        "src/w4gemm/weights/shards.py",
        "channels[rows].clone()",
        "channels[columns if len(channels) == columns.stop - columns.start else rows].clone()",
        "tests/test_weight.py -k channels_stay",
    ),
    Fault(
        "every process adds the bias of experts' second product",
        "src/w4gemm/integrations/transformers/sharding.py",
        "bias = bias if index == 0 else torch.zeros_like(bias)",
        "bias = bias.clone()",
        "tests/test_tensor_parallel.py -k parts_of_experts",
    ),
    Fault(
        "every process has the first one's factors of x",
        "src/w4gemm/integrations/tensor_parallel.py",
        "layer.pre_quant_scale[index * columns : (index + 1) * columns].clone()",
        "layer.pre_quant_scale[:columns].clone()",
        "tests/test_tensor_parallel.py -k styles",
    ),
    Fault(
        "scales of tokens are copied for less than nothing",
        "src/w4gemm/choice/cost/traffic.py",
        "(1 + problem.epilogue.token_scale)",
        "(1 - problem.epilogue.token_scale)",
        "tests/test_cost.py -k scales_of_tokens",
    ),
    Fault(
        "a shard's groups take the scales of groups counted from the shard's own first column",
        "src/w4gemm/weights/shards.py",
        "return columns.start + torch.arange(count, device=device) * length",
        "return torch.arange(count, device=device) * length",
        "tests/test_weight.py",
    ),
    Fault(
        "act-order in the inverse order",
        "src/w4gemm/weights/checks.py",
        "    perm = torch.argsort(g_idx, stable=True)\n",
        "    perm = torch.argsort(torch.argsort(g_idx, stable=True))\n",
        "tests/test_act_order.py",
    ),
    # --- the CPU kernel, the epilogue, the boundary
    Fault(
        "parts of a group take the next group's scale",
        "src/w4gemm/kernels/cpu/kernel.py",
        "group = torch.arange(parts) * part // problem.format.group_length(k)",
        "group = (torch.arange(parts) * part + part) // problem.format.group_length(k) % scales.shape[1]",
        "fuzz --like format=_g512",
    ),
    Fault(
        "float zero points without the 8 of signed codes",
        "src/w4gemm/kernels/cpu/kernel.py",
        "sums = torch.addcmul(zeros[0] * x_sums, sums + middle * x_sums, scales)",
        "sums = torch.addcmul(zeros[0] * x_sums, sums, scales)",
        "fuzz --like format=zfloat",
    ),
    Fault(
        "the residual is added before the activation",
        "src/w4gemm/core/epilogue.py",
        """        d = d if self.activation is None else parse(self.activation).apply(d)
        return d if residual is None else d + residual.to(d.dtype)
""",
        """        d = d if residual is None else d + residual.to(d.dtype)
        return d if self.activation is None else parse(self.activation).apply(d)
""",
        "fuzz --like residual=True",
    ),
    Fault(
        "alpha multiplies the bias too, on the CPU",
        "src/w4gemm/core/epilogue.py",
        """        d = d if alpha is None else d * alpha
        d = d if bias is None else d + bias.to(d.dtype)
""",
        """        d = d if bias is None else d + bias.to(d.dtype)
        d = d if alpha is None else d * alpha
""",
        "fuzz --like bias=True --like alpha=host",
    ),
    Fault(
        "scales of gathered rows by their place in d",
        "src/w4gemm/kernels/base.py",
        "own = {name: t.index_select(0, indices) for name, t in scales.items() if t is not None}",
        "own = {name: t[torch.arange(len(indices)) % len(t)] for name, t in scales.items() if t is not None}",
        "fuzz --like kind=gathered --like dtype=float8",
    ),
    Fault(
        "padded experts have one row more",
        "src/w4gemm/api/grouped.py",
        "apart = ExpertRows(starts, starts + counts)",
        "apart = ExpertRows(starts, starts + counts + 1)",
        "fuzz --like kind=masked",
    ),
    Fault(
        "the smallest top of a quantized row is not counted",
        "src/w4gemm/api/activations.py",
        "counted, largest = top.clamp(min=SMALLEST), torch.full_like(top, LARGEST)",
        "counted, largest = top, torch.full_like(top, LARGEST)",
        "tests/test_activations.py",
    ),
    # --- choices and caches
    Fault(
        "an interval ends one token late",
        "src/w4gemm/choice/intervals.py",
        "return bisect.bisect_left(BOUNDS, m)",
        "return bisect.bisect_right(BOUNDS, m) if m > 8 else bisect.bisect_left(BOUNDS, m)",
        "tests/test_choice.py",
    ),
    Fault(
        "a plan's key forgets batch_invariant",
        "src/w4gemm/choice/plan_cache.py",
        "return cls(plan_rows(m, weight.experts), weight, dtype, epilogue, at, config, batch_invariant, gathered)",
        "return cls(plan_rows(m, weight.experts), weight, dtype, epilogue, at, config, False, gathered)",
        "tests/test_batch_invariant.py",
    ),
    Fault(
        "experts have one order for gathered rows and another for sorted ones",
        "src/w4gemm/choice/model.py",
        "order = _invariant_order(replace(problem, m=0, gathered=False))",
        "order = _invariant_order(replace(problem, m=0))",
        "tests/test_batch_invariant.py -k one_order",
    ),
    Fault(
        "columns of an expert's rows are in another expert's order",
        "src/w4gemm/api/gather.py",
        "owner = (torch.searchsorted(starts, every, right=True) - 1).clamp(min=0)",
        "owner = torch.searchsorted(starts, every, right=False).clamp(max=len(starts) - 1)",
        "tests/test_act_order.py -k experts",
    ),
    Fault(
        "a bound launch outlives its plan",
        "src/w4gemm/api/product.py",
        "launches = self._launches if self._generation == plan_cache.generation else self._forget()",
        "launches = self._launches or self._forget()",
        "tests/test_ops.py tests/test_modes.py tests/test_choice.py tests/test_tuner.py",
    ),
    Fault(
        "calls with another bias dtype are bound alike",
        "src/w4gemm/api/product.py",
        "of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())",
        "of_bias = None if bias is None else (bias.shape, bias.device, bias.is_contiguous())",
        "tests/test_arguments.py tests/test_ops.py",
    ),
    Fault(
        "the file name of a compiled kernel lacks its key",
        "src/w4gemm/jit/disk.py",
        "text = repr((unit.name, unit.key, unit.arch, fingerprint()))",
        "text = repr((unit.name, unit.arch, fingerprint()))",
        "tests/test_jit.py -k name_depends",
    ),
    Fault(
        "the fingerprint forgets the decoders' tables",
        "src/w4gemm/jit/disk.py",
        '_SOURCES = ("kernels", "packing", ',
        '_SOURCES = ("kernels", ',
        "tests/test_jit.py -k sources",
    ),
    Fault(
        "records of another revision are taken",
        "src/w4gemm/choice/plan.py",
        "if legal and record.revision == kernel_named(record.kernel).revision:",
        "if legal:",
        "tests/test_choice.py tests/test_table.py",
    ),
    Fault(
        "a folder that others may write is trusted",
        "src/w4gemm/core/trust.py",
        "if others_rename and not private and not environment.cache_is_shared():",
        "if False:",
        "tests/test_trust.py",
    ),
    # --- checkpoints
    Fault(
        "GPTQ's zero points without the stored 1",
        "src/w4gemm/checkpoints/gptq.py",
        "zeros = unpack(words, bits).int() - self.stored_zero",
        "zeros = unpack(words, bits).int()",
        "tests/test_gptq.py",
    ),
    Fault(
        "the last pattern of GPTQ's dynamic that matches wins",
        "src/w4gemm/checkpoints/gptq.py",
        "for text in self._dynamic:",
        "for text in reversed([*self._dynamic]):",
        "tests/test_gptq.py -k from_the_beginning",
    ),
    Fault(
        "patterns of GPTQ's dynamic match anywhere in a name",
        "src/w4gemm/checkpoints/gptq.py",
        "if self._dynamic.match(text, name):",
        "if self._dynamic.search(text, name):",
        "tests/test_gptq.py -k from_the_beginning",
    ),
    Fault(
        "a search goes on where a run without one was",
        "src/w4gemm/checkpoints/writing.py",
        "[str(dtype) for dtype in dtypes.values()], how]",
        "[str(dtype) for dtype in dtypes.values()]]",
        "tests/test_convert.py -k search_does_not",
    ),
    Fault(
        "a GGUF file may go on behind its tensors",
        "src/w4gemm/checkpoints/gguf/header.py",
        "if file_size > at and tensors:",
        "if False:",
        "tests/test_hostile_folders.py -k goes_on",
    ),
    Fault(
        "AWQ's order the wrong way round",
        "src/w4gemm/checkpoints/awq.py",
        "ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "tests/test_awq.py",
    ),
    Fault(
        "GGUF's high nibbles first",
        "src/w4gemm/checkpoints/gguf/blocks.py",
        "return torch.cat(fields(bytes, bits), dim=-1).flatten(1)",
        "return torch.cat(fields(bytes, bits)[::-1], dim=-1).flatten(1)",
        "tests/test_gguf.py",
    ),
    Fault(
        "GGUF's rows of q and k stay in llama.cpp's order",
        "src/w4gemm/checkpoints/gguf/__init__.py",
        'return torch.arange(n, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(n)',
        'return torch.arange(n, device="cpu").view(heads, 2, -1).transpose(1, 2).reshape(n)',
        "tests/test_transformers.py -k gguf_equals",
    ),
    Fault(
        "a global scale that divides multiplies",
        "src/w4gemm/checkpoints/compressed_tensors.py",
        'factor = 1 / tensors["weight_global_scale"] if',
        'factor = tensors["weight_global_scale"] if',
        "tests/test_compressed_tensors.py",
    ),
    Fault(
        "W4AFP8's codes without the turned sign",
        "src/w4gemm/checkpoints/w4afp8.py",
        'along="k", signed=True)',
        'along="k")',
        "tests/test_deepseek.py -k w4afp8",
    ),
    Fault(
        "the last row of fp8 blocks with the first one's scale",
        "src/w4gemm/checkpoints/fp8_folder.py",
        "for rows, factors in zip(w.split(self._block.rows, -2), scale.unbind(-2), strict=True):",
        "for rows, factors in zip(w.split(self._block.rows, -2), scale.roll(1, -2).unbind(-2), strict=True):",
        "tests/test_deepseek.py -k w4afp8",
    ),
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
        _CODECS + "integers_decode_wide.py",
        "_BYTE_BIAS, _SIGNED_BIAS = 2.0**23, 2.0**15 + 128",
        "_BYTE_BIAS, _SIGNED_BIAS = 2.0**23, 2.0**15",
        "tests/test_emulated_kernels.py -k dequantized",
    ),
    Fault(
        "copies of cp.async are whole blocks or parts of one",
        "src/w4gemm/kernels/sm80_mixed_gemm/kernel.py",
        "if const_expr(threads % count and count % threads):  # or parts of several",
        "if const_expr(False):",
        "tests/test_emulated_kernels.py -k 64x128x128",
    ),
    Fault(
        "e4m3 of rows g + 8 without their signs",
        _CODECS + "e4m3_decode.py",
        "and.b32 a, a, 0x87808780; ",
        "and.b32 a, a, 0x07800780; ",
        "tests/test_emulated_kernels.py -k dequantized_weights",
    ),
    Fault(
        "e4m3 beside fp8 x: columns from 16 on are those of rows g + 8",
        _CODECS + "e4m3.py",
        "8 * i, 4 * step + 2 * col16 + row8)",
        "8 * i, 4 * step + 2 * row8 + col16)",
        "tests/test_emulated_kernels.py -k one_hot",
    ),
    Fault(
        "int3 beside fp8 x: a step's third bits are the other step's",
        _CODECS + "integers_fp8.py",
        "turns = ((0, 0), (0, 4)) if bits == 3",
        "turns = ((0, 0), (4, 0)) if bits == 3",
        "tests/test_emulated_kernels.py -k one_hot",
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
        _SM90 + "consumer.py",
        """        if self.variant.gathered:
            fence_proxy_async()
""",
        "",
        "tests/test_sass.py -k gathered",
    ),
    Fault(
        "a norm's weight is loaded before the launch before has ended",
        "src/w4gemm/kernels/helpers/rms_norm/kernel.py",
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
        """        if self.device.type == "cuda":
            _launch_behind(self.tensors)
""",
        "",
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
        "factors.repeat_interleave(self._block.columns, -1)",
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
    # --- device code that an emulator of the GPU runs
    Fault(
        "a second scale group in a k chunk takes the first one's scale",
        _SM90 + "consumer.py",
        "if step == 0 or column == 0:",
        "if step == 0:",
        _EMULATED + "sm90_mixed_gemm/16x128",
    ),
    Fault(
        "every k set reads the first one's blocks",
        _SM90 + "consumer.py",
        "index = row + consumer.k_set * (variant.blocks_k // variant.k_sets) + block",
        "index = row + block",
        _EMULATED + "coop_k2",
    ),
    Fault(
        "a stage is released before its last WGMMA is waited for",
        _SM90 + "consumer.py",
        """            warpgroup.wait_group(1)
            if const_expr(batch == 0):
                if state.has_previous:
                    self.release(pipeline, state.previous, consumer)
""",
        """            if const_expr(batch == 0):
                if state.has_previous:
                    self.release(pipeline, state.previous, consumer)
            warpgroup.wait_group(1)
""",
        _EMULATED + "sm90_mixed_gemm/16x128",
    ),
    Fault(
        "block scales of the next 128 columns",
        _SM90 + "consumer.py",
        "block = consumer.k_set * chunks + (batch - 1) // batches_per_chunk",
        "block = consumer.k_set * chunks + batch // batches_per_chunk",
        _EMULATED + "sm90_fp8",
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
        "for r, place in enumerate(places):",
        "for r, place in enumerate(places[:-1]):",
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
        "one token: what other groups' columns hold of x is not zero",
        "src/w4gemm/kernels/sm90_decode/kernel.py",
        "row = cutlass.select_(own, Int32(0), Int32(_ZEROS))",
        "row = Int32(0)",
        _EMULATED + "sm90_decode",
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
        "src/w4gemm/kernels/helpers/activation_quantize/kernel.py",
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
        "the norm leaves out its epsilon",
        "src/w4gemm/kernels/helpers/rms_norm/kernel.py",
        "square_root(mean + eps)",
        "square_root(mean)",
        _EMULATED + "rms_norm",
    ),
    # --- the layer of experts in one launch: handoffs between its warps, CTAs and launches
    Fault(
        "rows are published while threads still store them",
        _EXPERT_LAYER,
        "            cute.arch.sync_threads()  # the rows of all threads are stored\n",
        "",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a flag is stored without release",
        "src/w4gemm/ptx/memory.py",
        "st.release.gpu.global.b32 [$0], $1;",
        "st.relaxed.gpu.global.b32 [$0], $1;",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a flag is read without acquire",
        "src/w4gemm/ptx/memory.py",
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a share that a CTA has begun counts as computed",
        _EXPERT_LAYER,
        "vote_ballot_sync(flag != epoch * 2 + 1) == 0",
        "vote_ballot_sync(flag != epoch * 2 + 1 and flag != epoch * 2) == 0",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "flags of the last launch are taken for this one's",
        _EXPERT_LAYER,
        "* 4, 1, Boolean(True))[0] + 1",
        "* 4, 1, Boolean(True))[0]",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "parts of strips of down are counted before all threads have stored theirs",
        _EXPERT_LAYER,
        "        cute.arch.sync_threads()  # the parts of all threads are stored\n",
        "",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "the counter of a strip's parts is not set back",
        _EXPERT_LAYER,
        "                    store_relaxed(counter, Int32(0))\n",
        "                    store_relaxed(counter, Int32(1))\n",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "who adds up the parts of a strip takes the first part of each CTA",
        _EXPERT_LAYER,
        "is_later = Int32(strip > other * each // per_column)",
        "is_later = Int32(0)",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "all CTAs take the first one's epoch",
        _EXPERT_LAYER,
        "epoch = load_l2(flags + Int64(EPOCHS_AT + cta) * 4",
        "epoch = load_l2(flags + Int64(EPOCHS_AT) * 4",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "copies for down still arrive when a CTA computes another one's share",
        _EXPERT_LAYER,
        "                copies_wait()\n",
        "",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "the stages of another CTA's share begin where those of the own one ended",
        _EXPERT_LAYER,
        "cursor, stage = self.start(t, memory, share, warp), Int32(0)\n                for",
        "cursor = self.start(t, memory, share, warp)\n                for",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "a CTA computes its own share in the place of another one's",
        _EXPERT_LAYER,
        "for c in (index, index + 1):",
        "for c in (cta, cta + 1):",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "gate_up is requested into a stage that lanes still read",
        _EXPERT_LAYER,
        "fragments = self.read_x(x + k_block * 256)\n                cute.arch.sync_warp()\n",
        "fragments = self.read_x(x + k_block * 256)\n",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "down is requested into a stage that lanes still read",
        _EXPERT_LAYER,
        "self.load_hidden(t, c, slot, k_block, ahead)\n            cute.arch.sync_warp()\n",
        "self.load_hidden(t, c, slot, k_block, ahead)\n",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "weights of gate_up are read a step too early",
        _EXPERT_LAYER,
        "                cute.arch.cp_async_wait_group(layer.num_stages - 1)\n                cute.arch.sync_warp()",
        "                cute.arch.cp_async_wait_group(layer.num_stages)\n                cute.arch.sync_warp()",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a round stores its partial sums over those of the round before",
        _EXPERT_LAYER,
        "memory.partials + round % 2 * (",
        "memory.partials + 0 * (",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "partial sums are added from the last warp on",
        _EXPERT_LAYER,
        "partial = load_shared_f32x4(address + warp * layer.slot_bytes)",
        "partial = load_shared_f32x4(address + (first + last - warp) * layer.slot_bytes)",
        _ONE_LAUNCH + "ascending",
    ),
    Fault(
        "rows of tokens that did not choose an expert are read",
        _EXPERT_LAYER,
        "chosen = (c.masks[slot] >> token) & 1 != 0",
        "chosen = c.masks[slot] != 0",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "columns of experts without gates change places",
        _EXPERT_LAYER,
        "quad % 2 * 64 + strip % 4 * 8 + quad // 2 * 4",
        "quad // 2 * 64 + strip % 4 * 8 + quad % 2 * 4",
        _ONE_LAUNCH + "gates",
    ),
    Fault(
        "an expert that a token chose twice has one of both weights",
        _EXPERT_LAYER,
        "cutlass.select_(c.ids[other] == expert, c.weights[other]",
        "cutlass.select_(other == choice, c.weights[other]",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "of equal experts the higher number is chosen",
        "src/w4gemm/kernels/device/router.py",
        "_BEYOND - warp_maximum(_where(key == top, _BEYOND - number, 0))",
        "warp_maximum(_where(key == top, number, 0))",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "a group with a bias has the value of one expert",
        "src/w4gemm/kernels/device/router.py",
        "        if const_expr(router.groups > 1):\n            size",
        "        if const_expr(router.groups > 1):\n            bias = None\n            size",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "the router's bias is in the weights",
        "src/w4gemm/kernels/device/router.py",
        "for e, other in zip(experts, scores, strict=True):",
        "for e, other in zip(experts, values, strict=True):",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "a launch reads what the launch in front may still write",
        _EXPERT_LAYER,
        "        cute.arch.griddepcontrol_wait()\n        cute.arch.griddepcontrol_launch_dependents()\n",
        "        cute.arch.griddepcontrol_launch_dependents()\n        cute.arch.griddepcontrol_wait()\n",
        _ONE_LAUNCH + "in_front",
    ),
)
