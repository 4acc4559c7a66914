"""The fuzzer: a slice of it, and that it finds what is wrong."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch

from fuzz import calls, cases, formulas, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_a_slice_with_a_new_seed(capsys):
    with capsys.disabled():  # so that the seed is known if it fails
        assert run.main(["--seconds", "30", "--device", "cpu"]) == 0


@pytest.mark.gpu
def test_a_slice_on_the_gpu(capsys):
    with capsys.disabled():
        assert run.main(["--seconds", "30", "--device", "cuda"]) == 0


def test_the_formulas_are_independent():
    tree = ast.parse(Path(formulas.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"__future__", "math", "struct", "collections.abc", "typing", "torch"}


@pytest.mark.parametrize("dtype", DTYPES, ids=calls.name_of)
def test_rounding(dtype):
    """Against PyTorch's conversion of what float32 holds, to the ends of the range."""
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    values = bits.int().view(torch.float32)
    values = values[values.isfinite()]
    assert torch.equal(
        formulas.rounded(values.double(), formulas.TYPES[calls.name_of(dtype)]), values.to(dtype).double()
    )


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
        return product(x, formulas.Weight(value, w.terms), *rest, **others)

    def residual_lost(*given, **others):
        return epilogue(*given, **(others | {"residual": None}))

    def bias_after(*given, **others):
        bias = others["bias"]
        return epilogue(*given, **(others | {"bias": None if bias is None else bias.roll(1, -1)}))

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
