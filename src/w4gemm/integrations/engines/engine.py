"""A serving engine as its plugin sees it: :class:`Engine`, and whether a kernel runs a layer's products:
:func:`why_no_kernel`. Importing this imports no engine."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import w4gemm
from w4gemm.core import environment
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.core.words import dotted
from w4gemm.jit.toolchain import installed_version
from w4gemm.kernels import KERNELS
from w4gemm.packing.layouts import layout_for

if TYPE_CHECKING:
    from w4gemm.checkpoints.numbers import Numbers
    from w4gemm.weights.weight import QuantizedWeight

Capability = tuple[int, int]

PLUGIN = "w4gemm"
"""Name of the plugin's entry point."""
LEAST: Capability = (8, 0)
"""Compute capability from which on the kernels run."""
LEAST_FP8: Capability = (8, 9)
"""Compute capability from which on they take fp8 activations."""
OFFLOADED = "the engine keeps weights in the host's memory (--cpu-offload-gb or --offload-group-size)"
"""Reason to leave layers to an engine: it moves parameters that it knows by name, and packed ones have other names."""
PACKED_BEFORE = "they are read as another engine had packed them, and in its names"
"""Reason to leave layers to an engine that loads what it or another has written while it served."""

_TOKENS = 16
"""m of the question whether a kernel runs a product; the answer does not depend on it."""


