"""A real model's next tokens with each implementation inside vLLM: ``python -m bench.engine.agreement``.

The 4-bit weights of a checkpoint are quantized anew into the layouts of GPTQ, AWQ and compressed-tensors. vLLM reads
the texts of texts.py with the same numbers as bf16 matrices, then with each implementation; what is predicted after
each token is compared with the matrices' prediction. Both round in bf16: an implementation is as exact as another if it
differs from the matrices by as much. Rows go to bench/results/engine.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from bench.engine.implementations import OURS, Implementation
from bench.engine.launch import (
    RESULTS,
    Caches,
    EngineError,
    EngineOptions,
    environment,
    plugin_metadata,
    preloaded_vllm,
    run_offline,
    work_folder,
)
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.packing import SYMMETRIC_WORD, Packing, pack_words
from bench.engine.preload import Preloaded
from bench.engine.rows import Row, equal_prefix
from bench.engine.texts import TEXTS
from bench.options import add_out, command
from safetensors.torch import save_file

import w4gemm
from w4gemm import quantize
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.awq import ORDER
from w4gemm.checkpoints.base import Checkpoint
from w4gemm.console.options import positive
from w4gemm.console.progress import say
from w4gemm.integrations.generation import default_model
from w4gemm.tuning import record
from w4gemm.weights.weight import QuantizedWeight

LIKELIEST = 200
"""Tokens whose probabilities an engine gives after each token."""
COMPARED = 50
"""The reference's likeliest tokens, which are compared one by one; all others together are one more."""


@dataclass(frozen=True)
class Reading:
    """How engines read the texts."""

    options: EngineOptions
    tokens_out: int
    work: Path
    plugin: Path | None
    seconds: float
    preloaded: SimpleQueue[Preloaded]
    """Processes to fork engines from, one for each that reads at a time."""

    def read(self, folder: Path, implementation: Implementation) -> Result:
        """Return what an engine predicts; raises EngineError, also if it ended early."""
        model = Model(folder.name, json.loads((folder / "config.json").read_text()))
        task = Task(
            engine=self.options.arguments(folder, implementation, model, (1,)),
            vocabulary=model.vocabulary,
            tokens_out=self.tokens_out,
            texts=tokens_of(folder),
            likeliest=LIKELIEST,
        )
        name = f"{folder.name}-{implementation.name}"
        caches = Caches(self.work / "caches" / name, self.work / "caches/shared")
        caches.start()
        variables = environment(implementation, caches, self.plugin)
        preloaded = self.preloaded.get()
        try:
            result = run_offline(task, variables, self.work / f"{name}.log", self.seconds, preloaded)
        finally:
            self.preloaded.put(preloaded)
        if result.failure:
            raise EngineError(result.failure)
        return result


def main(argv: Sequence[str] | None = None) -> None:
    p = command("bench.engine.agreement", __doc__)
    p.add_argument("--checkpoint", metavar="PATH", help="a 4-bit checkpoint (default: that of w4gemm generate)")
    p.add_argument("--format", nargs="+", default=["gptq-int4-g64", "awq-int4-g64", "ct-int4-g64"])
    p.add_argument("--impl", nargs="+", default=[OURS, "marlin"], help="(default: w4gemm marlin)")
    p.add_argument("--tokens-out", type=int, default=64, help="greedy tokens after each text (default: %(default)s)")
    p.add_argument("--eager", action="store_true", help="without CUDA graphs")
    p.add_argument("--seconds", type=float, default=150, help="limit of each process (default: %(default)s)")
    p.add_argument("--memory", type=float, default=0.3, help="part of the GPU's that vLLM takes (default: 0.3)")
    p.add_argument(
        "--at-once", type=positive, default=1, metavar="N", help="engines side by side that share --memory (default: 1)"
    )
    p.add_argument("--work", type=Path, help="folder of models and caches to keep (default: a temporary one)")
    add_out(p, RESULTS)
    args = p.parse_args(argv)
    packings = [Packing.parse(text) for text in args.format]
    implementations = [Implementation.parse(text) for text in args.impl]
    facts = record.facts()
    common: Row = {"kind": "engine", "run": record.run_name(facts), "engine": "vllm", "dtype": "bfloat16", "gpus": 1}
    common |= {"mode": "eager" if args.eager else "graphs", "chosen": False, "phase": "agreement"}
    checkpoint = open_checkpoint(Path(args.checkpoint) if args.checkpoint else default_model())
    options = EngineOptions("bfloat16", False, args.eager, 1, args.memory, 512, LIKELIEST, args.at_once)
    with ExitStack() as stack:
        work = stack.enter_context(work_folder(args.work))
        plugin = plugin_metadata(work / "plugin") if any(OURS in i.name for i in implementations) else None
        preloaded: SimpleQueue[Preloaded] = SimpleQueue()
        for i in range(args.at_once):
            preloaded.put(stack.enter_context(preloaded_vllm(plugin, work / f"preload-{i}.log")))
        reading = Reading(options, args.tokens_out, work, plugin, args.seconds, preloaded)
        for packing in packings:
            of_format = {"model": checkpoint.path.stem, "format": str(packing)}
            for row in measure(reading, requantize(checkpoint, packing, work), implementations):
                record.append(args.out, common | of_format | row | facts)


