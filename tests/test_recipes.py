"""The recipes of docs/transformers.md for other programs.

lm-eval and GPTQModel are run if they are installed. Else a stand-in has the signature of 0.4.13's ``simple_evaluate``,
and calls ``from_pretrained`` as its class HFLM does; GPTQModel's have 7.7.0's signatures.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tiny_model
from quantized_model import write_model
from test_gptq import CONFIG, writer
from w4gemm.integrations.transformers import disable, load, summarize

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs/transformers.md").read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "quantized"
    disable()


def recipe(package: str) -> str:
    """The block that imports a package."""
    (block,) = (block for block in BLOCKS if f"from {package} import" in block)
    return block


def test_lm_eval_evaluates_packed_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder, CONFIG, writer(-1))
    evaluated: list[Any] = []
    if importlib.util.find_spec("lm_eval") is None:
        stand_in: Any = ModuleType("lm_eval")

        def simple_evaluate(model: str, model_args: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
            assert model == "hf" and tasks == ["wikitext"]
            evaluated.append(from_pretrained(**model_args))
            return {"results": {}}

        stand_in.simple_evaluate = simple_evaluate
        monkeypatch.setitem(sys.modules, "lm_eval", stand_in)
    else:
        from lm_eval.models.huggingface import HFLM

        def evaluate(lm: Any, **options: Any) -> dict[str, Any]:  # a task would load a data set from the hub
            assert isinstance(lm, HFLM)
            (answer,) = lm.loglikelihood([SimpleNamespace(args=("he", "llo"))])
            assert answer[0] < 0
            evaluated.append(lm.model)
            return {"results": {}}

        monkeypatch.setattr("lm_eval.evaluator.evaluate", evaluate)
        nothing = SimpleNamespace(load=lambda tasks: {"tasks": {}, "groups": {}})
        monkeypatch.setattr("lm_eval.evaluator.TaskManager", lambda **options: nothing)
        monkeypatch.setattr("lm_eval.evaluator._log_selected_tasks", lambda *args: None)
    names: dict[str, Any] = {"folder": str(folder)}
    exec(recipe("lm_eval").replace('"pretrained": folder', '"pretrained": folder, "device": "cpu"'), names)
    (model,) = evaluated
    assert summarize(model).quantized and "results" in names["results"]
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load(folder, device="cpu")[0].to(model.dtype)(ids).logits)


def from_pretrained(pretrained: str, device: str) -> Any:
    """Load a model with the arguments of HFLM."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers import AutoQuantizationConfig

    config = AutoConfig.from_pretrained(pretrained, revision="main", trust_remote_code=False)
    return AutoModelForCausalLM.from_pretrained(
        pretrained,
        revision="main",
        dtype="auto",
        trust_remote_code=False,
        gguf_file=None,
        quantization_config=AutoQuantizationConfig.from_dict(config.quantization_config),
        subfolder="",
        device_map={"": device},
    ).eval()


def test_gptqmodel_quantizes_and_w4gemm_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, texts = "dense", ["some text"]
    if importlib.util.find_spec("gptqmodel") is None:
        monkeypatch.setitem(sys.modules, "gptqmodel", stand_in_for_gptqmodel())
    else:
        monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")  # which machines of two cores lack
        monkeypatch.setattr(tiny_model, "HIDDEN", 256)  # two groups of columns
        monkeypatch.setattr(tiny_model, "FFN", 512)
        dense = str(tiny_model.write_dense(folder.parent / "dense"))
        texts = [" ".join(f"the he {i} {j}" for j in range(200)) for i in range(8)]
    names: dict[str, Any] = {"dense": dense, "texts": texts, "folder": str(folder)}
    exec(recipe("gptqmodel").replace('"cuda"', '"cpu"'), names)
    assert summarize(names["model"]).quantized and names["tokenizer"]("hello").input_ids


def stand_in_for_gptqmodel() -> ModuleType:
    class Quantizer:
        def quantize(self, calibration: list[str]) -> None:
            self.calibration = calibration

        def save(self, save_dir: str) -> None:
            assert self.calibration == ["some text"]
            write_model(Path(save_dir), CONFIG, writer(-1))

    def open_dense(model_id_or_path: str, quantize_config: Any = None) -> Quantizer:
        assert model_id_or_path == "dense" and quantize_config == {"bits": 4, "group_size": 128}
        return Quantizer()

    stand_in: Any = ModuleType("gptqmodel")
    stand_in.GPTQModel, stand_in.QuantizeConfig = SimpleNamespace(load=open_dense), dict
    return stand_in
