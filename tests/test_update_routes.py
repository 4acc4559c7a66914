"""Dense weights that come for an engine's packed layers again and again: without an engine, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from w4gemm import QuantizedWeight, quantize
from w4gemm.integrations.engines import routes, updates
from w4gemm.integrations.engines.updates import DenseUpdate

BFLOAT16 = torch.bfloat16
N, K, EXPERTS = 96, 128, 3
Load = Callable[[torch.Tensor, torch.Tensor, str], Any]


class Layer(torch.nn.Module):
    """A packed layer, whose loader puts this GPU's part of a tensor into the place of ``part``."""

    def __init__(self, load: Load, shape: tuple[int, ...], gated: bool = False) -> None:
        super().__init__()
        self.load, self.calls = load, 0
        zeros = [quantize(torch.zeros(shape[-2:]), "int4_g32") for _ in range(shape[0] if len(shape) == 3 else 1)]
        self.w = QuantizedWeight.stack(zeros) if len(shape) == 3 else zeros[0].repack()
        self.update = DenseUpdate("weight", "proj", lambda tensors: self.w, gated, lambda: Parameter)
        self.update.open(self)

    def weight_loader(self, param: Any, loaded: torch.Tensor, part: str) -> Any:
        self.calls += 1
        return self.load(param.data, loaded, part)

    def equals(self, dense: torch.Tensor) -> bool:
        return torch.equal(
            self.w.dequantize(),
            torch.stack([rounded(one) for one in dense.view(-1, *dense.shape[-2:])]).view(dense.shape),
        )


class Parameter(torch.nn.Parameter):
    def __new__(cls, data: torch.Tensor, **options: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, **options: Any) -> None:
        pass


def rounded(dense: torch.Tensor) -> torch.Tensor:
    return quantize(dense, "int4_g32").dequantize()


