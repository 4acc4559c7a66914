"""Folders as Hugging Face models come in: config.json, and safetensors, one file or shards."""

from __future__ import annotations

import functools
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from w4gemm.core.errors import FormatError, require_among
from w4gemm.core.files import read_regular, why_unread
from w4gemm.core.words import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILES = _SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of which a folder has one."""
_LARGEST_JSON = 100 * 2**20
"""Bytes of a JSON file that is read: the largest index of a published model has 20 million."""
_MOST_LAYERS = 10_000
"""Layers that a config may count, because transformers makes all of them before their tensors are looked for."""
_PICKLED = ("*.bin", "*.pt", "*.pth")
"""Names of files with weights whose reading could run any code."""
_OTHER_HEADS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"
"""End of the names of classes whose models do not predict tokens."""
AS_IT_IS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers with which nothing is downloaded, and no code that lies in a folder is run or asked for."""


def model_class(config: Any) -> Any:
    """Return transformers' class that makes the model of a config: a causal language model; or one that reads images
    too, if the config names such a model, or transformers makes no other of it.

    Raises:
        ValueError: for a config of another kind of model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    other = next((name for name in config.architectures or () if name.endswith(_OTHER_HEADS)), None)
    if other or not is_model(config):
        raise ValueError(
            f"it is a {other or f'{config.model_type} model'}, no causal language model; its own class quantizes it: "
            "from_pretrained(FOLDER, quantization_config=W4GemmConfig())"
        )
    images = AutoModelForImageTextToText._model_mapping
    if type(config) not in images:
        return AutoModelForCausalLM
    named = images[type(config)].__name__ in (config.architectures or ())
    return AutoModelForImageTextToText if named or not is_language_model(config) else AutoModelForCausalLM


def is_language_model(config: Any) -> bool:
    """True if transformers makes a causal language model of a config."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def is_model(config: Any) -> bool:
    """True if transformers makes a model of a config that :func:`model_class` knows."""
    from transformers import AutoModelForImageTextToText

    return is_language_model(config) or type(config) in AutoModelForImageTextToText._model_mapping


def outline(folder: Path) -> PreTrainedModel:
    """Return a folder's model without numbers.

    Raises:
        FormatError: if transformers makes none.
    """
    with transformers_makes("model", folder), torch.device("meta"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, **AS_IT_IS)
        model: PreTrainedModel = model_class(config).from_config(config)
        return model


def part_tied(model: PreTrainedModel, name: str) -> None:
    """Give a parameter that a model ties memory of its own."""
    owner, _, leaf = name.rpartition(".")
    parameter = model.get_parameter(name)
    own = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    setattr(model.get_submodule(owner), leaf, own)
    del model.all_tied_weights_keys[name]


