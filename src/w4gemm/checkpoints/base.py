"""The protocol between checkpoints and models: a :class:`Checkpoint` is modules with tensors behind them.

Names are those of the model's modules and parameters in Hugging Face's implementation
(``model.layers.0.self_attn.q_proj``), and rows are in the model's order. Whatever a format keeps under other names, in
another order or in several pieces, its own file puts right; nothing above it knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from w4gemm.checkpoints.gguf.file import GGUFFile

_EMBEDDING = re.compile(r"(?:.+\.)?(?:wte|wpe|embed_(?:tokens\w*|in|positions)|\w*embeddings?)")


@dataclass(frozen=True)
class Module:
    """A linear module with a quantized weight (n, k), or (experts, n, k), as far as headers tell."""

    n: int
    k: int
    format: WeightFormat
    bias: bool = False
    """True if ``<name>.bias`` (n), or (experts, n), is among the checkpoint's tensors."""
    experts: int = 0
    """Number of experts; 0 for a weight that is not one of several."""
    fused: tuple[str, ...] = ()
    """Of experts: last parts of the names of the modules whose rows alternate in this one: ("gate_proj", "up_proj")."""
    activations: str | None = None
    """See :attr:`w4gemm.QuantizedWeight.activations`: "fp8" if x is quantized before it is multiplied."""
    pre_quant_scale: bool = False
    """True if ``<name>.pre_quant_scale`` (k), which x is multiplied by first, is among the checkpoint's tensors."""
    shared: bool = False
    """True for a weight that is among the checkpoint's dense tensors too, which a model may take instead: an output
    layer that is its embedding, or experts in one tensor of fp8."""


class Pretrained(NamedTuple):
    """Arguments of transformers' ``from_pretrained`` that give a checkpoint's config and tokenizer."""

    folder: Path
    options: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    """Settings of the config that transformers does not take from there."""
    file: GGUFFile | None = None
    """The open GGUF file that ``options`` name."""


Pack = Callable[[Numbers, str | None], QuantizedWeight]
"""Return the packed weight of a module's numbers and its :attr:`Module.activations`."""


class Checkpoint(Protocol):
    """An open checkpoint. Opening reads headers only; tensors are read one at a time, when asked for.

    ``modules`` and ``tensors`` together are all that the checkpoint holds, each tensor in one of them, but for modules
    that are ``shared``, and for what a reader of quantized files leaves out with a reason (``left_out``). That includes
    what no model has a place for, so that :func:`w4gemm.integrations.transformers.load` refuses it.
    """

    path: Path

    @property
    def modules(self) -> Mapping[str, Module]:
        """Packed linear modules by name; :meth:`weight` gives their weights."""
        ...

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the dense parameters and buffers by name, those of biases too; :meth:`dense` gives them."""
        ...

    def stored_type(self, name: str) -> str:
        """Return the file's name for the type of one of ``tensors``, such as BF16 or Q6_K; "" if headers do not say.

        Raises:
            FormatError: if there is no such tensor.
        """
        ...

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        """Return the weight (n, k) or (experts, n, k) of a module, losslessly.

        Args:
            device: where it is to lie; it is unpacked there, which a GPU does sooner.
            pack: packs the module's numbers, by default in the canonical layout; ``Numbers.packed`` does in the one
                that the device's kernels read. Its errors get the file's and the module's name.

        Raises:
            FormatError: if there is no such module, or its numbers are damaged.
        """
        ...

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one of ``tensors``, rounded at most once to ``dtype``, on the CPU; integers, such as a table of a
        router, as they are.

        Raises:
            FormatError: if there is no such tensor, or it cannot be read.
        """
        ...

    def pretrained(self) -> Pretrained:
        """Return where transformers finds the config and the tokenizer.

        Raises:
            FormatError: if the checkpoint holds none, or one that contradicts its tensors.
        """
        ...


class Renamed:
    """A checkpoint under other names.

    Args:
        source: the checkpoint.
        own: name in ``source`` of each module and tensor. Those that it lacks are left out.
        modules: the modules by their new names; None for the source's own ones.
    """

    def __init__(self, source: Checkpoint, own: Mapping[str, str], modules: Mapping[str, Module] | None = None) -> None:
        self.path, self.source, self.own = source.path, source, own
        of_source = {name: source.modules[old] for name, old in own.items() if old in source.modules}
        self.modules = of_source if modules is None else modules
        self.tensors = {name: source.tensors[old] for name, old in own.items() if old in source.tensors}

    def stored_type(self, name: str) -> str:
        return self.source.stored_type(self.own.get(name, name))

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        return self.source.weight(self.own.get(name, name), device, pack)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.source.dense(self.own.get(name, name), dtype)

    def pretrained(self) -> Pretrained:
        return self.source.pretrained()


def is_embedding(name: str) -> bool:
    """True if a module of that name is probably of the class Embedding; others with quantized weights are of the class
    Linear."""
    return _EMBEDDING.fullmatch(name) is not None


def finite_dense(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a checkpoint's dense tensor in ``dtype``.

    Raises:
        FormatError: if float16 cannot hold its numbers, or as from ``dense``.
    """
    t = checkpoint.dense(name, dtype)
    if dtype == torch.float16 and not t.isfinite().all():
        whole = checkpoint.dense(name)
        if whole.isfinite().all():
            raise FormatError(
                f"{checkpoint.path}: tensor {name!r} holds {float(whole.abs().max()):g}, which float16 cannot hold; "
                "wanted bfloat16 or float32 as dtype"
            )
    return t


@dataclass(frozen=True)
class CheckpointFormat:
    """One format: how a path is recognized, and how it is opened."""

    name: str
    contents: str = field(repr=False)
    """Words for what is recognized, such as "a GGUF file, or a folder with one"."""
    find: Callable[[Path], Path | None]
    """Return the file or folder to open for an existing path, or None if there is nothing of this format."""
    open: Callable[[Path, WeightFormat | None], Checkpoint]
    """Open what ``find`` returned. The second argument says what dense weights are to be quantized to, None for the
    format's own choice; a quantized checkpoint ignores it."""
