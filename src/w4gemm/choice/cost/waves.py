"""Model of the Hopper kernels: waves of clusters that fill the GPU, the last one perhaps partly.

In a wave every CTA goes through its k-slices and then stores its output tile:

    time = fixed + bound(heat * sum over waves (k-slices * slice_us + tile_us), bytes / bandwidth)

slice_us grows from a config's time with the GPU to itself to its time with the GPU full, because CTAs share L2, memory
and power: alone + shared * contention. With stream-k all CTAs have equal work; they store and add partial sums besides,
the more the smaller a CTA's part of a tile is. The three numbers of each config are measured (``SliceTimes``).

If m is less than a TMA box, the box reaches past m, and TMA takes several times as long for a row there as for one of
x: a k-slice takes no less than its rows take TMA.

heat: large products bring the GPU to its power limit, which lowers the clock. bound is a smooth maximum. If rows are
gathered on load, a k-slice takes longer by its bytes of x, because cp.async brings them, which takes instructions. A
format that takes more instructions to decode has longer k-slices if a tile has few tokens.

On another Hopper GPU than the measured one, times of a multiprocessor change with its clock, contention with the
bandwidth per multiprocessor, and a k-slice takes no less than its matrix instructions on tensor cores that are slower
than its clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from w4gemm.choice.cost.constants import Constants, Scale, SliceTimes, reference, scale_of
from w4gemm.choice.cost.experts import m_tiles
from w4gemm.choice.cost.traffic import moved_us, roofline_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.hopper import launches
from w4gemm.packing.block import BLOCK_N
from w4gemm.packing.codecs import scales_on_sums

Timer = Callable[[int], float]
"""Microseconds by m, of a problem that is fixed but for its m."""

_SHARPNESS = 8
_DECODE_BOUND_TOKENS = 60
"""Largest tile_m of which the time to decode a k-slice shows in full; for more tokens the tensor cores hide it."""
_MEMORY_OF_SM, _RESERVED = 233472, 1024
"""Bytes of shared memory of a multiprocessor, and those of a CTA that the system takes."""
_FEW_TOKENS, _MOST_FEW, _MOST = 16, 3, 2
"""CTAs with one consumer warpgroup that the registers of a multiprocessor are enough for: three with 67 a thread, as
tiles of 16 tokens take, two with 89, as tiles of 32 do."""
_NEEDLESS_US = 1e3
"""Ranks a config of two launches last where one does it all."""


def timer(kernel: Any, problem: GemmProblem, config: GemmConfig) -> Timer:
    """Return the microseconds by m of the one or two launches of a Hopper kernel's config."""
    if config.tail is not None:
        return lambda m: _two_launches_us(kernel, replace(problem, m=m), config)
    of_launch = _launch_timer(kernel, problem, config)
    if of_launch is None:
        return lambda m: 2 * roofline_us(replace(problem, m=m))
    per_flop = 2 * problem.n * problem.k
    if kernel.name == "sm90_decode" and problem.experts:
        return lambda m: of_launch(m, m * per_flop) + _expert_tiles_us(kernel, replace(problem, m=m), config)
    return lambda m: of_launch(m, m * per_flop)


def _two_launches_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    parts, operations = launches(problem, config), 2 * problem.m * problem.n * problem.k
    timers = [(part.m, part, _launch_timer(kernel, part, c)) for part, c in parts]
    us = sum(2 * roofline_us(part) if of_launch is None else of_launch(m, operations) for m, part, of_launch in timers)
    return us + (_NEEDLESS_US if len(parts) == 1 else 0.0)


def timed_as(kernel: Any, problem: GemmProblem) -> str:
    """Name that the kernel's configs are measured under: either way to scale fp8 has times of its own."""
    promoted = scales_on_sums(problem.format) or problem.epilogue.block_scale
    folded = kernel.name == "sm90_fp8_gemm" and not promoted
    return f"{kernel.name} folded" if folded else kernel.name


def _launch_timer(kernel: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[int, float], float] | None:
    """:func:`launch_timer` with the config's times in the problem's format; None if nothing is known of the kernel."""
    times = reference().times(timed_as(kernel, problem), config)
    if times is None:
        return None
    slower = 1 + _decode_overhead(kernel, problem) * min(1, _DECODE_BOUND_TOKENS / config.tile_m)
    return launch_timer(kernel, problem, config, SliceTimes(times.alone * slower, times.shared * slower, times.tile))


