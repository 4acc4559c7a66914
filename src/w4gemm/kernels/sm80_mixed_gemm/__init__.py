"""Any NVIDIA GPU from SM80 on, without Hopper's units, x in 16 bits or e4m3. ``spec`` is the host side."""
