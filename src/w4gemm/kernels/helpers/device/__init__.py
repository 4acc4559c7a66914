"""Device code of the helpers."""