def measure(reading: Reading, folders: tuple[Path, Path], implementations: Sequence[Implementation]) -> list[Row]:
    """Return a row for each implementation that could be compared.

    Args:
        folders: the 4-bit model, and its numbers in matrices.
    """
    quantized, dense = folders
    rows: list[Row] = []
    with ThreadPoolExecutor(reading.options.at_once) as pool:
        of_matrices = pool.submit(reading.read, dense, Implementation.parse("default"))
        of_products = [pool.submit(reading.read, quantized, implementation) for implementation in implementations]
    try:
        reference = of_matrices.result()
    except EngineError as e:
        say(f"{dense.name} failed: {e}")
        return rows
    for implementation, done in zip(implementations, of_products, strict=True):
        try:
            found = done.result()
            name = implementation.check(found.kernels)
        except (EngineError, ValueError) as e:
            say(f"{quantized.name}: {implementation.name} failed: {e}")
            continue
        row = {"impl": name, "impl_version": w4gemm.__version__ if OURS in name else found.engine_version}
        rows.append({**row, "engine_version": found.engine_version, **compare(found.read, reference.read)})
        say(f"{quantized.name}: {name}: {json.dumps(compare(found.read, reference.read))}")
    return rows


def compare(found: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> Row:
    """Return by how much predictions differ from a reference's: mean and largest divergence in nats, the part of
    positions with the same likeliest token, and the mean of greedy tokens before the first that differs."""
    pairs = [(b, a) for x, y in zip(found, reference, strict=True) for a, b in zip(x["after"], y["after"], strict=True)]
    divergences = [divergence(p, q) for p, q in pairs]
    prefixes = [equal_prefix(x["answer"], y["answer"]) for x, y in zip(found, reference, strict=True)]
    return {
        "positions": len(pairs),
        "kl_mean": round(statistics.fmean(divergences), 6),
        "kl_max": round(max(divergences), 5),
        "top1": round(statistics.fmean(max(p, key=p.get) == max(q, key=q.get) for p, q in pairs), 4),  # type: ignore[arg-type]
        "same_tokens_as": "bf16 matrices",
        "tokens_out": len(reference[0]["answer"]),
        "equal_prefix": round(statistics.fmean(prefixes), 1),
    }


def divergence(reference: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return sum p * log(p / q) over the ``COMPARED`` likeliest tokens of a reference p and all others as one.

    Args:
        reference: log probabilities by token.
        other: as well. A token that it lacks is taken to be as likely as its least likely one.
    """
    likeliest = sorted(reference, key=lambda token: -reference[token])[:COMPARED]
    least = min(other.values())
    pairs = [(reference[token], other.get(token, least)) for token in likeliest]
    left = [max(1e-9, 1 - sum(math.exp(pair[i]) for pair in pairs)) for i in range(2)]
    pairs.append((math.log(left[0]), math.log(left[1])))
    return sum(math.exp(p) * (p - q) for p, q in pairs)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def requantize(
    checkpoint: Checkpoint, packing: Packing, work: Path, matrices: torch.dtype = torch.bfloat16
) -> tuple[Path, Path]:
    """Write the folder of a checkpoint in another format, and one of the same numbers in matrices of a dtype."""
    from transformers import AutoConfig, AutoTokenizer

    source, options, settings = checkpoint.pretrained()
    config = AutoConfig.from_pretrained(source, **options).to_dict() | settings
    config.pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    shared = {name: checkpoint.dense(name, torch.bfloat16) for name in checkpoint.tensors}
    packed, dense = dict(shared), dict(shared)
    suffix = f"_g{packing.group_size}{'_zint' * (packing.method == 'awq')}"
    for name in checkpoint.modules:
        numbers = checkpoint.weight(name).dequantize()
        if name == "lm_head":  # which the formats' producers leave dense
            packed["lm_head.weight"] = dense["lm_head.weight"] = numbers.bfloat16()
            continue
        w = quantize(numbers, f"int4{suffix}")
        packed |= {f"{name}.{leaf}": tensor for leaf, tensor in packed_tensors(w, packing).items()}
        dense[f"{name}.weight"] = w.dequantize(matrices)
    folders = work / f"{packing}", work / f"{packing}-matrices"
    for folder, tensors in zip(folders, (packed, dense), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        written = {**config, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        if tensors is packed:
            written["quantization_config"] = packing.config(Model(folder.name, config))
        (folder / "config.json").write_text(json.dumps(written))
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        tokenizer.save_pretrained(folder)
    return folders


def packed_tensors(w: QuantizedWeight, packing: Packing) -> dict[str, torch.Tensor]:
    """Return a weight's tensors by the last parts of their names, as the format's producers write them."""
    codes, scales, zeros, *_ = w.parts()
    if packing.method == "ct":
        shape = torch.tensor([w.n, w.k], dtype=torch.int64)
        return {"weight_packed": pack_words(codes, 1), "weight_scale": scales, "weight_shape": shape}
    if packing.method == "awq":
        assert zeros is not None
        qzeros = pack_words(zeros.T, 1, ORDER)
        return {"qweight": pack_words(codes.T, 1, ORDER), "qzeros": qzeros, "scales": scales.T}
    qzeros = torch.full((scales.shape[1], w.n // 8), SYMMETRIC_WORD, dtype=torch.int32)
    g_idx = torch.arange(w.k, dtype=torch.int32) // packing.group_size
    return {"qweight": pack_words(codes.T, 0), "qzeros": qzeros, "scales": scales.T, "g_idx": g_idx}


def tokens_of(folder: Path) -> tuple[list[int], ...]:
    """Return the texts in tokens of a folder's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tuple(tokenizer(text).input_ids for text in TEXTS)


if __name__ == "__main__":
    main()
