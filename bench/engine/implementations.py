"""Kernels to choose between in vLLM, how an engine is told to take one, and which one its layers got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.engine.models import Model

OURS = "w4gemm"
OURS_FP8 = "w4gemm-fp8"
"""w4gemm told to multiply 4-bit floats by x in fp8, where engines take turns."""
DEFAULT = "default"
"""vLLM without our plugin chooses by itself; its rows are named by what it chose."""
KNOWN = (OURS, "machete", "marlin", "humming", "cutlass", "triton", "conch", "exllama", "allspark")
"""Words in the names of kernels' classes or modules by which an implementation is known."""

Kernels = Mapping[str, Mapping[str, int]]
"""Number of layers by qualified name of the class that multiplies, for "linear" and "experts"; see worker.py."""


@dataclass(frozen=True)
class Implementation:
    """One for linear layers and one for experts, which may be the same: ``machete+marlin``.

    Attributes:
        name: as asked for.
        linear: one of ``KNOWN`` or ``DEFAULT``.
        experts: one of the same names.
    """

    name: str
    linear: str
    experts: str

    @classmethod
    def parse(cls, text: str) -> Implementation:
        """Return what a name stands for.

        Raises:
            ValueError: for a name that is not known.
        """
        parts = text.split("+")
        if len(parts) > 2 or not {*parts} <= {*KNOWN, DEFAULT}:
            names = ", ".join((DEFAULT, *KNOWN))
            raise ValueError(f"impl: wanted one of {names}, or two like machete+marlin (linear, experts), got {text!r}")
        return cls(text, parts[0], parts[-1])

    def environment(self) -> dict[str, str]:
        """Return the variables that switch our plugin on or off."""
        return {"W4GEMM_VLLM": "on" if OURS in (self.linear, self.experts) else "off"}

    def engine_arguments(self, model: Model) -> dict[str, str]:
        """Return the arguments of ``vllm.LLM`` that force vLLM's own kernels."""
        arguments = {}
        if model.quantized_matrices and self.linear not in (OURS, DEFAULT):
            arguments["linear_backend"] = self.linear
        if model.experts and self.experts not in (OURS, DEFAULT):
            arguments["moe_backend"] = self.experts
        return arguments

    def check(self, kernels: Kernels) -> str:
        """Return the name of what the layers run.

        Raises:
            ValueError: if a layer runs anything else than what was asked for.
        """
        got = {kind: {known_as(cls) for cls in classes} for kind, classes in kernels.items() if classes}
        if not got:
            raise ValueError("no layer of the model is quantized")
        for kind, asked in (("linear", self.linear), ("experts", self.experts)):
            names = got.get(kind, set())
            if len(names) > 1 or (names and asked not in (DEFAULT, *names)):
                counts = ", ".join(f"{n} x {cls}" for cls, n in kernels[kind].items())
                raise ValueError(f"asked for {asked}, but its {kind} layers got {counts}")
        return "+".join(dict.fromkeys(name for kind in ("linear", "experts") for name in got.get(kind, ())))


def known_as(kernel: str) -> str:
    """Return the implementation that a kernel's qualified class name belongs to; else the class's name.

    The class's own name goes before its module's: MarlinExperts may lie in a file of another's name.
    """
    module, _, own = kernel.rpartition(".")
    for text in (own.lower(), module.lower()):
        for name in KNOWN:
            if name in text:
                return name
    return own
