"""Puts the commit of a checkout into the packages that are built of it, for ``w4gemm info`` and for measured rows."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds the file ``commit.txt`` to what is built of a checkout. An unpacked sdist has the file already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        try:
            if not os.path.samefile(self._git("rev-parse", "--show-toplevel"), self.root):
                return
            dirty = "-dirty" if self._git("status", "--porcelain", "--", ".", ":!bench/results") else ""
            commit = self._git("rev-parse", "HEAD")
        except (OSError, subprocess.CalledProcessError):
            return
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "commit.txt"
        file.write_text(f"{commit}{dirty}\n")
        package = "src/w4gemm" if self.target_name == "sdist" else "w4gemm"
        build_data["force_include"][str(file)] = f"{package}/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()
