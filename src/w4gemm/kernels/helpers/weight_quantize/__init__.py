"""Quantization of dense weights into packed blocks."""
