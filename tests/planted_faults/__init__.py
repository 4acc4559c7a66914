"""Faults for tests/planted.py, as data. ``old`` occurs exactly once in the file: tests/test_planted.py."""

from planted_faults import device, emulated, expert_layer, host
from planted_faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*host.FAULTS, *device.FAULTS, *emulated.FAULTS, *expert_layer.FAULTS)

__all__ = ["FAULTS", "Fault"]
