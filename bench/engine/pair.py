"""vLLM with w4gemm and without, in one process: ``python -m bench.engine.pair --model llama-3-8b=ct-e4m3 --layers 2``.

A checkpoint of random numbers is served twice or more often. The engines' answers to the same prompts are compared, and
each layer's product with the checkpoint's numbers. Then the layers of all, as vLLM calls them, are timed by turns in
CUDA graphs, without attention, norms and the host; with ``--decode``, whole engines too. ``--updates`` first sends
dense weights to the running engine.

Needs vLLM and a GPU. Rows go to bench/results/engine_pair.jsonl, with ``phase`` "start", "updates", "answers"; "linear"
or "experts", whose ``us`` is the time of a decoder layer's products for ``batch`` tokens, the median of three rounds;
"decode" and "prefill" of whole engines. ``_least`` and ``_most`` are the extremes of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.engine import inside, turns
from bench.engine.apart import Started, rows_apart
from bench.engine.checkpoint import RANK, dense_folder, served, write_adapter, write_once
from bench.engine.gguf import FILE
from bench.engine.implementations import DEFAULT, OURS, OURS_FP8, Implementation, known_as
from bench.engine.launch import ROOT, plugin_metadata, turn, work_folder
from bench.engine.models import Model
from bench.engine.options import add_models, pairs_of
from bench.engine.packing import Packing
from bench.engine.rows import equal_prefix, spread
from bench.engine.worker import inspect_here, kernels_of, skip_router_warmup
from bench.options import add_out, counts, typed
from bench.rows import Row

import w4gemm
from w4gemm.console.options import positive
from w4gemm.console.progress import say
from w4gemm.tuning import record

RESULTS = ROOT / "bench/results/engine_pair.jsonl"
DENSE = "dense"
"""Stands for an engine that serves the checkpoint's numbers in bf16."""
WITHOUT_LORA = "w4gemm-without-lora"
"""Stands for an engine with w4gemm that takes no adapters, beside others that do."""
_PROMPTS, _TOKENS_IN, _TOKENS_OUT = 8, 64, 32
_CACHE_BYTES = 1 << 26
"""Of keys and values, for a decoder layer and 64 requests."""
RowsOf = Callable[[Model, Path, argparse.Namespace], Iterator[Row]]
"""What serves the checkpoint of a folder, and generates the rows of what was seen."""


