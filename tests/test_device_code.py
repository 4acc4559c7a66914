"""Device code says what it passes: every parameter is annotated, and values that belong together have names.

The DSL overloads annotations and control flow, so mypy does not read these files; their syntax trees are read here.
Sequences of one kind (``tuple[Int32, ...]``, ``list[Float32]``) are registers, words or accumulators, and have no
names. Everything else of more than two values is a NamedTuple, and its fields are read by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import w4gemm
from w4gemm.core.activation import ACTIVATIONS

PACKAGE = Path(w4gemm.__file__).parent
FOLDERS = ("ptx", "packing/codecs", "kernels")
MOST = 2
"""Values that may be returned or passed together without names."""
SEQUENCES = ("list", "Sequence", "Iterable", "dict")
"""Annotations of values that are indexed by position."""


def device_files() -> list[Path]:
    """Files that import the DSL when they are imported."""
    files = [file for folder in FOLDERS for file in sorted((PACKAGE / folder).rglob("*.py"))]
    return [file for file in files if _imports_dsl(ast.parse(file.read_text()))]


def _imports_dsl(tree: ast.Module) -> bool:
    imported = [name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names]
    imported += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "cutlass" for name in imported)


class Aliases(ast.NodeTransformer):
    """Puts the types that a file names, as ``Words = tuple[Int32, ...]``, where it uses the names."""

    def __init__(self, tree: ast.Module) -> None:
        named = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)]
        self.types = {ast.unparse(node.targets[0]): node.value for node in named}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.visit(self.types[node.id]) if node.id in self.types else node


def complaints(tree: ast.Module) -> Iterator[str]:
    tree = Aliases(tree).visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _of_function(node)


def _of_function(function: ast.FunctionDef) -> Iterator[str]:
    def at(node: ast.AST, text: str) -> str:
        return f"{node.lineno}: {function.name}: {text}"

    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    kinds = {p.arg: p.annotation for p in parameters if p is not None and p.arg not in ("self", "cls")}
    for name, annotation in kinds.items():
        if annotation is None:
            yield at(function, f"parameter {name} has no annotation")
        elif _unnamed(annotation):
            yield at(function, f"parameter {name}: {ast.unparse(annotation)} has no names")
    if function.returns is not None and _unnamed(function.returns):
        yield at(function, f"returns {ast.unparse(function.returns)}, which has no names")
    registers = function.returns is not None and _is_sequence(function.returns)
    by_name = {name for name, annotation in kinds.items() if annotation is None or not _is_sequence(annotation)}
    for node in _own_nodes(function):
        if isinstance(node, ast.Return) and _is_wide(node.value) and not registers:
            yield at(node, f"returns {ast.unparse(node.value)} without names")
        if isinstance(node, ast.Call) and _is_method_of_self(node):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if _is_wide(value):
                    yield at(value, f"passes {ast.unparse(value)} without names")
        if (
            isinstance(node, ast.Subscript)
            and _is_name_of(node.value, by_name)
            and isinstance(node.slice, ast.Constant)
        ):
            yield at(node, f"reads {ast.unparse(node)} by position")
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if _is_name_of(node.value, by_name) and isinstance(target, ast.Tuple) and len(target.elts) > MOST:
                yield at(node, f"unpacks {ast.unparse(node.value)} by position")
            if isinstance(target, ast.Name) and _is_wide(node.value):
                yield at(node, f"{target.id} = {ast.unparse(node.value)} has no names")


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions inside it."""
    actual: list[ast.AST] = list(function.body)
    while actual:
        node = actual.pop()
        yield node
        actual += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.FunctionDef)]


def _is_sequence(annotation: ast.expr) -> bool:
    """True for a type whose values are indexed by position: ``tuple[X, ...]``, lists, tensors."""
    text = ast.unparse(annotation)
    return text.startswith(SEQUENCES) or text.endswith(", ...]") or "Tensor" in text


def _unnamed(annotation: ast.expr) -> bool:
    """True for ``tuple[X, Y, Z]``, alone or inside another type."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tuple"
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) > MOST
        for node in ast.walk(annotation)
    )


def _is_wide(node: ast.expr | None) -> bool:
    """True for a tuple of more than two values that is written out, numbers aside."""
    if not isinstance(node, ast.Tuple) or all(isinstance(e, ast.Constant) for e in node.elts):
        return False
    return len(node.elts) > MOST or any(isinstance(e, ast.Starred) for e in node.elts)


def _is_method_of_self(call: ast.Call) -> bool:
    node = call.func
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _is_name_of(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


@pytest.mark.parametrize("file", device_files(), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_values_have_names(file):
    actual = list(complaints(ast.parse(file.read_text())))
    assert not actual, "\n".join(actual)


def test_each_activation_has_device_code():
    device = pytest.importorskip("w4gemm.kernels.device.activation")
    assert set(device._ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    "code, message",
    [
        ("def f(x): pass", "1: f: parameter x has no annotation"),
        ("def f(self, x: Int32) -> tuple[Int32, Int32, Int32]: pass", "returns tuple[Int32, Int32, Int32], which"),
        ("def f(x: tuple[int, int, int] | None): pass", "parameter x: tuple[int, int, int] | None has no names"),
        ("X = tuple[int, int, int]\ndef f(x: X): pass", "parameter x: tuple[int, int, int] has no names"),
        ("def f(x: Int32):\n  return x, x, x", "2: f: returns (x, x, x) without names"),
        ("def f(self, x: Int32):\n  self.g.h((x, x, x))", "passes (x, x, x) without names"),
        ("def f(work: Work):\n  return work[2]", "reads work[2] by position"),
        ("def f(work: Work):\n  a, b, c = work", "unpacks work by position"),
        ("def f(x: Int32):\n  ring = (x, x, x)", "ring = (x, x, x) has no names"),
        ("def f(x: Int32):\n  def g(y): pass", "2: g: parameter y has no annotation"),
    ],
)
def test_the_checks_refuse(code, message):
    (actual,) = complaints(ast.parse(code))
    assert message in actual


@pytest.mark.parametrize(
    "code",
    [
        "def f(x: Int32) -> tuple[Int32, Int32]:\n  return x, x",
        "def f(x: Int32) -> tuple[Int32, ...]:\n  return x, x, x",
        "def f(words: tuple[Int32, ...]):\n  a, b, c = words\n  return words[0]",
        "def f(self, t: cute.Tensor):\n  cute.make_layout((t, t, t))\n  return t[0]",
        "def f(self, i: int):\n  shape = (1, 2, 3)\n  return self.steps[0]",
    ],
)
def test_the_checks_accept(code):
    assert not list(complaints(ast.parse(code)))
