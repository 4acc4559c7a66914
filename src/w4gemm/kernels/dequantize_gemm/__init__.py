"""The kernel that decodes all of a weight and leaves the product to cuBLAS."""
