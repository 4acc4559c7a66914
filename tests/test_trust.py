"""The cache executes nobody else's code: what another user can have written is not read, nor written to."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tiny_kernel import tiny
from w4gemm import UnsupportedError
from w4gemm.choice import table
from w4gemm.cli.__main__ import main
from w4gemm.core import trust
from w4gemm.jit import compile as jit
from w4gemm.jit import compiled, disk

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that this user made."""
    monkeypatch.setattr(trust, "_is_private", lambda about: False)  # which pytest's folders are
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit, "_memory", {})
    trust.warn.cache_clear()
    trust.make_folder(folder)
    return folder


def refused(path: Path) -> bool:
    try:
        with open(path, "rb", opener=trust.opener):
            return False
    except trust.Untrusted:
        return True


def test_what_this_user_made_is_taken(folder):
    (folder / "f").write_bytes(b"1")
    (folder / "f").chmod(0o644)
    for mode in (0o700, 0o755, 0o500):
        folder.chmod(mode)
        assert not refused(folder / "f")
    assert oct(folder.parent.stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o722, 0o702])
def test_a_folder_that_others_may_write(folder, mode):
    (folder / "f").write_bytes(b"1")
    folder.chmod(mode)
    assert refused(folder / "f")


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o775])
def test_a_volume_that_everybody_may_write_by_request(folder, mode, monkeypatch):
    """Kubernetes' emptyDir is one; owners count all the same."""
    (folder / "f").write_bytes(b"1")
    folder.chmod(mode)
    folder.parent.chmod(mode)
    with pytest.raises(trust.Untrusted, match="W4GEMM_CACHE_SHARED=1"):
        trust.check_folder(folder)
    monkeypatch.setenv("W4GEMM_CACHE_SHARED", "1")
    assert not refused(folder / "f")
    if os.geteuid() == 0:
        os.chown(folder / "f", NOBODY, NOBODY)
        assert refused(folder / "f")
        os.chown(folder / "f", 0, 0)
        os.chown(folder.parent, NOBODY, NOBODY)
        assert refused(folder / "f")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write(folder, mode):
    (folder / "f").write_bytes(b"1")
    (folder / "f").chmod(mode)
    assert refused(folder / "f")


@as_root
def test_what_belongs_to_another_user(folder):
    (folder / "f").write_bytes(b"1")
    os.chown(folder / "f", NOBODY, NOBODY)
    assert refused(folder / "f")
    os.chown(folder / "f", 0, 0)
    assert not refused(folder / "f")
    os.chown(folder, NOBODY, NOBODY)
    assert refused(folder / "f")
    os.chown(folder, 0, 0)
    os.chown(folder.parent, NOBODY, NOBODY)  # who can put another folder there at any time
    assert refused(folder / "f")


@as_root
def test_a_folder_above_that_others_may_write(folder):
    (folder / "f").write_bytes(b"1")
    above = folder.parent
    above.parent.chmod(0o755)
    for mode, ours in ((0o777, False), (0o1777, True), (0o775, True)):  # the last by root's own group
        above.chmod(mode)
        assert refused(folder / "f") is not ours
    os.chown(above, 0, NOBODY)
    above.chmod(0o775)
    assert refused(folder / "f")


def test_below_a_folder_that_nobody_else_may_enter_modes_are_free(tmp_path):
    (tmp_path / "above" / "cache").mkdir(parents=True)
    (tmp_path / "above" / "cache" / "f").write_bytes(b"1")
    (tmp_path / "above" / "cache").chmod(0o755)
    (tmp_path / "above").chmod(0o777)
    tmp_path.chmod(0o700)
    assert not refused(tmp_path / "above" / "cache" / "f")


