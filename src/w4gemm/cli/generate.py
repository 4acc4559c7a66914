"""``w4gemm generate``: a language model with quantized linear layers answers a prompt, and says how fast."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

from w4gemm.console.devices import chosen_device, device_name, use_idle_cores
from w4gemm.console.progress import progress_line, say
from w4gemm.console.values import chosen_dtype
from w4gemm.integrations.generation import default_model, encode, generate, plans, quiet_transformers, timed_streamer
from w4gemm.integrations.transformers import load, summarize

_LOWEST_TEMPERATURE = 1e-6
"""Logits are divided by the temperature, and have to stay in the range of float32."""


def run(args: argparse.Namespace) -> int:
    if not (args.temperature == 0 or _LOWEST_TEMPERATURE <= args.temperature < math.inf):
        expected = f"wanted 0 or a finite number >= {_LOWEST_TEMPERATURE}"
        raise ValueError(f"--temperature: {expected}, got {args.temperature}")
    if not -(2**63) <= args.seed < 2**64:
        raise ValueError(f"--seed: wanted a number of 64 bits, got {args.seed}")
    if not args.prompt.strip():
        raise ValueError("PROMPT: it is empty")
    try:
        args.prompt.encode()
    except UnicodeEncodeError as e:  # Python keeps bytes that are no text as surrogates, which no tokenizer takes
        raise ValueError(f"PROMPT: wanted text in UTF-8, got other bytes at character {e.start}") from None
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
    for what in list(phases)[: times.tokens]:
        say(f"{what} ran " + ", ".join(f"{plan} x {count}" for plan, count in ran[what].items()))
    return 0
