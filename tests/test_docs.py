"""Links of the documents lead somewhere, and what they name exists."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

import w4gemm

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    missing = []
    for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", document.read_text()):
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in headings(target)):
            missing.append(f"{path}#{heading}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(document: Path) -> None:
    """A name such as ``kernels/gpu.py`` is the end of a file's path."""
    folders = "src", "bench", "tests", "docs"
    files = {f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", document.read_text()))
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def headings(document: Path) -> list[str]:
    """The names by which links lead to headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_version_of_the_dsl_is_said_alike() -> None:
    from w4gemm.kernels.requirements import DSL

    assert f'"nvidia-cutlass-dsl=={DSL}"' in (ROOT / "pyproject.toml").read_text()
    assert f"nvidia-cutlass-dsl=={DSL}" in (ROOT / "constraints.txt").read_text()
    assert f"`nvidia-cutlass-dsl` {DSL}" in (ROOT / "README.md").read_text()


def test_architecture_names_what_exists() -> None:
    """Every file and folder at the top of the package is in docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "src/w4gemm"
    parts = [p.name for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    missing = [name for name in parts if not name.startswith("__") and name not in text]
    assert not missing


def test_attributes_that_the_architecture_names_exist() -> None:
    """`Class.attribute` is defined in a class of that name."""
    sources = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    attributes: dict[str, set[str]] = {}
    for node in itertools.chain.from_iterable(map(ast.walk, sources)):
        if isinstance(node, ast.ClassDef):
            own = attributes.setdefault(node.name, set())
            own |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            own |= {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "docs/architecture.md").read_text())
    assert named
    assert not [f"{cls}.{name}" for cls, name in named if name not in attributes.get(cls, ())]


def test_every_page_is_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    missing = [page for page in pages if f": {page}\n" not in text]
    assert not missing, "add them to nav in mkdocs.yml"


def test_every_public_name_is_on_the_site() -> None:
    text = (ROOT / "docs/site.py").read_text()
    missing = [name for name in w4gemm.__all__ if f'"w4gemm.{name}"' not in text]
    assert not missing, "add them to REFERENCE in docs/site.py, and an example to their docstrings"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_powers_are_code(document: Path) -> None:
    """Markdown takes what is between two ``**`` for bold."""
    text = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
    assert not re.findall(r"\d\*\*[-(\d].*", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lists_are_lists_on_the_site_too(document: Path) -> None:
    """GitHub shows a list without an empty line before it, or within another list by two spaces; the site's Markdown
    does not."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^ {1,3}- ", text, re.MULTILINE), "a list within a list is indented by four"
    assert not re.search(r"^(?!- )[^\s|#<].*\n- ", text, re.MULTILINE)
