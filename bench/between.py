"""Measure a layer's products with what lies between them: ``python -m bench.between --model llama-3-8b --m 1,8,64``.

A layer as vLLM runs it: added norm, qkv, a copy in the place of attention, o, added norm, gate_up, gate, down; with fp8
x its norms, its gate and what follows the copy quantize. Timed in CUDA graphs, with cold weights, in turn: the layer
("layer"), its last four launches ("mlp") and each product alone ("qkv", "o", "gate_up", "down"). What the layer takes
beyond the sum of its products lies between them.

Rows go to bench/results/between_products.jsonl. Needs a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from bench.options import add_formats, add_out, command, counts, some_of, typed
from bench.shapes import MODELS

from w4gemm import QuantizedWeight, WeightFormat, linear, quantize_activations
from w4gemm.api.step import add_rms_norm, add_rms_norm_quantize, gate_halves
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs
from w4gemm.weights.random import random_weight

RESULTS = Path(__file__).parent / "results/between_products.jsonl"
PRODUCTS = ("qkv", "o", "gate_up", "down")
WHOLE = tuple(name for name, shapes in MODELS.items() if len(shapes) == len(PRODUCTS))
"""Models all of whose products are in bench/shapes.py."""
_BYTES = 400e6
"""Weights that the calls of a graph rotate over: more than L2 holds."""
_EPS = 1e-6


class Input(NamedTuple):
    """x of a product, and the scales of its tokens if x is quantized."""

    x: torch.Tensor
    scale: torch.Tensor | None = None


class Layer(NamedTuple):
    """The weights of a layer."""

    qkv: QuantizedWeight
    o: QuantizedWeight
    gate_up: QuantizedWeight
    down: QuantizedWeight


class Hidden(NamedTuple):
    """A model's state between two launches, (m, hidden) in bf16 each."""

    added: torch.Tensor
    """The last product, which the next norm adds to the residual."""
    residual: torch.Tensor


class Normed(NamedTuple):
    """The norm of added + residual, and that sum."""

    input: Input
    residual: torch.Tensor


class Step:
    """The launches of a layer, for ``hidden`` in front of it; its products take x in bf16 or, if ``fp8``, in e4m3."""

    def __init__(self, hidden: Hidden, fp8: bool) -> None:
        self.hidden, self.fp8 = hidden, fp8
        self.attended = torch.empty_like(hidden.residual)
        self.factors = torch.ones_like(hidden.residual[0])

    def layer(self, weights: Layer) -> Hidden:
        normed = self.normed(self.hidden)
        self.attended.copy_(product(normed.input, weights.qkv)[:, : self.attended.shape[1]])
        added = product(self.quantized(self.attended), weights.o)
        return self.mlp(weights, Hidden(added, normed.residual))

    def mlp(self, weights: Layer, hidden: Hidden) -> Hidden:
        """The norm behind attention and what follows."""
        normed = self.normed(hidden)
        halves = product(normed.input, weights.gate_up)
        return Hidden(product(self.gated(halves), weights.down), normed.residual)

    def normed(self, hidden: Hidden) -> Normed:
        if self.fp8:
            x8, scale, residual = add_rms_norm_quantize(*hidden, self.factors, _EPS)
            return Normed(Input(x8, scale), residual)
        y, residual = add_rms_norm(*hidden, self.factors, _EPS)
        return Normed(Input(y), residual)

    def gated(self, halves: torch.Tensor) -> Input:
        if self.fp8:
            return Input(*quantize_activations(halves, silu_mul=True))
        return Input(gate_halves(halves, "silu_mul"))

    def quantized(self, x: torch.Tensor) -> Input:
        return Input(*quantize_activations(x)) if self.fp8 else Input(x)


def product(given: Input, weight: QuantizedWeight) -> torch.Tensor:
    return linear(given.x, weight, token_scale=given.scale, out_dtype=torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.between", __doc__)
    names = ", ".join(WHOLE)
    parser.add_argument(
        "--model", type=typed(some_of(*WHOLE)), default=WHOLE[0], help=f"some of {names} (default: %(default)s)"
    )
    parser.add_argument("--m", type=typed(counts), default="1,8,16,64", help="tokens (default: %(default)s)")
    add_formats(parser)
    parser.add_argument("--fp8", action="store_true", help="products take x in e4m3 (W4A8)")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts = record.facts()
    for model, format in itertools.product(args.model, args.format):
        layers = drawn(model, format, args.fp8, "cuda")
        for m in args.m:
            common = {"kind": "between_products", "run": record.run_name(facts), "model": model, "m": m}
            common |= {"format": str(format), "dtype": "float8_e4m3fn" if args.fp8 else "bfloat16"}
            us = measure(layers, m, args.fp8)
            record.append(args.out, common | {"us": us} | facts)
            alone = sum(us[name] for name in PRODUCTS)
            print(f"{model} {format}, m {m}: {', '.join(f'{part} {time}' for part, time in us.items())} us; ", end="")
            print(f"between products {us['layer'] - alone:.2f}", flush=True)


def drawn(model: str, format: WeightFormat, fp8: bool, device: str) -> list[Layer]:
    """Return layers of random weights, as many as are larger than L2 together."""
    sizes = MODELS[model]
    count = max(2, round(_BYTES / sum(n * k / 2 for n, k in sizes)))

    def weight(n: int, k: int, seed: int) -> QuantizedWeight:
        return random_weight(format, n, k, seed, device=device).repack(activations="fp8" if fp8 else None)

    return [Layer(*(weight(n, k, seed) for n, k in sizes)) for seed in range(count)]


def measure(layers: list[Layer], m: int, fp8: bool) -> dict[str, float]:
    """Return the median microseconds of each part."""

    def random(k: int) -> torch.Tensor:
        return torch.randn(m, k, dtype=torch.bfloat16, device=layers[0].qkv.device)

    hidden = Hidden(random(layers[0].qkv.k), random(layers[0].qkv.k))
    step = Step(hidden, fp8)
    parts: dict[str, list[Callable[[], object]]] = {
        "layer": [lambda w=w: step.layer(w) for w in layers],
        "mlp": [lambda w=w: step.mlp(w, hidden) for w in layers],
    }
    for name in PRODUCTS:
        weights = [getattr(w, name) for w in layers]
        given = step.quantized(random(weights[0].k))
        weights += [copy_of(w) for w in weights * int(_BYTES / sum(w.nbytes for w in weights))]
        parts[name] = [lambda w=w, given=given: product(given, w) for w in weights]
    times = time_graphs(list(parts.values()), replays=25)
    return {part: round(time.p50, 2) for part, time in zip(parts, times, strict=True)}


def copy_of(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in memory of their own."""
    return replace(weight, tensors=tuple(t.clone() for t in weight.tensors))


if __name__ == "__main__":
    main()
