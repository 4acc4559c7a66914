"""Small whole GGUF files for :mod:`fuzz.files` to damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_model import write_out

N, K = 32, 64
EXPERTS = 2
TYPES = ("Q4_0", "Q4_1", "F16", "F32", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "Q4_K", "Q6_K", "IQ4_XS")
"""Types of the tensors a, b, ... of the GGUF file."""


def tensors(folder: Path) -> Path:
    """Write a file with a tensor of each type."""
    import gguf
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_array("test.words", ["one", "two"])
    rng = np.random.default_rng(0)
    for number, type in enumerate(TYPES):
        name, k = chr(ord("a") + number), 256 if type.endswith(("_K", "_XS")) else K
        values = rng.standard_normal((N, k)).astype(np.float16 if type == "F16" else np.float32)
        if type in ("F16", "F32"):
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType[type]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (N * k // elements, size), dtype=np.uint8)
        if type in ("MXFP4", "NVFP4"):
            blocks[:, : size - elements // 2] = rng.integers(64, 68, (len(blocks), size - elements // 2))
        else:
            at = size - 2 if type == "Q6_K" else 0
            of = 2 if type in ("Q4_1", "Q4_K") else 1
            factors = (rng.random((len(blocks), of)) / 50 + 0.01).astype(np.float16)
            blocks[:, at : at + 2 * of] = factors.view(np.uint8)
        writer.add_tensor(name, blocks.reshape(N, -1), raw_dtype=kind)
    _finish(writer)
    return folder / "small.gguf"


def experts(folder: Path) -> Path:
    """Write a file with the experts of two blocks: in 4 bits, and with downs of 8, which all become dense."""
    import gguf
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "experts.gguf", "qwen3moe")
    writer.add_block_count(2)
    rng = np.random.default_rng(0)
    for block, down in enumerate(("Q4_0", "Q8_0")):
        for role, type, shape in (("gate", "Q4_0", (N, K)), ("up", "Q4_0", (N, K)), ("down", down, (K, N))):
            kind, values = gguf.GGMLQuantizationType[type], rng.standard_normal((EXPERTS, *shape), np.float32)
            writer.add_tensor(f"blk.{block}.ffn_{role}_exps.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)
    return folder / "experts.gguf"


def _finish(writer: Any) -> None:
    write_out(writer)
