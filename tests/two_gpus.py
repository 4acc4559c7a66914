"""Tensor parallelism on two GPUs beside one: ``torchrun --nproc-per-node 2 tests/two_gpus.py``.

Prints one line a check and leaves with status 1 if one failed: transformers' tp_plan (a packed folder, k of down_proj
5504 = 43 x 128, so that halves divide a group), experts split by their features and among the GPUs, layers on two GPUs
by device_map, and torch's styles with gradients.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

from w4gemm import W4Experts, W4Linear, quantize
from w4gemm.integrations.tensor_parallel import W4ColwiseParallel, W4RowwiseParallel
from w4gemm.integrations.transformers import W4GemmConfig, load, summarize

RANK = int(os.environ.get("RANK", 0))
FOLDER = Path(tempfile.gettempdir()) / "w4gemm-two-gpus"
HIDDEN, FFN = 2048, 5504
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
)


def from_pretrained(**options: Any) -> torch.nn.Module:
    settings = {"quantization_config": W4GemmConfig(), "dtype": torch.bfloat16} | options
    return AutoModelForCausalLM.from_pretrained(FOLDER / "packed", **settings)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(1, 40, device=f"cuda:{RANK}")[None]).logits.float()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def write_model() -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(FOLDER / "dense")
    options = {"quantization_config": W4GemmConfig("int4_g128"), "dtype": torch.bfloat16, "device_map": "cuda:0"}
    AutoModelForCausalLM.from_pretrained(FOLDER / "dense", **options).save_pretrained(FOLDER / "packed")


def tp_plan() -> str:
    one = from_pretrained(device_map=f"cuda:{RANK}")
    two = from_pretrained(distributed_config=DistributedConfig(tp_size=2))
    down, wrong = two.model.layers[0].mlp.down_proj.weight, error(logits(two), logits(one))
    assert wrong < 0.02, wrong
    assert (str(down.format), down.k) == ("int4_g64", FFN // 2), down
    return f"error {wrong:.5f}, bytes here {summarize(two).nbytes / summarize(one).nbytes:.3f} of all"


def write_mixture() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    config = Qwen3MoeConfig(vocab_size=1024, intermediate_size=1024, num_hidden_layers=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(FOLDER / "dense-mixture")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(FOLDER / "dense-mixture")
    load(FOLDER / "dense-mixture", "cuda:0", torch.bfloat16, format="int4_g128")[0].save_pretrained(FOLDER / "mixture")


def experts() -> str:
    def of(**options: Any) -> torch.nn.Module:
        settings = {"quantization_config": W4GemmConfig(), "dtype": torch.bfloat16} | options
        return AutoModelForCausalLM.from_pretrained(FOLDER / "mixture", **settings)

    one, answers = logits(of(device_map=f"cuda:{RANK}")), []
    by_experts = {"tp_size": 2, "ep_size": 2}
    if "ep_size" not in inspect.signature(DistributedConfig).parameters:  # transformers 5.17
        by_experts = {"tp_size": 2, "enable_expert_parallel": True}
    for name, settings in (("features", {"tp_size": 2}), ("experts", by_experts)):
        two = of(distributed_config=DistributedConfig(**settings))
        held = next(m for m in two.modules() if isinstance(m, W4Experts)).gate_up.weight
        assert (held.experts, held.n) == ((16, 768) if name == "features" else (8, 1536)), held
        wrong = error(logits(two), one)
        assert wrong < 0.02, (name, wrong)
        answers.append(f"{name} {wrong:.5f}")
    return f"errors by {', '.join(answers)}"


def device_map() -> str:
    if RANK:
        return ""
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    two = from_pretrained(device_map=places | {"model.norm": 1, "lm_head": 1})
    assert {layer.weight.device.index for layer in two.modules() if isinstance(layer, W4Linear)} == {0, 1}
    assert torch.equal(logits(two).cpu(), logits(from_pretrained(device_map="cuda:0")).cpu())
    return "a layer on each GPU, equal bits"


def styles() -> str:
    torch.manual_seed(0)
    sizes = {"up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    weights = {name: quantize(torch.randn(size, device="cuda") / 32, "int4_g128") for name, size in sizes.items()}
    block = torch.nn.ModuleDict({name: W4Linear.from_weight(w, dtype=torch.bfloat16) for name, w in weights.items()})
    x = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        given = x.clone().requires_grad_()
        hidden = block["up"](given)
        y = block["down"](torch.relu(hidden))
        return hidden.detach(), y.detach(), torch.autograd.grad(y.float().square().mean(), given)[0]

    hidden, y, gradient = run()
    parallelize_module(block, init_device_mesh("cuda", (2,)), {"up": W4ColwiseParallel(), "down": W4RowwiseParallel()})
    half, y_2, gradient_2 = run()
    columns = slice(FFN // 2 * RANK, FFN // 2 * (RANK + 1))
    wrong = [error(a, b) for a, b in ((half, hidden[:, columns]), (y_2, y), (gradient_2, gradient))]
    assert max(wrong) < 0.02, wrong
    return f"errors of the hidden features, y, x's gradient: {', '.join(f'{e:.5f}' for e in wrong)}"


def main() -> int:
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    if RANK == 0:
        write_model()
        write_mixture()
    dist.barrier()
    checks: tuple[Callable[[], str], ...] = (styles, tp_plan, experts, device_map)
    failed = 0
    for check in checks:
        try:
            answer = check()
        except Exception as e:
            traceback.print_exc()
            answer, failed = f"FAILED: {type(e).__name__}: {e}", failed + 1
        if RANK == 0:
            print(f"{check.__name__}: {answer}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
