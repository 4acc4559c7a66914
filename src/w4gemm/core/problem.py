"""A product and the device that computes it, as values, :class:`GemmProblem` and :class:`Device`.

Neither holds tensors. So choosing, explaining and compiling need no GPU, and a test can describe any device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from w4gemm.core.activation import require_pairs
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.errors import device_named, require_bool, require_gpu, require_int
from w4gemm.core.formats import WeightFormat
from w4gemm.core.gpus import capability_of, known_name, rates_of

# --- devices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """The facts about a device that a choice depends on: capability, limits and rates.

    :meth:`of` describes a device of this machine. ``w4gemm.core.problem`` has descriptions of others, such as ``H200``
    and ``H100``. The name decides which measured choices are used, and the rates that are not given.

    Raises:
        ValueError: for a kind that is no device type.
    """

    kind: str
    """Type of the device as PyTorch names it: "cuda" or "cpu"."""
    name: str = ""
    """Exact name of the GPU, such as "NVIDIA H200"."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, such as (9, 0)."""
    sms: int = 0
    """Number of multiprocessors."""
    shared_memory: int = 0
    """Bytes of shared memory that one CTA may use."""
    rocm: bool = False
    """True for an AMD device behind ``torch.cuda``."""
    clock: float = 0.0
    """Boost clock of a multiprocessor in MHz; 0 if unknown."""
    bandwidth: float = 0.0
    """Memory bandwidth in bytes per us; 0 if unknown."""
    operations: float = 0.0
    """Dense 16-bit tensor-core operations per us; 0 if unknown."""

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu") and not _is_device_type(self.kind):
            raise ValueError(
                f"kind: wanted 'cuda', 'cpu' or another device type of PyTorch, got {self.kind!r}; "
                "w4gemm.Device.of describes a device of this machine"
            )
        for name, rate in rates_of(self.name)._asdict().items():
            if not getattr(self, name):
                object.__setattr__(self, name, rate)

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Describe a device of this machine.

        Raises:
            TypeError, ValueError: for what is no device, or a GPU that is not there.
        """
        device = device_named(device)
        if device.type != "cuda":
            return cls(device.type)
        require_gpu("device", device)
        return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


def _is_device_type(kind: object) -> bool:
    try:
        return isinstance(kind, str) and torch.device(kind).type == kind
    except RuntimeError:
        return False


@functools.cache
def _cuda_device(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    rates = rates_of(p.name)  # before what the driver says, so that a GPU and its description are equal
    kilohertz, bits = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    return Device(
        kind="cuda",
        name=p.name,
        capability=(p.major, p.minor),
        sms=p.multi_processor_count,
        shared_memory=getattr(p, "shared_memory_per_block_optin", 0),
        rocm=torch.version.hip is not None,
        clock=rates.clock or getattr(p, "clock_rate", 0) / 1e3,
        bandwidth=rates.bandwidth or 2 * kilohertz * 1e3 * bits / 8 / 1e6,  # two transfers a clock
    )


H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448)
"""Equal to :meth:`Device.of` on an H200; for choosing and compiling without one."""

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132, 232448)
"""Equal to :meth:`Device.of` on an H100 SXM."""

GPUS = {
    "sm_80": Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912),
    "sm_86": Device("cuda", "NVIDIA GeForce RTX 3090", (8, 6), 82, 101376),
    "sm_89": Device("cuda", "NVIDIA GeForce RTX 4090", (8, 9), 128, 101376),
    "sm_90a": H200,
    "sm_100a": Device("cuda", "NVIDIA B200", (10, 0), 148, 232448),
    "sm_120a": Device("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 170, 101376),
}
"""A GPU for each target of the compiler; for choosing and compiling without one."""

_SHORT = {"H100": H100, "H200": H200, "A100": GPUS["sm_80"], "RTX 3090": GPUS["sm_86"]}
_SHORT |= {"RTX 4090": GPUS["sm_89"], "B200": GPUS["sm_100a"], "RTX 5090": GPUS["sm_120a"]}
"""GPUs whose exact names are known, by which measured choices are found."""
_SHARED_MEMORY = {gpu.capability: gpu.shared_memory for gpu in GPUS.values()} | {(10, 3): 232448, (7, 5): 65536}


def gpu_named(name: str) -> Device | None:
    """Return the GPU of a name, which need not be there, or None if it is not known.

    Args:
        name: a short name such as "h200" or "rtx-4090", in any case, or the driver's name.
    """
    short = known_name(name)
    if short in _SHORT:
        return _SHORT[short]
    name = f"NVIDIA {short}" if short else name
    capability = capability_of(name)
    if capability is None:
        return None
    return Device("cuda", name, capability, shared_memory=_SHARED_MEMORY[capability])  # with the name's rates and SMs


# --- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmProblem:
    """The product x (m, k) @ w (n, k).T with its epilogue, on a device. It holds no tensors.

    Args:
        m, n, k: number of tokens, output features, input features.
        dtype: dtype of x.
        format: format of the weight, or its string.
        layout: the layout of the weight, ``w.layout``: "mma16" on GPUs, "mma8" there for fp8 x, "cpu" or "canonical" on
            the CPU.
        epilogue: the operations on the products before they are stored.
        device: the device: :meth:`Device.of` one of this machine, or a description. An H200 unless another is given.
        batch_invariant: True if the bits of a row of the result must not depend on the other rows or on m.
        experts: number of experts; 0 for a single weight. Each expert has its weight and some of the m rows of x, and
            only the device knows which.
        gathered: True if row i of the result is computed from row indices[i] of x. Only the device knows the indices,
            and x may have any number of rows. For a problem of experts.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    format: WeightFormat
    layout: str
    epilogue: Epilogue = PLAIN
    device: Device = field(default=H200)
    batch_invariant: bool = False
    experts: int = 0
    gathered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            object.__setattr__(self, "format", WeightFormat.parse(self.format))

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the field, if a field is wrong."""
        for name, least in (("m", 1), ("n", 1), ("k", 1), ("experts", 0)):
            require_int(name, getattr(self, name), least)
        for name in ("gathered", "batch_invariant"):
            require_bool(name, getattr(self, name))
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype: wanted a torch.dtype, got {type(self.dtype).__name__} {self.dtype!r}")
        if not isinstance(self.format, WeightFormat):
            raise TypeError(f"format: wanted a WeightFormat or its string, got {type(self.format).__name__}")
        if not isinstance(self.epilogue, Epilogue):
            raise TypeError(f"epilogue: wanted an Epilogue, got {type(self.epilogue).__name__}")
        if not isinstance(self.device, Device):
            raise TypeError(f"device: wanted a Device, got {self.device!r}; Device.of makes one")
        self.epilogue.check()
        if self.epilogue.expert_scale and not self.experts:
            raise ValueError("epilogue: wanted one without expert_scale for a single weight, got one with; use alpha")
        require_pairs("n", self.epilogue.activation, self.n)

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of d."""
        return self.epilogue.result_dtype(self.dtype)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        fused = "" if self.epilogue == PLAIN else f", {self.epilogue}"
        experts = f", {self.experts} experts" if self.experts else ""
        experts += ", gathered rows" if self.gathered else ""
        invariant = ", batch invariant" if self.batch_invariant else ""
        sizes = f"m {self.m}, n {self.n}, k {self.k}, {dtype} x {self.format}{experts}"
        return f"{sizes}{fused} ({self.layout} layout){invariant}"
