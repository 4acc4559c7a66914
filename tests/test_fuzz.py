"""The fuzzer: a slice of it, and that it finds what is wrong."""

from __future__ import annotations

import ast
import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import w4gemm
from fuzz import calls, cases, formulas, helpers, run
from fuzz.numbers import operands_of, rows_of
from w4gemm.core.problem import H200

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_a_slice_with_a_new_seed(new_seed):
    """So many variants, not so many seconds: the same problems on every machine."""
    arguments = ["--variants", "30", "--seconds", "3600", "--device", "cpu", "--seed", str(new_seed)]
    assert run.main(arguments) == 0


@pytest.mark.gpu
def test_a_slice_on_the_gpu(new_seed):
    assert run.main(["--seconds", "30", "--device", "cuda", "--seed", str(new_seed)]) == 0


def test_a_gpu_is_given_weights_of_every_width():
    drawn = {w4gemm.WeightFormat.parse(cases.drawn_variant(i, "cuda", None).format).element for i in range(400)}
    assert {"int2", "int3", "int4", "int5", "int6", "int8", "e4m3"} <= drawn


def test_a_forced_config_is_legal_where_rows_of_x_are_copied(monkeypatch):
    """Rows of a padded x are no multiples of 16 bytes, so that no kernel gathers them in place."""
    monkeypatch.setattr(w4gemm.Device, "of", lambda device: H200)
    case = cases.draw(141910209, 170577790, 2045742930, "cuda")
    assert (case.variant.kind, case.strides) == ("gathered", "padded")
    r = random.Random(0)
    operands = operands_of(case, rows_of(case, r), r, "cpu")
    w = SimpleNamespace(format=w4gemm.WeightFormat.parse(case.variant.format), layout="mma8", device="cuda")
    epilogue = w4gemm.Epilogue("swiglu_oai", "host", residual=True, token_scale=True)
    problem = w4gemm.GemmProblem(case.m, case.n, case.k, cases.FP8, w.format, "mma8", epilogue, H200, experts=8)
    assert calls.config_of(case, w, operands, case.m) in w4gemm.configs(problem)
    in_place = operands._replace(x=operands.x.contiguous())
    assert calls.config_of(case, w, in_place, case.m) in w4gemm.configs(dataclasses.replace(problem, gathered=True))


