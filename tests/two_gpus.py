"""Several GPUs beside one: ``torchrun --nproc-per-node 2 tests/two_gpus.py``, or 4 (NCCL; gloo where there is no GPU).

Held to one GPU's results, and printed as a table: torch's styles with gradients, transformers' tp_plan on a packed
folder (k of down_proj 5504 = 43 x 128, so that halves divide a group) and on a dense one, ``generate`` of both, experts
split by their features and among the GPUs, experts that move to another GPU, and layers on two GPUs by device_map.
Leaves with status 1 if a check failed. ``--json FILE`` appends a row of kind "parallel" for each check.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
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
from w4gemm.integrations.generation import quiet_transformers
from w4gemm.integrations.tensor_parallel import W4ColwiseParallel, W4RowwiseParallel
from w4gemm.integrations.transformers import W4GemmConfig, load, summarize
from w4gemm.tuning import record

RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
KIND = "cuda" if torch.cuda.is_available() else "cpu"
HERE = f"cuda:{RANK}" if KIND == "cuda" else "cpu"
FOLDER = Path(tempfile.gettempdir()) / "w4gemm-two-gpus"
HIDDEN, FFN, EXPERTS, EXPERT_FFN = 2048, 5504, 16, 768
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
)
TOKENS = 32
"""New tokens of an answer."""
BOUND = 0.02
"""Relative norm of a difference that other orders of sums in bf16 may make."""
Facts = dict[str, Any]
"""Measured numbers of a check, by name."""


def from_pretrained(folder: str = "packed", **options: Any) -> Any:
    config = W4GemmConfig(f"int4_g{math.gcd(128, FFN // COUNT)}" if folder == "dense" else None)
    settings = {"quantization_config": config, "dtype": torch.bfloat16} | options
    return AutoModelForCausalLM.from_pretrained(FOLDER / folder, **settings)


def split(**options: Any) -> Any:
    return {"distributed_config": DistributedConfig(**{"tp_size": COUNT, **options})}


def among_gpus() -> Facts:
    """Return the settings for whole experts on each GPU."""
    if "ep_size" in inspect.signature(DistributedConfig).parameters:
        return split(ep_size=COUNT)
    return split(enable_expert_parallel=True)  # transformers 5.17


def logits(model: torch.nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.arange(1, 40, device=HERE)[None] if ids is None else ids
    with torch.inference_mode():
        return model(ids).logits.float()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return round(((actual.float() - expected.float()).norm() / expected.float().norm()).item(), 6)


def answered(model: Any, one: Any) -> Facts:
    """Greedy answers of a split model: how many tokens one GPU would choose behind the same tokens, and by how much the
    others' logits are below its largest at most, beside the deviation of logits."""
    prompts = torch.randint(1, CONFIG.vocab_size, (4, 16), generator=torch.Generator().manual_seed(2)).to(HERE)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    assert ids.shape == (4, 16 + TOKENS), ids.shape
    scores = logits(one, ids)[:, 15:-1]
    below = scores.amax(-1) - scores.gather(-1, ids[:, 16:, None])[..., 0]
    worst = round((below.max() / scores.std()).item(), 5)
    assert worst < 5 * BOUND, worst
    return {"tokens": below.numel(), "same_choice": int((below == 0).sum()), "logit_below_best": worst}


def write_model() -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(FOLDER / "dense")
    options = {"quantization_config": W4GemmConfig("int4_g128"), "dtype": torch.bfloat16, "device_map": HERE}
    AutoModelForCausalLM.from_pretrained(FOLDER / "dense", **options).save_pretrained(FOLDER / "packed")


