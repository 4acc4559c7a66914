"""Compare how the site's pages look with those of another commit, in Chromium, on a phone and on a desk.

    python tests/same_pages.py                     this tree against its last commit; takes minutes
    python tests/same_pages.py --against main --only 'serving* api/*' --least 20
    python tests/same_pages.py --sites OLD NEW     two folders that MkDocs built

Columns of a page (navigation, text, contents) are cut into bands, such as lines of text, where a row of pixels equals
the one above. Bands are aligned as a diff aligns lines: a new paragraph is one change, and what it moves down is none.
build/same_pages/index.html shows old and new side by side, with changed bands in red.

Exit status: 0 if no page changed by --least rows of pixels, is too wide or lacks a picture; else 1.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import fnmatch
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (360, 1300)
TILE = 4000
"""Rows of pixels of one picture; Chromium takes none of more than 16384."""

_SIZES = """(async () => {
  document.head.appendChild(document.createElement("style")).textContent =  // what moves, or has shades that vary
    "* { transition: none !important; animation: none !important } .md-code__nav { visibility: hidden }" +
    ".md-sidebar__scrollwrap { overflow: visible !important }";
  await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
  const page = document.documentElement, text = (document.querySelector(".md-content") ?? page).getBoundingClientRect();
  const missing = [...document.images].filter(image => !image.naturalWidth).map(image => image.alt || image.src);
  const wide = page.scrollWidth > innerWidth ? [`${page.scrollWidth} pixels wide`] : [];
  return {height: page.scrollHeight, edges: [0, Math.floor(text.left), Math.ceil(text.right), innerWidth],
          mistakes: [...wide, ...missing.map(name => `lacks the picture ${name}`)]};
})()"""
_ROWS = """(async (picture, edges) => {
  const image = await createImageBitmap(await (await fetch("data:image/png;base64," + picture)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const pixels = new Uint32Array(canvas.getImageData(0, 0, image.width, image.height).data.buffer);
  // of the upper bits, because the shades of a box's edges vary
  const hash = (y, first, last) => pixels.subarray(y * image.width + first, y * image.width + last).reduce(
    (sum, pixel) => Math.imul(sum ^ pixel & 0xe0e0e0e0 ^ (sum >>> 15), 0x01000193), last - first);
  return [0, 1, 2].map(c => Array.from({length: image.height}, (_, y) => hash(y, edges[c], edges[c + 1])));
})"""
_STYLE = "div {display: flex; gap: 1em} p {position: relative; margin: 0} img {display: block} i {position: absolute}"

Band = tuple[int, tuple[int, ...]]
"""The first of neighbouring rows of pixels that differ from the row above, and a hash of each."""


class Browser:
    """Chromium, which takes commands from file 3 and answers on file 4."""

    def __init__(self, program: str, profile: str) -> None:
        (commands, out), (into, answers) = os.pipe(), os.pipe()
        files = [fcntl.fcntl(file, fcntl.F_DUPFD, 10) for file in (commands, answers)]
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
        self.process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}"],
            preexec_fn=lambda: [os.dup2(file, number) for number, file in enumerate(files, 3)] and None,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        for file in (commands, answers, *files):
            os.close(file)
        self._out, self._in = os.fdopen(out, "wb"), os.fdopen(into, "rb")
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")

    def call(self, method: str, until: str = "", **params: Any) -> Any:
        """Return a command's result, once there was the event ``until``, if one is named."""
        self._out.write(json.dumps({"id": 1, "method": method, "params": params} | self._session).encode() + b"\0")
        self._out.flush()
        result = None
        while result is None or until:
            letters = iter(lambda: self._in.read(1) or sys.exit("same_pages: Chromium has ended"), b"\0")
            answer = json.loads(b"".join(letters))
            result = answer["result"] if "id" in answer else result
            until = "" if answer.get("method") == until else until
        return result

    def value(self, script: str) -> Any:
        """Return what a script in the page comes to."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return answer["result"]["value"]

    def look(self, page: Path, width: int) -> tuple[dict[str, Any], list[str]]:
        """Return a page's sizes and mistakes, and its pictures, PNG in base64."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", "Page.loadEventFired", url=page.resolve().as_uri())
        sizes, pictures = self.value(_SIZES), []
        for y in range(0, sizes["height"], TILE):
            clip = {"x": 0, "y": y, "width": width, "height": min(TILE, sizes["height"] - y), "scale": 1}
            options = {"captureBeyondViewport": True, "optimizeForSpeed": True}
            pictures.append(self.call("Page.captureScreenshot", clip=clip, **options)["data"])
        return sizes, pictures

    def bands(self, pictures: list[str], edges: list[int]) -> list[list[Band]]:
        """Return the bands of each column."""
        columns: list[list[Band]] = []
        for parts in zip(*(self.value(f"{_ROWS}({picture!r}, {edges})") for picture in pictures), strict=True):
            rows = [*itertools.chain(*parts)]
            starts = [y for y in range(1, len(rows)) if rows[y] != rows[y - 1]]
            groups = itertools.groupby(enumerate(starts), lambda item: item[1] - item[0])
            lines = [[y for _, y in group] for _, group in groups]
            columns.append([(line[0], tuple(rows[line[0] : line[-1] + 1])) for line in lines])
        return columns


def changed(old: list[Band], new: list[Band]) -> tuple[list[Band], list[Band]]:
    """Return the bands of a column that the other does not have."""
    matcher = difflib.SequenceMatcher(None, [rows for _, rows in old], [rows for _, rows in new], autojunk=False)
    parts = [part for part in matcher.get_opcodes() if part[0] != "equal"]
    return [b for _, i, j, _, _ in parts for b in old[i:j]], [b for *_, i, j in parts for b in new[i:j]]


def compare(browser: Browser, old: Path, new: Path, page: str, width: int) -> tuple[int, list[str], str]:
    """Return how many rows of a page changed, what is wrong with it, and both pages in HTML."""
    views = [browser.look(site / page, width) for site in (old, new)]
    mistakes, same = views[1][0]["mistakes"], views[0] == views[1]
    both = [browser.bands(pictures, sizes["edges"]) if not same else [] for sizes, pictures in views]
    columns = [changed(*pair) for pair in zip(*both, strict=True)]
    count = sum(max(sum(len(rows) for _, rows in side) for side in column) for column in columns)
    text = "<div>"
    for side, (sizes, pictures) in enumerate(views):
        text += "<p>" + "".join(f'<img src="data:image/png;base64,{picture}">' for picture in pictures)
        for (left, right), column in zip(itertools.pairwise(sizes["edges"]), columns, strict=False):
            for y, rows in column[side]:
                box = f"left: {left}px; width: {right - left}px; top: {y}px; height: {len(rows)}px"
                text += f'<i style="background: #f004; {box}"></i>'
    return count, mistakes, text + "</div>"


def build(commit: str, folder: Path) -> Path:
    """Build the site of a commit, or of this tree if it is empty."""
    tree = ROOT
    if commit:
        tree = folder / "tree"
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder / "site")]
    subprocess.run(command, cwd=tree, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder / "site"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--sites", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two sites that were built")
    parser.add_argument("--only", default="*", metavar="PATTERNS", help="pages, such as 'serving* api/*'")
    parser.add_argument("--least", type=int, default=4, metavar="ROWS", help="rows that make a change")
    parser.add_argument("--report", type=Path, default=ROOT / "build/same_pages", metavar="DIR")
    args = parser.parse_args(argv)
    program = shutil.which("chromium") or shutil.which("google-chrome") or parser.error("needs Chromium")
    shown = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sites = args.sites or [build(args.against, Path(folder, "old")), build("", Path(folder, "new"))]
        old, new = ({str(page.relative_to(site)) for page in site.rglob("*.html")} for site in sites)
        pages = sorted(page for page in old & new if any(fnmatch.fnmatch(page, p) for p in args.only.split()))
        browser = Browser(program, f"{folder}/profile")
        try:
            for page, width in itertools.product(pages, WIDTHS):
                count, mistakes, pictures = compare(browser, *sites, page, width)
                if count >= args.least or mistakes:
                    heading = ", ".join((f"{page} at {width} pixels: {count} rows changed", *mistakes))
                    print(heading, flush=True)
                    shown.append(f"<h2>{heading}</h2>{pictures}")
        finally:
            browser.process.terminate()
            browser.process.wait()
    args.report.mkdir(parents=True, exist_ok=True)
    (args.report / "index.html").write_text(
        f"<!DOCTYPE html><meta charset=utf-8><style>{_STYLE}</style>{''.join(shown)}"
    )
    print(f"{2 * len(pages) - len(shown)} of {2 * len(pages)} views are the same: {args.report / 'index.html'}")
    if old != new:
        print(f"pages that only one site has: {', '.join(sorted(old ^ new))}")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
