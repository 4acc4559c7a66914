"""Fuzz the readers of weight files: damaged files raise FormatError, or give the right numbers.

    PYTHONPATH=src:tests python -m fuzz.files --cases 20000 --json bench/results/fuzz.jsonl
    PYTHONPATH=src:tests python -m fuzz.files --only gptq:123456                 one case again, by its name

A small file of each format is made, one damage is done to it, and all that it holds is read:

- ``flip``: bits of its headers and configs; ``data``: bits of its numbers; ``cut``: it ends early, or has more behind;
- ``size``: a number of a header or config becomes another one, among them 0, 1, negative and huge ones;
- ``swap``: two equally long pieces of a header change places; ``name``: a letter of a name, or a whole word, changes.

Right are the numbers that the whole file gives under the same name. Two tensors that a swap gives each other's entries
in the header make a whole file, too. Damage to the numbers themselves may change them; then what is read is finite. Any
other error, a process that dies, and more than 20 s for a file are wrong.

Exit status: 0, or 1 if a case was wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from fuzz.samples import FORMATS, Sample, samples
from w4gemm import FormatError, QuantizedWeight
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.gguf.file import GGUFFile

SECONDS = 20
"""The longest that reading a file of a few KiB may take."""


DAMAGES = ("flip", "flip", "data", "cut", "size", "size", "swap", "name")


def header_bytes(file: Path, whole: bytes) -> int:
    """Bytes of a file before its numbers."""
    if file.suffix == ".safetensors":
        return 8 + struct.unpack("<Q", whole[:8])[0]
    if file.suffix == ".gguf":
        return HEADERS.get(file, 0)
    return len(whole)


def damaged(whole: bytes, header: int, damage: str, r: random.Random) -> bytes:
    """Return a file's bytes with one damage of a kind."""
    data = bytearray(whole)
    if damage == "flip":
        for _ in range(r.choice((1, 1, 2, 8))):
            data[r.randrange(header)] ^= 1 << r.randrange(8)
    elif damage == "data" and header < len(data):
        data[r.randrange(header, len(data))] ^= 1 << r.randrange(8)
    elif damage == "cut":
        return whole[: r.randrange(len(whole))] if r.random() < 0.8 else whole + r.randbytes(r.randrange(1, 64))
    elif damage == "size":
        return _resized(whole, header, r)
    elif damage == "swap":
        length = r.choice((1, 2, 4, 8, 16))
        if header > 2 * length:
            a, b = sorted(r.sample(range(header - length), 2))
            data[a : a + length], data[b : b + length] = whole[b : b + length], whole[a : a + length]
            if bytes(x for x, y in zip(whole, data, strict=True) if x != y).isalpha():
                return whole  # names that change places: a whole file
    elif damage == "name":
        findings = [m.span() for m in re.finditer(rb"[A-Za-z_]{3,}", whole[:header])]
        start, end = r.choice(findings)
        data[start:end] = r.choice((b"x" * (end - start), whole[start:end].upper(), whole[start:end][::-1]))
    return bytes(data)


def _resized(whole: bytes, header: int, r: random.Random) -> bytes:
    """A number of the header becomes another: decimal digits of JSON, or 4 or 8 bytes of a binary header."""
    findings = [m.span() for m in re.finditer(rb"\d+", whole[:header])]
    numbers = (0, 1, 2, 3, 31, 33, 64, 65, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1)
    if findings and r.random() < 0.7:
        start, end = r.choice(findings)
        text = r.choice((str(r.choice(numbers)), f"-{r.choice(numbers)}", "1e9", "1e400", "null", '"4"', "[4]"))
        text = text.ljust(end - start) if r.random() < 0.7 else text  # the header's length may still be right
        return whole[:start] + text.encode() + whole[end:]
    width = r.choice((4, 8))
    start = r.randrange(max(1, header - width))
    value = r.choice(numbers) % 2 ** (8 * width)
    return whole[:start] + value.to_bytes(width, "little") + whole[start + width :]


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a file or folder holds, by name."""
    if path.suffix == ".safetensors":
        w = QuantizedWeight.load(path)
        yield f"{w.format} {w.n} {w.k} {w.activations}", w.dequantize()
        return
    checkpoint = open_checkpoint(path)
    for name in checkpoint.modules:
        yield name, checkpoint.weight(name).dequantize()
    for name in checkpoint.tensors:
        yield name, checkpoint.dense(name)


class Findings:
    """Findings so far."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.cases, self.refused, self.wrong = 0, 0, list[str]()


