from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from w4gemm import QuantizedWeight, W4Linear, linear, quantize
from w4gemm.api import arguments
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.packing.layouts import native_layout

IN, OUT = 333, 130
DTYPES = "dtype: wanted torch.float32 or torch.float16 or torch.bfloat16, got "
FORMATS = ["int4_g32_zfloat_fp16", "int4_g128", "int4_col_zint"]


@pytest.fixture(params=FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture
def layer(format, device) -> W4Linear:
    bias = torch.randn(OUT, generator=torch.Generator().manual_seed(3))
    return W4Linear.from_weight(random_weight(WeightFormat.parse(format), OUT, IN), bias).bfloat16().to(device)


def inputs(layer: W4Linear) -> torch.Tensor:
    return torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(4)).to(layer.weight.device, layer.dtype)


def same_weight(a: W4Linear, b: W4Linear) -> bool:
    pairs = zip(a.weight.repack("canonical").tensors, b.weight.repack("canonical").tensors, strict=True)
    return a.format == b.format and all(torch.equal(s.cpu(), t.cpu()) for s, t in pairs)


def test_forward_and_native_layout(layer):
    assert layer.weight.layout == native_layout(Device.of(layer.weight.device))
    x = inputs(layer)
    assert_close(layer(x), x, layer.weight, layer.bias.detach())


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_from_linear(bias, search):
    dense = torch.nn.Linear(IN, OUT, bias=bias, dtype=torch.bfloat16)
    layer = W4Linear.from_linear(dense, "int4_g32", search=search)
    assert (layer.in_features, layer.out_features, layer.dtype) == (IN, OUT, torch.bfloat16)
    w = w4gemm.quantize(dense.weight.detach(), "int4_g32", search=search)
    assert torch.equal(layer.weight.dequantize(), w.dequantize())
    assert (layer.bias is None) is (not bias)
    assert bias is False or torch.equal(layer.bias, dense.bias)


