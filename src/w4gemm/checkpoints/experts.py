"""Experts that a checkpoint holds one by one, put together as models have them: :func:`stacks`.

``model.layers.0.mlp.experts.3.up_proj`` is one of the modules of ``model.layers.0.mlp.experts.gate_up_proj``, which
holds gates and ups of all experts, their rows in pairs. ``down_proj`` is the other product of the experts. Experts
without gates (NemotronH) have ``up_proj`` in the place of ``gate_up_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.numbers import ExpertsNumbers, Numbers, PairedNumbers

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_ROLES = {
    "gate_proj": (GATE_UP, 0),
    "up_proj": (GATE_UP, 1),
    "down_proj": (DOWN, 0),
    "w1": (GATE_UP, 0),
    "w3": (GATE_UP, 1),
    "w2": (DOWN, 0),
}
"""By the last part of an expert's module: its product, and where it stands among that product's modules."""
_NAME = re.compile(rf"(?P<owner>(?:.+\.)?experts)\.(?P<index>\d+)\.(?P<role>{'|'.join(_ROLES)})")
_MODULES = {GATE_UP: 2, UP: 1, DOWN: 1}
_GATE_AND_UP = "gate_proj", "up_proj"


def fused_in(name: str) -> tuple[str, ...]:
    """Return :attr:`Module.fused` of the module of all experts of that name."""
    return _GATE_AND_UP if name.endswith(GATE_UP) else ()


@dataclass(frozen=True)
class Stack:
    """A module of all experts of a layer, in a checkpoint that has modules of each."""

    module: Module
    sources: tuple[tuple[str, ...], ...]
    """Names of each expert's modules: gate and up, or down."""

    def numbers(self, read: Callable[[str], Numbers], device: torch.device) -> Numbers:
        """Return the numbers (experts, n, k); ``read`` gives those of one of the ``sources``."""

        def expert(index: int) -> Numbers:
            each = [read(name) for name in self.sources[index]]
            return each[0] if len(each) == 1 else PairedNumbers(*each)

        m = self.module
        return ExpertsNumbers(m.format, m.n, m.k, device, m.experts, expert)

    def pre_quant_scale(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the factors of x (k), which all experts share; ``read`` gives those of one of the ``sources``.

        Raises:
            ValueError: if experts have others.
        """
        (first, scale), *others = ((name, read(name)) for names in self.sources for name in names)
        if other := next((name for name, s in others if not torch.equal(s, scale)), None):
            raise ValueError(
                f"{other} scales x (pre_quant_scale) by other factors than {first}; wanted the same for all experts of "
                "a layer: export the model again with a ModelOpt that averages them"
            )
        return scale

    def bias(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the bias (experts, n); ``read`` gives that of one of the ``sources``."""
        return torch.stack([torch.stack([read(name) for name in names], -1).flatten() for names in self.sources])


def stacks(modules: Mapping[str, Module]) -> dict[str, Stack]:
    """Return the modules of all experts that a checkpoint's modules make, by name.

    Raises:
        ValueError: if an expert is missing, or experts of a layer are not alike.
    """
    sources_of: dict[str, dict[tuple[int, int], str]] = {}
    for name in modules:
        if match := _NAME.fullmatch(name):
            product, position = _ROLES[match["role"]]
            sources_of.setdefault(f"{match['owner']}.{product}", {})[int(match["index"]), position] = name
    for name in [name for name, sources in sources_of.items() if name.endswith(GATE_UP)]:
        if all(source.endswith(f".{UP}") for source in sources_of[name].values()):
            ups = {(expert, 0): source for (expert, _), source in sources_of.pop(name).items()}
            sources_of[f"{name.rpartition('.')[0]}.{UP}"] = ups
    made = {name: _stack(name, sources, modules) for name, sources in sources_of.items()}
    for name, stack in made.items():
        owner = name.rpartition(".")[0]
        first = f"{owner}.{GATE_UP if f'{owner}.{GATE_UP}' in made else UP}"
        other = made.get(first)
        if other is not None and other.module.experts != stack.module.experts:
            has = f"{first} has {other.module.experts}"
            raise ValueError(f"{name} has {stack.module.experts} quantized experts, {has}")
    return made


def as_in_models(modules: Mapping[str, Module], name: str) -> str:
    """Return the name of a module of all experts with the last part that models have; a saved ``W4Experts`` calls its
    products ``gate_up``, with gates or without, and ``down``."""
    owner, _, product = name.rpartition(".")
    if product == "down":
        return f"{owner}.{DOWN}"
    if product != "gate_up":
        return name
    down = modules.get(f"{owner}.down")
    return f"{owner}.{UP if down is not None and modules[name].n == down.k else GATE_UP}"


def roles_of(modules: Mapping[str, Module], name: str) -> tuple[str, ...]:
    """Return the last parts of the names that the modules of single experts have of which this one is made, their rows
    in turn: as they were called, or as most models call them."""
    owner, _, product = as_in_models(modules, name).rpartition(".")
    gate_up = modules.get(f"{owner}.{GATE_UP}")
    fused = gate_up.fused if gate_up is not None and gate_up.fused else _GATE_AND_UP
    if product == UP:
        return (UP,)
    if product == GATE_UP:
        return fused
    return ("w2",) if fused == ("w1", "w3") else (DOWN,)


def _stack(name: str, positions: Mapping[tuple[int, int], str], modules: Mapping[str, Module]) -> Stack:
    count, each = max(index for index, _ in positions) + 1, _MODULES[name.rpartition(".")[2]]
    if missing := [f"{e}" for e in range(count) for i in range(each) if (e, i) not in positions]:
        raise ValueError(f"{name}: expert {missing[0]} of {count} lacks a packed module")
    sources = tuple(tuple(positions[e, i] for i in range(each)) for e in range(count))
    names = [name for expert in sources for name in expert]
    first = modules[names[0]]
    if other := next((name for name in names if modules[name] != first), None):
        unlike = [f.name for f in fields(Module) if getattr(modules[other], f.name) != getattr(first, f.name)]
        has, legal = (", ".join(f"{key} {getattr(m, key)}" for key in unlike) for m in (modules[other], first))
        raise ValueError(f"{other} has {has}, wanted {legal} as {names[0]} has")
    if each == 1:
        return Stack(replace(first, experts=count), sources)
    fused = tuple(name.rpartition(".")[2] for name in sources[0])
    return Stack(replace(first, n=each * first.n, experts=count, fused=fused), sources)