def one(name: str, seed: int, folder: Path, right: dict[Path, dict[str, torch.Tensor]], findings: Findings) -> None:
    """Damage a file of a format once, read it, and put it back."""
    r = random.Random(f"{name} {seed}")
    sample, damage = r.choice(SAMPLES[name]), r.choice(DAMAGES)
    whole = sample.damaged.read_bytes()
    bad = damaged(whole, header_bytes(sample.damaged, whole), damage, r)
    findings.cases += 1
    findings.kinds[f"{name} {damage}"] += 1
    sample.damaged.write_bytes(bad)
    signal.alarm(SECONDS)
    try:
        for key, tensor in read(sample.path):
            expected = right[sample.path].get(key)
            if damage == "swap" and any(torch.equal(tensor, other) for other in right[sample.path].values()):
                continue
            if damage != "data" and expected is not None and not torch.equal(tensor, expected):
                findings.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: other numbers in {key}")
                break
            if (
                damage == "data"
                and not tensor.isfinite().all()
                and expected is not None
                and tensor.shape == expected.shape
            ):
                if key in DENSE:
                    continue
                findings.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: {key} is not finite")
    except (FormatError, FileNotFoundError):
        findings.refused += 1
    except Exception:
        findings.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: {traceback.format_exc(limit=-3)}")
    finally:
        signal.alarm(0)
        sample.damaged.write_bytes(whole)


DENSE: set[str] = set()
"""Names of tensors that may hold any float."""
HEADERS: dict[Path, int] = {}
"""Bytes of a whole GGUF file's header."""
SAMPLES: dict[str, list[Sample]] = {}
"""Whole files by format, made by :func:`prepared`."""


def prepared(folder: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Make every format's file in a folder; return what each holds."""
    signal.signal(signal.SIGALRM, _too_long)
    for name in FORMATS:
        SAMPLES[name] = samples(name, folder / name)
    paths = {sample.path for each in SAMPLES.values() for sample in each}
    DENSE.update(name for p in paths if p.suffix != ".safetensors" for name in open_checkpoint(p).tensors)
    HEADERS.update({p: min(t.offset for t in GGUFFile(p).tensors.values()) for p in paths if p.suffix == ".gguf"})
    return {path: dict(read(path)) for path in paths}


def _quiet() -> None:
    """Let transformers, which opens what is no quantized folder any more, say nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="damages, evenly of all formats (2000)")
    parser.add_argument("--seconds", type=float, default=3600, help="at most so long (3600)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (the time)")
    parser.add_argument("--only", metavar="FORMAT:SEED", help="one case, by its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _quiet()
    findings, seed = Findings(), int(time.time()) % 100_000 if args.seed is None else args.seed
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        right = prepared(Path(folder))
        if args.only:
            name, _, number = args.only.partition(":")
            one(name, int(number), Path(folder), right, findings)
        else:
            print(f"seed {seed}", flush=True)
            for case in range(args.cases):
                if time.monotonic() - started > args.seconds or len(findings.wrong) >= 20:
                    break
                one(tuple(FORMATS)[case % len(FORMATS)], seed * 1_000_000 + case, Path(folder), right, findings)
    for text in findings.wrong:
        print(text)
    print(f"{findings.cases} damaged files, {findings.refused} refused, {len(findings.wrong)} wrong, seed {seed}")
    if args.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {"kind": "fuzz", "run": record.run_name(facts), "device": "files", "problems": findings.cases}
        row |= {"wrong": len(findings.wrong), "refused": findings.refused, "seed": seed}
        row |= {"seconds": round(time.monotonic() - started), "kinds": dict(sorted(findings.kinds.items()))}
        record.append(args.json, row | facts)
    return bool(findings.wrong)


if __name__ == "__main__":
    sys.exit(main())
