"""Whether an engine has loaded all of a layer: :func:`mark` before it loads, :func:`unloaded` afterwards.

An engine makes parameters of uninitialized memory, and does not ask of a quantized model whether each was loaded. A
tensor that a checkpoint lacks, or that a loader has put in the place of another, leaves a part of a parameter as it was
made. So the memory of parameters is filled with bits that no loader writes: scales with a NaN of all ones, and integers
with a pattern of 16 bytes. Each part that engines load apart holds at least one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.nn.parameter import is_lazy

NOTHING_LOADED = "nothing of them was loaded"
"""Reason to leave layers to an engine, which may never run them."""
_PATTERN = (0x5A17C3E9_0F2D86B4, 0x3BD4716E_C8950A1F)
"""Random words."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""dtypes of integers by their bytes."""
_UNITS = 2**22
"""Units that are compared at a time."""


def mark(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Fill those parameters of a layer that an engine has made, and has not loaded yet, with marks. Those without a
    shape, which the first tensor gives them, need none."""
    for name in names:
        parameter = layer._parameters.get(name)
        if parameter is not None and not is_lazy(parameter) and not parameter.is_meta:
            units, marks = _units(parameter)
            units.copy_(marks)


def draw(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Make scales that are powers of two 1, in a layer that an engine has loaded random numbers into. It may leave them
    as their memory was, where they may be NaN."""
    for name in names:
        parameter = layer._parameters.get(name)
        if parameter is not None and parameter.dtype == torch.uint8 and "scale" in name:
            parameter.data.fill_(127)


def unloaded(parameter: torch.Tensor) -> float:
    """Return the share of a parameter that still holds marks: 0 if all of it was loaded."""
    if is_lazy(parameter):
        return 1.0
    units, marks = _units(parameter)
    counts = [(each == marks).all(1).count_nonzero() for each in units.split(_UNITS)]
    return int(sum(counts)) / len(units) if len(units) else 0.0


def mark_rows(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Mark the first column of floating-point parameters (..., n, k), of which an engine loads whole rows."""
    for name in names:
        _first_column(layer._parameters[name]).fill_(-1)


def unloaded_rows(parameter: torch.Tensor) -> float:
    """Return the share of the rows of a parameter that :func:`mark_rows` has marked, and nobody has loaded."""
    column = _first_column(parameter)
    return int((column == -1).count_nonzero()) / column.numel()


def _first_column(parameter: torch.Tensor | None) -> torch.Tensor:
    assert parameter is not None
    return parameter.data.view(_WORDS[parameter.element_size()])[..., 0]


def check_loaded(layer: torch.nn.Module, names: Iterable[str], what: str) -> bool:
    """Return False if the engine has loaded nothing of a layer.

    Args:
        names: of the parameters that are packed.
        what: the layer, for the error.

    Raises:
        RuntimeError: if the engine has loaded a part of the layer, whose numbers no kernel should run.
    """
    shares = {name: unloaded(getattr(layer, name)) for name in names}
    if all(share == 1 for share in shares.values()):
        return False
    for name, share in shares.items():
        if share:
            parameter = getattr(layer, name)
            shape = "" if is_lazy(parameter) else f" of its shape {tuple(parameter.shape)}"
            raise RuntimeError(
                f"{what}: {name}: {share:.2%}{shape} was not loaded, wanted all of it: the checkpoint lacks a tensor, "
                "or the engine has loaded it in another's place"
            )
    return True


def check_known(layer: torch.nn.Module, known: Collection[str]) -> None:
    """Raise ValueError if a layer has a parameter that is not known, which may change what its numbers mean. Engines
    give known ones second names."""
    parameters = {id(layer._parameters.get(name)) for name in known}
    if unknown := sorted(
        name for name, p in layer._parameters.items() if id(p) not in parameters and name not in known
    ):
        raise ValueError(f"they have a parameter {unknown[0]!r}, wanted {', '.join(sorted(known))} alone")


def _units(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of a parameter as a matrix, and the row that marks one of its rows."""
    memory = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(parameter.untyped_storage())
    if parameter.is_floating_point():
        words = memory.view(_WORDS[parameter.element_size()])
        return words[:, None], words.new_tensor((-1,))
    words = memory[: len(memory) // 16 * 16].view(torch.int64)
    return words.view(-1, 2), words.new_tensor(_PATTERN)
