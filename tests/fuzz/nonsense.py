"""Nonsense calls: every argument of every public function in turn becomes something that it should not be.

    PYTHONPATH=src:tests python -m fuzz.nonsense                 every argument with every piece of nonsense
    PYTHONPATH=src:tests python -m fuzz.nonsense --only linear:x

A call that is right is made first. Then it must raise TypeError, ValueError, NotImplementedError or one of w4gemm's own
errors, with the argument's name in the message; or return, where what came is as good as what was wanted. A result that
has numbers must be finite or refused if what came was.

Exit status: 0, or 1 if a call ended otherwise.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import w4gemm
from w4gemm.tuning.random_weight import random_weight

MEMORY = 2**34
"""Bytes of address space that all calls have."""
SLOW = 60
"""Seconds that no call of this size takes."""
N, K, M, EXPERTS = 48, 64, 5, 3
OURS = str(Path(w4gemm.__file__).parent)
ERRORS = (TypeError, ValueError, NotImplementedError, w4gemm.UnsupportedError, w4gemm.FormatError, FileNotFoundError)


class Call(NamedTuple):
    """A public function with arguments that are right."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    also: tuple[str, ...] = ()
    """Other names by which a message may call the arguments."""


def calls() -> dict[str, Call]:
    """Return a call of every public function, by its name."""
    torch.manual_seed(0)
    w = w4gemm.quantize(torch.randn(N, K), "int4_g32")
    stack = w4gemm.QuantizedWeight.stack([w] * EXPERTS)
    return _functions(w, stack) | _methods_of_weights(w, stack) | _layers(w, stack) | _choices(w)


def _functions(w: w4gemm.QuantizedWeight, stack: w4gemm.QuantizedWeight) -> dict[str, Call]:
    x, ids = torch.randn(M, K), torch.randint(EXPERTS, (M, 2))
    fp8 = w4gemm.quantize(torch.randn(N, K), "int4_g32_e4m3")
    offsets, routing = torch.tensor([0, 2, 2, M], dtype=torch.int32), w4gemm.route(ids, EXPERTS)
    fused = {"alpha": 0.5, "activation": "gelu", "residual": torch.randn(M, N), "out_dtype": None, "config": None}
    masked = fused | {"residual": torch.randn(EXPERTS, 4, N)}
    out = torch.empty(M, N)
    return {
        "linear": Call(
            w4gemm.linear, {"x": x, "w": w, "bias": torch.randn(N), **fused, "out": out, "batch_invariant": False}
        ),
        "linear fp8": Call(
            w4gemm.linear, {"x": x.to(torch.float8_e4m3fn), "w": fp8, "token_scale": torch.rand(M), "out_dtype": None}
        ),
        "grouped_linear": Call(
            w4gemm.grouped_linear,
            {"x": x, "w": stack, "m_offsets": offsets, "bias": torch.randn(EXPERTS, N), **fused}
            | {"expert_scale": torch.rand(EXPERTS), "indices": torch.arange(M), "settled": False, "out": out},
        ),
        "masked_linear": Call(
            w4gemm.masked_linear,
            {"x": torch.randn(EXPERTS, 4, K), "w": stack, "counts": torch.tensor([1, 0, 4], dtype=torch.int32)}
            | {"bias": torch.randn(EXPERTS, N), "expert_scale": torch.rand(EXPERTS), "expected_m": 2, **masked},
        ),
        "quantize": Call(
            w4gemm.quantize, {"weight": torch.randn(N, K), "format": "int4_g32", "search": False, "progress": None}
        ),
        "quantize_activations": Call(
            w4gemm.quantize_activations, {"x": x, "norm_weight": torch.rand(K), "eps": 1e-6, "silu_mul": False}
        ),
        "route": Call(w4gemm.route, {"expert_ids": ids, "experts": EXPERTS, "expert_map": None}),
        "combine": Call(
            w4gemm.combine,
            {"d": torch.randn(2 * M, N), "row_of_choice": routing.row_of_choice, "weights": torch.rand(M, 2)}
            | {"out": torch.empty(M, N), "settled": False},
        ),
        "fold_scales": Call(w4gemm.fold_scales, {"w": w4gemm.quantize(torch.randn(N, K).bfloat16(), "int4_g32")}),
        "codebook": Call(w4gemm.codebook, {"values": [*range(-8, 8)]}),
        "autotune": Call(w4gemm.autotune, {"top": 3}),
    }


