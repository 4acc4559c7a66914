"""The rule for files of the cache: only this user or root can have written them.

A compiled object is machine code which the process runs, so whoever can write the cache folder can run code as its
user. A file is read only if

- the file and its folder belong to this user or to root, and nobody else may write them;
- no other user can put another folder in their place. Every folder above belongs to this user or root as well, and
  others may write it only if its sticky bit keeps them from renaming what is not theirs, as in /tmp. Symbolic links on
  the way count like folders. Below a folder of this user that nobody else may enter, the modes of folders are free.

``W4GEMM_CACHE_SHARED=1`` leaves out the rules about modes; owners count all the same.

The walk goes from the root down: a step that has passed cannot be replaced by another user while the next is looked
at. The file itself is opened without following a link, and what was opened is what is checked and read.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from pathlib import Path

from w4gemm.core import environment

_log = logging.getLogger("w4gemm")
_MOST_LINKS = 40
_POSIX = hasattr(os, "geteuid")  # elsewhere there are no modes to look at


class Untrusted(PermissionError):
    """Another user can have written a file or can replace its folder; names the culprit and the remedy."""


def check_folder(folder: Path) -> None:
    """Do nothing if files in ``folder`` can be trusted.

    Raises:
        Untrusted: if they cannot.
        OSError: if the folder is not there or is no folder.
    """
    if not _POSIX:
        return
    real, about = _walk(folder)
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    _check_owned(real, about, folder)


def refusal(folder: Path) -> str:
    """Return why files in ``folder`` are not used, or the empty string; also if there is no such folder yet."""
    try:
        check_folder(folder)
    except FileNotFoundError:
        return ""
    except OSError as e:
        return f"{e.filename}: {e.strerror}" if e.filename else str(e)
    return "" if os.access(folder, os.X_OK) else f"{folder} is not used, because this user may not enter it"


def opener(path: str, flags: int) -> int:
    """For ``open(path, mode, opener=opener)``: a descriptor of a trusted regular file, made with mode 0600 if needed.

    Do not use it with a mode that truncates, which would come before the check. Errors as :func:`check_folder`.
    """
    folder = Path(path).parent
    check_folder(folder)
    # not blocking: somebody may have put a pipe there
    extra = (os.O_NOFOLLOW | os.O_NONBLOCK) if _POSIX else 0
    handle = os.open(path, flags | extra, 0o600)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path} is no regular file")
        if _POSIX:
            _check_owned(Path(path), about, folder)
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder, and those above it, with ``mode`` whatever the umask, if it is not there. Errors as
    :func:`check_folder`."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        if mode != 0o700:
            path.chmod(mode)
    check_folder(folder)


@functools.cache
def warn(message: str) -> None:
    """Log a warning, once a process."""
    _log.warning("%s", message)


def _walk(folder: Path) -> tuple[Path, os.stat_result]:
    """Return ``folder`` without symbolic links, and its status; refuse an untrusted folder above it."""
    todo = list(reversed(folder.absolute().parts))
    at, links, private = Path(todo.pop()), 0, False
    about = os.lstat(at)
    while todo:
        private = _check_step(at, about, folder, private)
        name = todo.pop()
        if name == "..":
            at, private = at.parent, False
            about = os.lstat(at)
            continue
        below = at / name
        about = os.lstat(below)
        if not stat.S_ISLNK(about.st_mode):
            at = below
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(f"{folder}: too many symbolic links")
        _check_owner(below, about, folder)
        target = Path(os.readlink(below))
        todo.extend(reversed(target.parts))
        if target.is_absolute():
            at, private = Path(todo.pop()), False
        about = os.lstat(at)
    return at, about


def _check_step(path: Path, about: os.stat_result, folder: Path, private: bool) -> bool:
    """Refuse a folder above ``folder`` in which another user can rename; True if nobody else can get below it."""
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    _check_owner(path, about, folder)
    others_rename = _bits_of_others(about) & 0o022 and not about.st_mode & stat.S_ISVTX
    if others_rename and not private and not environment.cache_is_shared():
        raise _untrusted(path, about, folder, f"chmod go-w {path}")
    return private or _is_private(about)


def _check_owned(path: Path, about: os.stat_result, folder: Path) -> None:
    """Refuse a file, or the folder itself."""
    others_write = about.st_mode & 0o022 and not environment.cache_is_shared()
    if about.st_uid not in (os.geteuid(), 0) or others_write:
        me = _user(os.geteuid())
        raise _untrusted(path, about, folder, f"chown -R {me} {folder}; chmod -R go-w {folder}")


def _check_owner(path: Path, about: os.stat_result, folder: Path) -> None:
    """Refuse a step above the folder that belongs to another user."""
    if about.st_uid != os.geteuid() and about.st_uid not in _root_ids():
        raise _untrusted(path, about, folder, f"chown {_user(os.geteuid())} {path}")


def _untrusted(path: Path, about: os.stat_result, folder: Path, remedy: str) -> Untrusted:
    trusted = f"{_user(os.geteuid())} and root" if os.geteuid() else _user(0)
    return Untrusted(
        f"{folder} is not used, because users other than {trusted} can put code there: {path} "
        f"belongs to {_user(about.st_uid)} and has mode {stat.S_IMODE(about.st_mode):04o}. Set W4GEMM_CACHE_DIR to a "
        f"folder of your own, or, if you trust all that is there: {remedy}; where that is not possible, as in a "
        "container's volume of mode 0777 that nobody else can reach: W4GEMM_CACHE_SHARED=1"
    )


def _bits_of_others(about: os.stat_result) -> int:
    """Permission bits of everybody but the owner. A group that has nobody but this user is none of the others."""
    mode = about.st_mode
    return mode & (0o007 if mode & 0o070 and _is_own_group(about.st_gid) else 0o077)


def _is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not _bits_of_others(about)


@functools.cache
def _is_own_group(gid: int) -> bool:
    """True if a group is named like this user and has no other member, as distributions with umask 002 make them."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@functools.cache
def _root_ids() -> frozenset[int]:
    """Owners that may stand for root above a folder: 0, and in a user namespace without root (Apptainer) the id that
    the files of all users outside show."""
    try:
        numbers = [int(word) for word in Path("/proc/self/uid_map").read_text().split()]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):  # not Linux
        return frozenset({0})
    return frozenset({0}) if 0 in numbers[::3] else frozenset({0, overflow})


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
