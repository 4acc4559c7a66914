"""4-bit-weight matrix multiplication for NVIDIA GPUs, from pure Python. Importing this touches no GPU."""

from w4gemm.config import GemmConfig
from w4gemm.errors import FormatError, UnsupportedError
from w4gemm.formats import WeightFormat
from w4gemm.weight import QuantizedWeight, quantize

__version__ = "0.1.0"

__all__ = ["FormatError", "GemmConfig", "QuantizedWeight", "UnsupportedError", "WeightFormat", "quantize"]