class Answers(NamedTuple):
    """Greedy tokens of each prompt, their log probabilities and, if they were asked for, those of the prompt's."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompts: list[list[float]]


class Engine:
    """vLLM in this process.

    Args:
        kernels: a name of an :class:`Implementation`, or "dense" for none.
        feature: further arguments of ``vllm.LLM``.
    """

    def __init__(
        self, model: Model, folder: Path, kernels: str, args: argparse.Namespace, feature: Row | None = None
    ) -> None:
        from vllm import LLM
        from vllm.v1.worker import workspace

        skip_router_warmup()
        inspect_here()
        self.kernels = kernels
        ours = kernels in (OURS, OURS_FP8, WITHOUT_LORA)
        x = "fp8" if args.fp8 or kernels == OURS_FP8 else "auto"
        os.environ |= {"W4GEMM_VLLM": "on" if ours else "off", "W4GEMM_MXFP4": x, "W4GEMM_NVFP4": x}
        own = {} if ours or kernels == DENSE else Implementation.parse(kernels).engine_arguments(model)
        if (folder / FILE).exists():
            own = {**own, "hf_config_path": str(folder)}
        most = max((64, *args.decode))
        graphs: Row = {"cudagraph_capture_sizes": [2**i for i in range(most.bit_length())], "mode": args.compile}
        if not args.compile or kernels == DENSE:  # mode 0 alone would drop the CUDA graphs
            graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        longest = max(512, *args.tokens, *(tokens + 1 for tokens in args.prefill))
        lora: Row = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": args.lora}
        begun = time.perf_counter()
        self.llm = LLM(
            model=str(dense_folder(folder) if kernels == DENSE else served(folder)),
            dtype="bfloat16",
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=most,
            kv_cache_memory_bytes=_CACHE_BYTES * model.layers * most // 64,
            gpu_memory_utilization=0.02,  # other engines may share the GPU
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            seed=0,
            compilation_config=graphs,
            **own,
            **(lora if args.lora and kernels != WITHOUT_LORA else {}),
            **args.engine,
            **(feature or {}),
        )
        self.seconds = time.perf_counter() - begun
        self.workspace = workspace._manager
        self.look()

    def look(self) -> None:
        """See what the layers run."""
        self.model: Any = self.llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
        classes = {cls for classes in kernels_of(self.model).values() for cls in classes}
        # no engine on w4gemm takes the fp8 layers of ModelOpt's mixed checkpoints and of DeepSeek-V4, whose x is fp8
        # too; Humming's and Marlin's kernels of these names multiply fp8 weights by x in 16 bits
        fp8 = re.compile("(?<!Humming)(?<!Marlin)FP8ScaledMM|Fp8BlockScaled|Fp8LinearMethod")
        names = {known_as(cls) for cls in classes if not fp8.search(cls)}
        self.name = "+".join(sorted(names)) or DENSE
        if self.name == OURS or self.kernels == WITHOUT_LORA:
            self.name = self.kernels

    def generate(self, requests: list[Row], params: Any, adapters: list[Any] | None = None) -> list[Any]:
        """Return vLLM's outputs. Each engine has a workspace of its own, because its CUDA graphs hold the memory of it,
        which a larger step of another engine would give back."""
        from vllm.v1.worker import workspace

        workspace._manager = self.workspace
        return self.llm.generate(requests, params, use_tqdm=False, lora_request=adapters)

    def generate_beside(self, adapters: Sequence[Any], requests: list[Row], params: Any) -> list[Any]:
        """Return vLLM's outputs. The adapters and then none take turns among requests."""
        turn_of = [*adapters, None]
        own = [turn_of[i % len(turn_of)] for i in range(len(requests))]
        return self.generate(requests, params, own if adapters and self.kernels != WITHOUT_LORA else None)

    def answer(self, prompts: list[list[int]], adapters: Sequence[Any] = (), whole: bool = True) -> Answers:
        """Return greedy answers, as :meth:`generate_beside`. whole: with the prompts' log probabilities."""
        from vllm import SamplingParams

        asked: Row = {"temperature": 0.0, "max_tokens": _TOKENS_OUT, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(**asked, logprobs=1, prompt_logprobs=1 if whole else None)
        done = self.generate_beside(adapters, [{"prompt_token_ids": prompt} for prompt in prompts], params)
        return answers_of(prompts, done, whole)

    def answer_by_adapter(self, prompts: list[list[int]], adapters: Sequence[Any]) -> Answers:
        """Return the answers of :meth:`answer`, each from a batch in which all requests have its adapter."""
        kinds: list[list[Any]] = [[adapter] * len(prompts) for adapter in adapters]
        batches = [self.answer(prompts, kind, whole=False) for kind in [*kinds, []]]
        own = [batches[i % len(batches)] for i in range(len(prompts))]
        return Answers([b.tokens[i] for i, b in enumerate(own)], [b.logprobs[i] for i, b in enumerate(own)], [])


def answers_of(prompts: list[list[int]], done: list[Any], whole: bool) -> Answers:
    """Return what vLLM's outputs say."""
    answers = Answers([], [], [])
    for prompt, request in zip(prompts, done, strict=True):
        out: Any = request.outputs[0]
        answers.tokens.append(list(out.token_ids))
        answers.logprobs.append([at[t].logprob for t, at in zip(out.token_ids, out.logprobs, strict=True)])
        if whole:
            behind_first: Any = zip(prompt[1:], request.prompt_logprobs[1:], strict=True)
            answers.prompts.append([at[t].logprob for t, at in behind_first])
    return answers


def adapters_for(model: Model, folder: Path, count: int) -> list[Any]:
    """Write LoRA adapters of random numbers for all quantized matrices, and return vLLM's requests for them."""
    from vllm.lora.request import LoRARequest

    adapters = []
    for number in range(1, count + 1):
        own = folder.with_name(f"{folder.name}-{number}")
        write_adapter(model.name, inside.quantized(model), own, number)
        adapters.append(LoRARequest(f"adapter{number}", number, str(own)))
    return adapters


def compared(ours: Answers, others: Answers) -> Row:
    """Return how far two engines' answers agree. ``logprobs``: mean difference of the log probabilities of greedy
    tokens, up to the first token that differs; ``prompt_logprobs``: of the prompts' tokens."""
    prefixes = [equal_prefix(a, b) for a, b in zip(ours.tokens, others.tokens, strict=True)]
    pairs = zip(ours.logprobs, others.logprobs, prefixes, strict=True)
    greedy = [abs(x - y) for a, b, end in pairs for x, y in zip(a[:end], b[:end], strict=True)]
    prompt = [abs(x - y) for a, b in zip(ours.prompts, others.prompts, strict=True) for x, y in zip(a, b, strict=True)]
    numbers = {"logprobs": statistics.mean(greedy or [0.0])}
    if prompt:
        numbers |= {"prompt_logprobs": statistics.mean(prompt), "prompt_logprobs_most": max(prompt)}
        numbers |= {"prompt_logprobs_spread": statistics.pstdev([x for a in others.prompts for x in a])}
    rounded = {name: round(number, 5) for name, number in numbers.items()}
    return {"equal_prefix": statistics.mean(prefixes), "equal_first": sum(map(bool, prefixes)), **rounded}


def updated(engine: Engine, model: Model, folder: Path, prompts: list[list[int]], count: int) -> Row:
    """Return what ``count`` updates with dense weights took, by ``load_weights`` and ``reload_weights`` by turns, each
    followed by answers, and whether bits, addresses and answers are as they must be, also with the checkpoint's weights
    at the end. The first update compiles; the first one of either way does not count. ``grown_bytes``: of the GPU's
    memory, from the first update to the most."""

    def addresses() -> list[int]:
        return [p.data_ptr() for p in engine.model.parameters() if p.numel()]

    before, places, matrices = engine.answer(prompts), addresses(), inside.quantized(model)
    rows, change, allocated = [], True, []
    for i in range(count):
        by_reload, last = i % 2 == 1, i == count - 1
        rows.append(inside.update(engine.llm, engine.model, matrices, by_reload, i, None if last else 2))
        change &= engine.answer(prompts).tokens != before.tokens
        allocated.append(inside.allocated())
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    times = [row["seconds"] for row in rows]
    row = {"phase": "updates", "updates": count, "tensors": len(matrices), "first_seconds": round(times[0], 4)}
    row |= spread("seconds", times[2::2] or times)
    row |= spread("reload_seconds", times[3::2]) if times[3:] else {}
    row |= {"grown_bytes": max(allocated) - allocated[0]}
    row |= {"bits_equal": all(row["equal"] for row in rows), "same_addresses": places == addresses()}
    return row | {"answers_change": change, "answers_back": engine.answer(prompts) == before}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m bench.engine.pair", description=(__doc__ or "").partition("\n\n")[0])
    add_models(p)
    p.add_argument("--against", nargs="*", default=[DEFAULT, DENSE], metavar="IMPL", help="the first that start of "
                   f"implementations of bench.engine, {OURS_FP8}, and dense (default: %(default)s)")  # fmt: skip
    p.add_argument("--others", type=positive, default=1, metavar="N", help="how many of them (%(default)s)")
    apart = "each engine in a process of its own, N at a time (1)"
    p.add_argument("--apart", type=positive, nargs="?", default=0, const=1, metavar="N", help=apart)
    p.add_argument("--vocabulary", type=int, default=4096, metavar="N", help="words of each model (%(default)s)")
    p.add_argument("--tokens", type=typed(counts), default="1,8,64,2048", help="of timed products (%(default)s)")
    p.add_argument("--parts", nargs="+", choices=inside.PARTS, default=inside.PARTS, help="kinds of layers that are "
                   "timed (default: both)")  # fmt: skip
    p.add_argument("--unchecked", action="store_true", help="do not compute layers' errors")
    p.add_argument("--decode", type=typed(counts), default=(), metavar="N", help="requests at once of whole engines' "
                   "timed decode steps (default: none)")  # fmt: skip
    p.add_argument("--prefill", type=typed(counts), default=(), metavar="N", help="tokens of prompts, each alone, that "
                   "whole engines read (default: none)")  # fmt: skip
    p.add_argument("--rounds", type=positive, default=4, metavar="N", help="times of whole engines (%(default)s)")
    p.add_argument(
        "--each", type=positive, default=1, metavar="N", help="times in a row in a round, whose median counts"
    )
    p.add_argument("--request", type=typed(counts), default="128,128", metavar="IN,OUT", help="tokens of a decoding "
                   "request and of its answer (%(default)s)")  # fmt: skip
    p.add_argument("--fp8", action="store_true", help="w4gemm multiplies 4-bit floats by fp8")
    p.add_argument("--compile", type=int, nargs="?", default=0, const=3, choices=(1, 2, 3), metavar="MODE",
                   help="engines of 4-bit layers compile; 3, if no mode is named, is vLLM's default")  # fmt: skip
    p.add_argument("--updates", type=int, default=0, metavar="N", help="updates of all weights")
    p.add_argument("--lora", type=int, nargs="?", default=0, const=1, metavar="N", help="N LoRA adapters (1) and none "
                   f"take turns among requests; no products are timed; {WITHOUT_LORA} may be in --against")  # fmt: skip
    p.add_argument("--feature", default="", metavar="JSON", help="arguments of vllm.LLM for the engine with w4gemm, "
                   "in which FOLDER is the checkpoint; nothing is timed, and its layers may be vLLM's")  # fmt: skip
    p.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="arguments of every engine's vllm.LLM")
    p.add_argument("--turn", type=Path, metavar="FILE", help="locked while the GPU is timed")
    p.add_argument("--work", type=Path, metavar="DIR", help="models, kept (default: a temporary folder)")
    add_out(p, RESULTS)
    return p


