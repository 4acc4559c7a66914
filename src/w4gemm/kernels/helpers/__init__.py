"""Kernels beside the products, each small: a folder with the host side in spec.py and the device code in kernel.py."""
