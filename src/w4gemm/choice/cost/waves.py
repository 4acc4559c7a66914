"""Model of the Hopper kernels: waves of clusters that fill the GPU, the last one perhaps partly.

In a wave every CTA goes through its k-slices and then stores its output tile:

    time = fixed + bound(heat * sum over waves (k-slices * slice_us + tile_us), bytes / bandwidth)

slice_us grows from a config's time with the GPU to itself to its time with the GPU full, because CTAs share L2, memory
and power: alone + shared * contention. With stream-k all CTAs have equal work; they store and add partial sums besides,
the more the smaller a CTA's part of a tile is. The three numbers of each config are measured (``SliceTimes``).

Launches of sm90_decode that do not fill the GPU are timed by narrow.py. How much a format adds to a k-slice is in
decoding.py.

If m, of all experts together, is less than a TMA box, the box reaches past m, and TMA takes several times as long for a
row there as for one of x: a k-slice takes no less than its rows take TMA.

With tiles of more than 64 features and clusters of three CTAs or more, each wave behind the first takes later_wave_us
longer, probably because a cluster begins only when as many multiprocessors of one GPC are free. So it does with fp8 x
and clusters of two, for more than 128 tokens and up to 128 features.

If full waves wait for memory, the last wave does not, so that its time shows behind theirs; about half of it is hidden
by producers that run ahead (last_wave).

heat: large products bring the GPU to its power limit, which lowers the clock, unless its tensor cores are far slower
than those of the measured GPU. bound is a smooth maximum. If rows are gathered on load, the producer takes time for
each byte of x, while the consumers multiply: a k-slice takes the root of the sum of both times' squares, about the
longer of the two.

On another Hopper GPU than the measured one, times of a multiprocessor change with its clock, contention with the
bandwidth per multiprocessor, and a k-slice takes no less than its matrix instructions on tensor cores that are slower
than its clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from w4gemm.choice.cost.constants import (
    SHARPNESS,
    Constants,
    Scale,
    SliceTimes,
    Timer,
    constants_for,
    mma_us,
    moved_us,
    scale_of,
    unmeasured_us,
)
from w4gemm.choice.cost.decoding import slice_overhead
from w4gemm.choice.cost.experts import Division, Width, more_of_tile, of_tile, random_and_zipf_rows, unevenness
from w4gemm.choice.cost.narrow import NARROW_TOKENS, is_narrow, narrow_timer
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.hopper import first_features, most_narrow_rows
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY, RESERVED_SHARED_MEMORY
from w4gemm.packing.block import BLOCK_N
from w4gemm.packing.codecs import scales_on_sums

LaunchTimer = Callable[[int, float], float]
"""Microseconds of one launch by m and by the operations that heat the GPU. If there are two launches, these are the
operations of both."""

FP8_ROWS = "sm90_fp8_block_gemm rows"
"""What configs are measured as that multiply e4m3 of one scale a row. They move bytes at a lower rate."""
_ROOT = 1 / SHARPNESS
_MEMORY_OF_SM = HOPPER_SHARED_MEMORY + RESERVED_SHARED_MEMORY
"""Bytes of shared memory of a multiprocessor."""
_FEW_TOKENS_OF_SPLITS = 128
"""Largest tile_m of splits of two CTAs with fp8 x whose times include what a later wave costs."""
_FEW_TOKENS, _MOST_FEW, _MOST = 16, 3, 2
"""CTAs with one consumer warpgroup that the registers of a multiprocessor are enough for: three with 67 a thread, as
tiles of 16 tokens take, two with 89, as tiles of 32 do."""
_SMS_OF_SPLITS = {3: 117 / 132, 4: 120 / 132, 5: 110 / 132, 8: 120 / 132}
"""Part of a GPU's multiprocessors that clusters of a split reach at once, if not all (H200): a cluster lies in one of
the GPU's processing clusters, of 16 or 18 multiprocessors."""
_SECOND_LAUNCH_US, _MOST_LOSS = 1.8, 0.0125
"""Time that a second launch of experts takes if it has no tile, and the most of a product's time that it may be. Two
products of 128 experts with 4 to 32 random rows took 2.3 to 4.2 us longer with second launches, in all 1.02 to 1.04 of
the time; larger ones of four models 0.99 to 1.01 (H200, 2026-11-28, docs/measured.md); one of 149 us 1.01, gathered
1.00 (2026-11-29). Of tiles of two widths in one launch it is an upper bound: 0.4 to 1.1 us were measured."""
_SOME_TILES = 0.5
"""Expected tiles of a second launch of experts from which on they fill the first one's last wave."""
_COOL = 2
"""How much slower than the clock says a GPU's tensor cores are if it never reaches its power limit."""


