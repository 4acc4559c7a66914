"""Cases of ``python -m bench.engine``: where engines run, the checkpoints that they serve, and their rows."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.engine.checkpoint import tensors_of, write
from bench.engine.implementations import Implementation
from bench.engine.launch import Caches, EngineError, EngineOptions
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.packing import Packing
from bench.engine.preload import Preloaded
from bench.engine.rows import Answers, add_agreement
from bench.engine.turns import Turns
from bench.rows import Row

from w4gemm.console.progress import say
from w4gemm.tuning import record

_storing = threading.Lock()


def write_once(model: Model, packing: Packing, folder: Path) -> None:
    """Write a checkpoint, if it is not there."""
    done = folder / "complete"
    if done.exists():
        return
    start = time.monotonic()
    size = sum(tensor.nbytes for tensor in tensors_of(model, packing))
    say(f"{model.name}-{packing}: {size / 1e9:.1f} GB into {folder}")
    write(model, packing, folder)
    done.touch()
    say(f"{model.name}-{packing}: written in {time.monotonic() - start:.1f} s")


@dataclass(frozen=True)
class Place:
    """Where engines run.

    Attributes:
        work: folder of checkpoints and of compiled code.
        logs: folder for what engines print.
        plugin: folder with our plugin's metadata, if the package is not installed.
        preloaded: processes to fork engines of ``LLM.generate`` from, one for each that starts at the same time; or
            none.
        out: file of rows.
    """

    work: Path
    logs: Path
    plugin: Path | None
    preloaded: tuple[Preloaded, ...]
    out: Path

    def log(self, name: str) -> Path:
        """Return a file for what an engine prints, without what another printed before."""
        file = self.logs / f"{name}.log"
        file.unlink(missing_ok=True)
        return file


@dataclass(frozen=True)
class Slot:
    """One of the engines that start at the same time.

    Attributes:
        turns: shared by all of them.
        preloaded: process to fork it from; None to import vLLM anew.
        interrupted: set for all of them if the command is told to end, before it ends the engines.
    """

    turns: Turns
    preloaded: Preloaded | None
    interrupted: threading.Event


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint to serve and how.

    Attributes:
        task: what is measured of each implementation; its engine's arguments are added for each.
        serve: True to measure ``vllm serve``, False for ``LLM.generate``.
        starts: how often an engine starts; the last start is measured.
        seconds: limit of a process that is alone.
        common: fields of all rows.
        facts: of the run, with which all rows end.
        shown: the rows so far.
        reference: name and answers of the first implementation that measured all, once there is one.
    """

    model: Model
    packing: Packing
    options: EngineOptions
    task: Task
    serve: bool
    starts: int
    seconds: float
    place: Place
    common: Row
    facts: Row
    shown: list[Row] = field(default_factory=list)
    reference: list[tuple[str, Answers]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.model.name}-{self.packing}"

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self.place.work / "models" / str(self)

    @property
    def limit(self) -> float:
        """Seconds of a process, which may wait for as many others as start with it."""
        return self.seconds * self.options.at_once

    def caches_of(self, implementation: Implementation) -> Caches:
        """Return the implementation's folders of compiled code for this checkpoint."""
        caches = self.place.work / "caches"
        return Caches(caches / f"{self}-{implementation.name}", caches / "shared")

    def beside(self, count: int) -> Case:
        """Return the same case, with what it has so far, for one of ``count`` engines that share the memory."""
        return replace(self, options=replace(self.options, at_once=count), common=self.common | {"at_once": count})

    def memory_lack(self) -> str:
        """Return why the engine has too little memory beside the others; the empty string if it has enough."""
        try:
            self.options.cache_bytes(self.folder, self.model)
        except EngineError as e:
            return str(e)
        return ""

    def write(self) -> None:
        """Write the checkpoint, if it is not there."""
        write_once(self.model, self.packing, self.folder)

    def compare(self, name: str, result: Result, rows: list[Row]) -> None:
        """Compare answers with those of the first implementation; remember them if they are the first and whole."""
        answers = {point["batch"]: point["tokens"] for point in result.decode}
        if self.reference:
            add_agreement(rows, answers, *self.reference[0])
        elif not result.failure:
            self.reference.append((name, answers))

    def store(self, rows: list[Row]) -> None:
        """Write an engine's rows, which others may do at the same time."""
        with _storing:
            record.append(self.place.out, *(row | self.facts for row in rows))
            self.shown.extend(rows)

    def end(self, kept: bool) -> None:
        """Remove the checkpoint, unless it is kept."""
        if not kept:
            shutil.rmtree(self.folder)