def prompts_of(model: Model) -> list[list[int]]:
    """Return the prompts that engines' answers are compared by."""
    rng = random.Random(1)
    return [rng.choices(range(4, model.vocabulary), k=_TOKENS_IN) for _ in range(_PROMPTS)]


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    mode = "layer" + "+fp8" * args.fp8 + ("+lora" + f"{args.lora}" * (args.lora > 1)) * bool(args.lora)
    mode += f"+compile{args.compile}" if args.compile else ""
    mode += {0: "", 1: "+apart"}.get(args.apart, f"+apart{args.apart}")
    mode += "+invariant" * (os.environ.get("VLLM_BATCH_INVARIANT") == "1")
    mode += "".join(f"+{name}" for name in json.loads(args.feature or "{}"))
    serve(args, {"gpus": 1, "mode": mode}, rows_of_processes if args.apart else rows_of)


def serve(args: argparse.Namespace, facts: Row, rows_of: RowsOf) -> None:
    """Write the one checkpoint that ``--model`` names, and append the rows of engines that serve it to a file.

    Args:
        facts: that each row has, beside those of the machine and the checkpoint.
    """
    packings = [Packing.parse(text) for text in args.format]
    (model, packing), *more = (pair for text in args.model for pair in pairs_of(text, packings, args))
    if more:
        parser().error(f"--model, --format: wanted one of each, got {args.model} and {args.format}")
    model = replace(model, config={**model.config, "vocab_size": args.vocabulary})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    machine = record.facts()
    facts = {"kind": "engine_pair", "run": record.run_name(machine), "engine": "vllm", "model": model.name} | facts
    facts |= {"format": str(packing), "dtype": "bfloat16"}
    with work_folder(args.work) as work:
        if plugin := plugin_metadata(work / "plugin"):  # on the path of workers, too
            sys.path.insert(0, str(plugin))
            os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        folder = work / "models" / f"{model.name}-{packing}"
        write_once(model, packing, folder)
        for row in rows_of(model, folder, args):
            say(f"{folder.name}: {json.dumps(row)}")
            record.append(args.out, facts | row | machine)