def load_weights(layer: Layer, known: routes.Routes, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """An engine's: the part of the layer is a tensor's name."""
    with routes.loading(known, weights) as call:
        for name, tensor in call.passed():
            layer.weight.weight_loader(layer.weight, tensor, name)


def rows(data: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """Three parts, of which each of two GPUs has half of the rows."""
    data.narrow(0, int(part) * N // 3, N // 3).copy_(loaded.narrow(0, N // 3, N // 3))


def columns(data: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """The second half of the columns."""
    data.copy_(loaded[:, K:])


def by_value(data: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """A loader that computes, so that nothing is known of what it copies."""
    rows(data, loaded * 1, part)


def expert(data: torch.Tensor, loaded: torch.Tensor, part: str) -> bool:
    """Experts of which the first is elsewhere; gates before ups."""
    number, half = int(part[:-1]) - 1, int(part[-1])
    if number >= 0:
        data[number].chunk(2)[half].copy_(loaded)
    return number >= 0


def parts_of(load: Load, i: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by name, and the layer's rows that they make."""
    g = torch.Generator().manual_seed(i)
    if load is columns:
        dense = torch.randn(N, 2 * K, generator=g, dtype=BFLOAT16)
        return {"0": dense}, dense[:, K:].contiguous()
    if load is expert:
        tensors = {
            f"{e}{half}": torch.randn(N // 2, K, generator=g, dtype=BFLOAT16)
            for e in range(EXPERTS + 1)
            for half in (0, 1)
        }
        pairs = [torch.stack((tensors[f"{e}0"], tensors[f"{e}1"]), 1).flatten(0, 1) for e in range(1, EXPERTS + 1)]
        return tensors, torch.stack(pairs)
    tensors = {str(part): torch.randn(2 * N // 3, K, generator=g, dtype=BFLOAT16) for part in range(3)}
    return tensors, torch.cat([t[N // 3 :] for t in tensors.values()])


def layer_of(load: Load) -> Layer:
    return Layer(load, (EXPERTS, N, K), True) if load is expert else Layer(load, (N, K))


@pytest.mark.parametrize("load", [rows, columns, by_value, expert])
def test_a_tensor_goes_where_the_engine_has_put_it_before(load: Load) -> None:
    layer, known = layer_of(load), routes.Routes()
    for i in range(4):
        tensors, dense = parts_of(load, i)
        items = list(tensors.items())
        load_weights(layer, known, items[::-1] if i % 2 else items)
        assert layer.equals(dense)
        assert layer.calls == (len(items) * (i + 1) if load is by_value else len(items))
        assert known.keys() == (set() if load is by_value else tensors.keys())


def test_tensors_of_one_storage_and_of_other_strides() -> None:
    layer, known = layer_of(rows), routes.Routes()
    for i in range(3):
        tensors, dense = parts_of(rows, i)
        bucket = torch.stack(list(tensors.values()))
        if i == 2:
            bucket = bucket.mT.contiguous().mT
        load_weights(layer, known, zip(tensors, bucket, strict=True))
        assert layer.equals(dense) and layer.calls == (6 if i == 2 else 3)


def test_an_engine_that_has_all_tensors_before_it_loads_one() -> None:
    """Then nobody knows which one it is loading."""
    layer, known = layer_of(rows), routes.Routes()
    for i in range(2):
        tensors, dense = parts_of(rows, i)
        bucket = dict(zip(tensors, torch.stack(list(tensors.values())), strict=True))
        with routes.loading(known, bucket.items()) as call:
            passed = call.passed()
            ahead = next(passed)
            for following in [*passed, None]:
                layer.weight.weight_loader(layer.weight, ahead[1], ahead[0])
                ahead = following
        assert layer.equals(dense) and not known


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
@pytest.mark.parametrize("first", ["packed", "dense"])
def test_a_tensor_that_is_also_a_dense_parameter_comes_to_both_every_time(first: str, dtype: torch.dtype) -> None:
    layer, known = layer_of(rows), routes.Routes()
    dense = torch.nn.Parameter(torch.zeros(2 * N // 3, K, dtype=dtype), requires_grad=False)
    for i in range(3):
        tensors, whole = parts_of(rows, i)
        with routes.loading(known, tensors.items()) as call:
            for name, tensor in call.passed():
                copies = name == "1"
                if copies and first == "dense":
                    dense.data.copy_(tensor)
                layer.weight.weight_loader(layer.weight, tensor, name)
                if copies and first == "packed":
                    dense.data.copy_(tensor)
        assert layer.equals(whole) and torch.equal(dense, tensors["1"].to(dtype))
        assert known.keys() == {"0", "2"} and layer.calls == 3 + i


@pytest.mark.parametrize(
    "read", [lambda t: t[0, 0].item(), lambda t: t.mT.float(), lambda t: torch.stack([t, t]), torch.isfinite]
)
def test_a_tensor_that_a_model_reads_takes_no_route(read: Callable[[torch.Tensor], object]) -> None:
    layer, known = layer_of(rows), routes.Routes()
    for i in range(2):
        tensors, whole = parts_of(rows, i)
        with routes.loading(known, tensors.items()) as call:
            for name, tensor in call.passed():
                if name == "2":
                    read(tensor)
                assert tensor.narrow(0, 0, 1).shape and tensor.mT.shape  # views read nothing
                layer.weight.weight_loader(layer.weight, tensor, name)
        assert layer.equals(whole) and known.keys() == {"0", "1"}


def test_nothing_is_watched_after_a_call_that_fails() -> None:
    layer, known = layer_of(rows), routes.Routes()
    tensors, _ = parts_of(rows, 0)
    with pytest.raises(KeyError), routes.loading(known, tensors.items()) as call:
        for _ in call.passed():
            raise KeyError("of the model")
    assert _get_current_dispatch_mode() is None
    load_weights(layer, known, tensors.items())
    assert _get_current_dispatch_mode() is None and known.keys() == tensors.keys()


def test_tensors_that_another_thread_reads_ahead_take_no_route() -> None:
    """Whose operations are not seen."""
    layer, known = layer_of(rows), routes.Routes()
    for i in range(2):
        tensors, whole = parts_of(rows, i)
        with routes.loading(known, tensors.items()) as call, ThreadPoolExecutor(1) as reader:
            passed = call.passed()
            while (one := reader.submit(next, passed, None).result()) is not None:
                layer.weight.weight_loader(layer.weight, one[1], one[0])
        assert layer.equals(whole) and not known
        assert _get_current_dispatch_mode() is None


def test_two_threads_ask_for_tensors_by_turns() -> None:
    """No thread keeps what looks at tensors."""
    layer, known = layer_of(rows), routes.Routes()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for i in range(2):
            tensors, whole = parts_of(rows, i)
            with routes.loading(known, tensors.items()) as call:
                passed = call.passed()
                for reader in (one, other, one):
                    name, tensor = reader.submit(next, passed).result()
                    layer.weight.weight_loader(layer.weight, tensor, name)
                assert other.submit(next, passed, None).result() is None
            assert layer.equals(whole) and not known
        assert [reader.submit(_get_current_dispatch_mode).result() for reader in (one, other)] == [None, None]
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("has_context", [False, True])
def test_threads_that_load(has_context: bool) -> None:
    """They are not seen; a context of the call's own, as asyncio.to_thread gives them, says that one runs."""
    layer, known = layer_of(rows), routes.Routes()
    with ThreadPoolExecutor(2) as pool:
        for i in range(3):
            tensors, whole = parts_of(rows, i)
            with routes.loading(known, tensors.items()) as call:
                loads = []
                for name, tensor in call.passed():
                    run = copy_context().run if has_context else functools.partial
                    load = (run, layer.weight.weight_loader, layer.weight, tensor, name)
                    loads.append(pool.submit(*load) if has_context else pool.submit(run(*load[1:])))
                for load in loads:
                    load.result()
            assert layer.equals(whole) and not known


class Counts(TorchDispatchMode):
    """A mode of an engine's."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_engine_that_outlasts_a_tensor() -> None:
    layer, known, counts = layer_of(rows), routes.Routes(), Counts()
    for i in range(2):
        tensors, whole = parts_of(rows, i)
        with ExitStack() as modes, routes.loading(known, tensors.items()) as call:
            for name, tensor in call.passed():
                if name == "1":
                    modes.enter_context(counts)
                layer.weight.weight_loader(layer.weight, tensor, name)
                if name == "2":
                    modes.close()
        assert layer.equals(whole) and _get_current_dispatch_mode() is None
    assert known.keys() == tensors.keys() and layer.calls == 3 and counts.copies


@pytest.mark.parametrize(
    "make", [lambda t: TwoTensor(t, t), lambda t: t.to_sparse(), FakeTensorMode().from_tensor, lambda t: t.to("meta")]
)
def test_parameters_without_memory_of_their_own(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Such as a model's of torchao, to which it does something while a tensor comes: a wrapper may have the tensor."""
    layer, known = layer_of(rows), routes.Routes()
    other = make(torch.zeros(4, 4))
    for i in range(2):
        tensors, whole = parts_of(rows, i)
        with routes.loading(known, tensors.items()) as call:
            for name, tensor in call.passed():
                if name == "2":
                    torch.mul(other, 2)
                layer.weight.weight_loader(layer.weight, tensor, name)
        assert layer.equals(whole) and {"0", "1"} <= known.keys()


@pytest.mark.parametrize("is_on", [(True, True), (True, False), (False, True)])
def test_inference_mode(is_on: tuple[bool, bool]) -> None:
    """Of an engine that packs and updates in it, or a part of a layer in it and the next one not."""
    with torch.inference_mode(is_on[0]):
        layer, known = layer_of(rows), routes.Routes()
    for i in range(3):
        tensors, whole = parts_of(rows, i)
        for names, on in zip((["0", "1"], ["2"]), is_on, strict=True):
            with torch.inference_mode(on):
                load_weights(layer, known, [(name, tensors[name].clone()) for name in names])
        assert layer.equals(whole) and layer.calls == 3 and known.keys() == tensors.keys()


def at_once(data: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """All of the part's two halves of rows in one operator."""
    mine, own = data.narrow(0, int(part) * N // 3, N // 3), loaded.narrow(0, N // 3, N // 3)
    torch._foreach_copy_(list(mine.chunk(2)), list(own.chunk(2)))


def unseen(data: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """Without PyTorch's operators."""
    mine, own = data.narrow(0, int(part) * N // 3, N // 3), loaded.narrow(0, N // 3, N // 3)
    mine.view(torch.int16).numpy()[:] = own.view(torch.int16).numpy()


@pytest.mark.parametrize("load", [at_once, unseen])
def test_loaders_of_which_it_is_not_known_what_they_copy(load: Load) -> None:
    layer, known = layer_of(load), routes.Routes()
    for i in range(3):
        tensors, whole = parts_of(load, i)
        load_weights(layer, known, tensors.items())
        assert layer.equals(whole) and not known and layer.calls == 3 * (i + 1)


def test_a_stack_of_dense_parameters_that_takes_the_same_tensors() -> None:
    """All at once, by one operator, from views."""
    layer, known = layer_of(rows), routes.Routes()
    stack = torch.nn.Parameter(torch.zeros(3, 2 * N // 3, K, dtype=BFLOAT16), requires_grad=False)
    for i in range(3):
        tensors, whole = parts_of(rows, i)
        with routes.loading(known, tensors.items()) as call:
            for name, tensor in call.passed():
                layer.weight.weight_loader(layer.weight, tensor, name)
                if name != "0":
                    torch._foreach_copy_(list(stack.data[int(name)].chunk(2)), list(tensor.chunk(2)))
        assert layer.equals(whole) and known.keys() == {"0"} and known.without == {"1", "2"}
        assert torch.equal(stack[1:], torch.stack([tensors["1"], tensors["2"]]))


def test_two_models_of_a_process() -> None:
    """By names that both have: one after the other, one while the other is loaded, and at a time in two threads."""
    layers, known = [layer_of(rows), layer_of(rows)], [routes.Routes(), routes.Routes()]
    for i in range(4):
        sent = [parts_of(rows, 2 * i + j) for j in range(2)]
        if i == 0:  # a draft model, whose own load_weights is called by the target's
            with routes.loading(known[0], sent[0][0].items()) as call:
                for name, tensor in call.passed():
                    layers[0].weight.weight_loader(layers[0].weight, tensor, name)
                    if name == "1":
                        routes.route(functools.partial(load_each, layers[1]), known[1], sent[1][0].items())
            assert known[0].keys() == {"0", "2"} and not known[1]
        elif i == 1:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(load_weights, layers, known, [tensors.items() for tensors, _ in sent]))
            assert known[1].keys() == sent[1][0].keys()
        else:
            for layer, routes_of, (tensors, _) in zip(layers, known, sent, strict=True):
                load_weights(layer, routes_of, tensors.items())
        for layer, (_, whole) in zip(layers, sent, strict=True):
            assert layer.equals(whole)
    assert layers[1].calls == 6


def load_each(layer: Layer, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        layer.weight.weight_loader(layer.weight, tensor, name)


def test_nothing_looks_at_tensors_that_are_known() -> None:
    """Of a call that begins with one; those of it that are new, and go to packed layers, are learned in the next."""
    layer, known = layer_of(rows), routes.Routes()
    tensors, whole = parts_of(rows, 0)
    dense = torch.zeros(3)
    for names, looks, count in (["norm", "0"], True, 1), (["0", "1", "norm"], False, 1), (["0", "1", "2"], True, 3):
        with routes.loading(known, [(name, tensors.get(name, dense)) for name in names]) as call:
            for name, tensor in call.passed():
                assert (_get_current_dispatch_mode() is not None) == looks
                if name != "norm":
                    layer.weight.weight_loader(layer.weight, tensor, name)
        assert len(known) == count
    for _ in range(2):  # the norm belongs to no packed layer, and is looked at no more
        load_weights(layer, known, [("norm", dense), *tensors.items()][1:])
        with routes.loading(known, [("norm", dense)]) as call:
            assert call.reads is None
    assert layer.equals(whole)


def test_memory_is_the_senders_after_a_call() -> None:
    layer, known = layer_of(rows), routes.Routes()
    tensors, dense = parts_of(rows, 0)
    for _ in range(2):
        for half in (["0", "1"], ["2"]):
            load_weights(layer, known, [(name, t := tensors[name].clone()) for name in half])
            t.zero_()
        assert layer.equals(dense)
        assert layer.update.numbers == 0 and not layer.update.coming._parameters


def test_an_iterator_may_fill_the_memory_of_a_tensor_anew() -> None:
    layer, known = layer_of(rows), routes.Routes()
    for i in range(3):
        tensors, dense = parts_of(rows, i)
        buffer = torch.empty_like(tensors["0"])
        load_weights(layer, known, ((name, buffer.copy_(t)) for name, t in tensors.items()))
        assert layer.equals(dense) and layer.calls == 3


def test_parameters_that_require_gradients() -> None:
    layer, known = layer_of(rows), routes.Routes()
    for i in range(2):
        tensors, dense = parts_of(rows, i)
        load_weights(layer, known, [(name, torch.nn.Parameter(t)) for name, t in tensors.items()])
        assert layer.equals(dense) and layer.calls == 3


def test_a_part_that_comes_twice_is_not_another_one() -> None:
    layer, known = layer_of(rows), routes.Routes()
    tensors, dense = parts_of(rows, 0)
    load_weights(layer, known, tensors.items())
    with pytest.raises(RuntimeError, match=r"proj: weight: 33.33% of its shape \(96, 128\) was not loaded"):
        for name in ("0", "1", "1", "0"):
            load_weights(layer, known, [(name, tensors[name])])
        layer.update.end()
    load_weights(layer, known, tensors.items())
    assert layer.equals(dense)


@pytest.mark.parametrize("load", [rows, by_value])
@pytest.mark.parametrize("first", [0, 1], ids=["the first time", "again"])
def test_what_came_before_an_error_is_not_mixed_with_what_comes_anew(load: Load, first: int) -> None:
    layer, known = layer_of(load), routes.Routes()
    for i in range(first):
        load_weights(layer, known, parts_of(load, i)[0].items())
    old, _ = parts_of(load, 7)
    tensors, dense = parts_of(load, 8)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(old.items())[:2]
        raise OSError("the sender is gone")

    with pytest.raises(OSError, match="the sender is gone"):
        load_weights(layer, known, breaks_off())
    load_weights(layer, known, list(tensors.items())[::-1])
    assert layer.equals(dense)
    layer.update.end()


def test_what_came_in_calls_before_one_that_fails_stays() -> None:
    layer, known = layer_of(rows), routes.Routes()
    tensors, dense = parts_of(rows, 0)
    load_weights(layer, known, [("0", tensors["0"])])
    with pytest.raises(AttributeError):
        load_weights(layer, known, [("1", tensors["2"]), ("2", None)])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="33.33% of its shape"):
        load_weights(layer, known, [("1", tensors["1"])])
        layer.update.end()
    load_weights(layer, known, [("0", tensors["0"])])
    with pytest.raises(AttributeError):
        load_weights(layer, known, [("1", tensors["2"]), ("2", None)])  # type: ignore[list-item]
    load_weights(layer, known, [("2", tensors["2"]), ("1", tensors["1"])])
    assert layer.equals(dense)


def test_numbers_are_checked_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {name: layer_of(columns) for name in ("a", "b", "c")}
    for name, layer in layers.items():
        layer.update.what = name

    def launch(refused: int, w: QuantizedWeight, dense: torch.Tensor) -> torch.Tensor:
        return torch.tensor([refused], dtype=torch.int32)

    tensors, _ = parts_of(columns, 0)
    words, sent = "weight: weight: wanted finite values", [(name, tensors["0"]) for name in layers]
    with pytest.raises(ValueError, match=f"^a: {words} .*; c: {words}"), routes.loading(routes.Routes(), sent) as call:
        for name, tensor in call.passed():
            monkeypatch.setattr(updates, "launch_update", functools.partial(launch, name != "b"))
            layers[name].weight.weight_loader(layers[name].weight, tensor, name)
    with pytest.raises(ValueError, match="^a: weight: weight: wanted finite values"):  # without an end: at once
        layers["a"].weight.weight_loader(layers["a"].weight, tensors["0"], "a")
