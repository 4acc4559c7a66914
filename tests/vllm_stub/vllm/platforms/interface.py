"""A platform."""

import enum
from typing import NamedTuple


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> "DeviceCapability | None":
        return DeviceCapability(9, 0)