def rows_of(model: Model, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Serve a checkpoint with w4gemm and without; generate the rows of what was seen.

    Raises:
        ValueError: if w4gemm did not take over the layers.
    """
    import vllm

    adapters = adapters_for(model, folder.with_name(f"{folder.name}-lora"), args.lora)
    prompts = prompts_of(model)
    feature = json.loads(args.feature.replace("FOLDER", str(folder)) or "{}")
    ours = Engine(model, folder, OURS, args, feature)
    if ours.name != OURS and not feature:
        raise ValueError(f"asked for {OURS}, but the layers got {ours.name}")
    version = {"engine_version": vllm.__version__, "impl_version": w4gemm.__version__}
    own, only_answers = {"impl": ours.name, **version, "chosen": False}, bool(args.lora or feature)
    answers = ours.answer(prompts, adapters, not only_answers)
    errors = {} if only_answers or args.unchecked else inside.errors(ours.model, served(folder))
    yield own | {"phase": "start", "seconds": round(ours.seconds, 1), **errors}
    if adapters:
        row = compared(answers, ours.answer_by_adapter(prompts, adapters))
        yield own | {"phase": "answers", "same_tokens_as": "batches of one adapter"} | row
    if args.updates:
        with turn(args.turn):
            row = updated(ours, model, folder, prompts, args.updates)
        yield own | row
    torch.cuda.empty_cache()
    engines = [ours]
    for kernels in args.against:
        if len(engines) > args.others:
            break
        try:
            engines.append(Engine(model, folder, kernels, args))
            row = compared(answers, engines[-1].answer(prompts, adapters, not only_answers))
            row |= {"phase": "answers", "same_tokens_as": engines[-1].name, "tokens_out": _TOKENS_OUT}
        except Exception as e:  # whatever vLLM's own kernels lack here
            row = {"phase": "failed", "reason": f"{kernels}: {type(e).__name__}: {e}"[:400]}
        gc.collect()  # an engine that failed ends vLLM's process groups when it goes
        yield own | row
    if not feature and (args.decode or not args.lora):
        warm_up(engines, args)
        yield from (own | row for row in measured(engines, model, adapters, args))


def warm_up(engines: list[Engine], args: argparse.Namespace) -> None:
    """Call the layers that :func:`measured` times: Humming compiles kernels for each number of tokens. Engines in a
    process each do that at the same time."""
    if not args.lora:
        models = {engine.name: engine.model for engine in engines}
        inside.warm_up(models, args.tokens, engines[0].llm.llm_engine.vllm_config, args.parts)


def measured(engines: list[Engine], model: Model, adapters: list[Any], args: argparse.Namespace) -> Iterator[Row]:
    """Time whole engines and then their layers by turns; generate the rows."""
    chosen = {engine.name for engine in engines if engine.kernels == DEFAULT}
    generators = {engine.name: functools.partial(engine.generate_beside, adapters) for engine in engines}
    how_often = turns.Repeats(args.rounds, args.each)
    whole = turns.timed(generators, model.vocabulary, args.decode, args.prefill, how_often, args.request)
    while row := _next(whole, args.turn):
        yield row | {"chosen": row["impl"] in chosen}
    if args.lora:
        return
    models, config = {engine.name: engine.model for engine in engines}, engines[0].llm.llm_engine.vllm_config
    layers = inside.timed(models, args.tokens, config, args.parts)
    while row := _next(layers, args.turn):
        yield row | {"chosen": row["impl"] in chosen}


def _next(rows: Iterator[Row], file: Path | None) -> Row | None:
    """Return the next of rows that are timed when they are asked for, while other programs time nothing; None at the
    end."""
    with turn(file):
        return next(rows, None)


def rows_of_processes(model: Model, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Serve a checkpoint with w4gemm and with each of ``--against``, each in a process of its own; generate the rows of
    what was seen."""
    names, answers = (OURS, *args.against), dict[str, Answers]()  # of engines by the names in their rows
    for _, row, own in rows_apart(functools.partial(started_alone, model, folder, args), names, args.apart):
        yield row
        if own:
            agreement = {"phase": "answers", "same_tokens_as": row["impl"], "tokens_out": _TOKENS_OUT}
            for earlier, theirs in answers.items():
                yield {"impl": earlier} | agreement | compared(theirs, own)
            answers[row["impl"]] = own


def started_alone(model: Model, folder: Path, args: argparse.Namespace, kernels: str) -> Started:
    """Start the only engine of this process."""
    import vllm

    engine = Engine(model, folder, kernels, args)
    own = {"impl": engine.name, "engine_version": vllm.__version__, "impl_version": w4gemm.__version__}
    own |= {"chosen": kernels == DEFAULT}
    answers = engine.answer(prompts_of(model))
    with inside.forward_context(engine.llm.llm_engine.vllm_config, 2):
        errors = {} if args.unchecked else inside.errors(engine.model, served(folder))
    row = own | {"phase": "start", "seconds": round(engine.seconds, 1), **errors}
    warm_up([engine], args)
    return Started(row, answers, (own | timed for timed in measured([engine], model, [], args)))


if __name__ == "__main__":
    main()
