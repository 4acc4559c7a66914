"""Experts of a block of a GGUF file: tensors ``ffn_gate_exps``, ``ffn_up_exps`` and ``ffn_down_exps``, of all experts
each."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from w4gemm.checkpoints.base import Module, Pack
from w4gemm.checkpoints.experts import DOWN, GATE_UP
from w4gemm.checkpoints.gguf.architectures import Architecture
from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.checkpoints.numbers import ExpertsNumbers, Numbers, PairedNumbers
from w4gemm.core.errors import FormatError
from w4gemm.weights.weight import QuantizedWeight

_NAME = re.compile(r"blk\.(\d+)\.ffn_gate_exps\.weight")
_PRODUCTS = {GATE_UP: ("gate", "up"), DOWN: ("down",)}
"""Tensors of a product of the experts, by its name in models."""


@dataclass(frozen=True)
class BlockExperts:
    """The experts of one block.

    Attributes:
        owner: their name in the model, such as "model.layers.0.mlp.experts".
        block: number of the block.
        transposed: see :class:`~w4gemm.checkpoints.gguf.architectures.Architecture`.
    """

    file: GGUFFile
    owner: str
    block: int
    transposed: bool

    @classmethod
    def of(cls, file: GGUFFile, architecture: Architecture | None) -> dict[str, BlockExperts]:
        """Return the experts of each block that has some, by the name of their module.

        Raises:
            FormatError: if some of their tensors are missing, or have shapes that do not fit.
        """
        numbers = [int(match[1]) for name in file.tensors if (match := _NAME.fullmatch(name))]
        if architecture is None:
            return {}
        transposed = architecture.experts_transposed
        by_owner = {f"model.layers.{b}.mlp": cls(file, f"model.layers.{b}.mlp.experts", b, transposed) for b in numbers}
        for experts in by_owner.values():
            experts._check()
        return by_owner

    def _check(self) -> None:
        gate, up, down = (self.file.info(self._stored(role)).shape for role in ("gate", "up", "down"))
        if len(gate) != 3 or up != gate or down != (gate[0], gate[2], gate[1]):
            raise FormatError(
                f"{self.file.path}: ffn_gate_exps, ffn_up_exps and ffn_down_exps of block {self.block} have shapes "
                f"{gate}, {up} and {down}; wanted (experts, n, k), the same, and (experts, k, n)"
            )

    @property
    def stored(self) -> list[str]:
        """Names of their tensors in the file."""
        each = (self._stored(role, leaf) for role in ("gate", "up", "down") for leaf in ("weight", "bias"))
        return [name for name in each if name in self.file.tensors]

    @functools.cached_property
    def modules(self) -> dict[str, Module]:
        """Both products, if none of the three tensors stays dense, and gates and ups are of one type; else none."""
        products = {f"{self.owner}.{product}": self._module(product) for product in _PRODUCTS}
        return {name: m for name, m in products.items() if m} if all(products.values()) else {}

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of biases, and of weights if these are dense. Then transformers has another name for a bias."""
        shapes: dict[str, tuple[int, ...]] = {}
        for product in _PRODUCTS:
            experts, n, k = self._sizes(product)
            if not self.modules:
                shapes[f"{self.owner}.{product}"] = (experts, k, n) if self.transposed else (experts, n, k)
            if self._has_bias(product):
                shapes[f"{self.owner}.{product}{'.' if self.modules else '_'}bias"] = (experts, n)
        return shapes

    def stored_names(self, name: str) -> list[str]:
        """Return the names in the file of the weight and bias of one of :attr:`modules`, or of one of
        :attr:`tensors`."""
        product, leaf = self._parts(name)
        leaves = ("weight", "bias") if name in self.modules else (leaf,)
        each = (self._stored(role, leaf) for role in _PRODUCTS[product] for leaf in leaves)
        return [stored for stored in each if stored in self.file.tensors]

    def stored_type(self, name: str) -> str:
        product, leaf = self._parts(name)
        return self.file.info(self._stored(_PRODUCTS[product][0], leaf)).type

    def weight(self, name: str, device: torch.device, pack: Pack) -> QuantizedWeight:
        """Return the weight (experts, n, k) of one of :attr:`modules`."""
        m, stored = self.modules[name], [self._stored(role) for role in _PRODUCTS[self._parts(name)[0]]]

        def expert(index: int) -> Numbers:
            each = [self.file.numbers(one, device=device, expert=index) for one in stored]
            return each[0] if len(each) == 1 else PairedNumbers(*each)

        return self.file.packed(stored, ExpertsNumbers(m.format, m.n, m.k, device, m.experts, expert), pack)

    def dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one of :attr:`tensors`. In biases gates and ups alternate."""
        product, leaf = self._parts(name)
        roles = [self.file.dense(self._stored(role, leaf), dtype) for role in _PRODUCTS[product]]
        pairs = leaf == "bias" or self.transposed
        rows = torch.stack(roles, 2).flatten(1, 2) if pairs else torch.cat(roles, 1)
        return rows if leaf == "bias" or not self.transposed else rows.transpose(1, 2).contiguous()

    def _module(self, product: str) -> Module | None:
        roles = _PRODUCTS[product]
        format, *others = (self.file.format(self._stored(role), 3) for role in roles)
        if format is None or any(other != format for other in others):
            return None
        experts, n, k = self._sizes(product)
        fused = tuple(f"{role}_proj" for role in roles) if others else ()
        return Module(n, k, format, self._has_bias(product), experts, fused)

    def _sizes(self, product: str) -> tuple[int, ...]:
        """Number of experts, n and k of a product."""
        roles = _PRODUCTS[product]
        experts, n, k = self.file.info(self._stored(roles[0])).shape
        return experts, len(roles) * n, k

    def _has_bias(self, product: str) -> bool:
        return self._stored(_PRODUCTS[product][0], "bias") in self.file.tensors

    def _parts(self, name: str) -> tuple[str, str]:
        """Product and leaf of the name of a module or tensor."""
        part = name.removeprefix(f"{self.owner}.")
        product = part.removesuffix("bias").rstrip("._")
        return product, "bias" if part != product else "weight"

    def _stored(self, role: str, leaf: str = "weight") -> str:
        return f"blk.{self.block}.ffn_{role}_exps.{leaf}"
