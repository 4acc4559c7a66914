"""What the Hopper kernels share on the host side: where they run, and how their times are predicted."""

from __future__ import annotations

from w4gemm.config import GemmConfig
from w4gemm.formats import WeightFormat
from w4gemm.kernels.gpu import HOPPER_SHARED_MEMORY, GpuKernel
from w4gemm.kernels.sm90_model import predicted_us
from w4gemm.problem import Device, GemmProblem


class HopperKernel(GpuKernel):
    """A Kernel on SM90. A subclass adds configs and its device code."""

    def refusal(self, device: Device) -> str:
        if device.kind != "cuda" or device.rocm:
            have = "an AMD GPU" if device.rocm else f"a {device.kind} device"
            return f"needs an NVIDIA GPU of compute capability 9.0, this is {have}"
        if device.capability != (9, 0):
            have = ".".join(map(str, device.capability))
            return f"needs compute capability 9.0 (H100, H200, H800, H20), {device.name or 'this GPU'} has {have}"
        if device.shared_memory < HOPPER_SHARED_MEMORY:
            return f"needs {HOPPER_SHARED_MEMORY} bytes of shared memory a CTA, the GPU has {device.shared_memory}"
        return ""

    def arch(self, device: Device) -> str:
        return "sm_90a"

    def predicted_us(self, problem: GemmProblem, config: GemmConfig) -> float:
        named, ctas = self.timed_as(problem.format), self.ctas_per_sm(config)
        return predicted_us(problem, named, config, ctas, self.decode_overhead(problem))

    def decode_overhead(self, problem: GemmProblem) -> float:
        """The part by which the problem's format makes a slot of few tokens slower than the model's times have it."""
        return 0.0

    def timed_as(self, format: WeightFormat) -> str:
        """Under which name the model knows the times of configs."""
        return self.name
