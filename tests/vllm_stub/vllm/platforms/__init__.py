"""The platform of this process."""

from vllm.platforms.interface import Platform, PlatformEnum

current_platform = Platform()

__all__ = ["PlatformEnum", "current_platform"]
