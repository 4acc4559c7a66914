"""Measure whole models: ``python -m bench.generation --batch 1,64``.

Models of true shapes and random weights are made on the GPU, without a download: with 4-bit linear layers and in bf16.
All of them are in memory at once, and answer random prompts greedily by turns, in several ways:

    eager     transformers' default
    compiled  transformers' static cache and torch.compile
    graph     w4gemm's replay of a captured step of the model's own code
    fused     the same with a step in fewer kernels, what ``generate`` does by default with 4-bit layers

A row has the tokens per second of the whole call and of decoding alone, which is the difference of two calls, and the
share of the roofline: the bytes of weights and cache that a step has to read, at the bandwidth that large copies reach.
With ``--start`` a row of kind "start" says how long a process of its own takes to load the model from a folder that
was just written, to the first token, compiling apart, and to a second answer: with an empty cache of kernels (cold) and
with that of the run before.

Rows go to bench/results/generation.jsonl; those of kind "profile" are of a command that is cut.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.models import MIXES, MODELS, drawn_model
from bench.options import add_out, command, counts, some_of, typed

import w4gemm
from w4gemm.api.packed_module import PackedModule
from w4gemm.console.progress import say
from w4gemm.integrations.decoder import decode_by_graph
from w4gemm.integrations.decoder.loop import step_of
from w4gemm.integrations.generation import quiet_transformers
from w4gemm.integrations.transformers import describe
from w4gemm.tuning import record
from w4gemm.tuning.roofline import RATES

RESULTS = Path(__file__).parent / "results/generation.jsonl"
WAYS = ("eager", "compiled", "graph", "fused")
ROUNDS = 5
"""Turns of each model."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.generation", __doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="whose shapes (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="decoder layers (default: all of the model's)")
    parser.add_argument(
        "--weights",
        type=typed(kinds_of_weights),
        default="int4_g128,bfloat16",
        help=f"weight formats, {', '.join(MIXES)}, or bfloat16 (default: %(default)s)",
    )
    parser.add_argument("--batch", type=typed(counts), default="1,64", help="sequences at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a sequence (default: %(default)s)")
    parser.add_argument(
        "--ways",
        type=typed(some_of(*WAYS)),
        default="eager,graph,fused",
        help=f"some of {', '.join(WAYS)} (default: %(default)s)",
    )
    parser.add_argument("--start", action="store_true", help="measure loading and the first token instead")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process that --start times
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    quiet_transformers()
    settings = dict(MODELS[args.model]) | ({} if args.layers is None else {"num_hidden_layers": args.layers})
    if args.folder is not None:
        print(json.dumps(start(args.folder, args)), flush=True)
        return
    facts = record.facts()
    common = {"run": record.run_name(facts), "model": args.model, "prompt": args.prompt, "tokens": args.tokens}
    common["layers"] = settings["num_hidden_layers"]
    if args.start:
        for row in starts(settings, args):
            record.append(args.out, common | {"kind": "start", **row, "w4gemm": w4gemm.__version__} | facts)
            say(str(row))
        return
    models = {}
    for weights in args.weights:
        began = time.perf_counter()
        models[weights] = drawn_model(settings, weights)
        say(f"{args.model} in {weights}: made in {time.perf_counter() - began:.1f} s")
    for batch, way in itertools.product(args.batch, args.ways):
        for weights, numbers in by_turns(models, way, batch, args).items():
            row = {"kind": "generation", "batch": batch, "weights": weights, "way": way, **numbers}
            record.append(args.out, common | row | {"w4gemm": w4gemm.__version__} | facts)
            say(str(row))


def kinds_of_weights(text: str) -> tuple[str, ...]:
    """Return comma-separated names of weight formats, of mixes of them, and ``bfloat16``.

    Raises:
        ValueError: for a name that is none of these.
    """
    names = tuple(text.split(","))
    for name in names:
        if name != "bfloat16" and name not in MIXES:
            w4gemm.WeightFormat.parse(name)
    return names


def starts(settings: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the model in each kind of weights to a folder, and time two processes that load it."""
    for weights in args.weights:
        with tempfile.TemporaryDirectory() as scratch:
            model = describe_and_save(drawn_model(settings, weights), Path(scratch) / "model")
            gc.collect()
            torch.cuda.empty_cache()
            size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            sizes = [f"--prompt={args.prompt}", f"--tokens={args.tokens}"]
            command = [sys.executable, "-m", "bench.generation", f"--folder={model}", *sizes]
            kernels = {"W4GEMM_CACHE_DIR": f"{scratch}/kernels"}
            for cold in (True, False):
                began = time.time()
                done = subprocess.run(command, env=os.environ | kernels, stdout=subprocess.PIPE, text=True, check=True)
                times = json.loads(done.stdout.splitlines()[-1])
                whole = {"process_to_first_token_s": round(times.pop("first_token_at") - began, 2)}
                yield {"weights": weights, "batch": 1, "cold": cold, "folder_mib": size >> 20, **whole, **times}


def describe_and_save(model: Any, folder: Path) -> Path:
    if any(isinstance(m, PackedModule) for m in model.modules()):
        describe(model)
    model.save_pretrained(folder)
    return folder


def start(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds to load a folder, to answer with one token, of which compiling takes some, and to answer again with all:
    the second token has the step captured."""
    from transformers import AutoModelForCausalLM

    times = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    models: list[Any] = []
    options: dict[str, Any] = {"device_map": device, "dtype": torch.bfloat16}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, **options)
    times["load_s"] = seconds(lambda: models.append(load()))
    call = caller(models[0], "default", 1, args.prompt)
    times["first_token_s"] = seconds(lambda: call(1))
    times["first_token_at"] = time.time()
    times["first_answer_s"] = seconds(lambda: call(args.tokens))
    times["second_answer_s"] = seconds(lambda: call(args.tokens))
    step = step_of(models[0])
    prepared = step.prepared.values() if step is not None else ()
    times["compile_s"] = sum(p.seconds for p in prepared)
    return {name: round(value, 2) for name, value in times.items()} | {"compiled": sum(p.compiled for p in prepared)}


def caller(model: Any, way: str, batch: int, prompt: int) -> Callable[[int], torch.Tensor]:
    """A function that answers random prompts with a number of tokens, in one of the ways."""
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), device=model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    if way == "compiled":
        options["cache_implementation"] = "static"
    elif way in ("graph", "fused"):
        decode_by_graph(model, fuse=way == "fused")
    elif way == "eager":
        options["disable_compile"] = True
    return lambda tokens: model.generate(ids, max_new_tokens=tokens, **options)


