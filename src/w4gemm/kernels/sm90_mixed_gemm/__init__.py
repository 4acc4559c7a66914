"""Hopper: WGMMA with the weight decoded in registers. Host side: ``spec``; device side: ``kernel``, ``consumer``."""