class LaunchFacts(NamedTuple):
    """Facts that the launches of a kernel for a problem share, whatever their config, m and n."""

    kernel: Any
    constants: Constants
    scale: Scale
    timed_as: str
    """Name that the kernel's configs are measured under."""
    decode_overheads: dict[tuple[int, int, int, str, bool, bool], float]
    """Part by which the format makes a k-slice slower than the measured format: a cache by tile_m, tile_n, tile_k,
    schedule, and whether CTAs share x."""
    any_variant: Any
    """A variant of the kernel with a plain epilogue, whatever its config."""
    residents: dict[GemmConfig, int]
    """CTAs that share a multiprocessor: a cache by config."""

    @classmethod
    def of(cls, kernel: Any, problem: GemmProblem) -> LaunchFacts:
        any_variant = kernel.any_variant(replace(problem, epilogue=PLAIN))
        return cls(
            kernel,
            constants_for(problem.device),
            scale_of(problem.device),
            timed_as(kernel, problem),
            {},
            any_variant,
            _residents.setdefault(any_variant, {}),
        )


_residents: dict[Any, dict[GemmConfig, int]] = {}
"""``LaunchFacts.residents`` by ``LaunchFacts.any_variant``."""


def timers(kernel: Any, problem: GemmProblem) -> Callable[[GemmConfig], Timer]:
    """Return a function from each config of a Hopper kernel to the :data:`Timer` of its one or two launches."""
    facts, per_flop = LaunchFacts.of(kernel, problem), 2 * problem.n * problem.k
    moved = moved_us(problem)

    def timer(config: GemmConfig) -> Timer:
        if config.tail is not None:
            two = _two_widths_timer if problem.experts else _two_launches_timer
            return two(facts, problem, config)
        of_launch = _launch_timer(facts, problem, config, moved)
        if of_launch is None:
            return lambda m: unmeasured_us(replace(problem, m=m))
        if kernel.name == "sm90_decode" and problem.experts:
            return lambda m: of_launch(m, m * per_flop) + _expert_tiles_us(facts, replace(problem, m=m), config)
        return lambda m: of_launch(m, m * per_flop)

    return timer


def _two_launches_timer(facts: LaunchFacts, problem: GemmProblem, config: GemmConfig) -> Timer:
    per_flop, alone, tail = 2 * problem.n * problem.k, replace(config, tail=None), config.tail
    assert tail is not None
    slower = facts.constants.models["decoding"]["levels_two_launches"] if facts.any_variant.block.factors else 1.0
    timers_by_launch: dict[tuple[int, GemmConfig], Callable[[int, float], float]] = {}

    def launch_us(n: int, config: GemmConfig, m: int, operations: float) -> float:
        if (n, config) not in timers_by_launch:
            part = replace(problem, n=n)
            timer_of_part = _launch_timer(facts, part, config, moved_us(part))
            timers_by_launch[n, config] = timer_of_part or (lambda m, operations: unmeasured_us(replace(part, m=m)))
        return timers_by_launch[n, config](m, operations)

    def us(m: int) -> float:
        first, operations = first_features(problem, m, config), m * per_flop
        if first == problem.n:
            return math.inf  # the config without its tail is the same launch
        return slower * (launch_us(first, alone, m, operations) + launch_us(problem.n - first, tail, m, operations))

    return us


