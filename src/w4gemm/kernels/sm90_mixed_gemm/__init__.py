"""Hopper: WGMMA with the weight decoded in registers. ``spec`` is the host side, ``kernel`` and ``roles`` the device's."""
