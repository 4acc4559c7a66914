"""w4gemm as a kernel of the Hugging Face hub, which the package ``kernels`` loads:

    python -m w4gemm.integrations.hub FOLDER

writes the repository of such a kernel from the sources of this installation. ``kernels.get_local_kernel(FOLDER)`` loads
it from there, and ``kernels.get_kernel(NAME, version=1)`` once it is uploaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import w4gemm

VERSION = 1
"""Version of the names that :mod:`w4gemm` exports; it is raised when one of them breaks."""
PACKAGES: dict[str, list[str]] = {"cuda": ["nvidia-cutlass-dsl", "tvm-ffi"], "cpu": []}
"""By the hub's name of a device: the packages that are needed beside PyTorch, as the hub names them."""

_INIT = '''"""The package w4gemm beside this file, under its own name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # behind an installed w4gemm

import w4gemm

if w4gemm.__version__ != {version!r}:
    raise ImportError(
        f"this kernel is w4gemm {version}, but w4gemm {{w4gemm.__version__}} is installed in "
        f"{{Path(w4gemm.__file__).parent}}; uninstall that, or load a kernel of its version"
    )

from w4gemm import *  # noqa: E402, F403
from w4gemm import __all__  # noqa: E402, F401
'''

_CARD = """---
license: apache-2.0
tags: [kernels]
---

# w4gemm {version}

Matrix multiplication by weights of 4 bits first, and of 2 to 8, in CuTe DSL: fastest on NVIDIA Hopper, for GPUs from
Ampere on and CPUs.

```python
import torch
from kernels import get_kernel

w4gemm = get_kernel("NAME/w4gemm", version={hub})
w = w4gemm.quantize(torch.randn(4096, 4096, device="cuda"), "int4_g128").repack()
y = w4gemm.linear(torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16), w)
```
"""


def write(folder: Path) -> None:
    """Write the repository.

    Args:
        folder: where to; it is made, and must be empty if it exists.

    Raises:
        ValueError: if the folder has something in it.
        OSError: if the sources cannot be copied.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"FOLDER: wanted a new or an empty folder, got {folder}, which has something in it")
    package = Path(w4gemm.__file__).parent
    sources = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    for device, packages in PACKAGES.items():
        target = folder / "build" / f"torch-{device}"
        for path in sources:
            copy = target / "w4gemm" / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (target / "__init__.py").write_text(_INIT.format(version=w4gemm.__version__))
        facts = {
            "id": f"w4gemm_{device}_{digest}",
            "name": "w4gemm",
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": packages,
            "backend": {"type": device},
        }
        (target / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "README.md").write_text(_CARD.format(version=w4gemm.__version__, hub=VERSION))


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m w4gemm.integrations.hub FOLDER")
    try:
        write(Path(sys.argv[1]))
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
