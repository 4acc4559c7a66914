"""``w4gemm generate``: a language model with quantized linear layers answers a prompt, and says how fast."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from w4gemm.console.devices import chosen_device, device_name, use_idle_cores
from w4gemm.console.progress import progress_line, say
from w4gemm.console.values import chosen_dtype
from w4gemm.integrations.generation import default_model, encode, generate, plans, quiet_transformers, timed_streamer
from w4gemm.integrations.transformers import load, summarize


def run(args: argparse.Namespace) -> int:
    path = default_model() if args.model is None else args.model
    described, device = chosen_device(args.device)
    use_idle_cores(device)
    dtype = chosen_dtype(args.dtype, described)
    quiet_transformers()
    start = time.perf_counter()
    with progress_line() as progress:
        progress(0, 0, "reading the tokenizer")
        model, tokenizer = load(path, device, dtype, activations=args.activations, progress=progress)
    say(f"{Path(path).name}: {summarize(model)}; loaded in {time.perf_counter() - start:.1f} s")
    inputs = encode(tokenizer, args.prompt).to(device)
    phases = {"prefill": inputs.shape[1], "decode": 1}
    ran = {what: plans(model, m, dtype) for what, m in phases.items()}  # compiles now, not while timing
    streamer = timed_streamer(tokenizer, show=not args.json)
    answer = generate(model, inputs, args.max_new_tokens, args.temperature, args.seed, streamer)
    times = streamer.times(inputs.shape[1])
    if args.json:
        text = tokenizer.decode(answer[0], skip_special_tokens=True)
        facts = {
            "answer": text,
            "model": str(path),
            "device": device_name(device),
            "dtype": str(dtype).removeprefix("torch."),
        }
        print(json.dumps(facts | {"times": dataclasses.asdict(times), "ran": ran}, indent=2))
    say(f"{times}; {str(dtype).removeprefix('torch.')} on {device_name(device)}")
    shown = list(phases)[: times.tokens]  # an answer of one token has no decoding
    if ran["prefill"] == ran["decode"]:
        ran, shown = {"prefill and decode": ran["decode"]}, ["prefill and decode"]
    for what in shown:
        say(f"{what} ran " + ", ".join(f"{plan} x {count}" for plan, count in ran[what].items()))
    return 0
