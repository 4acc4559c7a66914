"""The cost of rounding a causal language model: perplexity, and how often it chooses another next token."""

from __future__ import annotations

import copy
import importlib.resources
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints import find_checkpoint, open_checkpoint
from w4gemm.checkpoints.dense import DenseCheckpoint, dense_model
from w4gemm.checkpoints.gguf.fields import tokenizer_of
from w4gemm.checkpoints.hugging_face import AS_IT_IS
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations import calibrated
from w4gemm.integrations.transformers import dequantize_layers, load, quantize_layers
from w4gemm.packing.packed_shape import PackedShape, packed_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXT = "jargon_file.txt"
"""Text that ships: chapters 1, 2, 7 and 8 of the Jargon File 4.4.7 and most of its appendix A, which are in the public
domain."""
METHODS = ("nearest", "search", *calibrated.METHODS)
"""Ways of rounding."""
_MARGIN = 64
"""Tokens in front of a cut of a text that the cut may have changed."""
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
    ids = _first_ids(tokenizer, text, tokens)
    if len(ids) < 2:
        raise ValueError(f"--text: wanted a text of at least 2 tokens, got {len(ids)}")
    return _in_windows(tokenizer, ids, length)


def _in_windows(tokenizer: PreTrainedTokenizerBase, ids: list[int], length: int) -> list[torch.Tensor]:
    """Return ids in the windows of :func:`windows`."""
    first = tokenizer("a").input_ids[:1]
    begin = first if first == [tokenizer.bos_token_id] else []
    if length < 2:  # a window's first token is not predicted
        raise ValueError(f"--length: wanted at least 2 tokens, got {length}")
    parts = (begin + ids[i : i + length - len(begin)] for i in range(0, len(ids), length - len(begin)))
    return [torch.tensor([part]) for part in parts if len(part) > 1]


def _first_ids(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> list[int]:
    """Return the ids of a text's first tokens. No more of it is read than they take, because a tokenizer takes 2 s for
    a megabyte; a cut changes tokens beside it alone."""
    chars = 8 * (tokens + _MARGIN)
    while True:
        ids: list[int] = tokenizer(text[:chars], add_special_tokens=False, verbose=False).input_ids
        if chars >= len(text) or len(ids) >= tokens + _MARGIN:
            return ids[:tokens]
        chars *= 2


def calibration_windows(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int, length: int) -> list[torch.Tensor]:
    """Return :func:`windows` of as many tokens that follow the first ``tokens`` of a text, or of fewer if it ends.

    Raises:
        ValueError: if the text ends before.
    """
    after = _first_ids(tokenizer, text, 2 * tokens)[tokens:]
    if len(after) < 2:
        size = len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        raise ValueError(
            f"--tokens: wanted fewer than the text's {size}, since this --method is calibrated on as many that follow, "
            f"got {tokens}"
        )
    return _in_windows(tokenizer, after, length)


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
        folder = find_checkpoint(path).path
        tokenizer = tokenizer_of(folder, AS_IT_IS)
        return dense_model(folder, dtype).to(device).eval(), tokenizer
    model, tokenizer = load(path, device, dtype)
    return dequantize_layers(model, dtype), tokenizer


def compare(
    dense: PreTrainedModel,
    parts: list[torch.Tensor],
    formats: Sequence[WeightFormat],
    method: str,
    progress: Callable[[int, int, str], None],
    calibration: Sequence[torch.Tensor] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the figures of a dense model for windows of token ids, then of a copy with its linear layers, and
    experts, in each format.

    Args:
        method: one of :data:`METHODS`.
        progress: called as ``progress(steps done, steps, format)``; a step is a window, or a layer that is calibrated.
        calibration: windows that a method of calibrated.py reads.

    Raises:
        ValueError: for a model or format that the method cannot round.
    """
    is_calibrated = method in calibrated.METHODS
    if is_calibrated:
        calibrated.check(dense, formats, method)
    each = len(parts) + (len(dense.model.layers) if is_calibrated else 0)
    done, total, reference = 0, len(parts) + each * len(formats), None
    for format in (None, *formats):
        name, model = ("dense", dense) if format is None else (str(format), copy.deepcopy(dense))

        def step(name: str = name) -> None:
            nonlocal done
            done += 1
            progress(done, total, name)

        shapes: list[PackedShape] = []
        if format is not None:
            rounding = f"rounding to {format}"
            progress(done, total, rounding)
            if is_calibrated:
                layers = calibrated.round_layers(model, calibration, format, method, partial(step, rounding))
                shapes = [packed_shape(format, "canonical", *layer.weight.shape) for layer in layers]
            else:
                quantize_layers(model, format, search=method == "search")
                weights = [layer.weight for layer in model.modules() if isinstance(layer, PackedModule)]
                shapes = [packed_shape(w.format, "canonical", w.n, w.k, w.experts) for w in weights]
        own = score(model, parts, step)
        reference = own if reference is None else reference
        numbers = sum(max(shape.experts, 1) * shape.n * shape.k for shape in shapes)
        yield {
            "format": name,
            "layers": len(shapes),
            "bits": 8 * sum(shape.nbytes for shape in shapes) / numbers if shapes else None,
            "tokens": len(own.choices),
            "perplexity": own.perplexity,
            "above_dense": own.perplexity / reference.perplexity - 1,
            "agreement": (own.choices == reference.choices).float().mean().item(),
        }
