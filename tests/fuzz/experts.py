"""Fuzz layers of experts in one launch: random routings beside a reference in float64.

    PYTHONPATH=src:tests python -m fuzz.experts --count 400                     emulated, half a second each
    PYTHONPATH=src:tests python -m fuzz.experts --count 20000 --device cuda
    PYTHONPATH=src:tests python -m fuzz.experts --only 17 --device cuda         one problem again, by its number
    PYTHONPATH=src:tests python -m fuzz.experts --format nvfp4 int4_g32_zint    forms with these weights alone

Problems take the forms of the kernel in turn, so that few are compiled. A routing is random, of one expert for all, of
one expert twice and more, or of none here. Ids may lie far outside, and numbers that nothing may touch may be NaN. A
problem of a form finds the flags and the scratch memory of the one before it. Emulated CTAs run at once or one after
another, in a random order, and races are looked for (``emulator.races``). On a GPU each problem runs once alone and
once in each of two more streams, with the same bits.

Exit status: 0, or 1 if a problem was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from expert_layers import (
    Layer,
    Sums,
    dtype_of,
    emulated,
    faults,
    forms_on,
    fresh_flags,
    launched,
    layer_of,
    reference,
    spec_of,
)
from w4gemm import Router
from w4gemm.api.expert_layer import ByIds, ByLogits
from w4gemm.choice import prepare
from w4gemm.jit import Unit
from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.kernels.helpers.experts import ExpertChoice
from w4gemm.tuning import record

TINY = spec_of(4, features=64, width=32, top_k=3, ctas=4)
"""Each CTA has one strip of down."""
GROUPED = ExpertChoice(Router(3, "sigmoid", groups=4, top_groups=2, scale=2.5), 12, torch.bfloat16, True)
CHOOSING = replace(TINY, mapped=True, choice=GROUPED)
SPLIT = spec_of(2, features=64, width=96, top_k=3, ctas=10, split=True, down_bias=True, down_scale=True)
"""Each strip of down is divided among two or three CTAs, of groups of two."""
_OAI = {"format": "mxfp4", "activation": "swiglu_oai", "gate_up_bias": True, "down_bias": True, "ids": torch.int32}
"""As gpt-oss' experts are."""
FORMS: tuple[tuple[ExpertLayer, str], ...] = (
    (TINY, "int4_g128"),
    (CHOOSING, "int4_g128"),
    (spec_of(8, features=128, width=96, mapped=True, **_OAI), "mxfp4"),
    (
        spec_of(
            2,
            activation="relu2",
            dtype=torch.float16,
            experts=40,
            features=192,
            width=32,
            top_k=5,
            gate_up_scale=True,
            down_scale=True,
            ctas=2,
        ),
        "int4_g128",
    ),
    (spec_of(1, format="int4_g32_zfloat", features=64, width=160, experts=3), "int4_g32_zfloat"),
    (
        replace(
            spec_of(4, experts=8, features=64, width=64, top_k=2, ctas=2),
            choice=ExpertChoice(Router(2), 8, torch.float32, False),
        ),
        "int4_g128",
    ),
    (SPLIT, "int4_g128"),
    (
        spec_of(
            4,
            format="mxfp4",
            activation="swiglu_oai",
            features=320,
            width=160,
            split=True,
            gate_up_bias=True,
            down_bias=True,
        ),
        "mxfp4",
    ),
    (
        spec_of(2, format="nvfp4", features=192, width=96, ctas=9, split=True, down_bias=True, down_scale=True),
        "nvfp4",
    ),
    (spec_of(1, format="int4_g32_zint", features=64, width=160, experts=3), "int4_g32_zint"),
)
"""Forms of the kernel, with the formats of their weights. On a GPU each has as many CTAs and warps as there are."""
_SIZES = {"experts": 16, "features": 704, "width": 416, "top_k": 4}
_IN_ORDER_SIZES = _SIZES | {"features": 832, "width": 608}
WIDE: tuple[tuple[ExpertLayer, str], ...] = (
    (spec_of(4, experts=16, features=2048, width=96, top_k=4), "int4_g128"),
    (spec_of(4, experts=8, features=704, width=1216, top_k=4, down_bias=True), "int4_g128"),
    (spec_of(8, experts=16, features=832, width=608, top_k=4), "int4_g128"),
    (spec_of(4, format="nf4", **_SIZES), "nf4"),
    (
        spec_of(
            2, format="mxfp4", activation="swiglu_oai", gate_up_bias=True, down_bias=True, ids=torch.int32, **_SIZES
        ),
        "mxfp4",
    ),
    (
        spec_of(
            4, format="int4_g32_zfloat", activation="gelu_mul", gate_up_bias=True, down_bias=True, mapped=True, **_SIZES
        ),
        "int4_g32_zfloat",
    ),
    (spec_of(2, format="int4_g64_zint_fp16", dtype=torch.float16, **_SIZES), "int4_g64_zint_fp16"),
    (spec_of(4, format="nvfp4", gate_up_bias=True, **_SIZES), "nvfp4"),
    (spec_of(8, format="nvfp4", dtype=torch.float16, **_SIZES | {"features": 704, "width": 1216}), "nvfp4"),
    (spec_of(8, in_order=True, **_IN_ORDER_SIZES), "int4_g128"),
    (spec_of(2, in_order=True, **_OAI, **_IN_ORDER_SIZES), "mxfp4"),
)
"""Larger forms, for a GPU. The first has a strip of down for each CTA of an H100, the second parts of strips, the third
odd numbers of blocks along k in steps of two."""
IN_ORDER: tuple[tuple[ExpertLayer, str], ...] = (
    (replace(TINY, in_order=True), "int4_g128"),
    (replace(CHOOSING, in_order=True), "int4_g128"),
    (spec_of(8, features=192, width=96, mapped=True, in_order=True, **_OAI), "mxfp4"),
)
"""Forms whose sums are in order, for the emulator: other kernels are the faster ones for so small layers on a GPU."""


