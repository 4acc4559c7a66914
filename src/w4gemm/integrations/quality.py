"""The cost of rounding a causal language model: perplexity, and how often it chooses another next token."""

from __future__ import annotations

import copy
import importlib.resources
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints import find_checkpoint, open_checkpoint
from w4gemm.checkpoints.dense import DenseCheckpoint
from w4gemm.checkpoints.hugging_face import AS_IT_IS
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers import dequantize_layers, load, quantize_layers
from w4gemm.packing.packed_shape import packed_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXT = "jargon_file.txt"
"""Text that ships: chapters 1, 2, 7 and 8 of the Jargon File 4.4.7 and most of its appendix A, which are in the public
domain."""
_ROWS = 64
"""Rows of logits whose probabilities are in memory at once, in float32."""


class Score(NamedTuple):
    """Figures of a model that has read a text."""

    nats: float
    """Sum over the tokens of -log(probability)."""
    choices: torch.Tensor
    """The likeliest token at each place, int64 (tokens,)."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / len(self.choices))


def shipped_text() -> str:
    """Return the text of :data:`TEXT`."""
    return importlib.resources.files("w4gemm.integrations").joinpath(TEXT).read_text(encoding="utf-8")


def windows(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int, length: int) -> list[torch.Tensor]:
    """Return the first ``tokens`` tokens of a text, in windows of token ids (1, length) that a model reads each from
    the start, behind the token that begins a text if the tokenizer puts one there.

    Raises:
        ValueError: if the text has fewer than two tokens, or a window no token that is predicted.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:tokens]
    if len(ids) < 2:
        raise ValueError(f"--text: wanted a text of at least 2 tokens, got {len(ids)}")
    first = tokenizer("a").input_ids[:1]
    begin = first if first == [tokenizer.bos_token_id] else []
    if length < 2:  # a window's first token is not predicted
        raise ValueError(f"--length: wanted at least 2 tokens, got {length}")
    parts = (begin + ids[i : i + length - len(begin)] for i in range(0, len(ids), length - len(begin)))
    return [torch.tensor([part]) for part in parts if len(part) > 1]


def score(model: PreTrainedModel, parts: list[torch.Tensor], progress: Callable[[], None]) -> Score:
    """Return the figures of a model for windows of token ids; call ``progress`` after each. The first token of a window
    is not predicted."""
    nats, choices = 0.0, []
    for ids in parts:
        ids = ids.to(model.device)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, :-1]
            for rows, tokens in zip(logits.split(_ROWS), ids[0, 1:].split(_ROWS), strict=True):
                nats += torch.nn.functional.cross_entropy(rows.float(), tokens, reduction="sum").item()
            choices.append(logits.argmax(-1).cpu())
        progress()
    return Score(nats, torch.cat(choices))


def load_dense(
    path: str | Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a checkpoint's model with dense layers of the numbers that it holds, and its tokenizer."""
    if isinstance(open_checkpoint(path), DenseCheckpoint):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = find_checkpoint(path).path
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **AS_IT_IS)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, **AS_IT_IS)
    model, tokenizer = load(path, device, dtype)
    return dequantize_layers(model, dtype), tokenizer


def compare(
    dense: PreTrainedModel,
    parts: list[torch.Tensor],
    formats: Sequence[WeightFormat],
    search: bool,
    progress: Callable[[int, int, str], None],
) -> Iterator[dict[str, Any]]:
    """Yield the figures of a dense model for windows of token ids, then of a copy with its linear layers in each
    format.

    Args:
        search: as for :func:`w4gemm.quantize`.
        progress: called as ``progress(windows done, windows, format)``.
    """
    done, total, reference = 0, len(parts) * (1 + len(formats)), None
    for format in (None, *formats):
        name, model = ("dense", dense) if format is None else (str(format), copy.deepcopy(dense))

        def step(name: str = name) -> None:
            nonlocal done
            done += 1
            progress(done, total, name)

        if format is not None:
            progress(done, total, f"quantizing to {format}")
            quantize_layers(model, format, search=search)
        own = score(model, parts, step)
        reference = own if reference is None else reference
        weights = [layer.weight for layer in model.modules() if isinstance(layer, W4Linear)]
        numbers = sum(w.n * w.k for w in weights)
        nbytes = sum(packed_shape(w.format, "canonical", w.n, w.k).nbytes for w in weights)
        yield {
            "format": name,
            "layers": len(weights),
            "bits": 8 * nbytes / numbers if numbers else None,
            "tokens": len(own.choices),
            "perplexity": own.perplexity,
            "above_dense": own.perplexity / reference.perplexity - 1,
            "agreement": (own.choices == reference.choices).float().mean().item(),
        }
