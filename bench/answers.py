"""Answers of a 4-bit model beside those of the same numbers in dense matrices: ``python -m bench.answers``.

Five prompts are answered greedily, twice in one dtype: with w4gemm behind every 4-bit linear layer, and with those
layers dequantized to that dtype. Each answer is a row of bench/results/answers.jsonl. Its differences are max |a - b| /
max |b| over the logits, where b is the dequantized model's: for the first new token (the layers take the whole prompt)
and for the second (the layers take one token).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.options import add_out, command

import w4gemm
from w4gemm.console.devices import choose_device
from w4gemm.console.options import WIDE_DTYPES
from w4gemm.console.progress import say
from w4gemm.integrations.generation import default_model, encode, generate, plans, quiet_transformers, timed_streamer
from w4gemm.integrations.transformers import dequantize_layers, load, summarize
from w4gemm.integrations.transformers.decode_step import cache_argument
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/answers.jsonl"
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 plus 25?",
    "Name three animals that can fly.",
    "Explain in one sentence why the sky is blue.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.answers", __doc__)
    parser.add_argument(
        "--model", metavar="PATH", help="GGUF file or folder, as w4gemm generate takes it (default: its own)"
    )
    parser.add_argument("--device", help="to run on, cpu or cuda (default: cuda if a kernel runs there, else cpu)")
    parser.add_argument(
        "--dtype", choices=WIDE_DTYPES, help="of the activations (default: bfloat16 on cuda, float32 on the CPU)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=48, metavar="N", help="length of an answer (default: %(default)s)"
    )
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    path = Path(args.model) if args.model else default_model()
    device, note = choose_device(args.device)
    if note:
        say(note)
    dtype = WIDE_DTYPES[args.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    quiet_transformers()
    model, tokenizer = load(path, device, dtype)
    say(f"{path.name}: {summarize(model)}")
    prompts = [encode(tokenizer, prompt).to(device) for prompt in PROMPTS]
    kernels = [" + ".join({name: None for m in (p.shape[1], 1) for name in plans(model, m, dtype)}) for p in prompts]
    ours = [answer(model, tokenizer, p, args.max_new_tokens) for p in prompts]
    dequantize_layers(model, dtype)
    dense = [answer(model, tokenizer, p, args.max_new_tokens) for p in prompts]
    facts = record.facts()
    common = {
        "kind": "answer",
        "run": record.run_name(facts),
        "model": path.name,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "max_new_tokens": args.max_new_tokens,
    }
    versions = {"w4gemm": w4gemm.__version__, "transformers": _transformers_version(), **facts}
    for prompt, kernel, a, b in zip(PROMPTS, kernels, ours, dense, strict=True):
        differences = compare(a.pop("logits"), b.pop("logits"))
        rows = (
            {"impl": "w4gemm", "prompt": prompt, **a, "kernel": kernel, **differences},
            {"impl": "dequantized", "prompt": prompt, **b, "kernel": "torch"},
        )
        record.append(args.out, *(common | row | versions for row in rows))
        same = "the same answer" if a["answer"] == b["answer"] else f"dequantized: {b['answer']!r}"
        say(f"\n{prompt}\n  {a['answer']!r}\n  {same}; {differences}")
        say(f"  decode {a['decode_tokens_per_s']} tokens/s, dequantized {b['decode_tokens_per_s']}")
    say(f"\n{2 * len(PROMPTS)} rows appended to {args.out}")


def answer(model: Any, tokenizer: Any, inputs: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
    """A greedy answer, its speed, and the logits of its first two tokens."""
    with torch.inference_mode():  # this also warms up: kernels are compiled here
        first = model(inputs, logits_to_keep=1, use_cache=True)
        token = first.logits.argmax(-1)
        name = cache_argument(model)
        second = model(token, **{name: first[name]})
    logits = [out.logits[0, -1].float().cpu() for out in (first, second)]
    streamer = timed_streamer(tokenizer, show=False)
    new = generate(model, inputs, max_new_tokens, 0.0, 0, streamer)
    times = streamer.times(inputs.shape[1])
    return {
        "answer": tokenizer.decode(new[0], skip_special_tokens=True),
        "prompt_tokens": times.prompt,
        "new_tokens": times.tokens,
        "prefill_tokens_per_s": round(times.prompt / times.prefill, 1),
        "decode_tokens_per_s": round((times.tokens - 1) / times.decode, 1) if times.tokens > 1 else None,
        "logits": logits,
    }


def compare(ours: list[torch.Tensor], dense: list[torch.Tensor]) -> dict[str, float | None]:
    """The differences that a row records; none for the second token if the first was another one."""
    first, second = (float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, dense, strict=True))
    same_token = ours[0].argmax() == dense[0].argmax()
    return {"first_logits_rel_diff": first, "second_logits_rel_diff": second if same_token else None}


def _transformers_version() -> str:
    import transformers

    return transformers.__version__


if __name__ == "__main__":
    main()
