"""Weights in 8-bit floats of a folder: :class:`Fp8Folder` reads matrices packed, others as dense tensors.

Such a weight is e4m3 or e5m2: a matrix (n, k), or those of all experts (experts, n, k). Its scale lies beside it:
``weight_scale_inv``, ``weight_scale``, ``scale`` or Mistral's ``qscale_weight`` beside ``weight``;
``down_proj_scale_inv``, ``down_proj_scale`` or ``down_proj_weight_scale`` beside a parameter of experts, ``down_proj``.
The scale is one of these:

- one number, or one for each expert;
- one for each row; of experts also for each column, because some models keep theirs transposed;
- one for each block of a grid, whose last row and column of blocks may be cut off; ModelOpt has it as
  (rows, 1, columns, 1);
- of MXFP8, e8m0 (..., n, k / 32), one for each 32 columns.

The weight is stored * scale, in float32. GPTQModel's scales divide, as its config says, so 1 / scale multiplies. The
scale of activations is not used, because x stays in 16 bits.

A matrix becomes ``e4m3_col_fp32``, ``e4m3_g128_b128`` for blocks of 128 x 128, ``e4m3_g*_fp32`` for others of a
multiple of 16 columns, whose scales are repeated for each row, or ``mxfp8``; or the same of e5m2. So does each matrix
of experts that are two tensors, ``gate_up_proj``, gates before ups, and ``down_proj``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.experts import DOWN, GATE_UP, fused_in
from w4gemm.checkpoints.hugging_face import SafetensorsFolder, TensorInfo
from w4gemm.checkpoints.numbers import ExpertsNumbers, Numbers, PairedNumbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.stored import FP8
from w4gemm.core.errors import FormatError
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.formats import PER_COLUMN, WeightFormat

_ENDS = ("_scale_inv", "_scale", "_weight_scale_inv", "_weight_scale")
"""What is added to a weight's name to make that of its scale."""
_SCALES_OF_WEIGHT = ("scale", "qscale_weight")
"""Other names of the scale of a tensor called ``weight``."""
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_E8M0 = ("F8_E8M0", "U8")
"""safetensors' names of the dtypes of scales of MXFP8."""
_MX_GROUP = 32
_ELEMENTS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_DIVIDE = "inverse"
"""GPTQModel's ``weight_scale_semantics``: a scale is the largest fp8 number / the largest magnitude of the weight."""