class Problem(NamedTuple):
    """A call."""

    x: torch.Tensor
    choices: ByIds | ByLogits
    expert_map: torch.Tensor | None

    def to(self, device: str) -> Problem:
        moved = (t.to(device) if isinstance(t, torch.Tensor) else t for t in self.choices)
        expert_map = None if self.expert_map is None else self.expert_map.to(device)
        return Problem(self.x.to(device), type(self.choices)(*moved), expert_map)

    def sums(self, layer: Layer) -> Sums:
        """What the call is to give."""
        if isinstance(self.choices, ByLogits):
            chosen = ByIds(*self.choices.router.choose(self.choices.logits, self.choices.bias))
        else:
            chosen = self.choices
        ids = chosen.expert_ids.long()
        if self.expert_map is not None:
            here = (ids >= 0) & (ids < len(self.expert_map))
            ids = torch.where(here, self.expert_map[ids.clamp(0, len(self.expert_map) - 1)].long(), -1)
        return reference(layer, self.x, ByIds(ids, chosen.expert_weights))


def draw(spec: ExpertLayer, number: int) -> Problem:
    """A problem of a form, by its number."""
    r, g = random.Random(number), torch.Generator().manual_seed(number)
    m = r.randint(1, spec.tokens)
    x = torch.randn(m, spec.features, generator=g).to(dtype_of(spec))
    names = 12 if spec.mapped else spec.experts
    expert_map = None
    if spec.mapped:  # some experts are here, some of them by two names, some nowhere
        expert_map = torch.randint(-2, spec.experts + 1, (names,), generator=g, dtype=torch.int32)
    if spec.choice is not None:
        bias = torch.randn(names, generator=g) if spec.choice.biased else None
        logits = torch.randn(m, names, generator=g).mul(3).round(decimals=r.choice((0, 6))).to(spec.choice.dtype)
        return Problem(x, ByLogits(logits, spec.choice.router, bias), expert_map)
    far = torch.iinfo(spec.ids).max
    kind = r.choice(("any", "any", "different", "one", "few", "none"))
    if kind == "any":
        ids = torch.randint(-1, names + 1, (m, spec.top_k), generator=g)
    elif kind == "different":
        ids = torch.stack([torch.randperm(max(names, spec.top_k), generator=g)[: spec.top_k] for _ in range(m)])
    elif kind == "none":
        ids = torch.tensor([r.choice((-1, names, far, -far - 1)) for _ in range(m * spec.top_k)]).view(m, -1)
    else:
        few = [r.randrange(names) for _ in range(1 if kind == "one" else 2)]
        ids = torch.tensor([r.choice(few) for _ in range(m * spec.top_k)]).view(m, -1)
    weights = torch.rand(m, spec.top_k, generator=g) * r.choice((1.0, 1.0, -2.0, 0.0))
    if r.random() < 0.2:
        weights[(ids < 0) | (ids >= names)] = torch.nan
    if r.random() < 0.1:
        x[r.randrange(m), r.randrange(spec.features)] = torch.nan
    return Problem(x, ByIds(ids.to(spec.ids), weights), expert_map)