def _methods_of_weights(w: w4gemm.QuantizedWeight, stack: w4gemm.QuantizedWeight) -> dict[str, Call]:
    codes, scales = torch.randint(16, (N, K), dtype=torch.uint8), torch.rand(N, 2).bfloat16() + 0.5
    zint = w4gemm.WeightFormat(32, "int")
    return {
        "from_codes": Call(
            w4gemm.QuantizedWeight.from_codes,
            {"format": "int4_g32", "codes": codes, "scales": scales, "zeros": None, "g_idx": None, "channels": None}
            | {"factors": None},
        ),
        "from_codes zint": Call(
            w4gemm.QuantizedWeight.from_codes,
            {"format": zint, "codes": codes, "scales": scales, "zeros": codes[:, :2].contiguous()}
            | {"g_idx": torch.arange(K) // 32},
        ),
        "QuantizedWeight": Call(
            w4gemm.QuantizedWeight,
            {"format": w.format, "n": N, "k": K, "layout": w.layout, "tensors": w.tensors, "perm": None, "experts": 0}
            | {"activations": None},
        ),
        "interleave": Call(w4gemm.QuantizedWeight.interleave, {"gate": w, "up": w}),
        "stack": Call(w4gemm.QuantizedWeight.stack, {"weights": [w, w], "count": 2, "layout": None}),
        "expert": Call(stack.expert, {"index": 1}),
        "repack": Call(w.repack, {"layout": "cpu", "activations": "same"}),
        "dequantize": Call(w.dequantize, {"dtype": torch.float32}),
        "to": Call(w.to, {"device": "cpu"}),
        "shard": Call(w.shard, {"dim": 0, "index": 1, "count": 2}),
    }


def _layers(w: w4gemm.QuantizedWeight, stack: w4gemm.QuantizedWeight) -> dict[str, Call]:
    x, ids = torch.randn(M, K), torch.randint(EXPERTS, (M, 2))
    layer = w4gemm.W4Linear.from_weight(w, torch.randn(N))
    gate_up = w4gemm.QuantizedWeight.stack([random_weight(w.format, 2 * 32, K, seed) for seed in range(EXPERTS)])
    down = w4gemm.QuantizedWeight.stack([random_weight(w.format, K, 32, seed) for seed in range(EXPERTS)])
    experts = w4gemm.W4Experts(gate_up, down)
    return {
        "W4Linear": Call(
            w4gemm.W4Linear,
            {"in_features": K, "out_features": N, "bias": True, "format": "int4_g32", "dtype": None, "device": None}
            | {"activation": None, "batch_invariant": False, "activations": None},
        ),
        "W4Linear.from_linear": Call(
            w4gemm.W4Linear.from_linear, {"linear": torch.nn.Linear(K, N), "format": "int4_g32", "search": False}
        ),
        "W4Linear.from_weight": Call(w4gemm.W4Linear.from_weight, {"w": w, "bias": torch.randn(N), "dtype": None}),
        "W4Linear.forward": Call(layer, {"x": x}),
        "W4GroupedLinear.from_weight": Call(
            w4gemm.W4GroupedLinear.from_weight,
            {"w": stack, "bias": torch.randn(EXPERTS, N), "dtype": None, "expert_scale": torch.rand(EXPERTS)},
        ),
        "W4Experts": Call(
            w4gemm.W4Experts,
            {"gate_up": gate_up, "down": down, "activation": "silu_mul", "dtype": None, "activations": "same"},
        ),
        "W4Experts.forward": Call(
            experts, {"x": x, "expert_ids": ids, "expert_weights": torch.rand(M, 2)}, ("row_of_choice", "weights")
        ),
    }


def _choices(w: w4gemm.QuantizedWeight) -> dict[str, Call]:
    """Formats, configs, problems, and what chooses by them."""
    x, runner = torch.randn(M, K), w4gemm.MixedGemm("int4_g32", torch.float32, "cpu")
    problem = w4gemm.GemmProblem(M, N, K, torch.bfloat16, w.format, "mma16")
    return {
        "configs": Call(w4gemm.configs, {"problem": problem}),
        "explain": Call(w4gemm.explain, {"problem": problem, "config": None}),
        "WeightFormat": Call(
            w4gemm.WeightFormat, {"group_size": 32, "zero": "none", "scale": "bf16", "element": "int4"}
        ),
        "WeightFormat.parse": Call(w4gemm.WeightFormat.parse, {"name": "int4_g32"}, ("format",)),
        "GemmConfig": Call(
            w4gemm.GemmConfig,
            {"tile_m": 64, "tile_n": 128, "tile_k": 128, "cluster_m": 1, "cluster_n": 1, "schedule": "coop"}
            | {"split_k": 1, "tail": None},
        ),
        "GemmConfig.parse": Call(w4gemm.GemmConfig.parse, {"text": "64x128x128_1x1x1_coop"}, ("config",)),
        "Device.of": Call(w4gemm.Device.of, {"device": "cpu"}),
        "GemmProblem": Call(
            checked_problem,
            {"m": M, "n": N, "k": K, "dtype": torch.bfloat16, "format": w.format, "layout": "mma16", "experts": 0}
            | {"epilogue": w4gemm.Epilogue(), "batch_invariant": False, "gathered": False},
        ),
        "MixedGemm": Call(
            w4gemm.MixedGemm,
            {"format": "int4_g32", "dtype": torch.float32, "device": "cpu", "layout": None}
            | {"epilogue": w4gemm.Epilogue(), "batch_invariant": False},
        ),
        **{
            f"MixedGemm.{name}": Call(getattr(runner, name), arguments)
            for name, arguments in {
                "problem": {"m": M, "n": N, "k": K},
                "weight_shapes": {"n": N, "k": K},
                "configs": {"m": M, "n": N, "k": K},
                "tokens": {"most": 64, "n": N, "k": K},
                "prepare": {"m": M, "n": N, "k": K, "config": None},
                "run": {"a": x, "b": w.repack().tensors, "out": torch.empty(M, N), "n": N, "config": None},
            }.items()
        },
    }


def checked_problem(**arguments: Any) -> list[str]:
    """The configs of a problem, which check it."""
    return w4gemm.configs(w4gemm.GemmProblem(**arguments))


class Refuses:
    """An object of no known type."""


def nonsense(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values that may come for another, with a name for each."""
    yield from {
        "None": None,
        "text": "nonsense",
        "no text": "",
        "bytes": b"x",
        "number": 3,
        "0": 0,
        "-1": -1,
        "huge": 10**400,
        "2**31": 2**31,
        "2**63": 2**63,
        "fraction": 0.5,
        "nan": math.nan,
        "inf": math.inf,
        "true": True,
        "list": [1, 2],
        "nothing": [],
        "tuple": (1,),
        "dict": {"a": 1},
        "object": Refuses(),
        "type": Refuses,
        "dtype": torch.int64,
        "device": torch.device("meta"),
        "array": np.zeros((2, 2)),
        "complex": 1j,
        "scalar tensor": torch.tensor(1.0),
        "empty tensor": torch.empty(0),
        "4-d tensor": torch.zeros(1, 2, 3, 4),
        "lone surrogate": "\ud800",
        "another weight": w4gemm.quantize(torch.randn(16, 32), "int4_g32"),
        "module": torch.nn.Linear(2, 2),
    }.items()
    if not isinstance(value, torch.Tensor):
        return
    yield "meta", value.to("meta")
    yield "sparse", value.to_sparse() if value.dtype not in (torch.float8_e4m3fn,) else Refuses()
    yield "bool", value.bool()
    yield "complex tensor", value.float() + 0j
    yield "float64", value.double()
    yield "int64", value.float().long()
    yield "float16", value.half()
    yield "one row less", value[:-1]
    yield "one column less", value[..., :-1]
    yield "another dimension", value[None]
    yield "no dimension", value.flatten()[0]
    yield "no rows", value[:0]
    yield "no columns", value[..., :0]
    yield "requires a gradient", value.detach().clone().requires_grad_(True) if value.is_floating_point() else None
    if value.dim() > 1:
        yield "transposed", value.T if value.dim() == 2 else value.mT
        yield "strided", torch.stack([value, value], -1)[..., 0] if value.element_size() > 1 else value
        yield "expanded", value[:1].expand_as(value)
    if value.dtype.is_floating_point and value.element_size() > 1:
        yield "with NaN", torch.where(torch.arange(value.shape[-1]) == 0, math.nan, value).to(value.dtype)
        yield "with inf", torch.where(torch.arange(value.shape[-1]) == 0, math.inf, value).to(value.dtype)
        yield "fp8", value.to(torch.float8_e4m3fn)
    if not value.dtype.is_floating_point:
        yield "negative", value - 100
        yield "too large", value + 100 if value.element_size() == 1 else value + 2**30
        yield "backwards", value.flip(0)


class Outcome(NamedTuple):
    """A call that ended otherwise than it may."""

    call: str
    argument: str
    came: str
    what: str

    def __str__(self) -> str:
        return f"{self.call}({self.argument}={self.came}): {self.what}"


def judged(name: str, call: Call, argument: str, came: str, value: Any) -> Outcome | None:
    """Make a call with one value replaced; None if it ends as it may."""
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.arguments.items()} | {
        argument: value
    }
    started = time.monotonic()
    try:
        result = call.function(**arguments)
    except ERRORS as error:
        text = str(error)
        named = any(re.search(rf"\b{name}\b", text) for name in (*call.arguments, *call.also))
        ours = any(frame.filename.startswith(OURS) for frame in traceback.extract_tb(error.__traceback__)[-1:])
        if not (named and ours):
            return Outcome(name, argument, came, f"no argument is named: {type(error).__name__}: {text[:300]}")
        if isinstance(error, TypeError) and "unexpected keyword" in text:
            return Outcome(name, argument, came, text[:300])
        return None
    except BaseException as error:
        return Outcome(name, argument, came, f"{type(error).__name__}: {str(error)[:300]}")
    if time.monotonic() - started > SLOW:
        return Outcome(name, argument, came, f"took {time.monotonic() - started:.1f} s")
    if _is_other_kind(argument, call.arguments[argument], value):
        return Outcome(name, argument, came, f"taken: {_short(result)}")
    return None


def _is_other_kind(argument: str, expected: Any, came: Any) -> bool:
    """True if no call should take one for the other."""
    if argument == "device" and isinstance(came, torch.device):
        return False
    if isinstance(expected, torch.Tensor):
        return not isinstance(came, (torch.Tensor, float, int)) and came is not None
    if isinstance(expected, str):
        return not isinstance(came, str) and came is not None
    if isinstance(expected, int):
        return isinstance(came, bool) or (not isinstance(came, int) and came is not None)
    if isinstance(expected, w4gemm.QuantizedWeight):
        return not isinstance(came, w4gemm.QuantizedWeight) and came is not None
    return isinstance(came, (Refuses, complex, bytes))


def _short(result: Any) -> str:
    text = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, torch.Tensor) else repr(result)
    return text[:120]


def find(r: random.Random | None = None, one_in: int = 1, only: str = "") -> tuple[int, list[Outcome]]:
    """Make every call, or one in so many; return how many there were, and what is wrong."""
    count, wrong = 0, []
    for name, call in calls().items():
        call.function(**call.arguments)  # is right
        parameters = inspect.signature(call.function).parameters
        varying = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        missing = [p for p in parameters if p not in call.arguments and parameters[p].kind not in varying]
        for argument in [*call.arguments, *missing]:
            if isinstance(call.arguments.get(argument), bool):
                continue  # whatever is true
            if only and not f"{name}:{argument}".startswith(only):
                continue
            value, full = call.arguments.get(argument), call._replace(arguments={argument: None, **call.arguments})
            for came, replaced in nonsense(value):
                if r is not None and r.randrange(one_in):
                    continue
                count += 1
                if argument == "progress" and callable(replaced):
                    continue  # a function of the caller's may do what it will
                verdict = judged(name, full, argument, came, replaced)
                if verdict is not None:
                    print(verdict, flush=True)
                    wrong.append(verdict)
    return count, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CALL:ARGUMENT", help="calls that begin so")
    args = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    count, wrong = find(only=args.only)
    print(f"{count} calls, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