def test_symbolic_links(folder):
    """One of this user's on the way is followed; a file that is one is not."""
    (folder / "f").write_bytes(b"1")
    (folder.parent / "link").symlink_to("cache/../cache")
    assert not refused(folder.parent / "link" / "f")
    (folder / "g").symlink_to("f")
    with pytest.raises(OSError, match="symbolic link"):
        refused(folder / "g")
    (folder.parent / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        refused(folder.parent / "loop" / "f")


@as_root
def test_a_symbolic_link_of_another_user(folder):
    (folder / "f").write_bytes(b"1")
    link = folder.parent / "link"
    link.symlink_to(folder)
    os.lchown(link, NOBODY, NOBODY)
    assert refused(link / "f")


def test_a_pipe_does_not_hang(folder):
    os.mkfifo(folder / "f")
    with pytest.raises(OSError, match="no regular file"):
        refused(folder / "f")


@as_root
def test_a_user_namespace_without_root(folder, monkeypatch):
    """There root's files show the id of every user outside: good enough above the folder, not for the folder."""
    (folder / "f").write_bytes(b"1")
    monkeypatch.setattr(trust, "_root_ids", lambda: frozenset({0, NOBODY}))
    os.chown(folder.parent, NOBODY, NOBODY)
    assert not refused(folder / "f")
    os.chown(folder, NOBODY, NOBODY)
    assert refused(folder / "f")


# --- what the cache makes of it --------------------------------------------------------------------------------------


@as_root
def test_a_planted_object_is_never_loaded(folder, monkeypatch, caplog):
    """Another user's folder, open to all, with a whole object of any processor's name in it."""
    pytest.importorskip("cutlass")
    name = disk.entry_name(tiny())
    disk.write(name, b"code that another user wrote")
    planted = folder / f"{name.rpartition('-')[0]}-00000000.o"
    os.rename(folder / name, planted)
    assert disk.read(name) == b"code that another user wrote", "ours is taken"
    os.chown(planted, NOBODY, NOBODY)
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o1777)
    loaded: list[bytes] = []
    load = jit._load
    monkeypatch.setattr(jit, "_load", lambda code: (loaded.append(code), load(code))[1])
    with caplog.at_level(logging.WARNING, "w4gemm"):
        assert callable(compiled(tiny()))
        assert callable(compiled(tiny(3.0)))
        assert table.read(folder / table.USER_FILE) == ()
    assert b"code that another user wrote" not in loaded
    assert os.listdir(folder) == [planted.name], "nothing is written there either"
    (warning,) = caplog.messages
    assert all(part in warning for part in (str(folder), "nobody", "mode 1777", "W4GEMM_CACHE_DIR", "chown -R"))
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    with pytest.raises(UnsupportedError, match="belongs to nobody and has mode 1777"):
        compiled(tiny(4.0))


def test_folders_are_private_whoever_makes_them(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "a" / "objects"))
        disk.write("x-sm_90a-1-2.o", b"code")
        table.append(tmp_path / "b" / table.USER_FILE, [])
        trust.make_folder(tmp_path / "c/d", 0o755)
    finally:
        os.umask(before)
    made = ("a", "a/objects", "a/objects/x-sm_90a-1-2.o", "b", f"b/{table.USER_FILE}", "c", "c/d")
    modes = [oct((tmp_path / path).stat().st_mode & 0o777) for path in made]
    assert modes == ["0o700", "0o700", "0o600", "0o700", "0o600", "0o755", "0o755"]