class Emulated:
    """Problems of a form, one after the other in the same memory."""

    def __init__(self, spec: ExpertLayer, format: str) -> None:
        self.layer, self.flags = layer_of(spec, format), fresh_flags()
        self.hidden = torch.full((spec.scratch_bytes // 4,), -1, dtype=torch.int32)

    def check(self, number: int) -> str:
        """Say what is wrong in a problem; the empty string if nothing is."""
        spec, r = self.layer.spec, random.Random(number)
        problem = draw(spec, number)
        order = r.sample(range(spec.ctas), spec.ctas)
        run = {"resident": r.choice((0, 1, 2)), "order": order, "seed": r.choice((None, number))}
        return faults(emulated(self.layer, *problem, self.flags, self.hidden, **run), problem.sums(self.layer))


class OnGpu:
    """Problems of a form on the current GPU."""

    def __init__(self, spec: ExpertLayer, format: str) -> None:
        self.layer = layer_of(spec, format)
        self.there, self.streams = self.layer.to("cuda"), [torch.cuda.Stream() for _ in range(2)]

    def units(self) -> set[Unit]:
        """All that the form's problems launch."""
        x, choices, _ = draw(self.layer.spec, 0).to("cuda")
        return {form.unit() for form in forms_on(x.device, self.there, x, choices)}

    def check(self, number: int) -> str:
        """Say what is wrong in a problem; the empty string if nothing is."""
        problem = draw(self.layer.spec, number)
        moved = problem.to("cuda")
        outs = [launched(self.there, *moved)]
        torch.cuda.synchronize()
        for stream in self.streams:
            with torch.cuda.stream(stream):
                outs += [launched(self.there, *moved)]
        torch.cuda.synchronize()
        bits = [out.view(torch.int16) for out in outs]
        if not all(torch.equal(bits[0], other) for other in bits[1:]):
            return "other bits in another stream"
        return faults(outs[0].cpu(), problem.sums(self.layer))


def fuzz(numbers: Sequence[int], device: str, forms: Sequence[tuple[ExpertLayer, str]] = FORMS) -> list[str]:
    """Run problems, and return what was wrong. numbers: of problems; a number's form is that of its remainder."""
    made = [(OnGpu if device == "cuda" else Emulated)(*form) for form in forms]
    if device == "cuda":
        prepare((), [unit for each in made if isinstance(each, OnGpu) for unit in each.units()])
    wrong = []
    for done, number in enumerate(numbers, 1):
        if done % 1000 == 0:
            print(f"{done} of {len(numbers)} problems", flush=True)
        if text := made[number % len(made)].check(number):
            wrong.append(f"{number}: {text}")
            print(wrong[-1], flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="problems (400)")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem (0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one problem")
    parser.add_argument("--format", nargs="+", help="of the weights of the forms to run (default: all)")
    parser.add_argument("--device", choices=("emulator", "cuda"), default="emulator")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count) if args.only is None else [args.only]
    started = time.monotonic()
    every = (*FORMS, *(WIDE if args.device == "cuda" else IN_ORDER))
    forms = [form for form in every if not args.format or form[1] in args.format]
    if not forms:
        parser.error(f"--format: there is no such form on the {args.device}")
    wrong = fuzz(numbers, args.device, forms)
    seconds = time.monotonic() - started
    print(f"{len(numbers)} problems on the {args.device} in {seconds:.0f} s, {len(wrong)} wrong")
    if args.json:
        facts = record.facts()
        row = {"kind": "fuzz", "run": record.run_name(facts), "device": args.device, "problems": len(numbers)}
        row |= {"wrong": len(wrong), "seed": args.first, "seconds": round(seconds), "kernels": record.kernels_hash()}
        row |= {"helpers": {"expert_layer": len(numbers)}, "names": [text[:120] for text in wrong[:20]]}
        record.append(args.json, row | facts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
