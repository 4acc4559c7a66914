"""What is known of a GPU: the measured constants of the cost models, :func:`constants_for`, and lower bounds of times:
of moving bytes, copying rows of x, and matrix instructions.

Constants are read from one file of JSON lines per GPU. A GPU without a file takes the times of the most similar one
that has one, scaled by what is known of both. A file begins with its GPU. Its other lines are constants of a model
(``"model"``), times of a config (``"config"``), or say where some came from (``"source"`` and ``"text"``). A term that
is 0 is left out. ``bench/fit.py`` writes the times. The files are data: no compiled kernel depends on them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.packing.codecs import MMA8, MMA16, Pairs, WeightOperand, codec_for

FOLDER = Path(__file__).resolve().parent
_REFERENCE = H200.name
_UNMEASURED = 1.2
"""Time of a config without measurements / time of its nearest measured config, so that it ranks after that one."""


class SliceTimes(NamedTuple):
    """Times of one config of a Hopper kernel, in us."""

    alone: float = 0.0
    """A k-slice of a CTA that has the GPU to itself."""
    shared: float = 0.0
    """Additional time of a k-slice if CTAs fill the GPU."""
    tile: float = 0.0
    """Storing an output tile."""


class Scale(NamedTuple):
    """Times on a GPU over those on the measured one."""

    clock: float = 1.0
    """Work of one SM alone."""
    memory: float = 1.0
    """Waiting for memory alone."""
    contention: float = 1.0
    """Waiting of a full GPU's CTAs for each other: memory per SM."""
    mma: float = 1.0
    """A matrix instruction. More than ``clock`` for a GPU whose tensor cores are throttled, such as the H20."""


@dataclass(frozen=True)
class Constants:
    """All constants that were measured on one GPU."""

    device: Device
    models: dict[str, dict[str, Any]]
    """By the model's name, with ``/<schedule>`` or ``/<compute capability>`` if it has several; terms by name."""
    configs: dict[str, SliceTimes]
    """By ``"<kernel>/<config>"``; the kernel's name may have a word after it, see waves.py."""
    sources: tuple[dict[str, str], ...] = ()
    _estimated: dict[str, SliceTimes | None] = field(default_factory=dict, compare=False)

    def scale(self, device: Device) -> Scale:
        """Return how much longer ``device`` takes, by its known rates. All are 1 for another compute capability,
        because clock and bandwidth of other multiprocessors do not tell enough to rank kernels."""
        ours = self.device
        if device.capability != ours.capability or not device.sms:
            return Scale()
        clock, memory = _ratio(ours.clock, device.clock), _ratio(ours.bandwidth, device.bandwidth)
        sms = device.sms / ours.sms
        mma = _ratio(ours.operations, device.operations) * sms if device.operations else clock
        return Scale(clock, memory, memory * sms, mma)

    def decode_overhead(self, kernel: str, weight: WeightOperand, pairs: Pairs | None) -> float:
        """Return the part by which decoding a weight takes longer than int4 with bf16 scales and bf16 x.

        Args:
            pairs: the contents of the kernel's table of pairs; None if it decodes without one. Codes take about as long
                either way.
        """
        model = self.models["decoding"]
        return float(sum(model[name] for name in weight.codec.costs(weight, pairs, kernel == "sm90_decode")))

    def times(self, kernel: str, config: GemmConfig) -> SliceTimes | None:
        """Return the times of a config. A config without measurements gets times between those of the configs with a
        smaller and a larger tile_m. If these were not measured, it gets a little more than the nearest measured config
        of the kernel. A chained one has the times of a cooperative one, and hands over a tile's sums. None for
        a kernel without measurements."""
        name = f"{kernel}/{config}"
        times = self.configs.get(name)
        if times is None:
            if name not in self._estimated:
                near = self._chained if config.schedule == "chain" else self._between
                self._estimated[name] = near(kernel, config) or self._estimate(kernel, config)
            times = self._estimated[name]
        return times

    def _chained(self, kernel: str, config: GemmConfig) -> SliceTimes | None:
        alone, chain = self.times(kernel, replace(config, schedule="coop", split_k=1)), self.models["chain"]
        narrow = kernel.startswith("sm90_fp8_gemm") and (config.tile_n, config.tile_k) == (64, 256)
        sums_us = chain["element_us"] * config.tile_m * config.tile_n + (0.0 if narrow else chain["tile_us"])
        return alone and alone._replace(tile=alone.tile + sums_us)

    def _between(self, kernel: str, config: GemmConfig) -> SliceTimes | None:
        like = self._by_tile_m.get(f"{kernel}/{_but_tile_m(str(config))}", {})
        below = max((m for m in like if m < config.tile_m), default=None)
        above = min((m for m in like if m > config.tile_m), default=None)
        if below is None or above is None:
            return None
        part = (config.tile_m - below) / (above - below)
        return SliceTimes(*(a + part * (b - a) for a, b in zip(like[below], like[above], strict=True)))

    def _estimate(self, kernel: str, config: GemmConfig) -> SliceTimes | None:
        measured = self._measured.get(kernel)
        if measured is None:
            return None
        near, times = min(measured, key=lambda pair: _distance(pair[0], config))
        codes = config.tile_n * config.tile_k / (near.tile_n * near.tile_k)
        tokens = config.tile_m / near.tile_m
        a_slice, a_tile = codes * max(1, tokens), tokens * config.tile_n / near.tile_n
        return SliceTimes(
            _UNMEASURED * a_slice * times.alone, _UNMEASURED * a_slice * times.shared, _UNMEASURED * a_tile * times.tile
        )

    @functools.cached_property
    def _measured(self) -> dict[str, list[tuple[GemmConfig, SliceTimes]]]:
        """``configs`` by the kernel's name."""
        measured: dict[str, list[tuple[GemmConfig, SliceTimes]]] = {}
        for name, times in self.configs.items():
            kernel, _, text = name.rpartition("/")
            measured.setdefault(kernel, []).append((GemmConfig.parse(text), times))
        return measured

    @functools.cached_property
    def _by_tile_m(self) -> dict[str, dict[int, SliceTimes]]:
        """``configs`` by their names without tile_m (:func:`_but_tile_m`), then by tile_m."""
        times_by_tile_m: dict[str, dict[int, SliceTimes]] = {}
        for name, times in self.configs.items():
            kernel, _, text = name.rpartition("/")
            times_by_tile_m.setdefault(f"{kernel}/{_but_tile_m(text)}", {})[int(text.partition("x")[0])] = times
        return times_by_tile_m


