"""How docstrings begin: with the thing or the verb, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    str(path.relative_to(ROOT))
    for folder in ("src", "bench", "tests")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]
BANNED = re.compile(r"\s*(Of|Those|Whose|As|Likewise|What)\b")


def bad_beginnings(file: str) -> list[str]:
    """Docstrings, and strings below an attribute or a constant, that begin with a banned word."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    texts = [(n.lineno, n.value.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return [f"{file}:{line}: {t.split(chr(10))[0]}" for line, t in texts if isinstance(t, str) and BANNED.match(t)]


@pytest.mark.parametrize("file", FILES)
def test_docstrings_begin_with_the_thing_or_the_verb(file: str) -> None:
    assert not bad_beginnings(file)


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


if __name__ == "__main__":
    print("\n".join(line for file in FILES for line in bad_beginnings(file)))
