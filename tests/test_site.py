"""The site of mkdocs.yml: it has every public name, builds without a warning, and its examples run."""

from __future__ import annotations

import doctest
import functools
import html
import http.server
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import same_pages
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links lead somewhere: mkdocs.yml makes every warning an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages_of(folder: Path) -> list[Path]:
    return [page for page in folder.rglob("*.html") if page.name != "404.html"]


def test_it_builds(built: Path) -> None:
    """No list became part of a paragraph, and nothing is loaded from another host."""
    pages = pages_of(built)
    assert len(pages) > 25 and not [*built.rglob("__pycache__")]
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<p>[^<]*\n- ", text), page
        assert not re.search(r'(src|<link[^>]* href)="https?:', text), page
        targets = re.findall(r'(?:href|src)="(?!https?:|data:|/)([^"#?]+)', text)
        assert not [target for target in targets if not (page.parent / target).exists()], page


_LOOK = """<!DOCTYPE html><body><pre id="seen"></pre><script>
const seen = [], frames = [360, 1300].map(width => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style.cssText = `border: 0; height: 2000px; width: ${width}px`;
  return frame;
});
const loaded = (frame, page) => new Promise(done => { frame.onload = done; frame.src = page; });
(async () => {
  for (const page of PAGES) {
    await Promise.all(frames.map(frame => loaded(frame, page)));
    await new Promise(done => setTimeout(done, 50));
    for (const frame of frames) {
      const inside = frame.contentDocument, copied = [];
      for (const block of inside.querySelectorAll("pre > code")) {
        const text = block.innerText;
        block.setAttribute("data-md-copying", "");  // as the copy button does
        if (block.querySelector(".gp")) copied.push([text, block.innerText]);
        block.removeAttribute("data-md-copying");
      }
      const plots = [...inside.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]);
      seen.push({page, width: frame.clientWidth, needed: inside.documentElement.scrollWidth, copied, plots});
    }
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
})();
</script>"""


def test_pages_in_a_browser(built: Path) -> None:
    """On a phone and on a desk no page is wider than the window, plots are there and fit, and the copy buttons take
    commands without prompts and output."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    names = sorted(str(page.relative_to(built)) for page in pages_of(built))
    (built / "look.html").write_text(_LOOK.replace("PAGES", json.dumps(names)))
    handler = functools.partial(_Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/look.html"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
        done = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=600)
        server.shutdown()
    (built / "look.html").unlink()
    text = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None and text[1], done.stderr[-2000:]
    views = json.loads(html.unescape(text[1]))
    assert len(views) == 2 * len(names)
    plots = copied = 0
    for view in views:
        where = view["page"], view["width"]
        assert view["needed"] <= view["width"], where
        for natural, shown in view["plots"]:
            assert natural > 0 and shown <= view["width"], where
            plots += 1
        for before, after in view["copied"]:
            prompt = re.compile(r"^(\$|>>>) ", re.MULTILINE)
            assert prompt.search(before) and not prompt.search(after) and len(after) < len(before), where
            copied += 1
    assert plots > 10 and copied > 50, "the views are empty"


def test_pages_that_look_otherwise_are_reported(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site equals itself; a word, text that is too wide and a plot that is gone are named, and nothing else is."""
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        pytest.skip("needs Chromium")
    other, pages = tmp_path / "other", "serving.html quality.html api/errors.html security.html"
    shutil.copytree(built, other)
    options = ["--only", pages, "--report", str(tmp_path)]
    assert same_pages.main(["--sites", str(built), str(other), *options]) == 0
    assert capsys.readouterr().out.startswith("8 of 8 views are the same")
    for page, text, planted in (
        ("serving.html", "<p>The log says what runs", "<p>It does not say what runs"),
        ("quality.html", 'src="plots/quality.svg"', 'src="plots/none.svg"'),
        ("api/errors.html", "<p>What is raised", '<p style="width: 500px">What is raised'),
    ):
        whole = (other / page).read_text()
        assert whole.count(text) == 1, page
        (other / page).write_text(whole.replace(text, planted))
    assert same_pages.main(["--sites", str(built), str(other), *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    for start, end in (
        ("api/errors.html at 360 pixels: ", "rows changed, 516 pixels wide"),
        ("quality.html at 360 pixels: ", "lacks the picture Perplexity by format and bits of a weight"),
        ("quality.html at 1300 pixels: ", "lacks the picture Perplexity by format and bits of a weight"),
        ("serving.html at 360 pixels: ", " rows changed"),
        ("serving.html at 1300 pixels: ", " rows changed"),
    ):
        assert len([line for line in lines if line.startswith(start) and line.endswith(end)]) == 1, lines
    rows = {line.partition(" pixels")[0]: int(line.split()[4]) for line in lines[:-1]}
    assert 4 <= rows["serving.html at 1300"] < 40 < rows["quality.html at 1300"] < 600, rows
    assert (tmp_path / "index.html").read_text().count("<i style") >= 8


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *what: Any) -> None:
        pass


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
