"""What mkdocs.yml needs beside the pages in docs/: the repository's own documents, and the reference.

A hook of MkDocs adds README.md and others as pages, corrects their links, and writes the pages of the reference, which
name what :data:`REFERENCE` lists. :class:`Roles` turns the roles of docstrings into links.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/results/README.md": "results.md",
    "LICENSE": "LICENSE.txt",
}
"""Files and their places on the site, if these are not those in docs/."""

TRANSFORMERS = "w4gemm.integrations.transformers"
REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "products": (
        "Products",
        "The functions that multiply, dense and for experts, and what they fuse.",
        (
            *(
                "w4gemm.linear",
                "w4gemm.grouped_linear",
                "w4gemm.masked_linear",
                "w4gemm.quantize_activations",
                "w4gemm.update_",
            ),
            *("w4gemm.Epilogue", "w4gemm.core.activation"),
        ),
    ),
    "weights": (
        "Weights",
        "Numbers, formats and packed weights. [Weight formats](../formats.md) explains them.",
        ("w4gemm.quantize", "w4gemm.fold_scales", "w4gemm.QuantizedWeight", "w4gemm.WeightFormat", "w4gemm.codebook"),
    ),
    "layers": (
        "Layers",
        "Modules for models, and the routing of tokens to experts.",
        (
            *(
                "w4gemm.W4Linear",
                "w4gemm.W4GroupedLinear",
                "w4gemm.W4Experts",
                "w4gemm.W4Embedding",
                "w4gemm.embedding",
            ),
            *("w4gemm.Router", "w4gemm.choose_experts", "w4gemm.route", "w4gemm.Routing", "w4gemm.combine"),
        ),
    ),
    "engines": (
        "Engines",
        "Kernels on an engine's own buffers and streams. [Your own engine](../engines.md) shows them.",
        ("w4gemm.MixedGemm", "w4gemm.choice.BOUNDS", "w4gemm.choice.prepare"),
    ),
    "choice": (
        "Choice and tuning",
        "Which kernel and config run a problem, and why. `w4gemm explain` prints it.",
        (
            *("w4gemm.GemmProblem", "w4gemm.Device", "w4gemm.GemmConfig", "w4gemm.explain", "w4gemm.configs"),
            *("w4gemm.choice.Explanation", "w4gemm.choice.why", "w4gemm.choice.Verdict", "w4gemm.choice.choose"),
            *("w4gemm.choice.Plan", "w4gemm.autotune"),
        ),
    ),
    "checkpoints": (
        "Checkpoints",
        "Quantized checkpoints of any known format, read one tensor at a time.",
        (
            *("w4gemm.checkpoints.open_checkpoint", "w4gemm.checkpoints.find_checkpoint"),
            *("w4gemm.checkpoints.Checkpoint", "w4gemm.checkpoints.Module"),
        ),
    ),
    "integrations": (
        "Integrations",
        "Whole models: transformers, PEFT and PyTorch's tensor parallelism. [The guide](../transformers.md).",
        (
            *(f"{TRANSFORMERS}.{name}" for name in ("load", "W4GemmConfig", "enable", "disable", "describe")),
            *(f"{TRANSFORMERS}.{name}" for name in ("quantize_layers", "dequantize_layers", "dequantize_embedding")),
            *(f"{TRANSFORMERS}.{name}" for name in ("summarize", "Summary")),
            f"{TRANSFORMERS}.Progress",
            "w4gemm.integrations.peft.enable",
            "w4gemm.integrations.tensor_parallel.W4ColwiseParallel",
            "w4gemm.integrations.tensor_parallel.W4RowwiseParallel",
        ),
    ),
    "errors": (
        "Errors",
        "What is raised beside TypeError and ValueError.",
        ("w4gemm.UnsupportedError", "w4gemm.FormatError"),
    ),
    "environment": ("Environment variables", "", ("w4gemm.core.environment",)),
}
"""Pages of the reference: title, introduction, and the names that each has."""
MODULES = ("w4gemm.core.activation", "w4gemm.core.environment")
"""Names of which only the module's docstring is shown."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for source, place in DOCUMENTS.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for page, (title, introduction, names) in REFERENCE.items():
        content = f"# {title}\n\n{introduction}\n\n" + "\n".join(map(_directive, names))
        files.append(File.generated(config, f"api/{page}.md", content=content))
    files.append(File.generated(config, "api/index.md", content=_overview()))
    return files


