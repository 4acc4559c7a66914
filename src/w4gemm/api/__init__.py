"""The public functions and classes, which :mod:`w4gemm` exports."""

from w4gemm.api.activations import quantize_activations
from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.grouped import grouped_linear, masked_linear
from w4gemm.api.lookup import embedding
from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.api.ops import linear
from w4gemm.api.routing import Routing, choose_experts, combine, route
from w4gemm.api.runner import MixedGemm
from w4gemm.api.update import update_
from w4gemm.choice import configs, explain
from w4gemm.core.config import GemmConfig
from w4gemm.core.elements import codebook
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import FormatError, UnsupportedError
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.core.router import Router
from w4gemm.tuning.tuner import autotune
from w4gemm.weights.fold import fold_scales
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

__all__ = [
    "Device",
    "Epilogue",
    "FormatError",
    "GemmConfig",
    "GemmProblem",
    "MixedGemm",
    "QuantizedWeight",
    "Router",
    "Routing",
    "UnsupportedError",
    "W4Embedding",
    "W4Experts",
    "W4GroupedLinear",
    "W4Linear",
    "WeightFormat",
    "autotune",
    "choose_experts",
    "codebook",
    "combine",
    "configs",
    "embedding",
    "explain",
    "fold_scales",
    "grouped_linear",
    "linear",
    "masked_linear",
    "quantize",
    "quantize_activations",
    "route",
    "update_",
]