def test_the_dtype_of_its_weight_is_the_layers():
    """Models cast x to it in front of a layer (Mamba's head, DeepSeek's indexer), which rounded float32 x to the dtype
    of the scales, and made infinities of bf16 x beside those of fp16."""
    w = w4gemm.quantize(torch.randn(OUT, IN), "int4_g32_fp16").repack()
    layer = W4Linear.from_weight(w, dtype=torch.float32)
    assert layer.weight.dtype == torch.float32 and w.dtype == torch.float16
    assert copy.deepcopy(layer).to(torch.bfloat16).weight.dtype == torch.bfloat16
    buffers = {name: t.clone() for name, t in layer.named_buffers()}
    assert torch.func.functional_call(layer, buffers, (torch.ones(2, IN),)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32
    layer.dtype = torch.bfloat16
    assert layer.weight.dtype == torch.bfloat16 and pickle.loads(pickle.dumps(layer)).weight.dtype == torch.bfloat16
    layer.weight = w
    assert layer.weight.dtype == torch.bfloat16 and w.dtype == torch.float16


@pytest.mark.parametrize("experts", [0, 2])
def test_a_bias_that_is_no_parameter_any_more(experts):
    """FullyShardedDataParallel takes parameters out of their modules, and sets views of one long tensor."""
    w, bias, rest = quantize(torch.randn(OUT, IN), "int4_g32"), torch.randn(experts or 1, OUT), ()
    if experts:
        w, rest = QuantizedWeight.stack([w] * experts), (torch.tensor([0, 1, 2], dtype=torch.int32),)
    layer = (w4gemm.W4GroupedLinear if experts else W4Linear).from_weight(w, bias if experts else bias[0])
    x = torch.randn(2, IN)
    expected, bias = layer(x, *rest), layer.bias.data
    del layer.bias
    layer.bias = bias.view_as(bias)
    assert torch.equal(layer(x, *rest), expected)


def test_starts_at_zero(format, device):
    layer = W4Linear(IN, OUT, True, format, dtype=torch.float16, device=device)
    assert layer.bias.dtype == torch.float16 and not layer.bias.requires_grad
    assert not layer(inputs(layer)).any()
    assert W4Linear(IN, OUT, False, format).bias is None


# --- state dict ------------------------------------------------------------------------------------------------------


def test_state_dict_round_trip(layer, format):
    state = layer.state_dict()
    zero = {"zeros"} if layer.format.has_zero else set()
    assert set(state) == {"bias", "_extra_state", "codes", "scales"} | zero
    assert state["scales"].dtype == layer.format.scale_dtype and state["codes"].shape == (OUT, (IN + 1) // 2)
    other = W4Linear(IN, OUT, True, format, dtype=torch.bfloat16, device=layer.weight.device)
    assert not same_weight(layer, other)
    missing, unexpected = other.load_state_dict(state)
    assert not missing and not unexpected and same_weight(layer, other)
    assert other.weight.layout == layer.weight.layout
    assert torch.equal(other(inputs(layer)), layer(inputs(layer)))


def test_state_dict_is_the_same_from_every_device(format, device):
    cpu = W4Linear.from_weight(random_weight(WeightFormat.parse(format), OUT, IN))
    moved = copy.deepcopy(cpu).to(device).state_dict()
    assert all(torch.equal(t, moved[name].cpu()) for name, t in cpu.state_dict().items())


def test_state_dict_inside_a_model(layer, format):
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    other = torch.nn.Sequential(torch.nn.Identity(), W4Linear(IN, OUT, True, format, dtype=torch.bfloat16))
    other.load_state_dict(model.state_dict())
    assert same_weight(other[1], layer)


def test_state_dict_in_a_file(layer, format, tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({name: t.contiguous() for name, t in layer.state_dict().items()}, tmp_path / "layer.safetensors")
    other = W4Linear(IN, OUT, True, format, dtype=torch.bfloat16)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert same_weight(layer, other)


def test_the_state_dict_of_distributed_checkpoints(layer, format):
    """Once AttributeError: PyTorch looks for an attribute of each name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model, other = (torch.nn.Sequential(torch.nn.Identity(), copy.deepcopy(layer)) for _ in range(2))
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        state = get_model_state_dict(model, options=options)
        assert state.keys() == model.state_dict().keys()
        other[1].load_state_dict(W4Linear(IN, OUT, True, format, dtype=torch.bfloat16).state_dict())
        set_model_state_dict(other, state, options=options)
        assert same_weight(other[1], layer)
    assert torch.equal(layer.codes, layer.state_dict()["codes"])
    assert hasattr(layer, "zeros") == layer.format.has_zero and not hasattr(layer, "perm")


def test_loading_into_a_layer_on_meta(layer, format):
    other = W4Linear(IN, OUT, True, format, dtype=torch.bfloat16, device="meta")
    assert other.weight.device.type == "meta"
    other.load_state_dict(layer.state_dict(), assign=True)
    assert other.weight.device == layer.weight.device and same_weight(layer, other)
    assert torch.equal(other(inputs(layer)), layer(inputs(layer)))


def test_an_assigned_bias_brings_its_dtype():
    """Once the layer went on to advertise its own, in which it refused every x."""
    state = W4Linear(IN, OUT, True, "int4_g32", dtype=torch.bfloat16).state_dict()
    for device in ("cpu", "meta"):
        layer = W4Linear(IN, OUT, True, "int4_g32", dtype=torch.float32, device=device)
        layer.load_state_dict(state, assign=True)
        assert layer.dtype == torch.bfloat16 and layer(torch.ones(2, IN, dtype=layer.dtype)).dtype == torch.bfloat16
    state = dict(state)  # without what PyTorch notes in it, that it was assigned
    layer = W4Linear(IN, OUT, True, "int4_g32", dtype=torch.float32)
    layer.load_state_dict(state)
    assert layer.dtype == layer.bias.dtype == torch.float32
    with pytest.raises(RuntimeError, match="bias: dtype: wanted torch.float32 .*, got torch.float64; nearest is"):
        layer.load_state_dict(state | {"bias": torch.zeros(OUT, dtype=torch.float64)}, assign=True)


def test_bad_state_dicts():
    layer = W4Linear(IN, OUT, False, "int4_g32")
    state = W4Linear(IN, OUT, False, "int4_g32").state_dict()
    with pytest.raises(RuntimeError, match="_extra_state: wanted a weight in int4_g64 .* got one in 'int4_g32'"):
        W4Linear(IN, OUT, False, "int4_g64").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"1\._extra_state: wanted a weight in int4_g64"):
        two = torch.nn.Sequential(W4Linear(IN, OUT), W4Linear(IN, OUT, format="int4_g64"))
        two.load_state_dict(torch.nn.Sequential(W4Linear(IN, OUT), W4Linear(IN, OUT)).state_dict())
    for name in ("codes", "scales", "perm", "pre_quant_scale", "_extra_state"):
        with pytest.raises(RuntimeError, match=f"{name}: wanted a tensor, got int"):
            layer.load_state_dict(state | {name: 3})
    with pytest.raises(RuntimeError, match=r"_extra_state: wanted the name of a format, torch.uint8 \(n\), got"):
        layer.load_state_dict(state | {"_extra_state": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"scales"'):
        layer.load_state_dict({name: t for name, t in state.items() if name != "scales"})
    for strict in (True, False):  # once the codes were not loaded either, and nothing said so
        with pytest.raises(RuntimeError, match="codes: wanted a weight's tensors together, got it without scales"):
            layer.load_state_dict({"codes": state["codes"]}, strict=strict)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"more"'):
        layer.load_state_dict(state | {"more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"codes: wanted torch.uint8 \(130, 167\)"):
        layer.load_state_dict(state | {"codes": torch.zeros(3, 3, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match=r"scales: wanted torch.bfloat16"):
        layer.load_state_dict(state | {"scales": state["scales"].float()})
    assert set(layer.load_state_dict({}, strict=False).missing_keys) == set(state)


# --- moving and converting -------------------------------------------------------------------------------------------


def test_dtype_conversions_leave_the_weight_alone(layer):
    before = [t.clone() for t in layer.weight.tensors]
    x = inputs(layer)
    half = layer.half()
    assert half is layer and layer.dtype == torch.float16 and layer.bias.dtype == torch.float16
    assert [t.dtype for t in layer.weight.tensors] == [t.dtype for t in before]
    assert all(torch.equal(s, t) for s, t in zip(layer.weight.tensors, before, strict=True))
    assert layer(x.half()).dtype == torch.float16
    no_bias = W4Linear.from_weight(layer.weight)
    assert no_bias.dtype == torch.float32 and no_bias.to(torch.bfloat16).dtype == torch.bfloat16


def test_moving_repacks(layer, device):
    bits = layer.state_dict()
    moved = copy.deepcopy(layer).cpu().to(device)
    assert moved.weight.layout == layer.weight.layout and moved.weight.device == layer.weight.device
    assert all(torch.equal(t, moved.state_dict()[name]) for name, t in bits.items())
    assert all(b.device == moved.weight.device and not b.is_floating_point() for b in moved.buffers())
    assert sum(b.numel() * b.element_size() for b in moved.buffers()) == moved.weight.nbytes


def test_meta_and_to_empty(layer):
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.device.type == "meta"
    meta.to_empty(device="cpu")
    assert meta.weight.device.type == "cpu"
    meta.load_state_dict(layer.state_dict())
    assert same_weight(meta, layer)


def test_copies_and_pickles(layer):
    x = inputs(layer)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_a_compiled_model(layer):
    torch.compiler.reset()
    model = torch.nn.Sequential(layer, torch.nn.ReLU()).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in (inputs(layer), inputs(layer)[:1, :3]):
        assert torch.equal(compiled(x), model(x))


def test_the_repr_says_sizes_format_and_layout(layer):
    layout = layer.weight.layout
    assert (
        repr(layer) == f"W4Linear(in_features=333, out_features=130, bias=True, format={layer.format}, layout={layout})"
    )


def test_bad_arguments():
    w = random_weight(WeightFormat(), OUT, IN)
    for make, error, message in (
        (lambda: W4Linear(0, 5), ValueError, "in_features: wanted an int from 1 on, got 0"),
        (
            lambda: W4Linear(torch.randn(4, 4)),
            TypeError,
            "in_features: wanted an int, got Tensor; .* from_weight a wei",
        ),
        (lambda: W4Linear(torch.nn.Linear(4, 4)), TypeError, "got Linear; .*W4Linear.from_linear takes a dense layer"),
        (lambda: W4Linear(5, 2.0), TypeError, "out_features: wanted an int from 1 on, got 2.0"),
        (lambda: W4Linear(5, 5, format="int4"), ValueError, "format: wanted int4_g<group size>"),
        (lambda: W4Linear(5, 5, format=4), TypeError, "format: wanted a WeightFormat or its string, got int"),
        (lambda: W4Linear(5, 5, dtype=torch.int8), TypeError, f"{DTYPES}torch.int8"),
        (lambda: W4Linear(5, 5, dtype="float32"), TypeError, f"{DTYPES}'float32'"),
        (lambda: W4Linear(5, 5, device="cuda:77"), ValueError, "device: cuda:77 is not there; PyTorch sees"),
        (lambda: W4Linear.from_linear(w), TypeError, "linear: wanted a torch.nn.Linear, got QuantizedWeight"),
        (lambda: W4Linear.from_weight(torch.zeros(3)), TypeError, "w: wanted a QuantizedWeight, got Tensor"),
        (
            lambda: W4Linear.from_weight(w, torch.zeros(3)),
            ValueError,
            r"bias: wanted shape \(130,\), n of w, got \(3,\)",
        ),
        (lambda: W4Linear.from_weight(w, torch.zeros(130).int()), TypeError, "bias: wanted floating point, got"),
        (
            lambda: W4Linear.from_weight(w, torch.zeros(130, device="meta")),
            ValueError,
            "bias: wanted w's device cpu, got meta",
        ),
    ):
        with pytest.raises(error, match=message):
            make()


def test_x_of_another_dtype_than_the_bias_is_named():
    layer = W4Linear.from_linear(torch.nn.Linear(64, 32))
    for model in (layer, torch.compile(layer, backend="eager")):
        with pytest.raises(TypeError, match="x: wanted torch.float32 like the layer's bias, got torch.bfloat16"):
            model(torch.randn(2, 64).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_x_is_cast_to_the_dtype_of_a_layer_of_16_bits(monkeypatch, dtype, scaled, bias):
    """PEFT's prepare_model_for_kbit_training makes norms and biases float32, and GPUs take 16-bit x only."""
    monkeypatch.setattr(arguments, "_dtypes", lambda w, device: (torch.float16, torch.bfloat16))
    layer = W4Linear.from_linear(torch.nn.Linear(64, 32, bias, dtype=dtype))
    if scaled:
        layer.pre_quant_scale = torch.full((64,), 2.0)
    x = torch.randn(3, 64)
    expected = layer(x.to(dtype))
    if bias:
        layer.bias.data = layer.bias.data.float()
        layer.bias.requires_grad_()
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        tracked = x.clone().requires_grad_()
        y = function(tracked)
        assert y.dtype == torch.float32 and torch.equal(y, expected.float())
        y.sum().backward()
        assert tracked.grad.dtype == torch.float32 and tracked.grad.abs().sum() > 0
        assert not bias or torch.equal(layer.bias.grad, torch.full((32,), 3.0))
        layer.zero_grad()
    with torch.no_grad():
        assert torch.equal(layer(x), expected.float())
        assert layer(x.to(dtype)).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="x: wanted .* got torch.float64"):
        layer(x.double())


def test_another_weight_stays(tmp_path):
    layer = W4Linear(128, 64, bias=False)
    w = quantize(torch.randn(32, 96), "int4_g32_zint")
    layer.weight = w
    x = torch.randn(3, 96)
    expected = linear(x, w.repack())
    for moved in (layer, layer.to("cpu"), layer.half().float(), copy.deepcopy(layer)):
        assert torch.equal(moved(x), expected)
    assert (layer.in_features, layer.out_features, str(layer.format)) == (96, 32, "int4_g32_zint")
    assert bytes(layer.state_dict()["_extra_state"].tolist()).decode() == "int4_g32_zint"
    for other in (torch.zeros(3), QuantizedWeight.stack([w])):
        with pytest.raises(TypeError, match="weight: wanted a QuantizedWeight of no experts, got"):
            layer.weight = other


def test_attributes_say_what_the_weight_is():
    """A value that would let the state dict or a framework read another thing than the product is refused."""
    layer = W4Linear.from_weight(quantize(torch.randn(32, 256), "int4_g32"))
    kept, state = repr(layer), layer.state_dict()
    for name, value, error, message in (
        ("format", "nf4", ValueError, "format: wanted the weight's, int4_g32; assign another weight, got 'nf4'"),
        ("in_features", 3, ValueError, "in_features: wanted the weight's k 256, or that of all its shards, got 3"),
        ("out_features", "32", TypeError, "out_features: wanted an int from 1 on, got '32'"),
        ("dtype", torch.int8, TypeError, f"{DTYPES}torch.int8"),
        ("pre_quant_scale", torch.ones(255), ValueError, r"pre_quant_scale: wanted shape \(256,\), k of"),
        ("pre_quant_scale", torch.ones(256).int(), TypeError, "pre_quant_scale: wanted a floating-point tensor"),
        ("pre_quant_scale", [1.0], TypeError, "pre_quant_scale: wanted .* or None, got list"),
    ):
        with pytest.raises(error, match=message):
            setattr(layer, name, value)
    assert repr(layer) == kept and torch.equal(layer.state_dict()["_extra_state"], state["_extra_state"])
    layer.in_features, layer.dtype, layer.pre_quant_scale = 512, torch.float16, torch.full((256,), 2.0)
    x = torch.randn(3, 256).half()
    assert torch.equal(layer(x), linear(2 * x, layer.weight))
    layer.pre_quant_scale = None
    assert torch.equal(layer(x), linear(x, layer.weight))


# --- fp8 activations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_says_how_x_is_taken(device, bias):
    """A layer of a weight for fp8, on every device, and one that was made as such, compute what linear does."""
    w = random_weight(WeightFormat(), OUT, 384).to(device).repack(activations="fp8")
    b = torch.randn(OUT, dtype=torch.bfloat16, device=device) if bias else None
    layer, x = W4Linear.from_weight(w, b), torch.randn(5, 384, device=device, dtype=torch.bfloat16)
    x8, scale = w4gemm.quantize_activations(x)
    expected = linear(x8, w, b, token_scale=scale)
    for same in (layer, copy.deepcopy(layer), layer.cpu().to(device)):
        assert same.activations == "fp8" and "activations=fp8" in repr(same)
        assert torch.equal(same(x), expected) and torch.equal(linear(x, w, b), expected)
    assert not torch.equal(linear(x, w.repack(activations=None), b), expected)
    layer.activations = None
    assert torch.equal(layer(x), linear(x, w.repack(activations=None), b)) and layer.weight.activations is None
    layer.weight = w
    assert layer.activations == "fp8" and torch.equal(layer(x), expected)


def test_a_saved_layer_for_fp8_loads_as_one(device):
    dense = torch.nn.Linear(384, OUT, dtype=torch.bfloat16, device=device).requires_grad_(False)
    layer, x = W4Linear.from_linear(dense, activations="fp8"), torch.randn(5, 384, dtype=torch.bfloat16, device=device)
    state, expected = layer.state_dict(), layer(x)
    plain = W4Linear(384, OUT, dtype=torch.bfloat16, device=device)
    plain.load_state_dict(state)
    assert plain.activations == "fp8" and torch.equal(plain(x), expected)
    other = W4Linear(384, OUT, dtype=torch.bfloat16, device=device, activations="fp8")
    other.load_state_dict(W4Linear.from_linear(dense).state_dict())
    assert other.activations is None and not torch.equal(other(x), expected)
    experts = QuantizedWeight.stack([quantize(torch.randn(64, 64)) for _ in range(2)]).repack(activations="fp8")
    model = w4gemm.W4Experts(experts, QuantizedWeight.stack([quantize(torch.randn(64, 32))] * 2))
    assert model.gate_up.activations == "fp8" and model.down.activations is None
    again = w4gemm.W4Experts(experts.repack(activations=None), model.down.weight)
    again.load_state_dict(model.state_dict())
    assert again.gate_up.activations == "fp8" and again.down.activations is None
    both = w4gemm.W4Experts(experts, model.down.weight, activations="fp8")
    assert both.gate_up.activations == both.down.activations == "fp8"
    with pytest.raises(ValueError, match="activations: wanted 'fp8' or None, got"):
        W4Linear(64, 64, activations="int8")


def test_float32_on_the_cpu():
    """Whatever dtype x has, its result and its bias have; a GPU takes 16-bit x only."""
    layer = W4Linear(64, 32, activations="fp8")
    layer.weight = quantize(torch.randn(32, 64)).repack(activations="fp8")
    x = torch.randn(3, 64)
    assert layer(x).dtype == torch.float32
    x8, scale = w4gemm.quantize_activations(x)
    assert torch.equal(layer(x), linear(x8, layer.weight, token_scale=scale, out_dtype=torch.float32))


# --- the fast way -----------------------------------------------------------------------------------------------------


def test_a_warm_layer_notices_what_changes(layer):
    """Other values, dtypes, attributes, tensors: a bound call fits all of them or none."""
    x = inputs(layer).detach()
    with torch.no_grad():
        layer(x)
        assert layer(x) is not None
        bound = layer.weight._bound
        assert bound is not None and layer(x[:1]) is not None and layer.weight._bound is bound
        layer.bias.mul_(2)
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias)) and layer.weight._bound is bound
        layer.activation = "relu"
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias, activation="relu"))
        layer.bias = None
        assert torch.equal(layer(x), linear(x, layer.weight, activation="relu"))
        assert layer.half()(x.half()).dtype == torch.float16
        with pytest.raises(ValueError, match="x: wanted shape"):
            layer(x[..., 1:].half())
        with pytest.raises(TypeError, match="x: wanted"):
            layer(x.double())
    tracked = x.half().requires_grad_()
    layer(tracked).sum().backward()
    assert tracked.grad is not None


