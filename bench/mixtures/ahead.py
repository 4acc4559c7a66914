"""w4gemm's kernels that bench.grouped will run, compiled on all cores meanwhile: :func:`units_of`, :class:`Kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import torch
from bench.mixtures.points import Extra, best_of
from bench.mixtures.weights import Sizes
from bench.peers.base import FP8

from w4gemm import WeightFormat, choice
from w4gemm.choice import plan_rows
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import Unit
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for


class Product(NamedTuple):
    """The product of a point, whatever the division of rows."""

    sizes: Sizes
    m: int
    """Tokens per expert."""
    format: WeightFormat
    dtype: torch.dtype


def problem_of(product: Product, device: Device) -> GemmProblem:
    (experts, n, k), m, format, dtype = product
    layout, epilogue = layout_for(device, format, dtype), Epilogue(token_scale=dtype == FP8)
    return GemmProblem(m * experts, n, k, dtype, format, layout, epilogue, device, experts=experts)


def unsupported(product: Product) -> str:
    """Return why w4gemm has no kernel for a product on this machine's GPU or, without one, an H200; or the empty
    string."""
    try:
        choice.choose(problem_of(product, this_device()))
    except UnsupportedError as e:
        return str(e).partition("\n")[0]
    return ""


def this_device() -> Device:
    return Device.of("cuda") if torch.cuda.is_available() else H200


def units_of(product: Product, extra: Extra) -> list[Unit]:
    """Return the kernels of the chosen configs and of those that ``extra`` asks for."""
    problem = problem_of(product, this_device())
    planned = replace(problem, m=plan_rows(problem.m, problem.experts))
    units = [choice.choose(planned).unit]
    for name in best_of(problem, extra.configs):
        kernel, config = config_named(name)
        units.append(kernel.unit(problem, config))
    return [unit for unit in units if unit is not None]


class Kernels:
    """Compiles the kernels of products in the order in which they are given, in other processes.

    Args:
        products: what will be measured, in that order.
    """

    def __init__(self, pool: CompilePool, products: Iterable[Product], extra: Extra) -> None:
        self._of = {product: units_of(product, extra) for product in products}
        units = dict.fromkeys(unit for each in self._of.values() for unit in each)
        self._futures: dict[Unit, Future[bytes]] = dict(zip(units, pool.submit(units), strict=True))

    def wait(self, products: Iterable[Product]) -> None:
        """Return when the kernels of ``products`` are in the cache folder.

        Raises:
            RuntimeError: if one cannot be compiled, with the compiler's message.
        """
        for product in products:
            for unit in self._of[product]:
                self._futures[unit].result()

    def wait_for_all(self) -> int:
        """Return the number of kernels when all are in the cache folder. Errors are those of :meth:`wait`."""
        self.wait(self._of)
        return len(self._futures)
