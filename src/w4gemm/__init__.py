"""4-bit-weight matrix multiplication for NVIDIA GPUs, from pure Python. Importing this touches no GPU."""

import warnings

from w4gemm.activations import quantize_activations
from w4gemm.choice import configs, explain
from w4gemm.config import GemmConfig
from w4gemm.environment import configure_logging
from w4gemm.epilogue import Epilogue
from w4gemm.errors import FormatError, UnsupportedError
from w4gemm.experts import W4Experts
from w4gemm.formats import WeightFormat
from w4gemm.grouped import grouped_linear, masked_linear
from w4gemm.nn import W4Linear
from w4gemm.ops import linear
from w4gemm.problem import Device, GemmProblem
from w4gemm.quantization import fold_scales, quantize
from w4gemm.routing import Routing, combine, route
from w4gemm.runner import MixedGemm
from w4gemm.tuning.tuner import autotune
from w4gemm.weight import QuantizedWeight

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Epilogue",
    "FormatError",
    "GemmConfig",
    "GemmProblem",
    "MixedGemm",
    "QuantizedWeight",
    "Routing",
    "UnsupportedError",
    "W4Experts",
    "W4Linear",
    "WeightFormat",
    "autotune",
    "combine",
    "configs",
    "explain",
    "fold_scales",
    "grouped_linear",
    "linear",
    "masked_linear",
    "quantize",
    "quantize_activations",
    "route",
]

try:
    configure_logging()
except ValueError as e:  # a command says it again, and ends
    warnings.warn(str(e), stacklevel=2)
