"""On a GPU that is not the current one: what takes a machine with two GPUs to test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from w4gemm import MixedGemm, WeightFormat, choice, linear
from w4gemm.api.routing import combine, route
from w4gemm.api.step import add_rms_norm, add_rms_norm_quantize, gate_halves, rms_norm
from w4gemm.core.problem import Device, GemmProblem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

HERE, THERE = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _the_first_gpu_stays_current() -> Iterator[None]:
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def drawn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, torch.bfloat16)


def test_a_product() -> None:
    n, k, format = 130, 96, WeightFormat.parse("int4_g32_zint_fp16")
    w, x = random_weight(format, n, k).to(THERE).repack(), drawn(THERE, 5, k)
    problem = GemmProblem(5, n, k, x.dtype, format, w.layout, device=Device.of(x.device))
    stream = next(c for c in choice.configs(problem) if "stream" in c)  # whose launches have flags of their own
    for config in (None, None, stream, stream):
        assert_close(linear(x, w, config=config), x, w)
    with pytest.raises(ValueError, match="x: wanted w's device cuda:1, got cuda:0"):
        linear(x.to(HERE), w)


def routed(device: torch.device) -> torch.Tensor:
    """The weighted sums of rows that went to experts, beside the order of these rows."""
    choices = torch.tensor([[0, 2], [1, 2], [3, 0], [2, 1], [0, 3]], device=device)
    routing = route(choices, 4)
    weights = drawn(device, 5, 2).float()
    sums = combine(drawn(device, 10, 64), routing.row_of_choice, weights)
    return torch.cat([sums.flatten().float(), *(part.flatten().float() for part in routing)])


SMALL_KERNELS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "route and combine": routed,
    "rms_norm": lambda on: rms_norm(drawn(on, 5, 4096), drawn(on, 4096), 1e-5),
    "add_rms_norm": lambda on: add_rms_norm(drawn(on, 5, 4096), drawn(on, 5, 4096), drawn(on, 4096), 1e-5)[0],
    "add_rms_norm_quantize": lambda on: add_rms_norm_quantize(
        drawn(on, 5, 4096), drawn(on, 5, 4096), drawn(on, 4096), 1e-5
    )[1],
    "gate_halves": lambda on: gate_halves(drawn(on, 5, 2048), "silu_mul"),
    "quantize_activations": lambda on: w4gemm.quantize_activations(drawn(on, 5, 4096))[0].float(),
}


@pytest.mark.parametrize("kernel", SMALL_KERNELS)
def test_small_kernels(kernel: str) -> None:
    run = SMALL_KERNELS[kernel]
    actual, expected = run(THERE), run(HERE)
    assert actual.device == THERE and torch.equal(actual.cpu(), expected.cpu())


def test_a_runner_and_streams() -> None:
    n, k = 1536, 1024
    w = w4gemm.quantize(drawn(THERE, n, k)).repack()
    x, out = drawn(THERE, 24, k), torch.empty(24, n, dtype=torch.bfloat16, device=THERE)
    gemm = MixedGemm("int4_g128", torch.bfloat16, THERE)
    expected = linear(x, w)
    stream = torch.cuda.Stream(THERE)
    torch.cuda.synchronize(THERE)
    for handle in (None, stream, stream.cuda_stream):
        gemm.run(x, w.tensors, out.zero_(), stream=handle)
        torch.cuda.synchronize(THERE)
        assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="stream: wanted one of cuda:1, where the tensors are, got one of cuda:0"):
        gemm.run(x, w.tensors, out, stream=torch.cuda.Stream(HERE))


def test_a_model_decodes() -> None:
    pytest.importorskip("transformers")
    from test_decoding import ids_of, tiny
    from w4gemm.integrations.decoder import decode_by_graph
    from w4gemm.integrations.decoder.loop import step_of

    model = tiny("llama", "cuda:1", torch.bfloat16)
    ids = ids_of(model)
    options = {"max_new_tokens": 24, "do_sample": False}
    theirs = model.generate(ids, disable_compile=True, **options)
    decode_by_graph(model)
    ours = model.generate(ids, **options)
    step = step_of(model)
    assert step is not None and step._graph is not None
    assert ours.device == THERE and (ours[:, :13] == theirs[:, :13]).all()