class ScaleBlock(NamedTuple):
    """Rows and columns that share a scale."""

    rows: int = 128
    columns: int = 128

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Return the number of blocks along the rows and the columns of a matrix."""
        return -(-n // self.rows), -(-k // self.columns)

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"


class Fp8Settings(NamedTuple):
    """What a quantization_config says of the scales of fp8."""

    blocks: tuple[ScaleBlock, ...] = (ScaleBlock(),)
    """Rows and columns that share a scale: of each weight those of which its scale has the grid."""
    blocks_only: bool = False
    """True if every scale is of blocks, so that one number for more than a block is no scale."""
    divide: bool = False
    """True if weights are divided by their scales."""


class Fp8Folder(SafetensorsFolder):
    """A folder whose ``tensors`` have no scales of weights in fp8: :meth:`tensor` gives these weights in float32.

    A tensor in fp8 without a scale stays among ``tensors``: it may be part of a packed module.

    Attributes:
        scales: place of the scale of each weight in fp8, by the weight's name.

    Raises:
        FormatError: if a tensor in fp8 has several scales, or one of another shape, or of a shape that blocks of
            several sizes have.
    """

    def __init__(self, path: Path, settings: Fp8Settings = Fp8Settings()) -> None:
        super().__init__(path)
        self.scales: dict[str, TensorInfo] = {}
        self._blocks, self._blocks_only, self._divide = settings
        for name in [name for name, info in self.tensors.items() if info.dtype in FP8]:
            owner, _, leaf = name.rpartition(".")
            others = [f"{owner}.{scale}" for scale in _SCALES_OF_WEIGHT] if leaf == "weight" else []
            candidates = [name + end for end in _ENDS] + others
            scales = [candidate for candidate in candidates if candidate in self.tensors]
            if len(scales) > 1:
                raise FormatError(f"{path}: {name} is in fp8, wanted one scale beside it, got {', '.join(scales)}")
            for scale in scales:
                info = self.tensors.pop(scale)
                if len(info.shape) == 4 and info.shape[1::2] == (1, 1):  # ModelOpt's, of blocks
                    info = info._replace(shape=info.shape[::2])
                self.scales[name] = info
                self._check(name)

    def format(self, name: str) -> WeightFormat | None:
        """Return the format of a matrix in fp8; None for any other tensor, and for blocks that no group fits."""
        if name not in self.scales or len(self.tensors[name].shape) != 2:
            return None
        return format_of(self.tensors[name], self.scales[name], self.block(name))

    def numbers(self, name: str, device: torch.device) -> Numbers:
        """Return the numbers of a matrix that has a :meth:`format`."""
        format = self.format(name)
        assert format is not None
        return numbers(format, super().tensor(name).to(device), self._scale(name).to(device), self.block(name))

    def block(self, name: str) -> ScaleBlock:
        """Return the rows and columns of a weight in fp8, as it is stored, that share a scale, if it is of blocks."""
        return next(iter(self._fitting(name)), self._blocks[0])

    def _fitting(self, name: str) -> list[ScaleBlock]:
        """Return the sizes of blocks of which the scale of a weight has the grid."""
        *experts, n, k = self.tensors[name].shape
        return [block for block in self._blocks if self.scales[name].shape == (*experts, *block.grid(n, k))]

    def _scale(self, name: str) -> torch.Tensor:
        info = self.scales[name]
        scale = info.read().reshape(info.shape)
        return scale.reciprocal() if self._divide else scale

    def experts(self) -> dict[str, Module]:
        """Return the products of experts that a format holds, by the names of their tensors. Shapes tell whether each
        matrix is (n, k) or (k, n). Gates and ups are taken to be in pairs if there are biases, as gpt-oss has them,
        else one after the other: it is for the model's code to say whether they are."""
        made: dict[str, Module] = {}
        for down in [name for name in self.scales if name.endswith(f"experts.{DOWN}")]:
            names = f"{down.removesuffix(DOWN)}{GATE_UP}", down
            if names[0] in self.scales and len({f"{name}_bias" in self.tensors for name in names}) == 1:
                both = {name: self._module(name) for name in names}
                made |= {name: module for name, module in both.items() if module} if all(both.values()) else {}
        return made

    def expert_numbers(self, name: str, device: torch.device) -> Numbers:
        """Return the numbers (experts, n, k) of one of :meth:`experts`, gates and ups in pairs."""
        module, transposed = self._module(name), self._is_transposed(name)
        assert module is not None and transposed is not None
        block, parts = self._block_of(name, transposed), 2 if module.fused and not module.bias else 1
        codes, scale = super().tensor(name).to(device), self._scale(name).to(device)

        def expert(e: int) -> Numbers:
            own = scale if scale.numel() == 1 else scale[e]
            own = own.reshape(1, 1) if own.numel() == 1 else own
            matrix, factors = (codes[e].T, own.T) if transposed else (codes[e], own)
            halves = factors.chunk(parts) if len(factors) > 1 else [factors] * parts
            both = [numbers(module.format, c, f, block) for c, f in zip(matrix.chunk(parts), halves, strict=True)]
            return both[0] if parts == 1 else PairedNumbers(*both)

        return ExpertsNumbers(module.format, module.n, module.k, device, module.experts, expert)

    def _is_transposed(self, name: str) -> bool | None:
        """True if the matrices of experts are (k, n), None if those of both products do not fit one another."""
        owner = name.rpartition(".")[0]
        first, second = (self.tensors[f"{owner}.{leaf}"].shape for leaf in (GATE_UP, DOWN))
        if len(first) != 3 or len(second) != 3 or first[0] != second[0]:
            return None
        (_, a, b), (_, c, d) = first, second
        return False if (a, b) == (2 * d, c) else True if (a, b) == (d, 2 * c) else None

    def _block_of(self, name: str, transposed: bool) -> ScaleBlock:
        block = self.block(name)
        return ScaleBlock(*reversed(block)) if transposed else block

    def _module(self, name: str) -> Module | None:
        """Return one product of experts, or None if no format holds it."""
        codes, scale, transposed = self.tensors[name], self.scales[name], self._is_transposed(name)
        if transposed is None:
            return None
        experts, *sizes = codes.shape
        alone = math.prod(scale.shape) == 1 or scale.shape == (experts,)
        own = (1, 1) if alone else scale.shape[1:]
        (n, k), own = (sizes[::-1], own[::-1]) if transposed else (sizes, own)
        block, fused = self._block_of(name, transposed), fused_in(name)
        matrix, factors = codes._replace(shape=(n, k)), scale._replace(shape=own)
        grid = block.grid(n, k)
        mx = _is_mx((n, k), factors) and not transposed
        if not (mx or own in ((1, 1), (n, 1), grid)):
            return None
        biased = f"{name}_bias" in self.tensors
        if fused and not biased and own == grid and grid[0] > 1 and n // 2 % block.rows and not mx:
            return None  # a block has gates and ups
        if (format := format_of(matrix, factors, block)) is None:
            return None
        return Module(n, k, format, biased, experts, fused, shared=True)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, of a weight in fp8 with a scale its numbers in float32.

        Raises:
            FormatError: if these are not all finite.
        """
        stored = super().tensor(name)
        if name not in self.scales:
            return stored
        w = self._scaled(name, stored.float())
        if not w.isfinite().all():
            which = int((~w.isfinite()).sum())
            raise FormatError(
                f"{self.path}: {name}: wanted finite numbers in fp8 and scales, got {which} weights of NaN or infinity"
            )
        return w

    def _scaled(self, name: str, w: torch.Tensor) -> torch.Tensor:
        scale = self._scale(name)
        if _is_mx(w.shape, self.scales[name]):
            factors = scale.view(torch.float8_e8m0fnu).float()[..., None]
            return w.unflatten(-1, (-1, _MX_GROUP)).mul_(factors).flatten(-2)
        scale = scale.float()
        if scale.shape not in _broadcast(w.shape):
            if scale.numel() != 1 and scale.dim() == w.dim():
                return _of_blocks(w, scale, self.block(name))
            scale = scale.view(-1, *[1] * (w.dim() - 1))
        return w.mul_(scale)

    def _check(self, name: str) -> None:
        shape, scale = self.tensors[name].shape, self.scales[name]
        if len(shape) not in (2, 3) or 0 in shape:
            raise FormatError(f"{self.path}: {name} is in fp8 and has shape {shape}, wanted (n, k) or (experts, n, k)")
        if self._divide and scale.dtype != "F32":
            raise FormatError(f"{self.path}: {name} in fp8 has a scale that divides and is {scale.dtype}, wanted F32")
        if _is_mx(shape, scale):
            return
        *experts, n, k = shape
        grids = {block: (*experts, *block.grid(n, k)) for block in self._blocks}
        grid, sizes = " or ".join(map(str, grids.values())), " or ".join(map(str, grids))
        alone = math.prod(scale.shape) == 1
        of_whole = alone or scale.shape in (shape[:-2], (*experts, 1, 1))
        if self._blocks_only and of_whole and (*experts, 1, 1) not in grids.values():
            raise FormatError(
                f"{self.path}: {name} in fp8 has shape {shape}, and its scale shape {scale.shape}; wanted {grid}, "
                f"because config.json says that blocks of {sizes} have scales"
            )
        legal = (*_broadcast(shape), *grids.values(), shape[:1])
        if scale.dtype not in _SCALE_DTYPES or not (alone or scale.shape in legal):
            raise FormatError(
                f"{self.path}: {name} in fp8 has shape {shape}, and its scale is {scale.dtype} of shape {scale.shape}; "
                f"wanted one number, {(*experts, n, 1)}, or {grid} for blocks of {sizes}"
            )
        fitting = self._fitting(name)
        if len({(rows < n and rows, columns < k and columns) for rows, columns in fitting}) > 1:
            raise FormatError(
                f"{self.path}: {name} in fp8 has shape {shape}, and its scale shape {scale.shape}; wanted a shape that "
                f"tells apart the blocks in config.json, got that of {' and of '.join(map(str, fitting))}"
            )


def format_of(codes: TensorInfo, scale: TensorInfo, block: ScaleBlock) -> WeightFormat | None:
    """Return the format of a matrix in fp8 with a scale of a legal shape; None for blocks that no group fits."""
    element, shape = _ELEMENTS[codes.dtype], codes.shape
    if _is_mx(shape, scale):
        return WeightFormat(_MX_GROUP, "none", "e8m0", element)
    if math.prod(scale.shape) == 1 or scale.shape in (shape[:1], (shape[0], 1)):
        return WeightFormat(PER_COLUMN, "none", "fp32", element)
    if block.columns % SMALLEST_GROUP:
        return None
    return WeightFormat(block.columns, "none", "b128" if block == ScaleBlock() else "fp32", element)


def numbers(format: WeightFormat, codes: torch.Tensor, scale: torch.Tensor, block: ScaleBlock) -> Numbers:
    """Return the numbers of a matrix in fp8 and its scale."""
    n = len(codes)
    if format.scale == "e8m0":
        scales = scale.view(torch.float8_e8m0fnu)
    elif format.group_size == PER_COLUMN:
        scales = scale.float().view(-1, 1).expand(n, 1)
    elif format.scale == "b128":
        scales = scale.float().repeat_interleave(2, 0)  # of even rows and of odd ones
    else:
        scales = scale.float().repeat_interleave(block.rows, 0)[:n]
    return PackedNumbers(format, PackedMatrix(codes.view(torch.uint8)), PackedMatrix(scales))


def _of_blocks(w: torch.Tensor, scale: torch.Tensor, block: ScaleBlock) -> torch.Tensor:
    for rows, factors in zip(w.split(block.rows, -2), scale.unbind(-2), strict=True):
        columns = factors.repeat_interleave(block.columns, -1)[..., : w.shape[-1]]
        rows.mul_(columns.unsqueeze(-2))
    return w


def _is_mx(shape: tuple[int, ...], scale: TensorInfo) -> bool:
    *rows, k = shape
    return scale.dtype in _E8M0 and k % _MX_GROUP == 0 and scale.shape == (*rows, k // _MX_GROUP)


def _broadcast(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of scales that multiply a weight as they are: of each row, of experts also of each column or expert."""
    *experts, n, k = shape
    rows = (*experts, n, 1)
    return (rows, (*experts, 1, k), (*experts, 1, 1)) if experts else (rows,)