def _two_widths_timer(facts: LaunchFacts, problem: GemmProblem, config: GemmConfig) -> Timer:
    """The timer of experts in tiles of two widths, by their rows, in one launch or two. Where the second width would
    show if it has no tile, or has the average expert, it is predicted to gain nothing."""
    assert config.tail is not None
    narrow, wide = replace(config, tail=None), config.tail
    moved, times = moved_us(problem), [facts.constants.times(facts.timed_as, each) for each in (narrow, wide)]
    alone = _launch_timer(facts, problem, narrow, moved)
    if alone is None or times[0] is None or times[1] is None:
        return lambda m: unmeasured_us(replace(problem, m=m))
    first, second = _busy_timer(facts, problem, narrow)(times[0]), _busy_timer(facts, problem, wide)(times[1])
    most = most_narrow_rows(config)
    widths = Width(narrow.tile_m, 1, most), Width(wide.tile_m, most + 1)

    def us(m: int) -> float:
        operations = 2 * m * problem.n * problem.k

        def of_tiles(tiles: float, tiles_of_second: float) -> float:
            before, after = first(m, tiles), second(m, tiles_of_second)
            busy = before.even_us + after.us if tiles_of_second > _SOME_TILES else before.us
            return _whole_us(facts, moved(m), busy, operations) + _SECOND_LAUNCH_US

        one = alone(m, operations)
        if one * _MOST_LOSS < _SECOND_LAUNCH_US or m > most * problem.experts:
            return one + _SECOND_LAUNCH_US
        return random_and_zipf_rows(replace(problem, m=m), widths, of_tiles)

    return us


def timed_as(kernel: Any, problem: GemmProblem) -> str:
    """Name that the kernel's configs are measured under: each way to scale fp8 has times of its own."""
    if kernel.name == "sm90_fp8_block_gemm":
        return str(kernel.name) if problem.epilogue.block_scale else FP8_ROWS
    if kernel.name != "sm90_fp8_gemm":
        return str(kernel.name)
    if problem.format.scale_rule.block_rows:
        return f"{kernel.name} blocks"
    if problem.format.bits == 8:  # fp8 of rows, which is not decoded
        return f"{kernel.name} stored"
    promoted = scales_on_sums(problem.format) or problem.epilogue.block_scale
    return str(kernel.name) if promoted else f"{kernel.name} folded"


def _launch_timer(facts: LaunchFacts, problem: GemmProblem, config: GemmConfig, moved: Timer) -> LaunchTimer | None:
    """:func:`launch_timer` with the config's times; None if nothing is known of the kernel."""
    times = facts.constants.times(facts.timed_as, config)
    return None if times is None else launch_timer(facts, problem, config, moved)(times)


