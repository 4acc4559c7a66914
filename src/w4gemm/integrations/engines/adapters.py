"""Experts beside LoRA adapters, whose rows engines keep in the order of the tokens' choices: :func:`adapted`,
:func:`beside_adapters`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from w4gemm.core.activation import parse
from w4gemm.core.problem import Device
from w4gemm.integrations.engines.warmup import Need
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.experts import AdaptedRows, RowCombine
from w4gemm.packing.repack import rows_in_pairs


class RowsInBothOrders(NamedTuple):
    """What stands between a layer's products: (choices, features)."""

    by_choice: torch.Tensor
    """In the order of the tokens' choices."""
    by_expert: torch.Tensor
    """Sorted by expert; rows past those of the experts here hold anything."""


def adapted(
    rows: torch.Tensor, added: torch.Tensor, row_of_choice: torch.Tensor, activation: str, halves: bool
) -> RowsInBothOrders:
    """Return the activation of what the first product and adapters give; for a choice whose expert is elsewhere, of
    what adapters give. On Hopper one launch computes it.

    Args:
        rows: the first product without its activation, sorted by expert.
        added: of adapters, in the order of the tokens' choices.
        row_of_choice: as that of :class:`~w4gemm.api.routing.Routing`.
        halves: True if all gates of ``added`` come first; else they and the ups are pairs, as in ``rows``.
    """
    formula, places = parse(activation), row_of_choice.view(-1)
    shape = len(places), rows.shape[1] // (2 if formula.formula.gated else 1)
    if rows.device.type == "cuda" and len(places) and AdaptedRows.takes(rows, added, shape[1]):
        run = launcher(AdaptedRows.of, rows.device, rows.dtype, activation, halves)
        if run is not None:
            hidden = RowsInBothOrders(rows.new_empty(shape), rows.new_empty(shape))
            run(rows, added, places, *hidden)
            return hidden
    added = rows_in_pairs(added) if halves and formula.formula.gated else added
    here = (places >= 0)[:, None]
    own = torch.where(here, rows[places.clamp(min=0)], 0.0).float()
    by_choice = formula.apply(own + added.float()).to(rows.dtype)
    moved = rows.new_empty(len(places) + 1, shape[1])
    moved[torch.where(places < 0, len(places), places)] = by_choice  # the last takes the choices of experts elsewhere
    return RowsInBothOrders(by_choice, moved[:-1])


def beside_adapters(
    need: Need, device: torch.device, dtype: torch.dtype, top_k: int, activation: str, halves: bool
) -> Need:
    """Return what a layer of experts launches, and what it launches beside adapters. halves: as of :func:`adapted`."""
    here, keys = Device.of(device), dict.fromkeys(need.keys)
    keys |= {key._replace(epilogue=key.epilogue._replace(activation=None)): None for key in need.keys}
    small = AdaptedRows.of(here, dtype, activation, halves), RowCombine.of(here, dtype, top_k, True)
    units = [helper.unit() for helper in small if helper is not None]
    return need._replace(keys=tuple(keys), helpers=tuple(dict.fromkeys((*need.helpers, *units))))
