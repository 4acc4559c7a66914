"""The program ``w4gemm``: a file of its name for each command."""
