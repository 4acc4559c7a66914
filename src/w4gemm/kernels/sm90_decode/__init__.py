"""Hopper, few tokens: every warp streams its own part of the weights. ``spec`` is the host side."""
