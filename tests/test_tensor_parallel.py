"""Two processes (gloo, CPU) with half of each quantized layer compute what one process computes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from two_processes import PROCESSES, in_two_processes
from w4gemm import QuantizedWeight, W4Linear, quantize
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.tensor_parallel import W4ColwiseParallel, W4RowwiseParallel

Folders = dict[Path, torch.Tensor]
"""Logits by folder."""
IDS = torch.arange(1, 8)[None]
FORMAT = "int4_g16"
"""Dense layers are quantized to it; its groups divide the halves of every k, which each process rounds by itself."""


def skip_of(folder: Path) -> tuple[str, ...]:
    return () if folder.name == "tied" else ("lm_head",)


def block() -> torch.nn.Module:
    """k of down is 96 in groups of 64, so that its halves divide a group."""
    torch.manual_seed(0)
    up = W4Linear.from_weight(quantize(torch.randn(96, 64), "int4_g32_zint"), torch.randn(96))
    down = W4Linear.from_weight(quantize(torch.randn(64, 96), "int4_g64"), torch.randn(64))
    down.pre_quant_scale = torch.rand(96) + 0.5
    return torch.nn.ModuleDict({"up": up, "down": down})


def results(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The hidden features of this process, y, and the gradient of x."""
    x = x.clone().requires_grad_()
    hidden = block["up"](x)
    y = block["down"](torch.relu(hidden))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return hidden.detach(), y.detach(), gradient


def styles(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    hidden, y, gradient = results(block(), x)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    halves = parallelize_module(block(), mesh, {"up": W4ColwiseParallel(), "down": W4RowwiseParallel()})
    assert (halves["up"].weight.n, halves["down"].weight.k, halves["down"].format.group_size) == (48, 48, 16)
    assert (halves["up"].out_features, halves["down"].in_features) == (96, 96)
    half_hidden, half_y, half_gradient = results(halves, x)
    assert torch.equal(half_hidden, hidden[:, 48 * rank : 48 * rank + 48])
    assert torch.equal(halves["up"](x=x), half_hidden)  # once IndexError
    torch.testing.assert_close(half_y, y, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(half_gradient, gradient, rtol=1e-4, atol=1e-2)
    with pytest.raises(ValueError, match="activation: wanted None in a rowwise layer"):
        other = block()
        other["down"].activation = "relu"
        parallelize_module(other, mesh, {"down": W4RowwiseParallel()})
    with pytest.raises(TypeError, match="module: wanted a W4Linear"):
        parallelize_module(torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)}), mesh, {"a": W4ColwiseParallel()})


def both(rank: int, folders: Folders, mixtures: Folders) -> None:
    """Checks of transformers, in one pair of processes, because to import it takes longer than they do."""
    dense_layers(folders)
    experts(mixtures)


def dense_layers(folders: Folders) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from w4gemm.integrations.transformers import W4GemmConfig

    for folder, logits in folders.items():
        config, split = W4GemmConfig(FORMAT, skip=skip_of(folder)), DistributedConfig(tp_size=PROCESSES)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, distributed_config=split
        )
        layers = [layer for layer in model.modules() if isinstance(layer, W4Linear)]
        assert layers and all(
            layer.weight.n * layer.weight.k * 2 == layer.in_features * layer.out_features for layer in layers
        )
        with torch.inference_mode():
            torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(folder / "saved")
        with pytest.raises(ValueError, match="q_proj: wanted a layer without a forward set on it, .* in one process"):
            model.dequantize()  # each process would compute with its part, and none add them up
        if folder.name == "dense":
            with pytest.raises(ValueError, match="lm_head: 259 x 64 does not split into equal parts for 2 processes"):
                AutoModelForCausalLM.from_pretrained(
                    folder, quantization_config=W4GemmConfig(FORMAT, skip=()), distributed_config=split
                )


