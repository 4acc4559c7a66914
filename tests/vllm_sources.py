"""vLLM's own sources for the tests of its plugin, on a machine without a GPU.

    pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl '*.py' -d SOURCES
    pip install --no-deps --target OTHERS compressed-tensors==0.17.0 loguru msgspec openai-harmony
    pip download --no-deps vllm-gguf-plugin==0.0.5 && unzip vllm_gguf_plugin-*.whl '*.py' -d OTHERS
    VLLM_SOURCES=SOURCES:OTHERS python -m pytest tests/test_vllm_sources*.py tests/test_vllm_model_*.py

Alone, because other tests need the stub. vLLM's Python makes layers and loads checkpoints into them; its libraries, and
packages that are not installed, are mocks. It takes the CPU for a Hopper GPU, as far as kernels are chosen.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from unittest.mock import MagicMock

import torch

from sglang_sources import Mock, Mocks

_LIBRARIES = {f"vllm.{name}" for name in ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "_version")}
_MISSING = {"tpu_inference", "libtpu", "amdsmi", "zentorch", "vllm_xpu_kernels", "triton_kernels", "flashinfer"}
_MISSING |= {"triton", "deep_ep", "deep_gemm", "aiter", "tilelang", "ray", "intel_extension_for_pytorch"}


def install(folders: Sequence[str]) -> None:
    """Make ``vllm`` importable from the first of ``folders``, and what it imports from the others."""
    sys.path[:0] = folders
    import transformers  # noqa: F401

    Mock.models |= {"openai", "anthropic", "mcp"}
    sys.meta_path.append(Mocks(os.path.abspath(folders[0]), {"vllm", *_MISSING}, _LIBRARIES))
    from vllm.model_executor.layers.quantization import get_quantization_config

    get_quantization_config("compressed-tensors")  # which imports them all, on a machine without a GPU
    _pretend_hopper()
    _pretend_one_process()


def _pretend_hopper() -> None:
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import torch_utils

    platform = type(current_platform)
    platform._enum = PlatformEnum.CUDA
    platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    platform.fp8_dtype = classmethod(lambda cls: torch.float8_e4m3fn)
    platform.num_compute_units = classmethod(lambda cls, device_id=0: 132)
    platform.is_cuda = lambda self: True
    platform.device_type, platform.dispatch_key = "cpu", "CPU"
    torch_utils.PIN_MEMORY = False


def _pretend_one_process() -> None:
    import vllm.config.vllm
    from vllm import distributed
    from vllm.config import OffloadConfig
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.fused_moe.experts import cutlass_moe
    from vllm.v1.worker.workspace import init_workspace_manager

    cutlass_moe.cutlass_group_gemm_supported = lambda: True
    torch.accelerator.empty_cache = lambda: None
    init_workspace_manager(torch.device("cpu"))

    for module in (distributed, parameter, linear, vocab_parallel_embedding):
        for name, value in (("rank", 0), ("world_size", 1)):
            setattr(module, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    config = MagicMock(lora_config=None)
    config.model_config.quantization_config = None
    config.kernel_config.linear_backend, config.kernel_config.linear_backend_per_quant = "auto", None
    config.scheduler_config.max_num_batched_tokens = 8
    config.offload_config, config.parallel_config.enable_elastic_ep = OffloadConfig(), False
    config.compilation_config = MagicMock(custom_ops=["none"], mode=0, static_forward_context={})
    config.compilation_config.inductor_compile_config, config.compilation_config.compile_ranges_endpoints = {}, [8]
    config.compilation_config.enabled_custom_ops = Counter()
    config.compilation_config.disabled_custom_ops = Counter()
    vllm.config.vllm._current_vllm_config = config
