"""Folders of tiny models with random packings, and random changes of them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_tensors import words
from many_models import Base, Tensors


def _numbers(n: int, k: int, group: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (n, k), and scales (n, groups) that every 16-bit dtype holds."""
    return torch.randint(0, 16, (n, k), generator=g), torch.randint(4, 16, (n, k // group), generator=g) / 256


def compressed(n: int, k: int, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, scales = _numbers(n, k, 32, g)
    parts = {"weight_packed": words(codes), "weight_scale": scales.bfloat16(), "weight_shape": torch.tensor([n, k])}
    return parts, (codes - 8) * scales.repeat_interleave(32, 1)


def gptq(n: int, k: int, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, scales = _numbers(n, k, 32, g)
    zeros = torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32)
    parts = {"qweight": words(codes.T.reshape(k // 8, 8, n).mT).contiguous().squeeze(-1), "qzeros": zeros}
    parts |= {"scales": scales.T.half().contiguous(), "g_idx": (torch.arange(k) // 32).int()}
    return parts, (codes - 8) * scales.repeat_interleave(32, 1)


def nvfp4(n: int, k: int, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, _ = _numbers(n, k, 16, g)
    scales = (torch.rand(n, k // 16, generator=g) * 100 + 20).to(torch.float8_e4m3fn)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    parts = {"weight": (codes[:, ::2] | codes[:, 1::2] << 4).byte(), "weight_scale": scales}
    parts["weight_scale_2"] = torch.tensor(1 / 1024)
    return parts, values[codes] * scales.float().repeat_interleave(16, 1) / 1024


_GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKINGS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "compressed-tensors": (
        compressed,
        {"format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": _GROUP}}},
    ),
    "gptq": (gptq, {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "modelopt": (nvfp4, {"quant_algo": "NVFP4"}),
}
BLOCK = (16, 32)
"""Rows and columns that share a scale of fp8."""


def fp8(w: torch.Tensor, kind: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, or those of all experts, in fp8, its scale and its numbers. kind: 0 to 1, of the scale."""
    *experts, n, k = w.shape
    kinds = ("tensor", "row", "block", *(["expert"] if experts else []))
    scaled = kinds[int(kind * len(kinds))]
    if scaled == "block":
        shape = (*experts, -(-n // BLOCK[0]), -(-k // BLOCK[1]))
    else:
        shape = {"tensor": (1,), "row": (*experts, n, 1), "expert": (*experts, 1, 1)}[scaled]
    scale = 2.0 ** torch.randint(-9, -6, shape).float()
    factors = scale
    if scaled == "block":
        factors = scale.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)[..., :n, :k]
    stored = (w / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * factors


@dataclass
class Folder:
    """What a folder is to hold, and the numbers that it means by the names of the dense folder."""

    stored: Tensors
    dense: Tensors
    config: dict[str, Any]
    touched: list[str] = field(default_factory=list)
    """Names of the tensors that were changed, before and after."""
    change: str = "none"
    uneven: bool = False
    """True if experts of a layer may have other formats than its first one, which is refused."""


def starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def is_matrix(name: str, t: torch.Tensor) -> bool:
    """True for what may be in 4 bits: linear layers, and experts one by one."""
    skipped = ("embed_", "norm", "wte", "wpe", "conv", "visual", "vision", "projector")
    return name.endswith(".weight") and t.dim() == 2 and not any(part in name for part in skipped)


def may_be_fp8(name: str, t: torch.Tensor) -> bool:
    """True for matrices, and for those of all experts in one tensor."""
    return (t.dim() == 2 and name.endswith(".weight")) or (t.dim() == 3 and "experts" in name and "bias" not in name)


def packed(base: Base, r: random.Random) -> Folder:
    """A folder with some of the matrices in 4 bits, at least four, some in fp8, and the rest in a dtype of its own."""
    while True:
        f = drawn(base, r)
        if sum(name.endswith(("weight_packed", "qweight", "weight_scale_2")) for name in f.stored) >= 4:
            return f


def drawn(base: Base, r: random.Random) -> Folder:
    method = r.choice(list(PACKINGS))
    pack, settings = PACKINGS[method]
    conv1d = "gpt2" in base.folder.name
    share, share_fp8, single = r.choice((0.3, 0.6, 1.0)), r.choice((0.0, 0.0, 0.4)), r.random() < 0.3
    g = torch.Generator().manual_seed(r.randrange(2**31))
    torch.manual_seed(r.randrange(2**31))
    stored: Tensors = {}
    dense: Tensors = {}
    chances: dict[str, tuple[float, float, float]] = {}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    dtype, experts = r.choice((None, *dtypes)), r.choice(("whole", "whole", "whole", "products", "each"))
    for name, w in base.tensors.items():
        key = name if (experts == "each" if ".experts." in name else single) else starred(name)
        if experts == "whole":
            key = re.sub(r"(?<=experts\.)\*\..+", "", key)
        elif experts == "products":
            key = re.sub(r"(?<=experts\.\*\.)(gate_proj|up_proj|w1|w3)\.", "", key)
        in_4_bits, in_8_bits, kind = chances.setdefault(key, (r.random(), r.random(), r.random()))
        owner = name.rpartition(".")[0]
        matrix = is_matrix(name, w)
        n, k = (w.T if conv1d else w).shape if matrix else (0, 0)
        if matrix and in_4_bits < share and n % 8 == 0 and k % 32 == 0:
            parts, numbers = pack(n, k, g)
            stored |= {f"{owner}.{part}": t for part, t in parts.items()}
            dense[name] = numbers.T if conv1d else numbers
        elif in_8_bits < share_fp8 and may_be_fp8(name, w):
            stored[name], scale, dense[name] = fp8(w, kind)
            stored[name + r.choice(("_scale", "_scale_inv"))] = scale
        else:
            stored[name] = w.to(dtype or r.choice(dtypes)) if w.is_floating_point() else w
            dense[name] = stored[name].float() if w.is_floating_point() else w
    if r.random() < 0.2:
        attention = sorted({name.rpartition(".k_proj.")[0] for name in stored if ".k_proj." in name})
        names = [
            f"{owner}.{scale}" for owner in attention for scale in ("k_proj.k_scale", "v_scale", "q_proj.output_scale")
        ]
        stored |= {name: torch.tensor(0.5) for name in names}
    for name in base.unneeded:
        del dense[name]
    config = {"quant_method": method, "weight_block_size": list(BLOCK), **settings}
    return Folder(stored, dense, config, uneven=experts == "each")


def write(base: Base, folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def _owners(f: Folder) -> dict[str, list[str]]:
    """Tensors of each module."""
    by_module: dict[str, list[str]] = {}
    for name in f.stored:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return by_module


def drop(f: Folder, r: random.Random) -> None:
    name = r.choice(list(f.stored))
    del f.stored[name]
    f.touched = [name]


_OTHER = {
    "q_proj": "query",
    "down_proj": "w2",
    "up_proj": "w3",
    "gate_proj": "w1",
    "w2": "down_proj",
    "o_proj": "dense",
}
_OTHER |= {"weight": "kernel", "weight_packed": "packed", "weight_scale": "scale", "qweight": "weight", "mlp": "ffn"}


def rename(f: Folder, r: random.Random) -> None:
    """One tensor, or all of a kind."""
    name = r.choice(list(f.stored))
    part = r.choice([part for part in name.split(".") if not part.isdigit()])
    new = _OTHER.get(part, f"{part}_x")
    every = r.random() < 0.5
    for old in [old for old in f.stored if old == name or (every and part in old.split("."))]:
        renamed = ".".join(new if each == part else each for each in old.split("."))
        f.stored[renamed] = f.stored.pop(old)
        f.touched += [old, renamed]


_FUSED = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj"), ("w1", "w3", "w13"))


def fuse(f: Folder, r: random.Random) -> None:
    """Several modules' tensors become one's, in one layer or in all."""
    owners, every = _owners(f), r.random() < 0.5
    places = [
        (owner.rpartition(".")[0], parts) for owner in owners for parts in _FUSED if owner.endswith(f".{parts[0]}")
    ]
    for place, (*parts, whole) in places if every else r.sample(places, min(1, len(places))):
        modules = [f"{place}.{part}" for part in parts]
        leaves = [{name.rpartition(".")[2] for name in owners.get(module, ())} for module in modules]
        if not all(leaves) or any(other != leaves[0] for other in leaves):
            continue
        for leaf in sorted(leaves[0]):
            each = [f.stored.pop(f"{module}.{leaf}") for module in modules]
            axis = -1 if leaf in ("qweight", "qzeros", "scales") else 0
            one = leaf in ("g_idx", "weight_shape", "weight_scale_2") or each[0].dim() == 0
            alike = {(t.dtype, *(t.shape[:-1] if axis else t.shape[1:])) for t in each} if not one else ()
            f.stored[f"{place}.{whole}.{leaf}"] = torch.cat(each, axis) if len(alike) == 1 else each[0]
        f.touched += [*modules, f"{place}.{whole}"]


def split(f: Folder, r: random.Random) -> None:
    """One module's tensors become two modules'."""
    owner = r.choice([owner for owner, names in _owners(f).items() if any(f.stored[n].dim() > 1 for n in names)])
    for name in _owners(f)[owner]:
        t, leaf = f.stored.pop(name), name.rpartition(".")[2]
        halves = t.chunk(2) if t.dim() and len(t) > 1 else (t, t)
        f.stored |= {f"{owner}_{i}.{leaf}": half for i, half in enumerate(halves)}
    f.touched = [owner, f"{owner}_0"]


def stack(f: Folder, r: random.Random) -> None:
    """Experts' tensors become one of all: ``experts.down_proj_packed`` or ``experts.down_proj``."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in f.stored:
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.(.+)", name):
            groups.setdefault((match[1], match[2], match[3]), []).append(name)
    joint = r.choice((".", "_"))
    for (owner, role, leaf), names in groups.items():
        each = [
            f.stored.pop(name) for name in sorted(names, key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
        ]
        if any((t.shape, t.dtype) != (each[0].shape, each[0].dtype) for t in each):
            each = each[:1]
        whole = f"{owner}.{role}" if leaf == "weight" else f"{owner}.{role}{joint}{leaf.removeprefix('weight_')}"
        f.stored[whole] = torch.stack(each)
        f.touched += [names[0], whole]


def cast(f: Folder, r: random.Random) -> None:
    """Another dtype of one tensor; a dense one of floats then means other numbers."""
    name = r.choice(list(f.stored))
    old = f.stored[name]
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int32,
        torch.uint8,
        torch.float8_e4m3fn,
    )
    f.stored[name] = new = old.to(r.choice([dtype for dtype in dtypes if dtype != old.dtype]))
    if name in f.dense and new.dtype in dtypes[:4] and old.dtype in dtypes[:4]:
        f.dense[name] = new.float()
    f.touched = [name]


def duplicate(f: Folder, r: random.Random) -> None:
    """The same numbers, or others, under another name."""
    name = r.choice(list(f.stored))
    owner, _, leaf = name.rpartition(".")
    others = [
        f"{owner}.{leaf}_copy",
        f"{owner}.weight",
        f"{owner}_copy.{leaf}",
        f"model.{name}",
        name.partition(".")[2],
    ]
    copy = r.choice([other for other in others if other and other not in f.stored])
    t = f.stored[name].clone()
    f.stored[copy] = t if r.random() < 0.5 or not t.is_floating_point() else (t.float() * 2).to(t.dtype)
    f.touched = [name, copy]


def stranger(f: Folder, r: random.Random) -> None:
    """A tensor of no model."""
    owner, i = r.choice(list(_owners(f))), r.randrange(9)
    name = r.choice(
        (f"{owner}.extra", f"{owner}.weight_scale_2", f"model.layers.{i}.extra.weight", f"{owner}.7.weight")
    )
    dtype = r.choice((torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn))
    if name not in f.stored:
        f.stored[name] = torch.ones(r.choice(((), (1,), (64,), (64, 64), (4, 64, 32)))).to(dtype)
    f.touched = [name]


CHANGES = (drop, rename, fuse, split, stack, cast, duplicate, stranger)
