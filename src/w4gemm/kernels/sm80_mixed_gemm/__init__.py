"""GPUs without Hopper's units, and Hopper as a fallback. ``spec`` is the host side."""
