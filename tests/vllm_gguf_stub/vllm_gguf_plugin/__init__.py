"""A stub of vLLM's GGUF plugin 0.0.5, as far as w4gemm's tests need it."""
