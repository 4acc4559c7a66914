"""Keys of how tensors are quantized."""

kMxfp4Static = "MXFP4"
