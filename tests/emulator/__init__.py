"""An emulator of NVIDIA GPUs, see kernel.py."""
