"""The quantization of activations to e4m3, with a scale for each token."""
