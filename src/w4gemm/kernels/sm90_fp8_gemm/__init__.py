"""W4A8 on Hopper: sm90_mixed_gemm's device code for fp8 activations."""