def test_the_lock_file_is_no_way_to_empty_another(folder):
    (folder.parent / "precious").write_text("kept")
    (folder / f".{table.USER_FILE}.lock").symlink_to(folder.parent / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        table.append(folder / table.USER_FILE, [])
    assert (folder.parent / "precious").read_text() == "kept"


TRAILERS = {"no processor": b"", "not ASCII": b"\xff\xfe", "JSON": b'["x86_64"]', "nested": b"[" * 100000}


@pytest.mark.parametrize("trailer", TRAILERS.values(), ids=TRAILERS)
def test_a_right_checksum_over_a_wrong_trailer_is_a_miss(folder, trailer):
    import hashlib

    for name, size in (("a", len(trailer)), ("b", 2**32 - 1)):
        for code in (b"code", b""):
            body = code + trailer + size.to_bytes(4, "little")
            (folder / f"{name}-sm_90a-1-00000000.o").write_bytes(body + hashlib.sha256(body).digest())
            assert disk.read(f"{name}-sm_90a-1-2.o") is None
    (folder / "c-sm_90a-1-2.o").write_bytes(hashlib.sha256(b"").digest())
    assert disk.read("c-sm_90a-1-2.o") is None


def test_what_a_killed_process_left_is_deleted(folder):
    old, new = folder / ".x-sm_90a-1-2.o.abcdefgh", folder / ".y-sm_90a-1-2.o.abcdefgh"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    disk._delete_abandoned.cache_clear()
    disk.write("z-sm_90a-1-2.o", b"code")
    assert not old.exists() and new.exists()


def test_info_says_why_a_folder_is_not_used(folder, capsys):
    assert main(["info"]) == 0 and "is not used" not in capsys.readouterr().out
    folder.chmod(0o777)
    assert main(["info"]) == 0
    assert f"{folder} is not used, because users other than" in capsys.readouterr().out


def test_clear_deletes_objects_and_leftovers_of_a_trusted_folder_alone(folder):
    names = {"x-sm_90a-1-2.o", ".y-sm_90a-1-2.o.abcdefgh", "kept"}
    for name in names:
        (folder / name).touch()
    folder.chmod(0o777)
    with pytest.raises(trust.Untrusted, match="mode 0777"):
        disk.clear()
    assert set(os.listdir(folder)) == names
    folder.chmod(0o700)
    assert disk.clear() == 1 and os.listdir(folder) == ["kept"]


def test_an_object_that_is_written_while_another_process_clears(folder, monkeypatch, caplog):
    """Nothing is stored, and nothing is wrong with the folder."""
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (disk.clear(), replace(*paths)))
    with caplog.at_level(logging.WARNING, "w4gemm"):
        assert not disk.write("z-sm_90a-1-2.o", b"code")
    assert not caplog.text and not os.listdir(folder)


def test_compiling_processes_import_nothing_of_the_current_folder(folder, tmp_path):
    pytest.importorskip("cutlass")
    (tmp_path / "pickle.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit")
    script = f"""
import sys; sys.path[:] = {[p for p in sys.path if p]!r}
from tiny_kernel import tiny
from w4gemm.jit.pool import CompilePool
with CompilePool(workers=1) as pool:
    print(len(pool.submit([tiny()])[0].result(timeout=600)))
"""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/script.py").write_text(script)
    run = subprocess.run([sys.executable, tmp_path / "bin/script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and int(run.stdout) > 1000, run.stderr
    assert not (tmp_path / "ran").exists()


@as_root
def test_what_root_compiled_another_user_may_load_and_not_change():
    """A container does this: the folder is filled as root and used by a user without rights."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        os.chmod(above, 0o755)
        path = Path(above) / "kernels" / "f"
        trust.make_folder(path.parent, 0o755)
        path.write_bytes(b"code")
        path.chmod(0o644)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                code = 0 if not refused(path) and path.read_bytes() == b"code" and not may_write(path) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@as_root
def test_a_folder_that_this_user_may_not_enter():
    """A container whose user has no rights and root's home folder: nothing is found there, and nothing fails."""
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import os
from w4gemm.cli import cache, info, tune  # with Python's own modules, which this user may not read in root's home
from w4gemm.cli.__main__ import main
from w4gemm.jit import disk
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
assert disk.read("a-sm_90a-b-c.o") is None and disk.find("a-sm_90a-b-c.so") is None and disk.stored() == []
assert not disk.write("a-sm_90a-b-c.o", b"code")
assert main(["info"]) == 0 and main(["cache", "list"]) == 0 and main(["cache", "path"]) == 0
assert main(["tune", "--shapes", "64x64", "--m", "1", "--device", "cpu"]) == 0
os.environ["W4GEMM_CACHE_DIR"] = os.environ["HOME"]
assert main(["cache", "list"]) == 0 and main(["cache", "clear"]) == 1
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        environment = os.environ | {"W4GEMM_CACHE_DIR": f"{home}/.cache/w4gemm", "HOME": home}
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert "cannot keep tuned configs in" in run.stderr and "kept in" not in run.stderr
    assert f"{home}/.cache: Permission denied" in run.stdout, "info says what is in the way"
    assert f"cannot read the tuned configs in {home}/.cache/w4gemm/tuned.jsonl (Permission denied)" in run.stderr
    assert run.stderr.count(f"{home} is not used, because this user may not enter it") == 2, "list and clear say so"


def may_write(path: Path) -> bool:
    try:
        with open(path, "ab", opener=trust.opener):
            return True
    except PermissionError:
        return False
