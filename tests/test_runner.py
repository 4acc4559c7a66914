"""The runner for engine authors: the same bits as linear, DLPack, no surprises."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

import w4gemm
from w4gemm import Epilogue, MixedGemm, choice
from w4gemm.api import runner
from w4gemm.api.runner import torch_tensor
from w4gemm.kernels import KERNELS

M, N, K = 5, 48, 64


@pytest.fixture
def weight() -> w4gemm.QuantizedWeight:
    return w4gemm.quantize(torch.randn(N, K), "int4_g32_fp16").repack()


def test_the_bits_of_linear(weight):
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu")
    x, out = torch.randn(M, K), torch.empty(M, N)
    configs = gemm.configs(M, N, K)
    assert configs == choice.configs(gemm.problem(M, N, K)) and len(configs) > 1
    assert gemm.weight_shapes(N, K) == tuple((t.dtype, tuple(t.shape)) for t in weight.tensors)
    for config in (None, *configs):
        out.fill_(float("nan"))
        assert gemm.run(x, weight.tensors, out, config=config, n=N) is None
        assert torch.equal(out, w4gemm.linear(x, weight, config=config))
        assert gemm.prepare(M, N, K, config) == (config or configs[0])
    kernel = KERNELS[-1]
    for config in configs:
        expected = kernel.workspace_bytes(gemm.problem(M, N, K), w4gemm.GemmConfig.parse(config.split("/")[1]))
        assert gemm.workspace_bytes(M, N, K, config) == expected > 0


def test_the_whole_epilogue(weight):
    epilogue = Epilogue("silu_mul", "host", bias=True, residual=True)
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=epilogue)
    x, bias, d = torch.randn(M, K), torch.randn(N), torch.randn(M, N // 2)
    expected = w4gemm.linear(x, weight, bias, alpha=0.5, activation="silu_mul", residual=d)
    gemm.run(x, weight.tensors, d, alpha=0.5, bias=bias, residual=d, n=N)
    assert torch.equal(d, expected)


def test_out_has_memory_of_its_own(weight):
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=Epilogue(residual=True))
    memory = torch.randn(M * (K + N))
    a, inside, apart = memory[: M * K].view(M, K), memory[K : K + M * N].view(M, N), memory[M * K :].view(M, N)
    with pytest.raises(ValueError, match="out: wanted memory of its own, got memory shared with a"):
        gemm.run(a, weight.tensors, inside, residual=apart, n=N)
    in_weight = weight.tensors[0].view(torch.uint8).view(-1)[: 4 * N].view(torch.float32).view(1, N)
    with pytest.raises(ValueError, match="out: wanted memory of its own, got memory shared with b"):
        gemm.run(a[:1], weight.tensors, in_weight, residual=apart[:1], n=N)
    expected = w4gemm.linear(a, weight, residual=apart)
    gemm.run(a, weight.tensors, apart, residual=apart, n=N)
    assert torch.equal(apart, expected)


@pytest.mark.parametrize("name", ["int4_g32_fp16", "int4_g32_e4m3"])
def test_fp8_activations(name):
    w = w4gemm.quantize(torch.randn(N, K), name)
    epilogue = Epilogue("gelu", bias=True, token_scale=True)
    gemm = MixedGemm(name, torch.float8_e4m3fn, "cpu", epilogue=epilogue)
    w = w.repack(gemm.layout)
    x8, scale = w4gemm.quantize_activations(torch.randn(M, K))
    bias, out = torch.randn(N).bfloat16(), torch.empty(M, N, dtype=torch.bfloat16)
    gemm.run(x8, w.tensors, out, bias=bias, token_scale=scale, n=N)
    assert torch.equal(out, w4gemm.linear(x8, w, bias, activation="gelu", token_scale=scale))
    with pytest.raises(ValueError, match="token_scale: the epilogue .* wants one, got none"):
        gemm.run(x8, w.tensors, out, bias=bias, n=N)
    with pytest.raises(TypeError, match="token_scale: wanted torch.float32, got torch.float64"):
        gemm.run(x8, w.tensors, out, bias=bias, token_scale=scale.double(), n=N)


def test_other_frameworks_by_dlpack(weight):
    """NumPy stands for them: its arrays have __dlpack__ and are no torch tensors."""
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu")
    x, out = np.random.default_rng(0).standard_normal((M, K), np.float32), np.zeros((M, N), np.float32)
    gemm.run(x, [t.numpy() for t in weight.tensors], out, n=N)
    assert np.array_equal(out, w4gemm.linear(torch.from_numpy(x), weight).numpy())
    with pytest.raises(TypeError, match="a: wanted a tensor of torch or one with __dlpack__, got list"):
        gemm.run([[1.0]], weight.tensors, out)


def test_a_read_only_array_is_read(weight):
    gemm, x, out = MixedGemm("int4_g32_fp16", torch.float32, "cpu"), np.ones((M, K), np.float32), np.zeros((M, N))
    out, x.flags.writeable = out.astype(np.float32), False
    try:
        torch.from_dlpack(x)
    except BufferError as e:  # PyTorch 2.8
        pytest.skip(f"this PyTorch takes no read-only array: {e}")
    gemm.run(x, weight.tensors, out, n=N)
    assert np.array_equal(out, w4gemm.linear(torch.ones(M, K), weight).numpy())


def test_a_read_only_array_is_not_written(weight):
    gemm, x, out = MixedGemm("int4_g32_fp16", torch.float32, "cpu"), np.ones((M, K), np.float32), np.zeros((M, N))
    out = out.astype(np.float32)
    gemm.run(x, weight.tensors, out, n=N)
    before, out.flags.writeable = out.copy(), False
    with pytest.raises(ValueError, match="out: wanted memory that may be written, got a read-only array"):
        gemm.run(2 * x, weight.tensors, out, n=N)
    assert np.array_equal(out, before) and before.any()


def test_no_tokens_are_no_error(weight):
    gemm, out = MixedGemm("int4_g32_fp16", torch.float32, "cpu"), torch.empty(0, N)
    gemm.run(torch.empty(0, K), weight.tensors, out, n=N)
    with pytest.raises(ValueError, match="out: wanted"):  # checked all the same
        gemm.run(torch.empty(0, K), weight.tensors, torch.empty(1, N), n=N)


def test_a_family_is_a_value():
    a, b = (MixedGemm("int4_g32_fp16", torch.float32, "cpu") for _ in range(2))
    assert a == b and hash(a) == hash(b) and a.layout == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "meta"}, "device: wanted 'cpu' or a CUDA GPU, such as 'cuda:0', got 'meta'"),
        ({"layout": "mma16"}, "layout: wanted 'cpu' or 'canonical' on the CPU, got 'mma16'"),
        ({"epilogue": Epilogue(block_scale=True)}, "epilogue: wanted one without block_scale, .*; use token_scale"),
    ],
)
def test_what_nothing_could_run_is_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        MixedGemm(**{"format": "int4_g128", "dtype": torch.float8_e4m3fn, "device": "cpu"} | changes)


def test_the_cpu_has_no_index():
    assert MixedGemm("int4_g32", torch.float32, "cpu:3") == MixedGemm("int4_g32", torch.float32, "cpu")


def test_workspace_bytes_without_a_config():
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu")
    assert gemm.workspace_bytes(M, N, K, None) == gemm.workspace_bytes(M, N, K, gemm.prepare(M, N, K)) > 0
    with pytest.raises(TypeError, match="config: wanted a GemmConfig, its string or None, got int 5"):
        gemm.workspace_bytes(M, N, K, 5)
    gated = MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=Epilogue("silu_mul"))
    with pytest.raises(ValueError, match="n: silu_mul wants an even n, .*, got n 47"):
        gated.workspace_bytes(M, N - 1, K)


@pytest.mark.parametrize("strides", [(100, 1), (0, 1), (1, 1)])
def test_the_stride_of_one_row_says_nothing(strides):
    gemm, w = MixedGemm("int4_g32", torch.bfloat16, "cpu"), w4gemm.quantize(torch.randn(N, 100), "int4_g32").repack()
    x, out = torch.randn(1, 100).bfloat16(), torch.empty(1, N).bfloat16()
    gemm.run(x.as_strided((1, 100), strides), w.tensors, out, n=N)
    assert torch.equal(out, w4gemm.linear(x, w))


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (torch.zeros(M, 2 * K)[:, ::2], r"a: wanted contiguous columns, stride 1, got strides \(128, 2\)"),
        (
            torch.zeros(M, K + 1)[:, :K],
            r"positive multiple of 16 bytes .*, got strides \(65, 1\) .*; nearest is \(64, 1\)",
        ),
        (torch.zeros(M, K + 3)[:, :K], r"got strides \(67, 1\) of torch.float32; nearest is \(68, 1\)"),
        (torch.zeros(1, K).expand(M, K), r"got strides \(0, 1\) of torch.float32; nearest is \(64, 1\)"),
    ],
)
def test_strides_that_are_refused(weight, a, message):
    with pytest.raises(ValueError, match=message):
        MixedGemm("int4_g32_fp16", torch.float32, "cpu").run(a, weight.tensors, torch.empty(M, N), n=N)


class Exporter:
    """An array of another framework that is a torch tensor inside."""

    def __init__(self, t):
        self.__dlpack__ = t.__dlpack__
        self.__dlpack_device__ = t.__dlpack_device__


class Deviceless:
    def __dlpack__(self):
        raise AssertionError


REFUSED = {
    "negative strides": (np.zeros((M, K), np.float32)[::-1], r"a: wanted no negative strides, got \(-256, 4\)"),
    "byte order": (np.zeros((M, K), ">f4"), "a: wanted what torch.from_dlpack takes, got ndarray .*native byte order"),
    "gradient": (Exporter(torch.zeros(M, K, requires_grad=True)), "a: wanted what .*, got Exporter .*require gradient"),
    "no device": (Deviceless(), "a: wanted a tensor .*, got Deviceless without __dlpack_device__"),
}


@pytest.mark.parametrize(("a", "message"), REFUSED.values(), ids=REFUSED)
def test_arrays_that_torch_cannot_import(weight, a, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MixedGemm("int4_g32_fp16", torch.float32, "cpu").run(a, weight.tensors, torch.empty(M, N), n=N)


def test_strides_that_only_the_array_interface_tells():
    array = Exporter(torch.zeros(2))
    array.__array_interface__ = np.zeros(2)[::-1].__array_interface__
    with pytest.raises(ValueError, match=r"bias: wanted no negative strides, got \(-8,\)"):
        torch_tensor("bias", array)


@pytest.mark.parametrize(("n", "columns"), [(128, 120), (120, 128), (120, 121), (256, 240)])
def test_out_has_a_column_for_each_feature_of_the_weight(n, columns):
    """Packed tensors of n and of ``columns`` features have the same shapes."""
    gemm, x = MixedGemm("int4_g32_fp16", torch.float32, "cpu"), torch.randn(M, K)
    w, out = w4gemm.quantize(torch.randn(n, K), "int4_g32_fp16").repack(), torch.empty(M, n)
    assert gemm.weight_shapes(n, K) == gemm.weight_shapes(columns, K)
    message = rf"out: wanted shape \({M}, {n}\) for n {n} of the weight, got \({M}, {columns}\)"
    with pytest.raises(ValueError, match=message):
        gemm.run(x, w.tensors, torch.empty(M, columns), n=n)
    gemm.run(x, w.tensors, out, n=n)
    assert torch.equal(out, w4gemm.linear(x, w))


def test_features_that_packed_tensors_do_not_tell_are_asked_for():
    gemm, x = MixedGemm("int4_g32_fp16", torch.float32, "cpu"), torch.randn(M, K)
    w, out = w4gemm.quantize(torch.randn(128, K), "int4_g32_fp16").repack(), torch.empty(M, 128)
    with pytest.raises(ValueError, match="n: wanted the weight's number of features, .*, got None; n=120 if out"):
        gemm.run(x, w.tensors, torch.empty(M, 120))
    gemm.run(x, w.tensors, out)  # no larger n has tensors of these shapes
    assert torch.equal(out, w4gemm.linear(x, w))
    gated = MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=Epilogue("silu_mul"))
    with pytest.raises(ValueError, match=r"out: wanted shape \(5, 64\) for n 128 of the weight, got \(5, 60\)"):
        gated.run(x, w.tensors, torch.empty(M, 60), n=128)
    with pytest.raises(ValueError, match="n: silu_mul wants an even n, pairs of gate and up rows, got n 127"):
        gated.run(x, w.tensors, torch.empty(M, 63), n=127)


MISTAKES = {
    "dtype": ({"a": torch.zeros(M, K, dtype=torch.float16)}, "a: wanted torch.float32"),
    "device of a": ({"a": torch.zeros(M, K, device="meta")}, "a: wanted the device of this MixedGemm, cpu, got meta"),
    "device of b": (
        {"b": tuple(t.to("meta") for t in w4gemm.quantize(torch.zeros(N, K), "int4_g32_fp16").repack().tensors)},
        r"b\[0\]: wanted the device of this MixedGemm, cpu, got meta",
    ),
    "alignment": ({"a": torch.zeros(M * K + 1)[1:].view(M, K)}, "a: wanted its data at a multiple of 16"),
    "k": ({"a": torch.zeros(M, 2 * K)}, "b.0.: wanted shape"),
    "m": ({"out": torch.zeros(M + 1, N)}, "a, out: wanted"),
    "features": ({"n": 2.5}, "n: wanted an int"),
    "out dtype": ({"out": torch.zeros(M, N, dtype=torch.float16)}, "out: wanted torch.float32"),
    "out strides": ({"out": torch.zeros(M, 2 * N)[:, :N]}, "out: wanted it contiguous"),
    "a missing tensor": ({"b": ()}, "b: wanted 2 tensors in the cpu layout, got 0"),
    "a bias too many": ({"bias": torch.zeros(N)}, "bias: the epilogue .* wants none"),
    "an alpha too many": ({"alpha": 2.0}, "alpha: the epilogue .* wants none, got host"),
    "config": ({"config": "1x2x3_1x1x1_coop"}, "config: 1x2x3_1x1x1_coop is not legal"),
}


@pytest.mark.parametrize("alpha", [2, 2.0, np.float32(2), np.int64(2)], ids=lambda alpha: type(alpha).__name__)
def test_an_alpha_is_what_linear_takes_for_a_number(weight, alpha):
    a, out = torch.randn(M, K), torch.empty(M, N)
    MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=Epilogue(alpha="host")).run(
        a, weight.tensors, out, n=N, alpha=alpha
    )
    assert torch.equal(out, w4gemm.linear(a, weight, alpha=2.0))


@pytest.mark.parametrize(
    ("alpha", "error", "message"),
    [
        (True, TypeError, "alpha: wanted a number or a tensor of one element, got bool"),
        ("2", TypeError, "alpha: wanted a number or a tensor of one element, got str"),
        ([2.0], TypeError, "alpha: wanted a number or a tensor of one element, got list"),
        (10**400, ValueError, "alpha: wanted a number of at most 1.8e308, got a larger int"),
    ],
)
def test_an_alpha_that_is_no_number(weight, alpha, error, message):
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=Epilogue(alpha="host"))
    with pytest.raises(error, match=message):
        gemm.run(torch.zeros(M, K), weight.tensors, torch.zeros(M, N), n=N, alpha=alpha)


def test_out_is_no_part_of_a_graph(weight, device):
    """It became one on the CPU beside operands that require a gradient, and the next run refused it; on a GPU PyTorch
    did, in the product of dequantize_gemm."""
    gemm = MixedGemm("int4_g32_fp16", torch.float16, device, epilogue=Epilogue(bias=True))
    weight = weight.to(device).repack(gemm.layout)
    make = partial(torch.randn, dtype=torch.float16, device=device, requires_grad=True)
    x, bias, out = make(M, K), make(N), torch.empty(M, N, dtype=torch.float16, device=device)
    config = next((c for c in gemm.configs(M, N, K) if c.startswith("dequantize_gemm/")), None)
    assert (config is None) == (device == "cpu")
    for _ in range(2):
        gemm.run(x, weight.tensors, out, bias=bias, n=N, config=config)
        assert not out.requires_grad and out.grad_fn is None
    assert torch.equal(out, w4gemm.linear(x, weight, bias, config=config))


def test_other_frameworks_hear_of_the_stream(weight, monkeypatch):
    """DLPack tells them torch's current stream, which then waits for their tensors."""
    current = []

    @contextmanager
    def launching_on(stream, device):
        current.append(stream)
        yield
        current.pop()

    class Array:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            assert current == [64]
            return x.__dlpack__()

    monkeypatch.setattr(runner, "_launching_on", launching_on)
    x, out = torch.randn(M, K), torch.empty(M, N)
    MixedGemm("int4_g32_fp16", torch.float32, "cpu").run(Array(), weight.tensors, out, n=N, stream=64)
    assert torch.equal(out, w4gemm.linear(x, weight)) and not current


