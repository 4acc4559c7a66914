"""Whole folders of many architectures, packed at random and then changed at random: right logits, or a clear refusal.

    PYTHONPATH=src:tests python tests/whole_folders.py --cases 300           a table by architecture and outcome
    PYTHONPATH=src:tests python tests/whole_folders.py --only "qwen3_moe 17"  one case again, by its name

A case takes a tiny model of transformers, packs some of its matrices in 4 bits, stores others in fp8 with scales and
the rest in a random dtype, and then drops, renames, fuses, splits, stacks, casts or copies a tensor, or adds one. Then
``load`` and ``from_pretrained`` each have to give the logits of the dense model with the numbers that the formats'
definitions say, or raise FormatError or ValueError with a name of what was changed.

Exit status: 0, or 1 if a case had other logits, another exception, or a message without a name.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import logging as transformers_logging

from many_models import MODELS, Base, base
from random_folders import CHANGES, Folder, packed, write
from w4gemm.integrations.transformers import W4GemmConfig, load

IDS = torch.tensor([[3, 55, 17, 23, 8, 71, 42, 9, 64, 5, 31]])
TOLERANCE = 1e-3
"""Relative error of float32 logits. Weights have a standard deviation of 0.2, so that each of them matters."""


class Wrong(AssertionError):
    """Other logits, another exception, or a message that names nothing."""


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits.float()


_COMMON = {"model", "layers", "language_model", "transformer", "weight", "backbone", "h", ""}


def outcome(get: Callable[[], Any], expected: torch.Tensor, f: Folder) -> str:
    """Return "equal" or "refused"; raise Wrong for anything else."""
    try:
        came = logits(get())
    except ValueError as e:  # FormatError is one
        said = str(e)
        parts = {part for name in (*f.touched, *f.stored) for part in name.split(".") if not part.isdigit()}
        if not any(re.search(rf"(?<![A-Za-z]){re.escape(part)}", said) for part in parts - _COMMON):
            raise Wrong(f"a message that names nothing: {said}") from e
        if f.change == "none" and not f.uneven:
            raise Wrong(f"refused as it is: {said}") from e
        return "refused"
    except Exception as e:
        raise Wrong(f"{type(e).__name__}: {' '.join(str(e).split()):.300}") from e
    error = float((came - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        raise Wrong(f"logits are off by {error:.2g}")
    return "equal"


class Case(NamedTuple):
    architecture: str
    number: int

    def __str__(self) -> str:
        return f"{self.architecture} {self.number}"

    def folder(self, base: Base) -> Folder:
        r = random.Random(str(self))
        f = packed(base, r)
        change = r.choice((None, None, *CHANGES))
        if change is not None:
            change(f, r)
            f.change = change.__name__ if f.touched else "none"
        return f


def run(case: Case, scratch: Path) -> tuple[str, str, str]:
    """Return the change and what ``load`` and ``from_pretrained`` did; raise :class:`Wrong`."""
    dense = base(case.architecture, scratch)
    f = case.folder(dense)
    options = {"dtype": torch.float32, "local_files_only": True}
    reference = write(dense, scratch / "dense", f.dense, None)
    expected = logits(dense.cls.from_pretrained(reference, **options))
    folder = write(dense, scratch / "packed", f.stored, f.config)
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: load(folder)[0],
        "from_pretrained": lambda: dense.cls.from_pretrained(folder, quantization_config=W4GemmConfig(), **options),
    }
    outcomes = []
    for way, get in ways.items():
        try:
            outcomes.append(outcome(get, expected, f))
        except Wrong as e:
            changed = f"{f.config['quant_method']}, {f.change} of {', '.join(f.touched[:4]) or 'nothing'}"
            raise Wrong(f"{case} ({changed}): {way}: {e}") from e
    return f.change, outcomes[0], outcomes[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each architecture")
    parser.add_argument("--only", help="the name of a case, such as 'qwen3_moe 17', or an architecture")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    name, number = (options.only, "") if options.only in MODELS or not options.only else options.only.rsplit(" ", 1)
    kinds = [name] if name else list(MODELS)
    first = int(number) if number else options.first
    count = 1 if number else -(-options.cases // len(kinds))
    table: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    changes: Counter[tuple[str, str]] = Counter()
    wrong, start = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(first, first + count):
            for kind in kinds:
                try:
                    change, *ways = run(Case(kind, i), Path(scratch))
                    table[kind] += Counter([f"load {ways[0]}", f"from_pretrained {ways[1]}"])
                    changes[change, " and ".join(ways)] += 1
                except Wrong as e:
                    wrong += 1
                    table[kind]["wrong"] += 1
                    print(f"wrong: {e}", flush=True)
    columns = ("load equal", "load refused", "from_pretrained equal", "from_pretrained refused", "wrong")
    print(" | ".join(("architecture", *columns)))
    for kind, counts in table.items():
        print(" | ".join((kind, *(str(counts[column]) for column in columns))))
    for (change, ways), times in sorted(changes.items()):
        print(f"{change}: {ways}: {times}")
    print(f"{count * len(kinds)} cases in {time.perf_counter() - start:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
