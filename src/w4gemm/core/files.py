"""Writes of files that are whole or absent, :func:`placed`, reads that refuse pipes and devices, :func:`read_regular`,
what lies at a user's path: :func:`existing`, :func:`lacks_weights`, :func:`why_unread`, and what Linux says of the
machine: :func:`linux_says`. Importing this does without PyTorch."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_OF_HUB = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
"""Address of a model of the hub."""


def existing(path: str | Path) -> Path:
    """Return the path of a file or folder that is there; ``~`` is the home folder.

    Raises:
        FileNotFoundError: if nothing is there.
    """
    if not str(path):
        raise FileNotFoundError("path: wanted a file or folder, got an empty string; '.' is the current folder")
    url = _OF_HUB.match(str(path))
    try:
        path = Path(path).expanduser()
    except RuntimeError as e:  # no such user
        raise FileNotFoundError(f"path: {str(path)!r}: {e}") from e
    if path.exists():
        return path
    is_hub_name = (
        not path.is_absolute() and len(path.parts) == 2 and path.suffix != ".gguf" and not path.parent.exists()
    )
    hub = ""
    if is_hub_name or url:
        name = url[1] if url else path
        hub = f"; nothing is downloaded: if it is a model of the hub, `hf download {name}` prints its folder"
    raise FileNotFoundError(f"path: no file or folder {str(path)!r}{hub}")


_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Ends of the names of files with a model's numbers."""


def lacks_weights(path: Path) -> bool:
    """True for a folder that describes a model, but has no file with its numbers."""
    return (path / "config.json").is_file() and not any(file.suffix in _WEIGHTS for file in path.iterdir())


def described(path: Path) -> str:
    """Describe a file or a folder that is no model, for a message."""
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir())
        if snapshots := sorted(path.glob("snapshots/*/config.json")):
            return f"a folder of the hub's cache: give the model's folder in it, {str(snapshots[0].parent)!r}"
        if "adapter_config.json" in names:
            return "an adapter of PEFT: give its model, to which peft.PeftModel.from_pretrained(model, FOLDER) adds it"
        return (
            f"a folder with {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "an empty folder"
        )
    if path.suffix == ".safetensors":
        return f"a file of tensors: give its folder, {str(path.parent)!r}"
    with path.open("rb") as f:
        return f"a file that begins with {f.read(8)!r}"


def why_unread(file: Path) -> str:
    """Return in words, to stand behind its path, why a file that should hold numbers does not: what kept its download
    from ending, or the system's reason. The empty string if the bytes themselves are to blame, or no file is there."""
    try:
        with file.open("rb") as f:
            if f.read(len(_POINTER)) == _POINTER:
                return "is a pointer of Git LFS, which `git lfs pull` in its folder replaces by the file"
    except FileNotFoundError:
        return "is a link to a file that is not there" if file.is_symlink() else ""
    except OSError as e:
        return f"cannot be read: {e.strerror or e}"
    return ""


_POINTER = b"version https://git-lfs"
"""Start of what Git leaves in place of a large file."""


def system_reason(error: OSError) -> str:
    """Return what the operating system says of paths, without its [Errno ...]; else the error's own text."""
    if not error.strerror or error.filename is None:  # None: of an open file
        return error.strerror or str(error)
    names = (error.filename, error.filename2)
    paths = " -> ".join(os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in names if name)
    return f"{paths}: {error.strerror}"


UNFINISHED = ".unfinished"
"""End of the name of a file that is being written."""
_ABANDONED_S = 86400.0
"""Time without a write after which an unfinished file is nobody's, if its process cannot be looked up from here."""


@contextlib.contextmanager
def placed(file: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file to write, which no other process or thread writes. It gets the name ``file``
    at the end, so that ``file`` is whole if it exists. A link at that path is replaced, not followed.

    Raises:
        OSError: if it cannot be written, as on a full disk. It names ``file``, which does not change.
    """
    start = f"{file.name[:50]}."  # of a name as long as they can be, so that the end has room
    own = f"{_pid_namespace()}-{os.getpid()}-{threading.get_ident():x}{UNFINISHED}"
    _remove_leftovers(file.parent, start, own)
    unfinished = file.with_name(start + own)
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield unfinished
        unfinished.replace(file)
    except BaseException as e:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if not isinstance(e, OSError):
            raise
        if e.errno is not None and (e.filename is None or str(e.filename) == str(unfinished)):  # None: of an open file
            raise OSError(e.errno, e.strerror, str(file)) from e
        if e.errno is None and str(unfinished) in str(e):
            raise OSError(str(e).replace(str(unfinished), str(file))) from e
        raise


@functools.cache
def _pid_namespace() -> str:
    """Return a short name of this host and container. Within it the number of a process is unique."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        container = ""
    return hashlib.sha256(f"{socket.gethostname()} {container}".encode()).hexdigest()[:8]


def _remove_leftovers(folder: Path, start: str, own: str) -> None:
    """Remove what processes that were killed, or had this one's number before it, left of their writes of a file."""
    for leftover in folder.glob(f"{glob.escape(start)}*-*-*{UNFINISHED}"):
        end = leftover.name.removeprefix(start)
        with contextlib.suppress(OSError):
            if end == own or _is_abandoned(leftover, *end.split("-")[:2]):
                leftover.unlink()


def _is_abandoned(unfinished: Path, namespace: str, process: str) -> bool:
    """True if the process that writes a file has ended. If it runs on another host or in another container, only the
    time of its last write is known."""
    if namespace == _pid_namespace() and process.isdecimal() and Path("/proc/self").exists():
        return not Path("/proc", process).exists()
    return time.time() - unfinished.lstat().st_mtime > _ABANDONED_S


def read_regular(file: Path, most: int) -> bytes:
    """Return the bytes of a regular file; a pipe or a device may have no end, or never begin.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no regular file, or is longer than ``most`` bytes.
    """
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as f:
        if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = f.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def linux_says(file: str, line: str) -> str | None:
    """Return what the group of a pattern matches in a line of /proc/``file``; None if no line does, or not on Linux."""
    try:
        match = re.search(f"^{line}$", Path("/proc", file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return match and match[1]
