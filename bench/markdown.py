"""Markdown that the programs of bench write: tables, paragraphs, and parts of pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def table(head: Sequence[object], rows: Iterable[Sequence[object]], right: bool = False) -> list[str]:
    """Return the lines of a table. right: align all columns but the first to the right."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    rule = "|---" + ("|--:" if right else "|---") * (len(head) - 1) + "|"
    return [lines[0], rule, *lines[1:]]


def paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def image(path: Path, words: str) -> str:
    """Return an image in docs/plots that links to its file, so that a phone can open it whole."""
    return f"[![{words}](plots/{path.name})](plots/{path.name})"


def with_parts(page: str, program: str, part: Callable[[str], Iterable[str]]) -> str:
    """Return a page with the parts that a program makes as they are now.

    Args:
        program: such as ``bench.cpu``. A part lies between ``<!-- made by python -m bench.cpu -->``, or with a name
            ``<!-- made by python -m bench.cpu: NAME -->``, and ``<!-- end -->``.
        part: returns the lines of a part by its name, or "".
    """
    marks = rf"(<!-- made by python -m {re.escape(program)}(?:: (\w+))? -->\n).*?(<!-- end -->\n)"

    def made(match: re.Match[str]) -> str:
        return match[1] + "".join(f"{line}\n" for line in part(match[2] or "")) + match[3]

    return re.sub(marks, made, page, flags=re.DOTALL)
