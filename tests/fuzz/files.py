"""Fuzz the readers of weight files: damaged files raise FormatError, or give the right numbers.

    PYTHONPATH=src:tests python -m fuzz.files --cases 20000 --json bench/results/fuzz.jsonl
    PYTHONPATH=src:tests python -m fuzz.files --only gptq:123456                 one case again, by its name

A small file of each format is made, one damage is done to it, and all that it holds is read:

- ``flip``: bits of its headers and configs; ``data``: bits of its numbers; ``cut``: it ends early, or has more behind;
- ``size``: a number of a header or config becomes another one, among them 0, 1, negative and huge ones;
- ``swap``: two equally long pieces of a header change places; ``name``: a letter of a name, or a whole word, changes.

Right are the numbers that the whole file gives under the same name. Damage to the numbers themselves may change them;
then what is read is finite. Any other error, a process that dies, and more than 20 s for a file are wrong.

Exit status: 0, or 1 if a case was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from engine_tensors import AWQ_ORDER, words
from w4gemm import FormatError, QuantizedWeight, quantize
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.w4gemm import settings

N, K, GROUP = 32, 64, 32
SECONDS = 20
"""The longest that reading a file of a few KiB may take."""


class Sample(NamedTuple):
    """A whole file or folder."""

    damaged: Path
    """The file of it that is damaged."""
    path: Path
    """The path that is opened."""


class Numbers(NamedTuple):
    """Random numbers of a module."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(cls, seed: int) -> Numbers:
        g = torch.Generator().manual_seed(seed)
        groups = N, K // GROUP
        codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        scales = (torch.rand(groups, generator=g) / 50 + 0.01).half()
        return cls(codes, scales, torch.randint(1, 16, groups, generator=g, dtype=torch.uint8))


