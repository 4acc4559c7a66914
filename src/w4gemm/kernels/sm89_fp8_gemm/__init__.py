"""W4A8 without Hopper's units: sm80_mixed_gemm's device code for fp8 activations."""