def test_on_meta():
    layer = W4Linear(256, 64, device="meta", dtype=torch.bfloat16)
    assert layer(torch.empty(3, 256, dtype=torch.bfloat16, device="meta")).shape == (3, 64)
    exported = torch.export.export(W4Linear(64, 32), (torch.randn(3, 64),))
    assert exported.module()(torch.randn(3, 64)).shape == (3, 32)
    file = io.BytesIO()
    torch.export.save(exported, file)  # once PyTorch 2.8 refused buffers of two dtypes in one memory
    file.seek(0)
    assert torch.export.load(file).module()(torch.randn(3, 64)).shape == (3, 32)
    with torch.device("meta"):
        x = torch.empty(3, 256, dtype=torch.bfloat16, requires_grad=True)
    assert layer(x).shape == (3, 64)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"x: wanted a tensor \(..., k\), got list"):
        W4Linear(128, 64)([1.0])


def test_flags_are_flags():
    with pytest.raises(TypeError, match="bias: wanted a bool, got 'int4_g64'; format is the fourth argument"):
        W4Linear(128, 64, "int4_g64")
    with pytest.raises(TypeError, match="batch_invariant: wanted a bool, got str 'no'"):
        W4Linear(128, 64, batch_invariant="no")


@pytest.mark.parametrize("name, value", [("scales", float("nan")), ("scales", 3e38), ("zeros", 200)])
def test_a_state_dict_with_numbers_that_are_refused_elsewhere(name, value):
    layer = W4Linear.from_weight(quantize(torch.randn(32, 64), "int4_g32_zint"))
    state = layer.state_dict()
    state[name][3, 1] = value
    with pytest.raises(RuntimeError, match=name):
        layer.load_state_dict(state)
    assert layer(torch.ones(1, 64)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    dense = torch.nn.Linear(64, 32)
    layer, x = W4Linear.from_linear(dense, "int4_g32"), torch.randn(5, 64)
    with torch.autocast("cpu", dtype):
        d = layer(x)
        assert d.dtype == dense(x).dtype == dtype
        with pytest.raises(TypeError, match="x: wanted .*, got torch.float64"):
            layer(x.double())  # as torch's own, which casts no float64
    assert torch.equal(d, linear(x.to(dtype), layer.weight, layer.bias.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backward_pass_under_autocast(dtype):
    """linear takes x as it is there, and its gradient is that of x's dtype, with the same bits."""
    w = quantize(torch.randn(32, 64), "int4_g32")
    stack = w4gemm.QuantizedWeight.stack([w, w])
    rows, offsets = torch.randn(5, 64), torch.tensor([0, 2, 5], dtype=torch.int32)

    def gradients() -> list[torch.Tensor]:
        outcomes = []
        for product in (lambda x: linear(x, w.repack()), lambda x: w4gemm.grouped_linear(x, stack, offsets)):
            x = rows.clone().requires_grad_()
            product(x).square().sum().backward()
            outcomes.append(x.grad)
        return outcomes

    expected = gradients()
    with torch.autocast("cpu", dtype):
        assert all(map(torch.equal, gradients(), expected))


def test_the_activation_can_be_changed():
    x, dense = torch.randn(3, 64), torch.nn.Linear(64, 10)
    layer = W4Linear.from_linear(dense, "int4_g32")
    y = layer(x)
    for activation in ("gelu", "silu_mul"):
        layer.activation = activation
        assert torch.equal(layer(x), w4gemm.linear(x, layer.weight, layer.bias, activation=activation))
        assert f"activation={activation}" in repr(layer)
    torch.testing.assert_close(layer(x), torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2])
    assert W4Linear(64, 10, activation="relu").activation == "relu"
    with pytest.raises(ValueError, match="activation: silu_mul wants an even n"):
        W4Linear(64, 9, activation="silu_mul")


def test_hooks_and_the_training_mode_are_the_new_layers():
    pytest.importorskip("transformers")
    from w4gemm.integrations.transformers import quantize_layers

    model, seen = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), []
    model[0].register_forward_pre_hook(lambda layer, args, kwargs: seen.append(("before", kwargs)), with_kwargs=True)
    model[0].register_forward_hook(lambda layer, args, out: out + 1)
    model[0].register_forward_hook(lambda layer, args, out: seen.append(("behind", len(args))), always_call=True)
    x = torch.randn(2, 64)
    d = quantize_layers(model, "int4_g32")(x)
    assert seen == [("before", {}), ("behind", 1)] and not model[0].training
    assert torch.equal(d, w4gemm.linear(x, model[0].weight, bias=model[0].bias) + 1)


@pytest.mark.parametrize("whole", [False, True], ids=["layer", "encoder"])
def test_pytorchs_encoder_layers_in_eval_mode(whole):
    """PyTorch would hand their weights to a fused operator."""
    pytest.importorskip("transformers")
    from w4gemm.integrations.transformers import dequantize_layers, quantize_layers

    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = quantize_layers(torch.nn.TransformerEncoder(layer, 1) if whole else layer, "int4_g32").eval()
    x, padding = torch.randn(2, 5, 64), torch.tensor([[False] * 4 + [True], [False] * 5])  # tokens without padding nest
    with torch.inference_mode():
        got = model(x, src_key_padding_mask=padding)
        expected = dequantize_layers(model, torch.float32)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-4)