def _folder(folder: Path, quantization: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_size": K, "num_hidden_layers": 1, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    dense = {"model.norm.weight": torch.ones(K).half(), "model.a.bias": torch.zeros(N).half()}
    save_file({name: t.contiguous() for name, t in (dense | tensors).items()}, folder / "model.safetensors")
    return folder


def _modules(stored: Callable[[Numbers], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"model.{name}.{leaf}": t
        for seed, name in enumerate(("a", "b"))
        for leaf, t in stored(Numbers.of(seed)).items()
    }


def _gptq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        g_idx = (torch.arange(K) // GROUP).int()
        zeros = words(m.zeros.T - 1)
        return {"qweight": words(m.codes).T, "qzeros": zeros, "scales": m.scales.T, "g_idx": g_idx}

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return _folder(folder, config, _modules(stored))


def _awq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        codes, zeros = (words(t.T, AWQ_ORDER) for t in (m.codes, m.zeros))
        return {"qweight": codes, "qzeros": zeros, "scales": m.scales.T}

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _folder(folder, config, _modules(stored))


def _compressed(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        zeros, shape = words(m.zeros.T).T, torch.tensor([N, K])
        return {
            "weight_packed": words(m.codes),
            "weight_scale": m.scales,
            "weight_shape": shape,
            "weight_zero_point": zeros,
        }

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    return _folder(folder, config, _modules(stored))


def _modelopt(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        packed = m.codes[:, ::2] | m.codes[:, 1::2] << 4
        scales = (torch.rand(N, K // 16, generator=torch.Generator().manual_seed(3)) * 400).to(torch.float8_e4m3fn)
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(2.0**-14)}

    return _folder(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, _modules(stored))


def _hqq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        rows = m.codes.view(-1, GROUP)
        numbers = {"shape": [N, K], "nbits": 4, "group_size": GROUP, "axis": 1, "packing": [*b"4bit_u8"]}
        settings = {leaf: torch.tensor(value, dtype=torch.int32) for leaf, value in numbers.items()}
        scales, zeros = m.scales.reshape(-1, 1), m.zeros.reshape(-1, 1).half() + 0.25
        return {"W_q": rows[: len(rows) // 2] << 4 | rows[len(rows) // 2 :], "scale": scales, "zero": zeros} | settings

    return _folder(folder, {"quant_method": "hqq"}, _modules(stored))


def _weights() -> dict[str, QuantizedWeight]:
    dense = torch.randn(2, N, K, generator=torch.Generator().manual_seed(5))
    return {"model.a": quantize(dense[0], "int4_g32_zint"), "model.b": quantize(dense[1], "mxfp4")}


def _own(folder: Path) -> Path:
    made = _weights()
    tensors = {f"{name}.{leaf}": t for name, w in made.items() for leaf, t in w.named_tensors().items()}
    return _folder(folder, settings(made.items()), tensors)


def _gguf(folder: Path) -> Path:
    import gguf
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_array("test.words", ["one", "two"])
    rng = np.random.default_rng(0)
    for name, type in (("a", "Q4_0"), ("b", "Q4_1"), ("c", "F16"), ("d", "F32"), ("e", "Q8_0")):
        values = rng.standard_normal((N, K)).astype(np.float32)
        if type in ("F16", "F32"):
            writer.add_tensor(name, values.astype(np.float16 if type == "F16" else np.float32))
        else:
            kind = gguf.GGMLQuantizationType[type]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "small.gguf"


def _weight_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _weights()["model.a"].save(folder / "weight.safetensors")
    return folder / "weight.safetensors"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "hqq": _hqq,
    "w4gemm": _own,
    "gguf": _gguf,
    "weight": _weight_file,
}
DAMAGES = ("flip", "flip", "data", "cut", "size", "size", "swap", "name")


def samples(name: str, folder: Path) -> list[Sample]:
    """Make a whole file or folder; one sample for each of its files."""
    path = FORMATS[name](folder)
    return [Sample(path, path)] if path.is_file() else [Sample(file, path) for file in sorted(path.iterdir())]


def header_bytes(file: Path, whole: bytes) -> int:
    """Bytes of a file before its numbers."""
    if file.suffix == ".safetensors":
        return 8 + struct.unpack("<Q", whole[:8])[0]
    if file.suffix == ".gguf":
        return len(whole) - N * K // 32 * (18 + 20 + 64 + 128 + 34)  # of Q4_0, Q4_1, F16, F32, Q8_0
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
            if not (whole[a : a + length] + whole[b : b + length]).isalpha():  # names that change places: a whole file
                data[a : a + length], data[b : b + length] = whole[b : b + length], whole[a : a + length]
    elif damage == "name":
        found = [m.span() for m in re.finditer(rb"[A-Za-z_]{3,}", whole[:header])]
        start, end = r.choice(found)
        data[start:end] = r.choice((b"x" * (end - start), whole[start:end].upper(), whole[start:end][::-1]))
    return bytes(data)


def _resized(whole: bytes, header: int, r: random.Random) -> bytes:
    """A number of the header becomes another: decimal digits of JSON, or 4 or 8 bytes of a binary header."""
    found = [m.span() for m in re.finditer(rb"\d+", whole[:header])]
    numbers = (0, 1, 2, 3, 31, 33, 64, 65, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1)
    if found and r.random() < 0.7:
        start, end = r.choice(found)
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


class Found:
    """Findings so far."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.cases, self.refused, self.wrong = 0, 0, list[str]()


def one(name: str, seed: int, folder: Path, right: dict[Path, dict[str, torch.Tensor]], found: Found) -> None:
    """Damage a file of a format once, read it, and put it back."""
    r = random.Random(f"{name} {seed}")
    sample, damage = r.choice(SAMPLES[name]), r.choice(DAMAGES)
    whole = sample.damaged.read_bytes()
    bad = damaged(whole, header_bytes(sample.damaged, whole), damage, r)
    found.cases += 1
    found.kinds[f"{name} {damage}"] += 1
    sample.damaged.write_bytes(bad)
    signal.alarm(SECONDS)
    try:
        for key, tensor in read(sample.path):
            wanted = right[sample.path].get(key)
            if damage != "data" and wanted is not None and not torch.equal(tensor, wanted):
                found.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: other numbers in {key}")
                break
            if damage == "data" and not tensor.isfinite().all() and wanted is not None and tensor.shape == wanted.shape:
                if key in DENSE:
                    continue  # a dense tensor may hold any float
                found.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: {key} is not finite")
    except (FormatError, FileNotFoundError):
        found.refused += 1
    except Exception:
        found.wrong.append(f"{name}:{seed}: {damage} of {sample.damaged.name}: {traceback.format_exc(limit=-3)}")
    finally:
        signal.alarm(0)
        sample.damaged.write_bytes(whole)


DENSE = ("model.norm.weight", "model.a.bias", "c", "d", "e")
SAMPLES: dict[str, list[Sample]] = {}
"""Whole files by format, made by :func:`prepared`."""


def prepared(folder: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Make every format's file in a folder; return what each holds."""
    signal.signal(signal.SIGALRM, _too_long)
    for name in FORMATS:
        SAMPLES[name] = samples(name, folder / name)
    paths = {sample.path for each in SAMPLES.values() for sample in each}
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
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _quiet()
    found, seed = Found(), int(time.time()) % 100_000 if given.seed is None else given.seed
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        right = prepared(Path(folder))
        if given.only:
            name, _, number = given.only.partition(":")
            one(name, int(number), Path(folder), right, found)
        else:
            print(f"seed {seed}", flush=True)
            for case in range(given.cases):
                if time.monotonic() - started > given.seconds or len(found.wrong) >= 20:
                    break
                one(tuple(FORMATS)[case % len(FORMATS)], seed * 1_000_000 + case, Path(folder), right, found)
    for text in found.wrong:
        print(text)
    print(f"{found.cases} damaged files, {found.refused} refused, {len(found.wrong)} wrong, seed {seed}")
    if given.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {"kind": "fuzz", "run": record.run_name(facts), "device": "files", "problems": found.cases}
        row |= {"wrong": len(found.wrong), "refused": found.refused, "seed": seed}
        row |= {"seconds": round(time.monotonic() - started), "kinds": dict(sorted(found.kinds.items()))}
        record.append(given.json, row | facts)
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
