"""A platform."""

import enum
from typing import NamedTuple


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    @property
    def pass_key(self) -> str:
        return "post_grad_custom_post_pass"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> "DeviceCapability | None":
        return DeviceCapability(9, 0)