@pytest.mark.gpu
def test_arrays_of_another_framework_are_waited_for():
    """CuPy fills x on a stream of its own, behind work that takes some milliseconds; the product starts in time."""
    cupy = pytest.importorskip("cupy")
    m, n, k = 24, 1536, 1024
    w = w4gemm.quantize(torch.randn(n, k, device="cuda")).repack()
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    out, gemm = cupy.zeros((m, n), cupy.float16), MixedGemm("int4_g128", torch.float16)
    expected = w4gemm.linear(x, w)
    filled, long = cupy.full((m, k), 7, cupy.float16), cupy.ones((8192, 8192), cupy.float32)
    gemm.prepare(m, n, k)
    torch.cuda.synchronize()
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        for _ in range(3):
            long @ long
        filled[...] = cupy.from_dlpack(x)
        gemm.run(filled, w.tensors, out, stream=torch.cuda.Stream())
    torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(out), expected)


def test_a_stream_of_another_gpu(monkeypatch):
    class Stream:
        device = torch.device("cuda:1")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    with (
        pytest.raises(ValueError, match="stream: wanted one of cuda:0, where the tensors are, got one of cuda:1"),
        runner._launching_on(Stream(), torch.device("cuda:0")),
    ):
        pass


def test_a_workspace_that_is_no_buffer():
    """On the CPU run ignores it."""
    gemm = MixedGemm("int4_g32_fp16", torch.float32, "cpu")
    plan = choice.plan_for(gemm._key(gemm._weight(N, K), M))
    with pytest.raises(TypeError, match="workspace: wanted a buffer on cpu or None, got int 4096"):
        gemm._workspace(4096, plan)


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(weight, changes, message):
    arguments = {"a": torch.zeros(M, K), "b": weight.tensors, "out": torch.zeros(M, N), "n": N} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        MixedGemm("int4_g32_fp16", torch.float32, "cpu").run(**arguments)