def launch_timer(
    kernel: Any, problem: GemmProblem, config: GemmConfig, times: SliceTimes
) -> Callable[[int, float], float]:
    """Return the microseconds of one launch of a config with these times, by m and by the operations that heat the GPU:
    those of all launches, if this is one of two."""
    constants, scale, ctas_per_sm = reference(), scale_of(problem.device), _resident(kernel, problem, config)
    model = constants.models["waves"]
    alone, shared, tile = times.alone * scale.clock, times.shared * scale.contention, times.tile * scale.clock
    if problem.gathered:
        gathered_us = model["gathered_us"] * config.tile_m * config.tile_k * problem.dtype.itemsize
        alone += gathered_us * ctas_per_sm * scale.clock
    least = _mma_us(problem, config, constants, scale) * ctas_per_sm
    cluster = config.cluster_m * config.cluster_n * config.split_k
    n_tiles = -(-problem.n // (config.tile_n * config.cluster_n))
    held = problem.device.sms // cluster * ctas_per_sm
    slices, rows = -(-problem.k // (config.tile_k * config.split_k)), config.tile_m * config.cluster_m
    stream, experts = config.schedule == "stream", problem.experts
    box = 0 if experts else _first_box(kernel, problem, config)
    chunks = config.tile_k * problem.dtype.itemsize / 128 / config.cluster_n * scale.clock
    row_us, past_us = chunks * model["row_us"], chunks * model["row_past_us"]
    fixed_us, heat, hot = model["fixed_us"], model["heat"], model["hot_operations"]
    moved = moved_us(problem)

    def us(m: int, operations: float) -> float:
        fill = (m_tiles(replace(problem, m=m), rows) if experts else -(-m // rows)) * n_tiles / held
        full = int(fill)
        part = fill - full
        loading = m * row_us + (box - m) * past_us if m < box else 0.0
        full_us = max(alone + shared, least, loading * ctas_per_sm)
        if stream:
            busy = fill * slices * full_us + (fill + max(1, 1 / fill)) * tile
        else:
            busy = full * (slices * full_us + tile)
            if part > 1e-9:
                beside = math.ceil(part * ctas_per_sm)
                part_us = max(alone + shared * _contention(part, ctas_per_sm), least, loading * beside)
                busy += slices * part_us + tile
        busy *= 1 + heat * min(1, operations / hot)
        return float(fixed_us + (busy**_SHARPNESS + moved(m) ** _SHARPNESS) ** (1 / _SHARPNESS))

    return us


_residents: dict[tuple[str, str, str, bool], int] = {}
"""CTAs that share a multiprocessor, by kernel, format, config, and whether there are experts."""


def _resident(kernel: Any, problem: GemmProblem, config: GemmConfig) -> int:
    """CTAs of a launch that one multiprocessor holds at once: as many as the kernel is made for, or, of CTAs with one
    consumer warpgroup that are not persistent, as many as there is room for (seen with 16-bit x)."""
    meant: int = kernel.ctas_per_sm(config)
    if kernel.name != "sm90_mixed_gemm" or config.schedule != "coop" or config.tile_n != BLOCK_N:
        return meant
    name = kernel.name, str(problem.format), str(config), problem.experts > 0
    if name not in _residents:
        variant, room = kernel.variant.of(problem, config), 1
        if variant.warpgroups == 1 and not variant.persistent:
            room = _MEMORY_OF_SM // (kernel.resources(problem, config).memory + _RESERVED)
        _residents[name] = max(meant, min(room, _MOST_FEW if config.tile_m <= _FEW_TOKENS else _MOST))
    return _residents[name]


_boxes: dict[tuple[str, int], int] = {}
"""Tokens of one TMA box by kernel and tile_m."""


def _first_box(kernel: Any, problem: GemmProblem, config: GemmConfig) -> int:
    """Tokens of a tile's first TMA box, which cannot be moved back to end at m; 0 if boxes have no rows past m."""
    if kernel.name == "sm90_decode":
        return 0
    name = kernel.name, config.tile_m
    if name not in _boxes:
        _boxes[name] = kernel.variant.of(problem, config).box_tokens
    return _boxes[name]


def _decode_overhead(kernel: Any, problem: GemmProblem) -> float:
    """Part by which the format makes a k-slice of few tokens slower than the measured one, bf16 with bf16 scales."""
    model = reference().models["decoding"]
    if problem.format.element == "e2m1" and problem.dtype.itemsize == 2:
        if problem.dtype == torch.float16:
            return model["e2m1_half"]
        return model[f"e2m1_{problem.format.scale}" + ("_few" if kernel.name == "sm90_decode" else "")]
    codebook = not problem.format.element_rule.counts and problem.dtype.itemsize == 2
    if kernel.name != "sm90_mixed_gemm":
        return model["codebook_few"] if codebook and kernel.name == "sm90_decode" else 0.0
    found = model["codebook"] if codebook else 0.0
    same = problem.dtype == problem.format.scale_dtype
    if problem.dtype == torch.float16:
        return found + model["half" if same else "half_other_scales"]
    if not same:
        return found + model["other_scales"]
    return found + (model["integer_zeros"] if problem.format.zero == "int" else 0.0)


def _expert_tiles_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Additional time of sm90_decode with experts: it begins later, as each warp looks for its expert and rows by
    itself; and a CTA has tile after tile, and its pipelines drain while its warps add up."""
    tiles = m_tiles(problem, config.tile_m) * -(-problem.n // config.tile_n)
    model, clock = reference().models["waves"], scale_of(problem.device).clock
    each = tiles * config.split_k / (problem.device.sms * kernel.ctas_per_sm(config))
    return float((model["expert_start_us"] + model["expert_tile_us"] * each) * clock)


def _mma_us(problem: GemmProblem, config: GemmConfig, constants: Constants, scale: Scale) -> float:
    """Least time of a k-slice's matrix instructions; 0 where the measured times, at this clock, have them already."""
    if scale.mma <= 1.01 * scale.clock:
        return 0.0
    rate = constants.device.operations / constants.device.sms / scale.mma * (2 if problem.dtype.itemsize == 1 else 1)
    return 2 * config.tile_m * config.tile_n * config.tile_k / rate


def _contention(part: float, ctas_per_sm: int) -> float:
    """From 0 to 1, if ``part`` of the CTAs that the GPU holds run. Beyond one for each multiprocessor, those that hold
    one more than others take longer."""
    if part * ctas_per_sm > 1:
        part = (part + math.ceil(part * ctas_per_sm) / ctas_per_sm) / 2
    return part**1.5
