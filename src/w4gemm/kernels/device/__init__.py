"""Device code that kernels share."""