def _directive(name: str) -> str:
    """mkdocstrings' request for a name."""
    options = "    options: {members: false, show_root_toc_entry: false, show_root_heading: false}\n"
    return f"::: {name}\n" + (options if name in MODULES else "")


def _overview() -> str:
    """The reference's first page: every name with a link."""
    lines = ["# Reference\n\nExamples begin with `import torch, w4gemm`; every one is run by the tests.\n"]
    for page, (title, introduction, names) in REFERENCE.items():
        lines.append(f"## [{title}]({page}.md)\n\n{introduction}\n")
        lines += [f"- [`{name}`][{name}]" for name in names if name not in MODULES]
        lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point a page's links at places on the site; of one to a file that only the repository has, the text stays."""
    sources = {place: source for source, place in DOCUMENTS.items()}
    here = page.file.src_uri
    if here.startswith(("measured", "benchmarks", "results", "changelog", "trust")):
        page.meta["search"] = {"boost": 0.3}  # the guide and the reference are found first
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # which would be the one word Home
    source = sources.get(here, f"docs/{here}")
    if here.startswith("api/"):
        return markdown
    if here == "measured.md":  # browsers break a line within "->" and before "%"
        markdown = re.sub(r"(?<=\d) %", "\u00a0%", markdown.replace("->", "\u2192"))

    def placed(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = DOCUMENTS.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(place) is None and (ROOT / path).exists():
            return text
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    markdown = re.sub(r"\[([^\[\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", placed, markdown)
    return re.sub(r"(?<!\[)!\[[^\]]*\]\(([^)]+)\)", r"[\g<0>](\1)", markdown)  # a phone's reader enlarges a plot


def on_page_content(html: str, **_: Any) -> str:
    """Keep browsers from breaking options such as --format at their hyphens, which is all that HTML lets do."""

    def kept(code: re.Match[str]) -> str:
        return re.sub(r"(?<![\w-])--?[a-z][\w-]*", r'<span class="option">\g<0></span>', code[0])

    return re.sub(r"<code>[^<]*</code>", kept, html)


_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Turns the roles of docstrings, such as :func:`linear`, into links, or into code where the site has no such
    name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        documented = set(_documented(pkg))
        for module in _modules(pkg):
            for thing in _things(module):
                if (docstring := thing.docstring) is not None:
                    docstring.value = _ROLE.sub(lambda m, t=thing: _link(m[1], t, documented), docstring.value)


def _documented(pkg: griffe.Module) -> Iterator[str]:
    """Names that the reference has."""
    for _, _, names in REFERENCE.values():
        for name in names:
            if name in MODULES:
                continue
            yield name
            thing = pkg[name.removeprefix("w4gemm.")]
            members = (thing.final_target if thing.is_alias else thing).members.values()
            yield from (f"{name}.{member.name}" for member in members if member.docstring and member.name[0] != "_")


def _link(name: str, thing: Any, documented: set[str]) -> str:
    """Markdown for a name in the docstring of a thing."""
    own = thing.path if thing.is_class else thing.parent.path if thing.parent is not None else ""
    spellings = (name, f"w4gemm.{name}", f"w4gemm.{own.rpartition('.')[2]}.{name}", f"{thing.module.path}.{name}")
    found = next((spelling for spelling in spellings if spelling in documented), None)
    return f"`{name}`" if found is None else f"[`{name.removeprefix('w4gemm.')}`][{found}]"


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for child in module.members.values():
        if not child.is_alias and child.is_module:
            yield from _modules(child)


def _things(thing: Any) -> Iterator[Any]:
    """A module, class or other object, and what it contains but for modules."""
    yield thing
    for child in getattr(thing, "members", {}).values():
        if not child.is_alias and not child.is_module:
            yield from _things(child)