def read_json(file: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError, RecursionError: if it is no JSON, no regular file, or longer than any model's.
    """
    return json.loads(read_regular(file, _LARGEST_JSON))


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is none.
        FormatError: if it is no JSON object, or counts more layers than any model has.
    """
    file = folder / "config.json"
    try:
        config: dict[str, Any] = dict(read_json(file).items())
    except (ValueError, AttributeError, RecursionError) as e:
        raise FormatError(f"path: {str(file)!r} is no JSON object: {e}") from e
    check_layers(config, f"path: {str(file)!r}")
    return config


def stated_dtype(config: dict[str, Any]) -> str:
    """Return which of float32, bfloat16 and float16 a config says its model has; bfloat16 if none of them."""
    for part in (config, config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name in ("float32", "bfloat16", "float16"):
            return str(name)
    return "bfloat16"


def check_layers(config: dict[str, Any], source: str) -> None:
    """Raise FormatError if a config counts more layers than any model has."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key, value in part.items():
            if "layers" in str(key) and isinstance(value, int) and value > _MOST_LAYERS:  # labels have numbers for keys
                raise FormatError(f"{source}: {key}: wanted at most {_MOST_LAYERS}, got {value}")


def check_index(folder: Path) -> None:
    """Raise FormatError for an index of shards without "metadata", of which transformers says KeyError alone."""
    try:
        index = read_json(folder / _INDEX)
    except (OSError, ValueError, RecursionError):  # which is said where the index is read
        return
    if isinstance(index, dict) and "metadata" not in index and not (folder / _SINGLE).exists():
        raise FormatError(f'{folder}: {_INDEX} has no "metadata", which transformers wants: add "metadata": {{}} to it')


def check_files(folder: Path) -> None:
    """Raise FormatError for a pipe or a device in a folder, which a library may open and wait for."""
    for entry in os.scandir(folder):
        with suppress(OSError):  # of a link to nothing
            mode = entry.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise FormatError(f"path: {str(folder / entry.name)!r} is no regular file")


def refuse_adapter(folder: Path) -> None:
    """Raise FormatError for a folder with PEFT's adapter beside its model: transformers makes the model with both, and
    without the adapter it computes something else."""
    if (folder / "adapter_config.json").is_file():
        raise FormatError(
            f"{folder}: adapter_config.json says that PEFT's adapter is part of the model, which from_pretrained alone "
            "adds; wanted the model alone: move adapter_* to a folder for peft.PeftModel.from_pretrained(model, FOLDER)"
        )


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """Return ``quantization_config`` of a folder's config.json, or of its text_config (Kimi-K2.5); None if there are no
    such files or the model is dense. It tells a quantized model's format.

    The settings that ModelOpt writes into hf_quant_config.json alone are added, and DeepSeek-V4's ``expert_dtype``,
    which config.json has outside of it. The old name, ``compression_config``, is read too.

    Raises:
        FormatError: if config.json cannot be read.
    """
    try:
        config = read_config(folder)
        text = config.get("text_config") or {}
        keys = "quantization_config", "compression_config", "expert_dtype"
        settings, old, experts = (config.get(key, text.get(key)) for key in keys)
        settings = old if settings is None else settings
        if isinstance(mlx := config.get("quantization"), dict):
            named = isinstance(settings, dict) and "quant_method" in settings
            settings = settings if named else {"quant_method": "MLX", **mlx}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except AttributeError as e:
        raise FormatError(f"path: {str(folder / 'config.json')!r}: text_config is no JSON object: {e}") from e
    by_modelopt = settings is None or (isinstance(settings, dict) and settings.get("quant_method") == "modelopt")
    if by_modelopt and (modelopt := folder / "hf_quant_config.json").is_file():
        try:  # config.json may lack settings that are there
            settings = {"quant_method": "modelopt", **read_json(modelopt)["quantization"], **(settings or {})}
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise FormatError(f"path: {str(modelopt)!r} says no quantization: {type(e).__name__}: {e}") from e
    if settings is not None and not isinstance(settings, dict):
        raise FormatError(f"path: {str(folder / 'config.json')!r}: quantization_config is {settings!r}, no object")
    return {"expert_dtype": experts, **settings} if settings is not None and experts else settings


making = threading.RLock()
"""Held by the one thread that makes a model, config or tokenizer of transformers."""


def require_transformers() -> None:
    """Raise ImportError if transformers is not installed, with the words that install it."""
    try:
        import transformers  # noqa: F401
    except ImportError as e:
        raise ImportError(f"models need transformers and gguf: pip install '.[hf]' in a clone of w4gemm ({e})") from e


@contextmanager
def transformers_makes(product: str, path: Path) -> Iterator[None]:
    """Let transformers make a ``product`` of ``path``, in one thread at a time: it changes PyTorch's default dtype and
    its own functions meanwhile, for all threads. Its errors for a damaged config or tokenizer become a FormatError."""
    require_transformers()
    try:
        with making:
            yield
    except (ImportError, FormatError):
        raise
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise FormatError(
                f"{path}: its model's code lies in the folder, and load and the commands run no such code; "
                "from_pretrained(FOLDER, quantization_config=W4GemmConfig(), trust_remote_code=True) does"
            ) from e
        reason = printable(f"{type(e).__name__}: {' '.join(str(e).split()):.300}")
        raise FormatError(f"{path}: transformers makes no {product} of it: {reason}") from e


class TensorInfo(NamedTuple):
    """Place of a tensor: a file, and its name there; ``dtype`` is safetensors' name of it, such as "BF16"."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    stamp: tuple[int, ...]
    """The :func:`_stamp` of the file when its header was read."""

    def read(self) -> torch.Tensor:
        """Return the tensor as it is stored, on the CPU.

        Raises:
            FormatError: if its file has changed since, because it may hold another model now, or has become unreadable.
        """
        with _errors(self.file):
            if (stamp := _stamp(self.file)) != self.stamp:
                raise FormatError(f"{self.file} has changed since it was opened: open it again")
            return _opened(self.file, stamp).get_tensor(self.name)


class SafetensorsFolder:
    """The tensors of a folder with model.safetensors, or with shards and model.safetensors.index.json. An index whose
    shards are all gone is left from an earlier save, and not read beside model.safetensors.

    Attributes:
        path: the folder.
        tensors: place, dtype and shape of each tensor, by name, from the files' headers.

    Raises:
        FormatError: if a file is missing, cut short or no safetensors file, or does not hold what the index says; if
            there are both model.safetensors and shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        places = self._index()
        if places is None and not os.path.lexists(path / _SINGLE):
            raise FormatError(f"{path} holds no whole model: there is no {_SINGLE}{_variant_in(path)}")
        for file in dict.fromkeys(places.values()) if places is not None else [path / _SINGLE]:
            in_file = read_header(file)
            if twice := self.tensors.keys() & in_file.keys():
                raise FormatError(f"{path}: tensor {min(twice)!r} is in {file.name} and in another file")
            self.tensors |= in_file
        for name, file in (places or {}).items():
            if name not in self.tensors or self.tensors[name].file is not file:
                raise FormatError(f"{path}: {_INDEX} says that {name!r} is in {file.name}, which does not hold it")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, on the CPU.

        Raises:
            FormatError: if there is no such tensor, or its file has become unreadable.
        """
        require_among(self.path, "tensor", name, self.tensors)
        return self.tensors[name].read()

    def _index(self) -> dict[str, Path] | None:
        """File of each tensor, or None if there is no index."""
        try:
            places = read_json(self.path / _INDEX)["weight_map"]
            files = set(places.values())
            plain = all(isinstance(file, str) and file == Path(file).name and file.isprintable() for file in files)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise FormatError(f"{self.path}: {_INDEX} is no index of tensors: {type(e).__name__}: {e}") from e
        if not plain:
            raise FormatError(f"{self.path}: {_INDEX} names files that are not in the folder")
        paths = {file: self.path / file for file in files}  # one for all tensors of a file: there may be many
        if _SINGLE not in paths and (self.path / _SINGLE).is_file():  # transformers removes neither, and reads this one
            if any(path.exists() for path in paths.values()):
                raise FormatError(
                    f"{self.path}: holds {_SINGLE} and shards of {_INDEX}, two models of which one is left from an "
                    "earlier save; wanted one: remove the other"
                )
            return None  # whose shards transformers removed when it saved the model in one file
        return {name: paths[file] for name, file in places.items()}


def _variant_in(path: Path) -> str:
    """Return the end of a message about a folder without model.safetensors, if it has a variant of that file, or of the
    index of shards, as ``save_pretrained(variant=...)`` writes them, shards without an index, or pickled weights."""
    for name, variants in ((_INDEX, f"{_INDEX[:-5]}.*.json"), (_SINGLE, "model.*.safetensors")):
        if others := sorted(file.name for file in path.glob(variants)):
            return f"; variants are not read: rename {others[0]!r} to {name!r}"
    if others := sorted(file.name for file in path.glob("model-*-of-*.safetensors")):
        return f", nor {_INDEX}, which says what {others[0]} and other shards hold"
    if others := sorted(file.name for pattern in _PICKLED for file in path.glob(pattern)):
        return f"; pickled weights are not read: save {others[0]!r} as safetensors"
    return ""


@functools.lru_cache(maxsize=2)
def _opened(file: Path, stamp: tuple[int, ...]) -> Any:
    """Return an open file. It is kept for the tensors behind, because each opening reads the whole header: 24 ms for
    12,000 tensors."""
    return safe_open(file, "pt")


def _stamp(file: Path) -> tuple[int, ...]:
    """Numbers that change with the file."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no regular file")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _errors(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as e:  # which safetensors raises for each file that it cannot open
        if reason := why_unread(file):
            raise FormatError(f"{file} {reason}") from e
        raise FormatError(f"{file.parent} holds no whole model: there is no {file.name}") from e
    except SafetensorError as e:
        raise FormatError(f"{file} {why_unread(file) or f'is not a whole safetensors file: {e}'}") from e
    except OSError as e:
        raise FormatError(f"{file} cannot be read: {e.strerror or e}") from e


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return place, dtype and shape of each tensor in a safetensors file, by name.

    Raises:
        FormatError: if the file is missing, cut short or no safetensors file.
    """
    with _errors(file):
        f = _opened(file, stamp := _stamp(file))
        slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    if odd := next((name for name in slices if not name.isprintable()), None):
        raise FormatError(f"{file}: a tensor is called {odd!r:.200}, wanted a name of printable characters")
    return {name: TensorInfo(file, name, s.get_dtype(), tuple(s.get_shape()), stamp) for name, s in slices.items()}


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that a safetensors file holds beside its tensors, by name.

    Raises:
        FormatError: if the file is missing, cut short or no safetensors file.
    """
    with _errors(file):
        return _metadata(file, _stamp(file))


@functools.lru_cache(maxsize=2)
def _metadata(file: Path, stamp: tuple[int, ...]) -> dict[str, str]:
    return _opened(file, stamp).metadata() or {}
