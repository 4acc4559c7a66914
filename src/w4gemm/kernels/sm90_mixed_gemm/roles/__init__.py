"""Device code of the warps: what kernel.py is made of."""