def _but_tile_m(config: str) -> str:
    """A config's string without tile_m, with which it begins. Parsing hundreds would make a first choice wait."""
    return config.partition("x")[2]


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if ours and theirs else 1.0


def _distance(a: GemmConfig, b: GemmConfig) -> tuple[float, str]:
    """Return how unlike two configs are, as a sort key: the schedule counts most, the cluster least."""
    sizes = _octaves(a.tile_m, b.tile_m) + _octaves(a.tile_n, b.tile_n) + _octaves(a.tile_k, b.tile_k)
    sizes += _octaves(a.split_k, b.split_k)
    clusters = _octaves(a.cluster_m, b.cluster_m) + _octaves(a.cluster_n, b.cluster_n)
    return 4.0 * (a.schedule != b.schedule) + sizes + 0.25 * clusters, str(a)


@functools.cache
def _octaves(a: int, b: int) -> float:
    return abs(math.log2(a / b))


def read(path: Path) -> Constants:
    """The constants in a file."""
    return parse(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def parse(rows: Iterable[dict[str, Any]]) -> Constants:
    gpu, models, configs, sources = None, {}, {}, []
    for row in rows:
        if "gpu" in row:
            gpu = _device(row)
        elif "config" in row:
            configs[row["config"]] = SliceTimes(*(row.get(term, 0.0) for term in SliceTimes._fields))
        elif "model" in row:
            of = row.get("schedule") or ".".join(map(str, row.get("capability", ())))
            models[f"{row['model']}/{of}" if of else row["model"]] = row
        else:
            sources.append(row)
    assert gpu is not None, "wanted a line with a gpu"
    return Constants(gpu, models, configs, tuple(sources))


def _device(row: dict[str, Any]) -> Device:
    """The GPU that the first line of a file names."""
    return Device("cuda", row["gpu"], tuple(row["capability"]), row["sms"], row["shared_memory"])


def path_of(gpu: str) -> Path:
    """The file of a GPU's constants, whether or not there is one."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', gpu.lower())}.jsonl"


@functools.cache
def measured() -> dict[str, Device]:
    """The GPUs that constants were measured on, by name."""
    gpus = {}
    for path in sorted(FOLDER.glob("*.jsonl")):
        with open(path, encoding="utf-8") as f:
            gpu = _device(json.loads(f.readline()))
        gpus[gpu.name] = gpu
    return gpus


@functools.cache
def reference() -> Constants:
    """The constants that stand for GPUs of other compute capabilities."""
    return read(path_of(_REFERENCE))


@functools.cache
def constants_for(device: Device) -> Constants:
    """The constants of the measured GPU that is most similar to ``device``: itself, or the one of the same compute
    capability whose clock, and whose bandwidth and matrix instructions per multiprocessor, are the nearest."""
    alike = [gpu for gpu in measured().values() if gpu.capability == device.capability]
    if not alike or not device.sms:
        return reference()
    nearest = min(alike, key=lambda gpu: (gpu.name != device.name, _unlikeness(gpu, device), gpu.name != _REFERENCE))
    return reference() if nearest.name == _REFERENCE else read(path_of(nearest.name))


def unmeasured(device: Device) -> str:
    """Say what predictions for a device rest on if no times were measured there; the empty string if some were."""
    if device.kind != "cuda" or device.name in measured():
        return ""
    gpu = constants_for(device).device
    if gpu.capability != device.capability:
        return f"times of an {gpu.name} as they are; none was measured on this architecture"
    same = scale_of(device) == Scale()
    how = "whose data sheet says the same" if same else "scaled by clock, memory bandwidth and tensor-core rate"
    return f"times of an {gpu.name}, {how}; none was measured here"


def _unlikeness(a: Device, b: Device) -> float:
    ratios = (
        _ratio(a.clock, b.clock),
        _ratio(a.bandwidth / a.sms, b.bandwidth / b.sms),
        _ratio(a.operations / a.sms, b.operations / b.sms),
    )
    return sum(abs(math.log(ratio)) for ratio in ratios)


@functools.cache
def scale_of(device: Device) -> Scale:
    """How much longer ``device`` takes than the GPU that its constants were measured on."""
    return constants_for(device).scale(device)


# --- least times, by data sheets -------------------------------------------------------------------------------------

Timer = Callable[[int], float]
"""Microseconds by m, of a problem that is fixed but for its m. inf if the config is needless there: it has two
launches, and the first does everything."""

_MMA_SYNC = 0.625
"""Rate of mma.sync over that of WGMMA, on a Hopper GPU at best."""
SHARPNESS = 8
"""Power of the smooth maximum of the time of moving bytes and another time."""


@functools.cache
def _block_bytes(format: WeightFormat, fp8: bool) -> int:
    codec = codec_for(format, MMA8 if fp8 else MMA16)
    return (Block.of(format) if codec is None else codec.block(format)).stride


def moved_us(problem: GemmProblem) -> Timer:
    """Return the microseconds, by m, to move every byte once: packed blocks, x and d, the latter two as if in 16
    bits."""
    blocks = -(-problem.n // BLOCK_N) * -(-problem.k // BLOCK_K)
    block_bytes = _block_bytes(problem.format, problem.dtype == torch.float8_e4m3fn)
    rate = constants_for(problem.device).models["waves"]["bytes_per_us"] / scale_of(problem.device).memory
    weight_us, row_us = block_bytes * blocks / rate, 2 * (problem.n + problem.k) / rate
    weights = max(1, problem.experts)
    return lambda m: weight_us * min(weights, m) + row_us * m


def copy_us(problem: GemmProblem) -> float:
    """Return the microseconds of a copy of x's rows, and of their scales if they have any, before a launch."""
    copy = constants_for(problem.device).models["copy"]
    moved = problem.m * problem.k * problem.dtype.itemsize
    return (1 + problem.epilogue.token_scale) * copy["launch_us"] + moved / copy["bytes_per_us"] * scale_of(
        problem.device
    ).memory


def row_sums_us(problem: GemmProblem) -> Timer:
    """Return by m the microseconds of the launch that adds up rows of x in front of a product."""
    sums, memory = constants_for(problem.device).models["row_sums"], scale_of(problem.device).memory
    return lambda m: sums["launch_us"] + m * problem.k / sums["bytes_per_us"] * memory


def unmeasured_us(problem: GemmProblem) -> float:
    """Return the time that a kernel or config without measurements is ranked by: twice the larger of the times of all
    bytes and of all operations, by the device's data sheet as far as it is known."""
    ours = constants_for(problem.device).device
    operations = 2 * problem.m * problem.n * problem.k
    return 2 * max(moved_us(problem)(problem.m), operations / (problem.device.operations or ours.operations))


def mma_us(problem: GemmProblem, config: GemmConfig, wgmma: bool) -> float:
    """Least time of the matrix instructions of a k-slice, WGMMA or mma.sync; 0 if tensor cores are no slower than the
    clock says, because measured times, scaled by the clock, then include them."""
    ours, scale = constants_for(problem.device).device, scale_of(problem.device)
    if scale.mma <= 1.01 * scale.clock:
        return 0.0
    rate = ours.operations / ours.sms / scale.mma * (2 if problem.dtype.itemsize == 1 else 1)
    return 2 * config.tile_m * config.tile_n * config.tile_k / (rate if wgmma else _MMA_SYNC * rate)