def write_mixture() -> None:
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": EXPERT_FFN, "num_experts": EXPERTS, "num_experts_per_tok": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 1024}
    config = Qwen3MoeConfig(vocab_size=1024, intermediate_size=1024, num_hidden_layers=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(FOLDER / "dense-mixture")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(FOLDER / "dense-mixture")
    load(FOLDER / "dense-mixture", HERE, torch.bfloat16, format="int4_g128")[0].save_pretrained(FOLDER / "mixture")


def styles() -> Facts:
    """torch's parallelize_module: errors of a colwise layer's part, of y behind a rowwise one, of x's gradient."""
    torch.manual_seed(0)
    sizes = {"up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    weights = {name: quantize(torch.randn(size, device=HERE) / 32, "int4_g128") for name, size in sizes.items()}
    block = torch.nn.ModuleDict({name: W4Linear.from_weight(w, dtype=torch.bfloat16) for name, w in weights.items()})
    x = torch.randn(64, HIDDEN, device=HERE, dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        leaf = x.clone().requires_grad_()
        hidden = block["up"](leaf)
        y = block["down"](torch.relu(hidden))
        return hidden.detach(), y.detach(), torch.autograd.grad(y.float().square().mean(), leaf)[0]

    hidden, y, gradient = run()
    parallelize_module(
        block, init_device_mesh(KIND, (COUNT,)), {"up": W4ColwiseParallel(), "down": W4RowwiseParallel()}
    )
    part, y_2, gradient_2 = run()
    columns = slice(FFN // COUNT * RANK, FFN // COUNT * (RANK + 1))
    errors = {"part": error(part, hidden[:, columns]), "y": error(y_2, y), "gradient": error(gradient_2, gradient)}
    assert max(errors.values()) < BOUND, errors
    return errors


def tp_plan(folder: str = "packed") -> Facts:
    """transformers' tp_plan: the error of logits, the bytes on this GPU beside one GPU's, and answers."""
    one, parts = from_pretrained(folder, device_map=HERE), from_pretrained(folder, **split())
    down, wrong = parts.model.layers[0].mlp.down_proj.weight, error(logits(parts), logits(one))
    assert wrong < BOUND, wrong
    assert (down.format.group_size, down.k) == (math.gcd(128, FFN // COUNT), FFN // COUNT), down
    share = summarize(parts).nbytes / summarize(one).nbytes
    return {"error": wrong, "bytes_share": round(share, 4), **answered(parts, one)}


def tp_plan_dense() -> Facts:
    """The same of a dense folder, of which each process rounds its own part."""
    return tp_plan("dense")


def experts_by_features() -> Facts:
    """A mixture with some features of each expert on each GPU."""
    return mixture(split(), (EXPERTS, 2 * EXPERT_FFN // COUNT))


def experts_among_gpus() -> Facts:
    """A mixture with whole experts on each GPU."""
    return mixture(among_gpus(), (EXPERTS // COUNT, 2 * EXPERT_FFN))


def mixture(options: Facts, expected: tuple[int, int]) -> Facts:
    one, parts = from_pretrained("mixture", device_map=HERE), from_pretrained("mixture", **options)
    held = next(m for m in parts.modules() if isinstance(m, W4Experts)).gate_up.weight
    assert (held.experts, held.n) == expected, held
    wrong = error(logits(parts), logits(one))
    assert wrong < BOUND, wrong
    return {"error": wrong, **answered(parts, one)}


def moved_experts() -> Facts:
    """Every other expert moves to the next GPU, by its rows of the experts' buffers, and the router's rows follow."""
    model = from_pretrained("mixture", **among_gpus())
    before = logits(model)
    rows = sum(move_on(m) for m in model.modules() if isinstance(m, W4Experts))
    without_router = error(logits(model), before)
    route_on(model)
    wrong = error(logits(model), before)
    assert wrong < BOUND < 5 * BOUND < without_router, (wrong, without_router)
    return {"error": wrong, "error_before_the_router_follows": without_router, "rows_moved": rows}


def move_on(experts: W4Experts) -> int:
    """Send every other expert to the next process; return how many rows of tensors that is."""
    rows = 0
    for tensor in experts.buffers():
        own = tensor[::2].contiguous()
        received = torch.empty_like(own)
        rank, count = dist.get_rank(), dist.get_world_size()
        sent = [dist.P2POp(dist.isend, own, (rank + 1) % count), dist.P2POp(dist.irecv, received, (rank - 1) % count)]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        tensor[::2] = received
        rows += len(own)
    return rows


def route_on(model: torch.nn.Module) -> None:
    """Let routers choose experts where :func:`move_on` put them."""
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            weight = module.weight.detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            place, each = torch.arange(len(weight), device=weight.device), len(weight) // dist.get_world_size()
            before = torch.where(place % each % 2 == 0, place - each, place) % len(weight)
            weight.copy_(weight[before])


def device_map() -> Facts:
    """A layer on each of two GPUs: equal bits."""
    if RANK or KIND == "cpu":
        return {}
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    two = from_pretrained(device_map=places | {"model.norm": 1, "lm_head": 1})
    assert {layer.weight.device.index for layer in two.modules() if isinstance(layer, W4Linear)} == {0, 1}
    assert torch.equal(logits(two).cpu(), logits(from_pretrained(device_map="cuda:0")).cpu())
    return {"error": 0.0}


CHECKS: tuple[Callable[[], Facts], ...] = (
    styles,
    tp_plan,
    tp_plan_dense,
    experts_by_features,
    experts_among_gpus,
    moved_experts,
    device_map,
)


def main() -> int:
    parser = argparse.ArgumentParser("two_gpus.py", description=(__doc__ or "").partition(":")[0])
    names = ",".join(check.__name__ for check in CHECKS)
    parser.add_argument("--only", default=names, help="checks (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    args = parser.parse_args()
    checks = [check for check in CHECKS if check.__name__ in args.only.split(",")]
    quiet_transformers()
    backend = "nccl" if KIND == "cuda" else "gloo"
    if KIND == "cuda":
        torch.cuda.set_device(RANK)
    options = {"device_id": torch.device(HERE)} if KIND == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **options)
    if RANK == 0:
        if {tp_plan, tp_plan_dense, device_map} & set(checks):
            write_model()
        if {experts_by_features, experts_among_gpus, moved_experts} & set(checks):
            write_mixture()
    dist.barrier()
    facts, failed = record.facts(), 0
    common = {"kind": "parallel", "run": record.run_name(facts), "gpus": COUNT, "backend": backend}
    for check in checks:
        began = time.perf_counter()
        try:
            errors = check()
        except Exception as e:
            traceback.print_exc()
            errors, failed = {"failed": f"{type(e).__name__}: {e}"[:300]}, failed + 1
        dist.barrier()
        if RANK == 0 and errors:
            took = {"seconds": round(time.perf_counter() - began, 1)}
            print(f"{check.__name__:20} {', '.join(f'{k} {v}' for k, v in (errors | took).items())}", flush=True)
            if args.json is not None:
                record.append(args.json, common | {"check": check.__name__} | errors | took | facts)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