@dataclass(frozen=True)
class Engine:
    """Whether w4gemm takes over layers of an engine here, and what is logged about it.

    Attributes:
        name: of the engine, in sentences.
        variable: the environment variable that switches w4gemm in it, and ``switch``, which reads it: auto, on or off;
            raises ValueError for anything else.
        logger: name of a logger below the engine's own, whose level and format it shares.
        distributions: names of the packages that hold the engine, the usual one first.
        group: of the entry points by which the engine finds plugins.
        plugins: the engine's own environment variable with the names of the plugins that it loads.
        tested: the first and the last version of the engine that the plugin was tested with.
        folds_scales: True if the engine's own W4A8 kernels multiply e4m3 weights, into which group scales are folded;
            False if they multiply the float32 sums of groups by the scales.
    """

    name: str
    variable: str
    switch: Callable[[], str]
    logger: str
    distributions: tuple[str, ...]
    group: str
    plugins: str
    tested: tuple[str, str]
    folds_scales: bool

    def multiplied(self, loaded: WeightFormat, activations: str | None) -> WeightFormat:
        """Return the format in which a weight is multiplied.

        In W4A8 integers are in the one of the engine's own kernels, so that a layer's numbers do not depend on which
        kernel runs it. Folded scales take two thirds of the time for many tokens, and a twentieth more for few. NVFP4
        has no other format than the folded one.

        Args:
            loaded: format in which the engine loads the weight.
            activations: as of :class:`w4gemm.QuantizedWeight`.
        """
        folded = loaded.scale == "e4m3_row" or (loaded.element == "int4" and self.folds_scales)
        return replace(loaded, scale="e4m3") if activations == "fp8" and folded else loaded

    def why_no_kernel(self, numbers: Numbers, activations: str | None, dtype: torch.dtype) -> str:
        """Return every reason why no kernel multiplies x of a model's dtype by the weight of numbers, in the format of
        :meth:`multiplied`, or the empty string."""
        format, fp8 = self.multiplied(numbers.format, activations), activations == "fp8"
        return why_no_kernel(layer_product(numbers.device, format, numbers.n, numbers.k, dtype, fp8, numbers.experts))

    def packed(self, numbers: Numbers, activations: str | None, gated: bool = False) -> QuantizedWeight:
        """Return the weight of numbers that a layer holds, in the format in which it is multiplied.

        Args:
            gated: True if all gates lie before all ups; they become pairs.

        Raises:
            ValueError: for numbers that cannot be packed.
        """
        return numbers.packed(activations, self.multiplied(numbers.format, activations), gated=gated)

    def register(self, package: str, parts: Mapping[str, str], installed: list[str]) -> None:
        """Install every part that the switch and this version of the engine allow, once in each process.

        Args:
            package: of the plugin.
            parts: modules of ``package``, and in words the layers that each takes over. A module has ``install()``. An
                exception, of its import or of ``install``, says what this version of the engine lacks: then the
                engine's own kernels run these layers.
            installed: parts that this process has installed.
        """
        try:
            if reason := self.why_off():
                self.log().debug("w4gemm takes over no layers: %s", reason)
                return
        except ValueError as e:  # a mistyped variable must not end the engine
            self.log().warning("w4gemm takes over no layers: %s", e)
            return
        taken = []
        for name, layers in parts.items():
            if name in installed:
                continue
            try:
                importlib.import_module(f"{package}.{name}").install()
            except Exception as e:  # whatever it is, the engine starts without this part
                self.log().warning(
                    "w4gemm leaves %s to %s's own kernels, because version %s lacks what was there in %s: %s: %s",
                    *(layers, self.name, self.version(), self._versions, type(e).__name__, e),
                )
                continue
            installed.append(name)
            taken.append(layers)
        if taken:
            self.announce(taken)

    def why_off(self) -> str:
        """Return why nothing is taken over on any GPU, or the empty string.

        Raises:
            ValueError: if the switch, or a choice of activations, is none of its values.
        """
        for format in environment.FP8_BY_CHOICE:
            environment.activations(format)
        return f"{self.variable} is off" if self.switch() == "off" else ""

    def why_not_here(self, capability: Capability | None, fp8: bool = False) -> str:
        """Return why layers are not taken over on a GPU, or the empty string.

        Args:
            capability: of the GPU; None if there is none.
            fp8: True for layers with fp8 activations.
        """
        if reason := self.why_off():
            return reason
        if capability is None:
            return "there is no NVIDIA GPU"
        least = LEAST_FP8 if fp8 else LEAST
        if capability < least:
            return f"w4gemm needs compute capability {dotted(least)}, and this GPU has {dotted(capability)}"
        if self.switch() == "auto" and capability[0] != 9:
            return (
                f"w4gemm is measured to be faster on Hopper (9.0) only, and this GPU has {dotted(capability)}; "
                f"{self.variable}=on takes over"
            )
        return ""

    def why_not_loaded(self) -> str:
        """Return why the engine does not load the plugin, or the empty string."""
        names = [point.name for point in importlib.metadata.entry_points(group=self.group)]
        if PLUGIN not in names:
            return f"no installed package has w4gemm's entry point in {self.group}; install w4gemm by pip"
        loaded = environment.engine_plugins(self.plugins)
        if loaded is not None and PLUGIN not in loaded:
            return f"{self.plugins} does not name {PLUGIN}"
        return ""

    def answer(self, capability: Capability | None, needs: str = "") -> str:
        """Return in words what runs the engine's quantized layers on a GPU.

        Args:
            capability: as for :meth:`why_not_here`.
            needs: why the kernels do not run here, or the empty string.
        """
        if not (version := self.version()):
            return f"{self.name}: not installed"
        try:
            reason = self.why_not_here(capability) or needs or self.why_not_loaded()
        except ValueError as e:
            reason = str(e)
        if reason:
            return f"{self.name} {version}: its own kernels run quantized layers: {reason}"
        known = "" if version in self.tested else f" (tested with {self._versions})"
        return f"{self.name} {version}{known}: w4gemm runs its quantized layers; {self.variable}=off switches it off"

    def announce(self, taken: Sequence[str]) -> None:
        """Log once an engine what can be taken over; the processes that it starts say nothing."""
        if multiprocessing.parent_process() is None:
            self.log().info(
                "w4gemm %s is in %s %s, with kernels for %s; what they run is logged when weights are loaded "
                "(%s=off switches them off)",
                *(w4gemm.__version__, self.name, self.version(), "; ".join(taken), self.variable),
            )

    def asked(self, kind: str, why_not: Callable[[], str]) -> str:
        """Return why layers of a kind are not taken over, after logging it, or the empty string.

        Args:
            why_not: returns the reason. A TypeError or ValueError is one too, and an AttributeError says what this
                version of the engine lacks.
        """
        try:
            reason = why_not()
        except AttributeError as e:
            reason = f"this version of {self.name} is not known: {e}"
        except (TypeError, ValueError) as e:
            reason = str(e)
        if reason:
            self.refuse(kind, reason)
        return reason

    def refuse(self, kind: str, reason: str) -> None:
        """Log that layers of a kind are left to the engine's own kernels: once in each process for each reason."""
        _refuse(self, kind, reason)

    @property
    def _versions(self) -> str:
        """The tested versions, in words."""
        return " to ".join(dict.fromkeys(self.tested))

    def log(self) -> logging.Logger:
        """Return the logger."""
        return logging.getLogger(self.logger)

    def version(self) -> str:
        """Version of the installed engine, or the empty string."""
        return next(filter(None, map(installed_version, self.distributions)), "")


@functools.cache
def _refuse(engine: Engine, kind: str, reason: str) -> None:
    engine.log().info("w4gemm leaves %s to %s's own kernels: %s", kind, engine.name, reason)


def layer_product(
    device: torch.device, format: WeightFormat, n: int, k: int, dtype: torch.dtype, fp8: bool = False, experts: int = 0
) -> GemmProblem:
    """Return the product x (m, k) @ w.T of a layer, with some m.

    Args:
        dtype: of the model's activations.
        fp8: True if they are quantized to float8_e4m3fn before they are multiplied.
        experts: 0 for a product with one weight.
    """
    here = Device.of(device)
    taken = torch.float8_e4m3fn if fp8 else dtype
    epilogue = PLAIN.of_quantized(dtype) if fp8 else PLAIN
    layout = layout_for(here, format, taken)
    return GemmProblem(_TOKENS, n, k, taken, format, layout, epilogue, here, experts=experts)


@functools.cache
def why_no_kernel(problem: GemmProblem) -> str:
    """Return every reason why no kernel runs a product, or the empty string."""
    answers = [kernel.supports(problem) for kernel in KERNELS]
    return "" if any(answers) else "; ".join(dict.fromkeys(answer.reason for answer in answers))
