"""GPUs that are known by their names, and their rates. Importing this does without PyTorch."""

from __future__ import annotations

import re
from typing import NamedTuple

from w4gemm.core.words import nearest


class GpuRates(NamedTuple):
    """Rates and size from a GPU's data sheet; 0 for what is not known. The driver does not tell the rates, or for the
    clock of the moment only."""

    clock: float = 0.0
    """Boost clock of a multiprocessor, MHz."""
    bandwidth: float = 0.0
    """Memory bandwidth, bytes per us."""
    operations: float = 0.0
    """Dense 16-bit tensor-core operations with float32 sums, per us: 2 for a multiplication and an addition."""
    sms: int = 0
    """Number of multiprocessors."""


_KNOWN: dict[tuple[int, int], dict[str, GpuRates]] = {
    (10, 3): {"B300": GpuRates(1965, 8.0e6, 2250e6, 148)},
    (10, 0): {"GB200": GpuRates(2062, 8.0e6, 2500e6, 152), "B200": GpuRates(1965, 8.0e6, 2250e6, 148)},
    (9, 0): {
        "H200 NVL": GpuRates(1785, 4.8e6, 835e6, 132),
        "GH200": GpuRates(1980, 4.0e6, 989.5e6, 132),
        "H200": GpuRates(1980, 4.8e6, 989.5e6, 132),
        "H[18]00 PCIe": GpuRates(1755, 2.0e6, 756e6, 114),
        "H[18]00 NVL": GpuRates(1785, 3.9e6, 835e6, 132),
        "H[18]00": GpuRates(1980, 3.35e6, 989.5e6, 132),
        "H20": GpuRates(1980, 4.0e6, 148e6, 78),
    },
    (7, 5): {"T4": GpuRates(1590, 0.32e6, 65e6, 40)},  # which no kernel supports: `explain` says so
    (8, 0): {
        "A[18]00.*40GB": GpuRates(1410, 1.555e6, 312e6, 108),
        "A[18]00": GpuRates(1410, 2.0e6, 312e6, 108),
        "A30": GpuRates(1440, 0.933e6, 165e6, 56),
    },
    (8, 6): {
        "A10G": GpuRates(1695, 0.6e6, 125e6, 80),
        "A10": GpuRates(1695, 0.6e6, 125e6, 72),
        "A40": GpuRates(1740, 0.696e6, 149.7e6, 84),
        "RTX 3090": GpuRates(1695, 0.936e6, 71e6, 82),
    },
    (8, 9): {
        "L40S": GpuRates(2520, 0.864e6, 362e6, 142),
        "L40": GpuRates(2490, 0.864e6, 181e6, 142),
        "L4": GpuRates(2040, 0.3e6, 121e6, 58),
        "RTX 6000 Ada": GpuRates(2505, 0.96e6, 364e6, 142),
        "RTX 4090": GpuRates(2520, 1.008e6, 165e6, 128),
    },
    (12, 0): {
        "RTX 5090": GpuRates(2407, 1.792e6, 209e6, 170),
        "RTX PRO 6000": GpuRates(2617, 1.792e6, 503e6, 188),
    },
}
"""Rates by compute capability and by a pattern that matches whole words of the name. The first pattern that matches
counts."""


def rates_of(name: str) -> GpuRates:
    """Return the rates of the GPU called ``name``, such as ``"NVIDIA H100 PCIe"``."""
    return _capability_and_rates(name)[1]


def capability_of(name: str) -> tuple[int, int] | None:
    """Return the compute capability of the GPU called ``name``; None for one that is not known."""
    return _capability_and_rates(name)[0]


def known_names() -> list[str]:
    """Return a name of each known GPU, without the words that all GPUs of its vendor share."""
    patterns = [pattern.replace(".*", " ") for gpus in _KNOWN.values() for pattern in gpus]
    return [p.replace("[18]", digit) for p in patterns for digit in ("1", "8")[: 1 + ("[18]" in p)]]


def known_name(name: str) -> str | None:
    """Return the one of :func:`known_names` that a short name stands for, in any case and with or without spaces,
    such as "h200", "rtx-4090" or "rtx4090"; None for another name, which may be the driver's."""
    letters = re.sub("[-_ ]", "", name).upper()
    return next((known for known in known_names() if re.sub("[-_ ]", "", known).upper() == letters), None)


def nearest_gpu(name: str) -> str:
    """Return the end of a message about an unknown GPU: the known one of nearest name, if one is near."""
    if re.match(r"(amd\b|instinct|radeon|mi\d|gfx\d)", name, re.IGNORECASE):
        return "; AMD GPUs are not supported"
    words = re.sub("nvidia |geforce ", "", name.replace("-", " "), flags=re.IGNORECASE)
    return nearest(words, known_names())


def is_known(name: str) -> bool:
    """True for a short name of a known GPU, or the driver's."""
    return capability_of(known_name(name) or name) is not None


def _capability_and_rates(name: str) -> tuple[tuple[int, int] | None, GpuRates]:
    for capability, gpus in _KNOWN.items():
        for pattern, rates in gpus.items():
            if re.search(rf"\b{pattern}\b", name, re.IGNORECASE):
                return capability, rates
    return None, GpuRates()
