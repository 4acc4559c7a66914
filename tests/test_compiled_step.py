"""Decoding on a CPU by a list of calls of machine code: the tokens are those of transformers' own loop."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("llvmlite")

from test_decoding import ids_of, tiny
from w4gemm.integrations.decoder import compiled_step, decode_by_graph
from w4gemm.integrations.decoder.compiled_step import CompiledStep
from w4gemm.integrations.decoder.loop import step_of
from w4gemm.integrations.decoder.requirements import log_once, rotated
from w4gemm.integrations.decoder.step import Prompt
from w4gemm.kernels.cpu import compiled, machine
from w4gemm.kernels.cpu.step import AttentionArguments, NormArguments, attention, norm

pytestmark = pytest.mark.skipif(not machine.is_available(), reason=f"needs {machine.NEEDS}")
LANES = pytest.mark.parametrize("lanes", [8, 16])


def run(program: Any, parameters: tuple[Any, ...], arguments: Any) -> None:
    addresses = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    machine.machine_code(program, *parameters)(machine.packing(type(arguments))(*addresses))


@LANES
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm(lanes: int, adds: bool) -> None:
    x, added, weight, out = torch.randn(3, 96), torch.randn(3, 96), torch.randn(96), torch.empty(3, 96)
    total = x + added if adds else x.clone()
    run(norm, (lanes, 96, 1e-5, adds), NormArguments(x, added, weight, out, 3))
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(total, (96,), weight, 1e-5))
    assert torch.equal(x, total)


@LANES
@pytest.mark.parametrize("slot", [0, 6, 30])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_an_attention(lanes: int, slot: int, spread: float) -> None:
    """Scores that lie far apart have shares of 0, and what the cache has behind the slot is not read."""
    kv_heads, group, dim, length = 2, 3, 64, 32
    q, k, v = spread * torch.randn(6, dim), torch.randn(2, dim), torch.randn(2, dim)
    half = torch.randn(dim // 2).repeat(2)
    cos, sin = half.cos(), half.sin()
    keys, values = torch.randn(kv_heads, length, dim), torch.randn(kv_heads, length, dim)
    keys[:, slot:], values[:, slot:] = math.nan, math.nan
    out, scores = torch.empty(6, dim), torch.full((length + 16,), math.nan)
    k_rows = torch.cat((keys[:, :slot], rotated(k, cos, sin)[:, None]), 1)
    v_rows = torch.cat((values[:, :slot], v[:, None]), 1)
    shares = (rotated(q, cos, sin).unflatten(0, (kv_heads, group)) @ k_rows.mT / 8).softmax(-1)
    tensors = q, k, v, cos, sin, keys, values, torch.tensor([slot]), scores, out
    run(attention, (lanes, dim, group, 1 / 8), AttentionArguments(*tensors, kv_heads, length))
    torch.testing.assert_close(out.view(kv_heads, group, dim), shares @ v_rows, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys[:, : slot + 1], k_rows)
    assert torch.equal(values[:, : slot + 1], v_rows)
    assert bool(keys[:, slot + 1 :].isnan().all())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tokens_are_those_of_transformers(architecture: str) -> None:
    """Also where a step is used again, for more tokens, and where the head is dense."""
    model = decode_by_graph(tiny(architecture))
    ids = ids_of(model)[:1]
    for tokens, sampling in ((12, {"do_sample": False}), (40, {"do_sample": True, "temperature": 0.8, "top_k": 20})):
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, **sampling}
        torch.manual_seed(2)
        theirs = model.generate(ids, disable_compile=True, **options)
        torch.manual_seed(2)
        assert torch.equal(model.generate(ids, **options), theirs)
        step = step_of(model)
        assert isinstance(step, CompiledStep) and step.error is not None and step.error < 1e-5
    assert step_of(model) is step


def test_a_model_that_changed_gets_a_new_step() -> None:
    model = decode_by_graph(tiny("llama"))
    ids = ids_of(model)[:1]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(ids, **options)
    first = step_of(model)
    model.model.layers[0].mlp.up_proj = model.model.layers[1].mlp.up_proj
    tokens = model.generate(ids, **options)
    assert step_of(model) is not first
    assert torch.equal(tokens, model.generate(ids, disable_compile=True, **options))
    for layer in model.model.layers:  # numbers that are part of a step's calls
        layer.self_attn.scaling = 3.0
        layer.input_layernorm.variance_epsilon = 50.0
    again = model.generate(ids, **options)
    assert not torch.equal(again, tokens)
    assert torch.equal(again, model.generate(ids, disable_compile=True, **options))
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: torch.zeros(()))
    tokens = model.generate(ids, **options)
    assert step_of(model) is None
    assert torch.equal(tokens, model.generate(ids, disable_compile=True, **options))
    hook.remove()


@pytest.mark.parametrize("architecture", ["mistral", "mixtral", "granite", "ministral3"])
def test_other_models_run_their_own_code(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    """Windows and experts are refused, Granite's factors are seen in the logits, and a scale that grows with the
    position by its name."""
    model = decode_by_graph(tiny(architecture))
    if architecture == "granite":
        for layer in model.model.layers:
            layer.residual_multiplier = 0.5
    ids = ids_of(model)[:1]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    log_once.cache_clear()
    caplog.set_level("INFO", "w4gemm")
    assert torch.equal(model.generate(ids, **options), model.generate(ids, disable_compile=True, **options))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("its logits would be off" if architecture == "granite" else "generate runs transformers' own loop") in said


def test_a_step_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of a part of a head cannot be written to their place."""

    def fail(*_: Any) -> torch.Tensor:
        return torch.zeros(2).copy_(torch.zeros(3))

    model = decode_by_graph(tiny("llama"))
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids_of(model)[:1], **options)
    monkeypatch.setattr(CompiledStep, "_run", fail)
    monkeypatch.setattr(CompiledStep, "serves", lambda *_: False)
    assert torch.equal(model.generate(ids_of(model)[:1], **options), expected)
    step = step_of(model)
    assert isinstance(step, CompiledStep) and step.error == math.inf


