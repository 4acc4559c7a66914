"""The packages that are released: what is in the wheel and the sdist, their metadata, and what messages say to install.

CONTRIBUTING.md has the release checklist, with what is too slow for every run.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import w4gemm

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "from hatchling import build as b; print(b.build_{0}('{1}'))"


def sources() -> list[str]:
    """Paths of the repository's files; in an unpacked sdist, of its files."""
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if git.returncode == 0 and (ROOT / ".git").exists():
        files = git.stdout.splitlines()
    else:
        is_sdist = (ROOT / "PKG-INFO").exists()
        files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if is_sdist and path.is_file()]
        files = [path for path in files if not re.search(r"^PKG-INFO$|__pycache__|^\.\w+_cache/", path)]
    files = [path for path in files if (ROOT / path).exists()]
    if not files:
        pytest.skip("needs a checkout or an unpacked sdist")
    return sorted(files)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(sdist, wheel made of it, wheel made of the sources), from a copy, so that the checkout stays as it is."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("release")
    for path in sources():
        (folder / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "copy" / path)
    sdist = make("sdist", folder / "copy", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, make("wheel", unpacked, folder / "of_sdist"), make("wheel", folder / "copy", folder / "of_copy")


def make(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel as pip does, without an environment of its own."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD.format(kind, target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def test_packages_of_a_checkout_know_its_commit(
    built: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a wheel that is made of the sdist; ``w4gemm info`` prints it."""
    from w4gemm.tuning import record

    checkout, own = built[0].parent / "checkout", {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tmp_path)}
    shutil.copytree(built[0].parent / "copy", checkout)
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("W4GEMM_COMMIT", raising=False)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    sdist = make("sdist", checkout, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout / "README.md").write_text("changed\n")
    wheels = [make("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "of_sdist")]
    wheels.append(make("wheel", checkout, tmp_path / "changed"))
    for wheel, expected in zip(wheels, ((commit, False), (commit, True)), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("w4gemm/commit.txt", tmp_path)
        monkeypatch.setattr(record, "_BUILT_OF", tmp_path / "w4gemm/commit.txt")
        facts = record.facts()
        assert (facts["commit"], facts["dirty"]) == expected


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_sdist_is_the_repository(built: tuple[Path, Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert sorted(name for name in names if name != "PKG-INFO") == sources()


def test_the_wheel_is_the_package(built: tuple[Path, Path, Path]) -> None:
    lists = []
    for wheel in built[1:]:
        with zipfile.ZipFile(wheel) as archive:
            lists.append(sorted(name for name in archive.namelist() if ".dist-info/" not in name))
    assert lists[0] == lists[1]
    package = [path.removeprefix("src/") for path in sources() if path.startswith("src/w4gemm/")]
    assert lists[0] == [path for path in package if not path.endswith(".md")]
    assert "w4gemm/py.typed" in lists[0]


def test_metadata(built: tuple[Path, Path, Path]) -> None:
    files = metadata(built[1])
    assert files["Name"] == "w4gemm" and files["Version"] == w4gemm.__version__
    assert sorted(files["Requires-Python"].split(",")) == sorted(PROJECT["requires-python"].split(","))
    assert files["License-Expression"] == "Apache-2.0"
    assert files["License-File"] == "LICENSE" and files["Description-Content-Type"] == "text/markdown"
    text = str(files.get_payload())
    assert text.startswith("# w4gemm") and "backend, or a plugin of vLLM or SGLang" in " ".join(text.split())
    assert not re.search(r"\]\((?!https?:)", text), "an index follows no relative link"
    assert set(files.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert all(re.fullmatch(r"[\w -]+, https://\S+", url) for url in files.get_all("Project-URL", []))
    classifiers = files.get_all("Classifier", [])
    assert classifiers == PROJECT["classifiers"] and "Typing :: Typed" in classifiers
    versions = [line.rpartition(" ")[2] for line in classifiers if re.search(r"Python :: 3\.\d+$", line)]
    assert f">={versions[0]}" in files["Requires-Python"] and versions == ["3.10", "3.11", "3.12", "3.13"]


def test_the_readme_of_an_index_has_absolute_links_once_there_is_an_address() -> None:
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text()
    links = len(re.findall(r"\]\((?!https?:|#)", text))
    for pattern, place in zip(
        hook["fancy-pypi-readme"]["substitutions"], ("![\\1](https://a/raw", "[\\1](https://a"), strict=True
    ):
        text = re.sub(pattern["pattern"], f"{place}/\\2)", text)
    assert text.count("](https://a/") == links > 20


def test_from_a_zip_file_the_cpu_multiplies_and_gpu_kernels_say_what_they_lack(built: tuple[Path, Path, Path]) -> None:
    pytest.importorskip("cutlass")
    script = f"""
import sys; sys.path[:] = {[str(built[1]), *(path for path in sys.path if path != str(ROOT / "src"))]!r}
import torch, w4gemm
from w4gemm.cli.__main__ import main
assert w4gemm.__file__.startswith({str(built[1])!r})
print(w4gemm.linear(torch.ones(3, 64), w4gemm.quantize(torch.ones(32, 64)).repack()).shape)
sys.exit(main(["explain", "--m", "1", "--n", "64", "--k", "64", "--device", "h200"]))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.startswith("torch.Size([3, 32])"), run.stderr
    reason = f"needs w4gemm's sources in a folder, as pip installs them, and {built[1]}/"
    assert re.search(rf"^  [\w, ]*\bsm90_decode\b.*: {re.escape(reason)}", run.stdout, re.MULTILINE), run.stdout


def test_the_changelog_has_this_version_first() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == w4gemm.__version__


def test_what_is_to_be_installed_exists() -> None:
    """Every ``pip install '.[...]'`` of messages and documents names extras that there are. None names w4gemm, which is
    on no index yet."""
    texts = [path for path in sources() if path.startswith(("src/", "docs/")) or "/" not in path]
    commands = [
        (path, command)
        for path in texts
        if path.endswith((".py", ".md"))
        for command in re.findall(r"pip install ([^\n`\"]*)", (ROOT / path).read_text())
    ]
    assert len(commands) > 5
    for path, command in commands:
        for extras in re.findall(r"'\.\[([\w,]+)\]'", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), (path, command)
        assert not re.match(r"['\"]?w4gemm\b", command), (path, command)


def test_what_a_command_needs_for_a_dense_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extra hf they said "No module named 'transformers'" alone."""
    pytest.importorskip("transformers")
    from tiny_model import write_dense
    from w4gemm.cli.__main__ import main
    from w4gemm.integrations.transformers import load

    folder = str(write_dense(tmp_path / "dense"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "models need transformers and gguf: pip install '.[hf]' in a clone of w4gemm ("
    for arguments in (["inspect", folder], ["convert", folder, f"{tmp_path}/out"], ["tune", "--model", folder]):
        assert main(arguments) == 1
        assert f"w4gemm: error: {message}" in capsys.readouterr().err
    with pytest.raises(ImportError, match=re.escape(message)):
        load(folder)