@pytest.mark.parametrize(
    ("epilogue", "error", "message"),
    [
        (Epilogue("swish"), ValueError, "activation: wanted one of relu, .*, got 'swish'"),
        (Epilogue(alpha="both"), ValueError, "alpha: wanted 'host', 'device' or None, got 'both'"),
        (Epilogue(bias=torch.zeros(3)), TypeError, r"bias: wanted a bool, got Tensor tensor\(\[0., 0., 0.\]\)"),
        (Epilogue(residual=1), TypeError, "residual: wanted a bool, got int 1"),
        (Epilogue(token_scale="yes"), TypeError, "token_scale: wanted a bool, got str 'yes'"),
        (Epilogue(out_dtype=torch.int8), TypeError, "out_dtype: wanted torch.float32, .*, got torch.int8"),
    ],
)
def test_an_epilogue_that_there_is_not(epilogue, error, message):
    with pytest.raises(error, match=message):
        MixedGemm("int4_g32_fp16", torch.float32, "cpu", epilogue=epilogue)


def test_batch_invariant_is_no_word():
    with pytest.raises(TypeError, match="batch_invariant: wanted a bool, got str 'off'"):
        MixedGemm("int4_g32_fp16", torch.float32, "cpu", batch_invariant="off")


def test_a_dtype_that_no_kernel_takes():
    with pytest.raises(TypeError, match=r"dtype: wanted torch.float16 or .*, got torch.int8"):
        MixedGemm("int4_g32_fp16", torch.int8, "cpu")