def experts(folders: Folders) -> None:
    """Every mixture once with some features of each expert on a process, and once with some experts."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from w4gemm import W4Experts
    from w4gemm.integrations.transformers import W4GemmConfig

    by_experts = {"tp_size": PROCESSES, "ep_size": PROCESSES}
    if "ep_size" not in inspect.signature(DistributedConfig).parameters:  # transformers 5.17
        by_experts = {"tp_size": PROCESSES, "enable_expert_parallel": True}
    for folder, logits in folders.items():
        whole = open_checkpoint(folder)
        product = next(name for name in whole.modules if name.endswith("gate_up_proj"))
        for settings in ({"tp_size": PROCESSES}, by_experts):
            options: dict[str, Any] = {"quantization_config": W4GemmConfig(), "dtype": torch.float32}
            split = DistributedConfig(**settings)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, **options)
            gate_up = next(m for m in model.modules() if isinstance(m, W4Experts)).gate_up.weight
            if settings is by_experts:
                assert gate_up.experts == whole.modules[product].experts // PROCESSES
            elif "gpt_oss" not in folder.name:  # whose plan leaves experts whole
                assert gate_up.n == whole.modules[product].n // PROCESSES
            with torch.inference_mode():
                torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-5)
            assert model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 9)
            if settings is by_experts and folder.name == "qwen3_moe":
                moved(model)


def moved(model: Any) -> None:
    """An expert is a row of each of the buffers, which may be sent to another process while the model serves."""
    from two_gpus import move_on, route_on
    from w4gemm import W4Experts

    mixtures = [m for m in model.modules() if isinstance(m, W4Experts)]
    scales = torch.tensor([200.0, 300.0]) * (1 + torch.distributed.get_rank())
    for product in (p for m in mixtures for p in (m.gate_up, m.down)):
        product.expert_scale = scales.clone()  # random experts of a tiny model add next to nothing
    with torch.inference_mode():
        before = model(IDS).logits
        assert sum(map(move_on, mixtures))
        assert not torch.allclose(model(IDS).logits, before, rtol=1e-2, atol=1e-2)
        route_on(model)
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [96, 512])
@pytest.mark.parametrize(
    "format", ["int4_g16_zint", "nvfp4", "mxfp4", "int8_col_fp32", "int3_g32", "q6_k", "mxfp8", "e4m3_g128_b128"]
)
def test_two_layers_in_one_weight(format: str, n: int) -> None:
    """transformers' packed_colwise: a process holds some rows of both. Scales of nvfp4 and mxfp4 are fp8; 128 rows of
    b128 share scales, which 24 rows of a process have for themselves."""
    pytest.importorskip("transformers")
    from w4gemm.checkpoints.numbers import WeightNumbers
    from w4gemm.integrations.transformers.sharding import local_shard

    w = quantize(torch.randn(n, 64), format)
    for rank in range(PROCESSES):
        mesh = SimpleNamespace(ndim=1, get_group=lambda dim, rank=rank: SimpleNamespace(rank=lambda: rank))
        model: Any = SimpleNamespace(tp_size=PROCESSES, tp_plan={"up.*": "packed_colwise"}, _device_mesh=mesh)
        got = local_shard(model, "up.3", WeightNumbers(w)).weight()
        assert torch.equal(got.dequantize(), w.dequantize().view(2, PROCESSES, -1, 64)[:, rank].flatten(0, 1))
        assert got.format == (w.format if "b128" not in format or n == 512 else replace(w.format, scale="fp32"))


@pytest.mark.parametrize("format", ["int4_g16", "q6_k", "int8_g32", "mxfp8"])
@pytest.mark.parametrize("of_experts", [False, True])
def test_parts_of_experts_add_up_to_the_whole(of_experts: bool, format: str) -> None:
    """Also their biases, each once, and the factors of x."""
    pytest.importorskip("transformers")
    from w4gemm.checkpoints.numbers import WeightNumbers
    from w4gemm.integrations.transformers.sharding import Local, Split

    w = QuantizedWeight.stack([quantize(torch.randn(32, 64), format) for _ in range(4)], layout="canonical")
    bias, scale, x = torch.randn(4, 32), torch.rand(64) + 0.5, torch.randn(64)

    def products(local: Local, x: torch.Tensor) -> torch.Tensor:
        assert local.bias is not None and local.pre_quant_scale is not None
        return local.weight.dequantize() @ (x * local.pre_quant_scale) + local.bias

    expected = products(Local(w, bias, scale), x)
    splits = [Split(i, PROCESSES, of_experts) for i in range(PROCESSES)]
    parts = [
        Local(split.numbers(WeightNumbers(w), True).packed(), split.bias(bias, True), split.factors(scale, True))
        for split in splits
    ]
    if of_experts:
        got = torch.cat([products(part, x) for part in parts])
    else:
        got = sum(products(part, some) for part, some in zip(parts, x.chunk(PROCESSES), strict=True))
    torch.testing.assert_close(got, expected)


def test_styles_of_torch() -> None:
    in_two_processes(styles)


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    import test_awq
    import test_compressed_tensors
    import test_gptq
    import test_mixtures
    import test_modelopt
    from quantized_model import write_model
    from tiny_model import write_dense
    from w4gemm.integrations.transformers import W4GemmConfig

    mixtures = [tmp_path / name for name in ("qwen3_moe", "mixtral", "gpt_oss", "mixtral with factors of x")]
    test_mixtures.quantized(mixtures[0], "qwen3_moe-gptq")
    test_mixtures.quantized(mixtures[1], "mixtral-awq")
    test_mixtures.write_gpt_oss(mixtures[2])
    scaled = test_modelopt.int4(("w1", "w2", "w3", "o_proj"))
    write_model(mixtures[3], test_modelopt.INT4, scaled, ("lm_head", "gate"), "mixtral")
    expected_of_mixtures = {folder: test_mixtures.logits_of(folder, IDS) for folder in mixtures}
    folders = [tmp_path / name for name in ("gptq", "awq", "compressed-tensors", "dense", "fp8 and nvfp4", "tied")]
    write_model(folders[0], test_gptq.CONFIG | {"sym": False}, test_gptq.writer(-1, zeros=(1, 15)))
    write_model(folders[1], test_awq.CONFIG, test_awq.writer(zeros=(0, 15)))
    write_model(folders[2], test_compressed_tensors.config(), test_compressed_tensors.writer())
    write_dense(folders[3], "qwen2")
    test_modelopt.write_mix(folders[4])
    sizes = {"vocab_size": 260, "tie_word_embeddings": True}
    tied = AutoConfig.from_pretrained(write_dense(folders[5], "llama"), **sizes)
    AutoModelForCausalLM.from_config(tied).save_pretrained(folders[5])
    expected = {}
    for folder in folders:
        config = W4GemmConfig(FORMAT, skip=skip_of(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        with torch.inference_mode():
            expected[folder] = model(IDS).logits
    in_two_processes(both, expected, expected_of_mixtures)


def saved_by_all(rank: int, expected: dict[Path, torch.Tensor]) -> None:
    """Models whose parameters FSDP2 has sharded are saved whole, in compressed-tensors and in our own format."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from w4gemm.integrations.transformers import W4GemmConfig

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for folder, logits in expected.items():
        config = W4GemmConfig(FORMAT)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
        model.save_pretrained(folder / "saved", is_main_process=rank == 0)
        torch.distributed.barrier()
        again = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
        with torch.inference_mode():
            torch.testing.assert_close(again(IDS).logits, logits)


def test_a_model_under_fsdp2_is_saved_whole(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tiny_model import write_dense
    from w4gemm.integrations.transformers import W4GemmConfig

    expected = {}
    for architecture in ("qwen2", "qwen3_moe"):
        folder = write_dense(tmp_path / architecture, architecture)
        config = W4GemmConfig(FORMAT)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        with torch.inference_mode():
            expected[folder] = model(IDS).logits
    in_two_processes(saved_by_all, expected)