def test_the_formulas_are_independent():
    tree = ast.parse(Path(formulas.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"__future__", "math", "struct", "collections.abc", "typing", "torch"}


@pytest.mark.parametrize("dtype", DTYPES, ids=calls.name_of)
def test_rounding_is_that_of_pytorch(dtype):
    """Against PyTorch's conversion of what float32 holds, to the ends of the range."""
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    values = bits.int().view(torch.float32)
    values = values[values.isfinite()]
    assert torch.equal(
        formulas.rounded(values.double(), formulas.TYPES[calls.name_of(dtype)]), values.to(dtype).double()
    )


def cut_sums(x, w, columns, of_x=None, of_w=None):
    """x @ w.T as fp8 tensor cores add it up: in steps of 32 columns each product and the sum so far lose what is below
    14 bits of the largest of them. After ``columns`` the sum is added to another one, in float64 here. of_x, of_w: the
    magnitudes that products are aligned by, if not those of x and w."""
    of_x, of_w = x.abs() if of_x is None else of_x, w.abs() if of_w is None else of_w
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for first in range(0, x.shape[1], columns):
        sums = torch.zeros_like(total)
        for start in range(first, min(first + columns, x.shape[1]), 32):
            step = slice(start, min(start + 32, first + columns))
            terms = torch.cat((x[:, None, step] * w[:, step], sums[..., None]), -1)
            counted = torch.cat((of_x[:, None, step] * of_w[:, step], sums.abs()[..., None]), -1)
            least = torch.exp2(torch.frexp(counted.amax(-1, keepdim=True)).exponent.double() - 14)
            sums = (torch.trunc(terms / least) * least).sum(-1)
        total += sums
    return total


@pytest.mark.parametrize(
    ("format", "block_scale", "columns"),
    [
        ("int4_g32", False, 128),
        ("e2m1_g32_e8m0", False, 4096),
        ("int4_g32_e4m3", False, 4096),
        ("int4_col_e4m3", True, 128),
    ],
)
def test_what_fp8_tensor_cores_cut_off_is_allowed(format, block_scale, columns):
    """Also where the first columns' products are the largest, and those of each later step are cut at their sum."""
    case = next(c for c in (cases.draw(i, 0, 0, "cuda") for i in range(9999)) if c.variant.dtype == cases.FP8)
    variant = dataclasses.replace(case.variant, format=format, block_scale=block_scale)
    assert calls.columns_at_a_time(dataclasses.replace(case, variant=variant, k=4096)) == columns
    x, w = torch.randn(64, 4096).to(cases.FP8).double(), torch.randint(-8, 8, (64, 4096)).double()
    w[:, 32:] *= 2.0**-6
    actual = cut_sums(x, w, columns)

    def used(columns):
        options = {"w_may_be_rounded": False, "columns_at_a_time": columns}
        sums = formulas.product(x, formulas.Weight(w, w.abs(), w.abs()), "float8_e4m3fn", **options)
        return float(((actual - sums.value).abs() / sums.error).max())

    assert 0.01 < used(columns) < 0.7
    assert columns == 128 or used(128) > 1


@pytest.mark.parametrize("element", ["e5m2", "int4"])
def test_what_subnormal_numbers_and_float_zero_points_cost_is_allowed(element):
    """A subnormal operand aligns products like the least normal one, and zero points are added to sums of codes: more
    may be lost than the magnitudes of x and w say."""
    source, group = torch.Generator().manual_seed(0), torch.zeros(16, dtype=torch.long)
    x = torch.randn(64, 16, generator=source) * torch.logspace(-5, 8, 16, base=2)
    x, scales = x.to(cases.FP8).double(), torch.ones(64, 1)
    if element == "e5m2":
        x = 2.0**-9 * torch.randint(1, 4, (64, 16), generator=source).double()
        codes = torch.randint(36, 56, (64, 16), generator=source, dtype=torch.uint8)  # 2**-6 to 1.75 * 2**-2
        codes[:, 0] = 23 << 2  # 2**8, which all others are cut off by
        w = formulas.weight(codes, scales, None, None, group, "none", element)
        of_x = formulas.aligned(x, torch.tensor(2.0**-6))
        actual = cut_sums(x, w.value, 128, of_x, formulas.aligned(w.value, torch.tensor(2.0**-14)))
    else:
        codes = torch.randint(0, 16, (64, 1), generator=source, dtype=torch.uint8).repeat(1, 16)
        zeros = 2.0**-6 - codes[:, :1].float()
        w = formulas.weight(codes, scales, zeros, None, group, "float")
        actual = cut_sums(x, codes.double() - 8, 128) + x.sum(1, keepdim=True) * (zeros.double() + 8).T

    def used(w, **options):
        sums = formulas.product(x, w, "float8_e4m3fn", w_may_be_rounded=False, columns_at_a_time=128, **options)
        return float(((actual - sums.value).abs() / sums.error).max())

    assert 0.01 < used(w) < 0.7
    assert used(w._replace(operands=w.value.abs()), x_scale=torch.zeros_like(x)) > 1


def faults():
    """Changes of the formulas, each of which makes a right result a wrong one."""
    weight, product, epilogue = formulas.weight, formulas.product, formulas.epilogue

    def one_code(codes, *rest):
        codes = codes.clone()
        codes[-1, -1] ^= 1
        return weight(codes, *rest)

    def groups_shifted(codes, scales, *rest):
        return weight(codes, scales.roll(1, 1), *rest)

    def last_column_lost(x, w, *rest, **others):
        value = w.value.clone()
        value[:, -1] = 0
        return product(x, w._replace(value=value), *rest, **others)

    def residual_lost(*args, **others):
        return epilogue(*args, **(others | {"residual": None}))

    def bias_after(*args, **others):
        bias = others["bias"]
        return epilogue(*args, **(others | {"bias": None if bias is None else bias.roll(1, -1)}))

    yield "weight", one_code
    yield "weight", groups_shifted
    yield "product", last_column_lost
    yield "epilogue", residual_lost
    yield "epilogue", bias_after


@pytest.mark.parametrize("name, fault", list(faults()), ids=lambda f: getattr(f, "__name__", ""))
def test_faults_are_found(monkeypatch, name, fault):
    """A fault in the formulas looks like one in the library, and is found among 300 problems."""
    monkeypatch.setattr(formulas, name, fault)
    r = random.Random(0)
    for _ in range(300):
        case = cases.draw(r.randrange(100), r.randrange(2**31), r.randrange(2**31), "cpu")
        (verdict,) = calls.verdicts([calls.check(case, "cpu").verdict])
        if str(verdict):
            return
    pytest.fail("not found")


def faults_of_helpers():
    """A name that the fuzzer of the helper kernels calls, and a fault in what it returns."""

    def one_number(t):
        t = t.clone()
        t.view(-1)[-1] += 1 + t.abs().amax()
        return t

    norm, gates, attend = helpers.rms_norm, helpers.gate_halves, helpers.step_attention
    added, added8 = helpers.add_rms_norm, helpers.add_rms_norm_quantize
    route, combine, quantize = w4gemm.route, w4gemm.combine, w4gemm.quantize_activations

    def half_the_epsilon(x, weight, eps):
        return norm(x, weight, eps / 2)

    def another_sum(x, residual, weight, eps):
        return added(x, residual, weight, eps)[0], x + 1.01 * residual

    def residual_twice(x, residual, weight, eps):
        return *added8(x + residual, residual, weight, eps)[:2], x + residual

    def halves_changed(x, activation):
        return gates(x.roll(x.shape[1] // 2, 1), activation)

    def a_slot_too_many(q, k, v, angles, cached, scale, window):
        return attend(q, k, v, angles, cached, scale, window + 1)

    def another_slot_written(q, k, v, angles, cached, *rest):
        cached.values[0, 0, 0] += 1
        return attend(q, k, v, angles, cached, *rest)

    def last_token(*args):
        routed = route(*args)
        return routed._replace(tokens=routed.tokens.flip(0))

    def one_sum(*args, **others):
        return one_number(combine(*args, **others))

    def scale_of_another_row(*args, **others):
        x8, scale = quantize(*args, **others)
        return x8, scale.roll(1, 0)

    yield "rms_norm", helpers, "rms_norm", half_the_epsilon
    yield "rms_norm", helpers, "add_rms_norm", another_sum
    yield "rms_norm", helpers, "add_rms_norm_quantize", residual_twice
    yield "gate_halves", helpers, "gate_halves", halves_changed
    yield "step_attention", helpers, "step_attention", a_slot_too_many
    yield "step_attention", helpers, "step_attention", another_slot_written
    yield "routing", w4gemm, "route", last_token
    yield "routing", w4gemm, "combine", one_sum
    yield "activation_quantize", w4gemm, "quantize_activations", scale_of_another_row


@pytest.mark.parametrize("helper", sorted({helper for helper, *_ in faults_of_helpers()}))
def test_helpers_are_right(helper):
    assert not any(helpers.check(helper, seed, seed, "cpu") for seed in range(12))


@pytest.mark.parametrize(
    "helper, owner, name, fault", list(faults_of_helpers()), ids=lambda f: getattr(f, "__name__", "")
)
def test_faults_of_helpers_are_found(monkeypatch, helper, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    assert any(helpers.check(helper, seed, seed, "cpu") for seed in range(40))