@pytest.mark.gpu
def test_on_the_gpu_without_allocating_or_synchronizing():
    m, n, k = 24, 1536, 1024
    w = w4gemm.quantize(torch.randn(n, k, device="cuda")).repack()
    epilogue = Epilogue("gelu", "device", bias=True, residual=True)
    gemm = MixedGemm("int4_g128", torch.bfloat16, epilogue=epilogue)
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    bias, residual = (torch.randn(*s, dtype=torch.bfloat16, device="cuda") for s in ((n,), (m, n)))
    alpha, out = torch.full((1,), 0.5, device="cuda"), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    fused = {"alpha": alpha, "bias": bias, "residual": residual}
    configs = gemm.configs(m, n, k)
    assert {bool(gemm.workspace_bytes(m, n, k, c)) for c in configs if "_stream" in c} == {True}
    for config in [c for c in configs if gemm.workspace_bytes(m, n, k, c) == 0][:3]:
        gemm.prepare(m, n, k, config)
        expected = w4gemm.linear(x, w, bias, alpha=alpha, activation="gelu", residual=residual, config=config)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            gemm.run(x, w.tensors, out.zero_(), config=config, **fused)
            gemm.run(x, w.tensors, out, config=config, stream=stream.cuda_stream, **fused)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm.run(x, w.tensors, out, config=config, **fused)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
