"""Small kernels around the products, each a folder with the host side in spec.py and the device code in kernel.py."""