def test_memory_that_no_token_reaches_is_not_touched() -> None:
    """Callers allow as many tokens as a model takes, most of which never come."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    model, before = tiny("llama"), resident()
    step = CompiledStep(model, 500_000)
    step.prefill(model, Prompt(ids_of(model)[:1]))
    keys, _ = step._caches[0]
    assert resident() - before < 2**27 < keys.nbytes * 2 * len(step._caches)


def test_without_room_for_caches_transformers_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own grow with the text."""

    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2199023255552 bytes.")

    model = decode_by_graph(tiny("llama"))
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids_of(model)[:1], **options)
    log_once.cache_clear()
    for name in ("prefill", "__init__"):
        monkeypatch.setattr(CompiledStep, name, fail)
        monkeypatch.setattr(CompiledStep, "serves", lambda *_: True)
        with caplog.at_level("INFO", "w4gemm"):
            assert torch.equal(model.generate(ids_of(model)[:1], **options), expected)
        assert step_of(model) is None
    length = ids_of(model).shape[1] + 6
    said = f"because memory has no room for caches of {length} tokens; 2048.0 GiB could not be allocated"
    assert said in caplog.text


def test_calls_at_once_do_not_share_a_step() -> None:
    """The second call begins while the first streams."""
    model = decode_by_graph(tiny("llama"))
    ids, other = ids_of(model)[:1], ids_of(model)[1:2]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = [model.generate(each, **options) for each in (ids, other)]
    inner: list[torch.Tensor] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            inner.append(model.generate(other, **options))

        def end(self) -> None:
            pass

    assert torch.equal(model.generate(ids, streamer=Streamer(), **options), expected[0])
    assert len(inner) > 2 and all(torch.equal(tokens, expected[1]) for tokens in inner)


def test_a_token_is_streamed_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step follows the last token."""
    model = decode_by_graph(tiny("llama"))
    ids, events, own = ids_of(model)[:1], list[str](), CompiledStep.__call__
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(ids, **options)[0, ids.shape[1] :].tolist()

    def step(*arguments: Any) -> torch.Tensor:
        events.append("step")
        return own(*arguments)

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            events.append("token")

        def end(self) -> None:
            events.append("end")

    monkeypatch.setattr(CompiledStep, "__call__", step)
    for end in (None, tokens[2]):
        count = 5 if end is None else tokens.index(end) + 1
        assert model.generate(ids, streamer=Streamer(), eos_token_id=end, **options).shape[1] == ids.shape[1] + count
        assert events == ["token", "token", *["step", "token"] * (count - 1), "end"]  # the first are the prompt's
        events.clear()


def test_several_sequences_and_other_dtypes_are_left_to_transformers() -> None:
    model = decode_by_graph(tiny("llama"))
    ids = ids_of(model)
    for tokens, dtype in ((ids, torch.float32), (ids[:1], torch.bfloat16)):
        mask = torch.ones_like(tokens)
        assert model.to(dtype).generate(tokens, attention_mask=mask, max_new_tokens=3).shape == (len(tokens), 14)
        assert step_of(model) is None


def test_sums_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_THREAD_COLUMNS", 1)
    monkeypatch.setattr(compiled_step.torch, "get_num_threads", lambda: 2)
    test_tokens_are_those_of_transformers("llama")
