"""A real model's next tokens in 4 bits beside the same numbers in matrices: ``python -m bench.agreement``.

SmolLM2 is quantized anew into the layouts of GPTQ, AWQ and compressed-tensors, as ``bench.engine.agreement`` does for
vLLM. transformers then reads the texts of bench/engine/texts.py with w4gemm behind the 4-bit layers, and with the same
numbers in matrices; what both predict after each token is compared. Rows of kind "agreement" go to
bench/results/answers.jsonl. Runs on the CPU, and on a GPU with ``--device cuda --dtype bfloat16``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench import answers
from bench.engine.agreement import requantize, tokens_of
from bench.engine.packing import Packing
from bench.engine.rows import Row, equal_prefix
from bench.options import add_out, command

import w4gemm
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.base import Checkpoint
from w4gemm.console.options import WIDE_DTYPES
from w4gemm.console.progress import say
from w4gemm.integrations.generation import default_model, generate, quiet_transformers
from w4gemm.integrations.transformers import load
from w4gemm.tuning import record

FORMATS = ("gptq-int4-g64", "awq-int4-g64", "ct-int4-g64", "ct-int4-g64-fp8")


class Where(NamedTuple):
    """Device and dtype of a model's activations."""

    device: torch.device
    dtype: torch.dtype


class Reading(NamedTuple):
    """The texts as a model reads them."""

    predicted: torch.Tensor
    """float64 (positions, vocabulary): log probabilities of what follows each token but a text's last one."""
    following: torch.Tensor
    """int64 (positions,): the tokens that follow."""
    continued: list[list[int]]
    """Greedy tokens behind each text."""

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p of the tokens that follow."""
        return float(torch.nn.functional.nll_loss(self.predicted, self.following).exp())


def main(argv: Sequence[str] | None = None) -> None:
    p = command("bench.agreement", __doc__)
    p.add_argument("--checkpoint", metavar="PATH", help="a 4-bit checkpoint (default: that of w4gemm generate)")
    p.add_argument("--format", nargs="+", default=FORMATS, help=f"of the packed model (default: {' '.join(FORMATS)})")
    p.add_argument("--device", default="cpu", help="to run on (default: %(default)s)")
    p.add_argument("--dtype", choices=WIDE_DTYPES, default="float32", help="of the activations (default: %(default)s)")
    p.add_argument("--tokens-out", type=int, default=16, help="greedy tokens after each text (default: %(default)s)")
    add_out(p, answers.RESULTS)
    args = p.parse_args(argv)
    packings = [Packing.parse(text) for text in args.format]
    quiet_transformers()
    facts = record.facts()
    checkpoint = open_checkpoint(Path(args.checkpoint) if args.checkpoint else default_model())
    common: Row = {"kind": "agreement", "run": record.run_name(facts), "model": checkpoint.path.stem}
    common |= {"device": args.device, "dtype": args.dtype, "impl": "w4gemm", "w4gemm": w4gemm.__version__}
    for packing in packings:
        began = time.perf_counter()
        row = measured(checkpoint, packing, Where(torch.device(args.device), WIDE_DTYPES[args.dtype]), args.tokens_out)
        record.append(args.out, common | {"format": str(packing)} | row | facts)
        say(f"{packing}, {time.perf_counter() - began:.0f} s: {row}")


def measured(checkpoint: Checkpoint, packing: Packing, where: Where, tokens_out: int) -> Row:
    """Return by how much a format's products differ from those of the same numbers in matrices."""
    with tempfile.TemporaryDirectory() as folder:
        folders = requantize(checkpoint, packing, Path(folder), where.dtype)
        ours, matrices = (read(path, where, tokens_out) for path in folders)
    return compare(ours, matrices)


def read(folder: Path, where: Where, tokens_out: int) -> Reading:
    """Return what a folder's model predicts; dense layers stay dense."""
    model = loaded(folder, where)
    predicted, following, continued = [], [], []
    for tokens in tokens_of(folder):
        ids = torch.tensor([tokens], device=where.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].double()
        predicted.append(torch.log_softmax(logits, -1).cpu())
        following.append(ids[0, 1:].cpu())
        continued.append(generate(model, ids, tokens_out, 0.0, 0)[0].tolist())
    return Reading(torch.cat(predicted), torch.cat(following), continued)


def loaded(folder: Path, where: Where) -> Any:
    """Return a folder's model: of 4-bit layers, or of matrices."""
    from transformers import AutoModelForCausalLM

    if "matrices" in folder.name:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=where.dtype).to(where.device).eval()
    return load(folder, *where)[0]


def compare(ours: Reading, matrices: Reading) -> Row:
    """Return the divergence from the matrices' predictions in nats (mean and largest), the part of positions with the
    same likeliest token, both perplexities, and the mean of greedy tokens before the first that differs."""
    divergences = (matrices.predicted.exp() * (matrices.predicted - ours.predicted)).sum(-1).clamp(min=0)
    prefixes = [equal_prefix(a, b) for a, b in zip(ours.continued, matrices.continued, strict=True)]
    same = ours.predicted.argmax(-1) == matrices.predicted.argmax(-1)
    return {
        "positions": len(divergences),
        "kl_mean": float(f"{divergences.mean():.3g}"),
        "kl_max": float(f"{divergences.max():.3g}"),
        "top1": round(float(same.float().mean()), 4),
        "perplexity": round(ours.perplexity, 4),
        "perplexity_matrices": round(matrices.perplexity, 4),
        "tokens_out": len(matrices.continued[0]),
        "equal_prefix": round(sum(prefixes) / len(prefixes), 1),
    }


if __name__ == "__main__":
    main()
