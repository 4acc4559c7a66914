"""Quantized weights: the value, how it is made, stacked, split, saved and dequantized."""