def by_turns(models: dict[str, Any], way: str, batch: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds of a first call, and tokens per second of a warm one and of decoding alone, by model. The models take
    turns, so that a busy host slows all of them; the fastest of a model's calls count."""
    calls: dict[str, Callable[[int], torch.Tensor]] = {}
    firsts: dict[str, float] = {}
    for weights, model in models.items():
        call = caller(model, way, batch, args.prompt)
        try:
            firsts[weights] = seconds(functools.partial(call, args.tokens))
        except Exception as e:  # a way that fails is a result, not the end of the run
            say(f"  {weights} {way} batch {batch}: {e!r:.300}")
            continue
        calls[weights] = call
    whole, short = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, float("inf"))
    for _ in range(1 if way == "eager" else ROUNDS):
        for weights, call in calls.items():
            whole[weights] = min(whole[weights], seconds(functools.partial(call, args.tokens)))
            short[weights] = min(short[weights], seconds(functools.partial(call, 2)))
    rates = RATES.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    rows = {}
    for weights in calls:
        step = (whole[weights] - short[weights]) / (args.tokens - 2)
        rows[weights] = {
            "first_call_s": round(firsts[weights], 2),
            "tokens_per_s": round(batch * args.tokens / whole[weights], 1),
            "decode_tokens_per_s": round(batch / step, 1),
            "step_us": round(step * 1e6, 1),
            "two_tokens_ms": round(short[weights] * 1e3, 1),
        }
        if rates is not None:
            read = step_bytes(models[weights], batch, args.prompt + args.tokens // 2)
            rows[weights]["roofline_share"] = round(read / rates.bytes / step / 1e6, 3)
    return rows


def step_bytes(model: Any, batch: int, length: int) -> int:
    """Bytes that a step has to read: all weights but the embedding's, of experts those that a random choice for each
    sequence takes, and keys and values of ``length`` tokens."""
    config, embedding = model.config, model.get_input_embeddings().weight
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = 1 - (1 - getattr(config, "num_experts_per_tok", 1) / experts) ** batch
    dense = sum(p.nbytes * (chosen if p.dim() == 3 else 1) for p in model.parameters() if p is not embedding)
    layers = [layer for layer in model.modules() if isinstance(layer, PackedModule)]
    packed = sum(layer.weight.nbytes * (chosen if layer.grouped else 1) for layer in layers)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2
    return round(dense + packed) + batch * length * cache


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
