"""Weights in 8-bit floats of a folder that has others in 4 bits: :class:`Fp8Folder` reads them as dense tensors.

Such a ``weight`` is e4m3 (n, k). Beside it lies its scale, ``weight_scale_inv``, ``weight_scale`` or ``scale``: one
number; one for each row; one for each block of a grid, whose last row and column of blocks may be cut off; or, of
MXFP8, e8m0 (n, k / 32), one for each 32 columns. The weight is e4m3 * scale, in float32. The scale of its activations
is not used, because x stays in 16 bits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from w4gemm.checkpoints.hugging_face import SafetensorsFolder, TensorInfo
from w4gemm.core.errors import FormatError

E4M3 = "F8_E4M3"
_SCALE_LEAVES = ("weight_scale_inv", "weight_scale", "scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_E8M0 = ("F8_E8M0", "U8")
"""safetensors' names of the dtypes of scales of MXFP8."""
_MX_GROUP = 32
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")
"""Last parts of the names of tensors beside a weight in fp8 that are not needed."""


class Block(NamedTuple):
    """Rows and columns that share a scale."""

    rows: int = 128
    columns: int = 128


class Fp8Folder(SafetensorsFolder):
    """A folder whose ``tensors`` have no scales of weights in fp8: :meth:`tensor` gives these weights in float32.

    Attributes:
        scales: place of the scale of each weight in fp8, by the weight's name.
        beside: names of these scales and of other tensors beside such weights that are not among ``tensors``.

    Raises:
        FormatError: if a weight in fp8 has no scale, or one of another shape.
    """

    def __init__(self, path: Path, block: Block = Block()) -> None:
        super().__init__(path)
        self.scales: dict[str, TensorInfo] = {}
        self.beside: list[str] = []
        self._block = block
        stored = dict(self.tensors)
        for name in [name for name, info in self.tensors.items() if info.dtype == E4M3 and name.endswith("weight")]:
            owner = name.removesuffix("weight")
            found = [leaf for leaf in _SCALE_LEAVES if owner + leaf in self.tensors]
            if len(found) != 1:
                raise FormatError(f"{path}: {name} is in fp8, wanted one scale beside it, got {found or 'none'}")
            self.scales[name] = scale = self.tensors.pop(owner + found[0])
            self._check(name, self.tensors[name].shape, scale)
            self.beside += [owner + leaf for leaf in (*found, *_UNUSED) if owner + leaf in stored]
            for leaf in _UNUSED:
                self.tensors.pop(owner + leaf, None)

    def tensor(self, name: str) -> torch.Tensor:
        stored = super().tensor(name)
        if name not in self.scales:
            return stored
        w, scale = stored.float(), self.scales[name].read()
        if self._is_mx(w.shape, self.scales[name]):
            return w.unflatten(1, (-1, _MX_GROUP)).mul_(scale.view(torch.float8_e8m0fnu).float()[..., None]).flatten(1)
        scale = scale.float()
        if scale.numel() == 1:
            return w.mul_(scale.flatten())
        if scale.shape in ((len(w),), (len(w), 1)):
            return w.mul_(scale.view(-1, 1))
        for rows, factors in zip(w.split(self._block.rows), scale, strict=True):
            rows.mul_(factors.repeat_interleave(self._block.columns)[: w.shape[1]])
        return w

    @staticmethod
    def _is_mx(shape: tuple[int, ...], scale: TensorInfo) -> bool:
        n, k = shape
        return scale.dtype in _E8M0 and k % _MX_GROUP == 0 and scale.shape == (n, k // _MX_GROUP)

    def _check(self, name: str, shape: tuple[int, ...], scale: TensorInfo) -> None:
        if len(shape) != 2 or 0 in shape:
            raise FormatError(f"{self.path}: {name} is in fp8 and has shape {shape}, wanted a matrix")
        n, k = shape
        if self._is_mx(shape, scale):
            return
        grid = -(-n // self._block.rows), -(-k // self._block.columns)
        whole = math.prod(scale.shape) == 1
        if scale.dtype not in _SCALE_DTYPES or not (whole or scale.shape in (grid, (n,), (n, 1))):
            raise FormatError(
                f"{self.path}: {name} in fp8 has shape {shape}, and its scale is {scale.dtype} of shape {scale.shape}; "
                f"wanted one number, {(n, 1)}, or {grid} for blocks of {self._block.rows} x {self._block.columns}"
            )


def block_of(weight_block_size: object) -> Block:
    """Return the blocks of a config's ``weight_block_size``, 128 x 128 without one; raise ValueError for no pair of
    positive integers."""
    if weight_block_size is None:
        return Block()
    if (
        not isinstance(weight_block_size, (list, tuple))
        or len(weight_block_size) != 2
        or not all(type(size) is int and size > 0 for size in weight_block_size)
    ):
        raise ValueError(f"weight_block_size is {weight_block_size!r}, wanted two positive integers")
    return Block(*weight_block_size)
