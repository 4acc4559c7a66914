"""w4gemm as a kernel of the Hugging Face hub, loaded by the package that loads such kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import w4gemm
from w4gemm.integrations import hub

LOAD = """
import sys
from pathlib import Path

sys.path[:] = [p for p in sys.path if not (Path(p or ".") / "w4gemm").is_dir()]  # nothing that is installed
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
import torch

w = kernel.quantize(torch.ones(32, 64), "int4_g32").repack()
assert kernel.linear(torch.ones(2, 64), w).shape == (2, 32)
print(Path(sys.modules["w4gemm"].__file__).parent)
"""


def test_a_repository_loads_without_an_installed_package(tmp_path):
    pytest.importorskip("kernels")
    hub.write(tmp_path / "hub")
    run = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "hub")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "hub/build/torch-cpu/w4gemm")


def test_another_version_that_is_installed_is_refused(tmp_path, monkeypatch):
    hub.write(tmp_path)
    init = tmp_path / "build/torch-cpu/__init__.py"
    code = init.read_text().replace(w4gemm.__version__, "0.0.1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ImportError, match=f"this kernel is w4gemm 0.0.1, but w4gemm {w4gemm.__version__} is installed"):
        exec(code, {"__file__": str(init)})


def test_what_is_written(tmp_path):
    hub.write(tmp_path)
    for device in hub.PACKAGES:
        folder = tmp_path / "build" / f"torch-{device}"
        facts = json.loads((folder / "metadata.json").read_text())
        assert facts["backend"] == {"type": device} and facts["id"].startswith(f"w4gemm_{device}_")
        written = {path.relative_to(folder / "w4gemm") for path in (folder / "w4gemm").rglob("*") if path.is_file()}
        assert Path("kernels/sm90_decode/kernel.py") in written and Path("choice/tables") in {p.parent for p in written}
        assert not any("__pycache__" in path.parts for path in written)
    with pytest.raises(ValueError, match="FOLDER: wanted a new or an empty folder, got"):
        hub.write(tmp_path)