def launch_timer(
    facts: LaunchFacts, problem: GemmProblem, config: GemmConfig, moved: Timer, divided: Division = random_and_zipf_rows
) -> Callable[[SliceTimes], LaunchTimer]:
    """Return a function from a config's times to the timer of one launch.

    Args:
        moved: :func:`moved_us` of the problem.
        divided: how rows are divided among experts.
    """
    busy_of, width = _busy_timer(facts, problem, config), Width(config.tile_m * config.cluster_m)
    slower = facts.constants.models["waves"]["fp8_rows_moved"] if facts.timed_as == FP8_ROWS else 1.0

    def of_times(times: SliceTimes) -> LaunchTimer:
        busy = busy_of(times)

        if not problem.experts:
            return lambda m, operations: _waves_us(facts, slower * moved(m), busy(m, -(-m // width.tile_m)), operations)

        def of_tiles(m: int, m_tiles: float, operations: float, uneven: float) -> float:
            return _whole_us(facts, slower * moved(m), uneven * busy(m, m_tiles).us, operations)

        def of_experts(m: int, operations: float) -> float:
            problem_of_m = replace(problem, m=m)
            uneven = unevenness(problem_of_m, width.tile_m) * of_tile(problem_of_m, config)
            return divided(problem_of_m, [width], lambda m_tiles: of_tiles(m, m_tiles, operations, uneven))

        return of_experts

    return of_times


def _whole_us(facts: LaunchFacts, moved: float, busy: float, operations: float) -> float:
    """The time of a launch whose multiprocessors are busy for so long if they are cool, and that moves its bytes in
    ``moved``."""
    model, scale = facts.constants.models["waves"], facts.scale
    heat = 0.0 if scale.mma > _COOL * scale.clock else model["heat"]
    busy *= 1 + heat * min(1, operations / model["hot_operations"])
    return float(model["fixed_us"] + (busy**SHARPNESS + moved**SHARPNESS) ** _ROOT)


def _waves_us(facts: LaunchFacts, moved: float, busy: Busy, operations: float) -> float:
    """:func:`_whole_us` of a dense launch: between that of all waves as one, and the sum of full ones and the last one.
    In sm90_decode producers run so far ahead that it is the former."""
    us = _whole_us(facts, moved, busy.us, operations)
    if not busy.full or facts.kernel.name == "sm90_decode":
        return us
    model = facts.constants.models["waves"]
    full_us = _whole_us(facts, moved * busy.full, busy.full_us, operations)
    last_us = _whole_us(facts, moved * (1 - busy.full), busy.us - busy.full_us, operations)
    return us + float(model["last_wave"]) * (full_us + last_us - model["fixed_us"] - us)


class Busy(NamedTuple):
    """How long a launch occupies multiprocessors that are cool."""

    us: float
    """With the last wave of tiles, whether or not it fills them."""
    even_us: float
    """If they shared the work of all tiles evenly."""
    full_us: float = 0.0
    """The waves that fill them."""
    full: float = 0.0
    """Part of the tiles that are in such waves."""


def _busy_timer(
    facts: LaunchFacts, problem: GemmProblem, config: GemmConfig
) -> Callable[[SliceTimes], Callable[[int, float], Busy]]:
    """Return a function from a config's times to :class:`Busy` by m and the number of m tiles. The times were measured
    with bf16 x, int4 weights and bf16 scales; other formats take longer to decode."""
    scale, model, ctas_per_sm = facts.scale, facts.constants.models["waves"], _resident(facts, config)
    gathered_us = 0.0
    if problem.gathered:
        gathered_us = model["gathered_us"] * config.tile_m * config.tile_k * problem.dtype.itemsize
        gathered_us *= ctas_per_sm * scale.clock
    slower = 1 + _slice_overhead(facts, problem, config)
    least = mma_us(problem, config, facts.kernel.name != "sm90_decode") * ctas_per_sm
    cluster = config.cluster_m * config.cluster_n * config.split_k
    n_tiles = -(-problem.n // (config.tile_n * config.cluster_n * config.split_tiles))
    sms = problem.device.sms * _SMS_OF_SPLITS.get(config.split_k, 1.0)
    held = max(1, int(sms) // cluster) * ctas_per_sm  # a device described with fewer SMs than a cluster
    slices, stream = _slices(problem, config), config.schedule == "stream"
    box = 0 if problem.gathered else _first_box(facts, config)
    chunks = config.tile_k * problem.dtype.itemsize / 128 * scale.clock
    row_us = chunks / config.cluster_n * model["row_us"]
    past_us = chunks * model["row_past_us"]  # CTAs of a cluster, which share x, gain nothing there
    later_wave_us = _later_wave_us(facts, config)
    narrow_us = None
    if facts.kernel.name == "sm90_decode" and is_narrow(problem, config):
        warps = replace(facts.any_variant, config=config).warps
        narrow_us = narrow_timer(facts.constants, problem, config, warps, slower - 1)
    mixed = facts.kernel.name == "sm90_mixed_gemm"

    def of_times(times: SliceTimes) -> Callable[[int, float], Busy]:
        alone = math.hypot(times.alone * slower * scale.clock, gathered_us)
        shared, tile = times.shared * slower * scale.contention, times.tile * scale.clock
        in_full_wave = max(alone + shared, least)

        def busy(m: int, m_tiles: float) -> Busy:
            if narrow_us is not None and m <= NARROW_TOKENS:
                us = narrow_us(m) * scale.clock
                return Busy(us, us)
            fill = m_tiles * n_tiles / held
            full = int(fill)
            part = fill - full
            loading = m * row_us + (box - m) * past_us if m < box else 0.0
            full_us = max(in_full_wave, loading * ctas_per_sm) if loading else in_full_wave
            tile_us = tile + (more_of_tile(problem.experts, m) * scale.clock if mixed else 0.0)
            wave_us = slices * full_us + tile_us
            if stream:
                us = fill * slices * full_us + (fill + max(1, 1 / fill)) * tile_us
                return Busy(us, us)
            us = of_full = full * wave_us
            if part > 1e-9:
                ctas_of_sm = math.ceil(part * ctas_per_sm)
                part_us = max(alone + shared * _contention(part, ctas_per_sm), least, loading * ctas_of_sm)
                us += slices * part_us + tile_us
            if later_wave_us:
                us += later_wave_us * (math.ceil(fill) - 1)
            return Busy(us, fill * wave_us, of_full, full / fill if full else 0.0)

        return busy

    return of_times


def _slices(problem: GemmProblem, config: GemmConfig) -> int:
    """The k-slices of a CTA in a wave."""
    slices = -(-problem.k // config.tile_k)
    if config.schedule == "chain":
        return slices - slices // config.split_k
    return -(-problem.k // (config.tile_k * config.split_k))


def _later_wave_us(facts: LaunchFacts, config: GemmConfig) -> float:
    """How much longer each wave behind the first takes, because its clusters wait for multiprocessors side by side."""
    waits = config.split_k > 2 and config.tile_n > BLOCK_N
    if facts.kernel.name == "sm90_fp8_gemm" and config.split_k == 2:
        waits = config.tile_m > _FEW_TOKENS_OF_SPLITS and config.tile_n <= 2 * BLOCK_N
    return float(facts.constants.models["waves"]["later_wave_us"] * facts.scale.clock) if waits else 0.0


def _resident(facts: LaunchFacts, config: GemmConfig) -> int:
    """CTAs of a launch that one multiprocessor holds at once. That is the number that the kernel is made for. Of
    CTAs that have one consumer warpgroup and are not persistent, it is as many as shared memory and registers allow
    (seen with 16-bit x)."""
    meant: int = facts.kernel.ctas_per_sm(config)
    if facts.kernel.name != "sm90_mixed_gemm" or config.schedule != "coop" or config.tile_n != BLOCK_N:
        return meant
    ctas = facts.residents.get(config)
    if ctas is None:
        variant, room = replace(facts.any_variant, config=config), 1
        if variant.warpgroups == 1 and not variant.persistent:
            room = _MEMORY_OF_SM // (variant.shared_bytes + RESERVED_SHARED_MEMORY)
        ctas = max(meant, min(room, _MOST_FEW if config.tile_m <= _FEW_TOKENS else _MOST))
        facts.residents[config] = ctas
    return ctas


_boxes: dict[tuple[str, int], int] = {}
"""Tokens of one TMA box by kernel and tile_m."""


def _first_box(facts: LaunchFacts, config: GemmConfig) -> int:
    """Tokens of a tile's first TMA box, which cannot be moved back to end at m; 0 if boxes have no rows past m."""
    if facts.kernel.name == "sm90_decode":
        return 0
    name = facts.kernel.name, config.tile_m
    if name not in _boxes:
        _boxes[name] = replace(facts.any_variant, config=config).box_tokens
    return _boxes[name]


def _slice_overhead(facts: LaunchFacts, problem: GemmProblem, config: GemmConfig) -> float:
    """:func:`slice_overhead` of a config."""
    form = config.tile_m, config.tile_n, config.tile_k, config.schedule, config.cluster_n > 1, config.split_k > 1
    overhead = facts.decode_overheads.get(form)
    if overhead is None:
        variant = replace(facts.any_variant, config=config)
        overhead = slice_overhead(facts.constants, facts.kernel.name, variant, problem.dtype)
        facts.decode_overheads[form] = overhead
    return overhead


def _expert_tiles_us(facts: LaunchFacts, problem: GemmProblem, config: GemmConfig) -> float:
    """Additional time of sm90_decode with experts. It begins later, because each warp looks for its expert and rows by
    itself. A CTA has tile after tile, and its pipelines drain while its warps add up."""
    n_tiles, model = -(-problem.n // config.tile_n), facts.constants.models["waves"]
    ctas = problem.device.sms * facts.kernel.ctas_per_sm(config)

    def us(m_tiles: float) -> float:
        each = m_tiles * n_tiles * config.split_k / ctas
        return float((model["expert_start_us"] + model["expert_tile_us"] * each) * facts.scale.clock)

    return random_and_zipf_rows(problem, [Width(config.tile_m)], us)


def _contention(part: float, ctas_per_sm: int) -> float:
    """Contention from 0 to 1 if ``part`` of the CTAs that the GPU holds run. Beyond one CTA for each multiprocessor,
    multiprocessors that hold one more than others take longer."""
    if part * ctas_per_sm > 1:
        part = (part + math.ceil(part * ctas_per_sm) / ctas_per_sm) / 2
    return part**1.5
