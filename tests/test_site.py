"""The site of mkdocs.yml: it has every public name, builds without a warning, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import w4gemm
from w4gemm.integrations import transformers

ROOT = Path(__file__).resolve().parent.parent


def shown() -> list[str]:
    """Names that the reference shows, from the text of docs/site.py, since importing it needs MkDocs."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [name for _, _, names in module.REFERENCE.values() for name in names]


def public() -> Iterator[tuple[str, Any]]:
    """Public functions, classes and their methods by name."""
    for name in w4gemm.__all__:
        thing = getattr(w4gemm, name)
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if member[0] != "_" and inspect.isroutine(getattr(thing, member)):
                    yield f"{name}.{member}", getattr(value, "__func__", value)


def test_the_reference_has_every_public_name_once() -> None:
    pytest.importorskip("mkdocs")
    names = shown()
    assert len(names) == len(set(names))
    expected = {f"w4gemm.{name}" for name in w4gemm.__all__}
    expected |= {f"w4gemm.integrations.transformers.{name}" for name in transformers.__all__}
    assert not expected - set(names)


def test_it_builds(tmp_path: Path) -> None:
    """Links lead somewhere: mkdocs.yml makes every warning an error. No list became part of a paragraph, and nothing is
    loaded from another host."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 25 and not [*tmp_path.rglob("__pycache__")]
    assert "[data-md-copying] :is(.gp, .go)" in (tmp_path / "css/site.css").read_text()
    assert 'class="gp">$ </span>' in (tmp_path / "vllm.html").read_text(), "what the rule above leaves out"
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<p>[^<]*\n- ", text), page
        assert not re.search(r'(src|<link[^>]* href)="https?:', text), page
        targets = re.findall(r'(?:href|src)="(?!https?:|data:|/)([^"#?]+)', text)
        assert not [target for target in targets if not (page.parent / target).exists()], page


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_docstrings_name_parameters_that_there_are(name: str) -> None:
    thing = dict(public())[name]
    lines = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.cleandoc(thing.__doc__ or ""), re.MULTILINE)
    if lines is None:
        return
    entries = re.findall(r"^    (\w[\w, ]*):", lines[1], re.MULTILINE)
    documented = {name for names in entries for name in names.split(", ")}
    assert documented and not documented - set(inspect.signature(thing).parameters)


@pytest.mark.parametrize("name", [name for name, thing in public() if ">>>" in (inspect.cleandoc(thing.__doc__ or ""))])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "configs":
        pytest.importorskip("cutlass")
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    thing = dict(public())[name]
    test = doctest.DocTestParser().get_doctest(
        inspect.cleandoc(thing.__doc__ or ""), {"torch": torch, "w4gemm": w4gemm}, name, None, 0
    )
    wrong: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=wrong.append)
    assert not wrong, "".join(wrong)


def test_most_functions_have_an_example() -> None:
    """All public names but errors, plain records and what needs files or a GPU."""
    without = {name for name in w4gemm.__all__ if ">>>" not in (getattr(w4gemm, name).__doc__ or "")}
    assert without <= {"Device", "Epilogue", "FormatError", "GemmProblem", "Routing", "UnsupportedError"}