def settings_of(config: Mapping[str, Any]) -> Fp8Settings:
    """Return what a quantization_config says of the scales of fp8. Blocks are those of ``weight_block_size`` or, in
    config groups of compressed-tensors, ``block_structure``, which older files have as "128x128", or one row times
    ``group_size``. Without a setting they are 128 x 128. GPTQModel's ``weight_scale_semantics`` is "inverse" for scales
    that divide.

    Raises:
        ValueError: for no pair of positive integers, and for other semantics.
    """
    if (semantics := config.get("weight_scale_semantics")) not in (None, _DIVIDE):
        raise ValueError(f"weight_scale_semantics is {semantics!r}, wanted {_DIVIDE!r} or no such setting")
    settings = [("weight_block_size", config.get("weight_block_size"))]
    # a 4-bit method's setting gives the size of blocks only, and scales may have any shape
    of_all = config.get("quant_method") == "fp8" and settings[0][1] is not None
    strategies: set[Any] = {"block"} if of_all else set()
    groups = config.get("config_groups")
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        if (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            strategies.add(weights.get("strategy"))
            if weights.get("strategy") == "group":
                settings.append((f"config_groups.{key}.weights.group_size", [1, weights.get("group_size")]))
        if weights.get("strategy") == "block":
            settings.append((f"config_groups.{key}.weights.block_structure", weights.get("block_structure")))
    blocks = tuple(dict.fromkeys(_block(name, sizes) for name, sizes in settings if sizes is not None))
    return Fp8Settings(blocks or (ScaleBlock(),), strategies == {"block"}, semantics == _DIVIDE)


def _block(name: str, sizes: object) -> ScaleBlock:
    if isinstance(sizes, str) and re.fullmatch(r"\d+x\d+", sizes, re.ASCII):
        sizes = [int(size) for size in sizes.split("x")]
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ValueError(f"{name} is {sizes!r}, wanted two positive integers")
    return ScaleBlock(*sizes)
