"""Machine code of compiled kernels, for tests: no GPU needed."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_EM_CUDA = 190
"""e_machine of an ELF file with GPU code."""


@dataclass(frozen=True)
class Sass:
    """The SASS of one kernel."""

    text: str
    registers: int
    stack: int
    """Bytes of stack and local memory per thread; spilled registers go there."""

    def count(self, opcode: str) -> int:
        """Instructions whose opcode starts with ``opcode``, up to a dot: ``"HGMMA"`` counts ``HGMMA.64x16x16.F32``."""
        return len(re.findall(rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?{re.escape(opcode)}\b", self.text, re.MULTILINE))


class Opcode(NamedTuple):
    """The bits of an instruction's two 64-bit words that say what it is, on GPUs since Volta."""

    low: int
    """Bits 0 to 11 of the first word."""
    mask: int = 0
    high: int = 0
    """The second word under the mask."""
    either: int = 0
    """Bits of ``low`` that may be missing: of a WGMMA whose operand A comes from shared memory."""


_OPCODES = {
    "HMMA": Opcode(0x23C),
    "QMMA": Opcode(0x27A),
    "HGMMA": Opcode(0xDF0, either=0x400),
    "QGMMA": Opcode(0xDF3, either=0x400),
    "WARPGROUP.DEPBAR": Opcode(0x9C5, 0x10000, 0x10000),
    "STG.E.128": Opcode(0x986, 0xE00, 0xC00),
}
"""By name; ``test_sass.py`` compares what :func:`scan` counts with the disassembled text."""
_LDS, _LDG, _STL = 0x984, 0x981, 0x387


@dataclass(frozen=True)
class Scanned:
    """Facts of machine code that need no disassembler."""

    counts: dict[str, int]
    stack: int

    def count(self, opcode: str) -> int:
        """Instructions of a name in ``_OPCODES``; the shape of a matrix instruction is not looked at."""
        return self.counts[opcode.split(".")[0] if "MMA" in opcode else opcode]


def scan(code: bytes) -> Scanned:
    """Count instructions by their bits: 2 ms, while a disassembler takes 0.4 s to start."""
    words = np.frombuffer(b"".join(_text_sections(_cubin(code))), "<u8").reshape(-1, 2)
    low, high = words[:, 0] & 0xFFF, words[:, 1]
    counts = {name: int(((low | o.either == o.low) & (high & o.mask == o.high)).sum()) for name, o in _OPCODES.items()}
    return Scanned(counts, local_memory(code))


def loads_into_flight(code: bytes) -> list[int]:
    """Registers of operands A that are loaded anew while a WGMMA that reads them may be in flight."""
    loaded = []
    for section in _text_sections(_cubin(code)):
        groups: list[set[int]] = [set()]  # registers that the WGMMAs of each group read; the last one is open
        for low, high in np.frombuffer(section, "<u8").reshape(-1, 2).tolist():
            opcode, first = low & 0xFFF, low >> 16 & 0xFF
            if opcode in (_OPCODES["HGMMA"].low, _OPCODES["QGMMA"].low):
                a = low >> 24 & 0xFF
                groups[-1] |= set(range(a, a + 4))
                if high >> 20 & 7 == 0:  # gsb0: the last of its group
                    groups.append(set())
            elif opcode == _OPCODES["WARPGROUP.DEPBAR"].low and high & 0x10000:
                groups = groups[-1 - (high >> 8 & 7) :]
            elif opcode == _LDS:
                words = {5: 2, 6: 4}.get(high >> 9 & 7, 1)
                loaded += sorted(set().union(*groups) & set(range(first, first + words)))
    return loaded


def spilled_in_flight(code: bytes) -> list[int]:
    """Places of stores to local memory that wait for a load from global memory, so that the load was in vain ahead of
    its use. An instruction whose result takes a while names one of six scoreboards, and the first one that needs the
    result has it in its mask."""
    places = []
    for section in _text_sections(_cubin(code)):
        loading: set[int] = set()  # scoreboards of loads that nothing has waited for
        for place, (low, high) in enumerate(np.frombuffer(section, "<u8").reshape(-1, 2).tolist()):
            waits = {board for board in range(6) if high >> 52 + board & 1}
            if low & 0xFFF == _STL and waits & loading:
                places.append(16 * place)
            loading -= waits
            board = high >> 46 & 7  # 7: none
            loading = loading | {board} if low & 0xFFF == _LDG else loading - {board}
    return places


def _text_sections(cubin: bytes) -> Iterator[bytes]:
    """The instructions of each kernel in an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    first = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if cubin[first + name :].startswith(b".text."):
            yield cubin[offset : offset + length]


@functools.lru_cache(maxsize=4)
def disassemble(code: bytes) -> Sass:
    """The machine code in an object file of ``w4gemm.jit``; a config with a tail launch has two kernels, read as one.

    Raises:
        RuntimeError: if there is no cuobjdump; the ``test`` extra installs one.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(_cubin(code))
        f.flush()
        usage = _usage(f.name)
        return Sass(_cuobjdump("--dump-sass", f.name), usage.registers, usage.local_bytes)


def functions(code: bytes) -> list[str]:
    """The instructions of each kernel in an object file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(_cubin(code))
        f.flush()
        parts = _cuobjdump("--dump-sass", f.name).split("Function :")[1:]
    return ["\n".join(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", part, re.MULTILINE)) for part in parts]


def local_memory(code: bytes) -> int:
    """Bytes of stack and local memory per thread, without disassembling, which takes a hundred times as long."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(_cubin(code))
        f.flush()
        return _usage(f.name).local_bytes


class _Usage(NamedTuple):
    """Per thread: the most registers of any kernel in the object; bytes of stack and local memory of all of them."""

    registers: int
    local_bytes: int


def _usage(file: str) -> _Usage:
    usage = _cuobjdump("--dump-resource-usage", file)
    actual = [tuple(map(int, k)) for k in re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)]
    assert actual, f"wanted a kernel, found none:\n{usage}"
    return _Usage(max(registers for registers, *_ in actual), sum(stack + local for _, stack, local in actual))


SPILLED_ONCE = 32
"""Bytes per thread that a kernel may spill outside its main loop, so once a tile: too few to be seen in its time."""


def check(sass: Sass | Scanned, instruction: str, *, asynchronous: bool = True) -> None:
    """Assert what must hold of every kernel: it uses the matrix instruction that it was written for, and ptxas compiled
    it cleanly. asynchronous: False if each WGMMA is waited for on purpose."""
    assert sass.count(instruction), f"no {instruction}"
    assert not (seen := flaw(sass, instruction, asynchronous=asynchronous)), seen


def flaw(sass: Sass | Scanned, instruction: str, *, asynchronous: bool = True) -> str:
    """Return what ptxas did badly: it spilled in the main loop, or much elsewhere, or makes each WGMMA wait for the one
    before. The empty string if it did not. Arguments are those of :func:`check`."""
    spilled = f"{sass.stack} bytes of local memory"
    if isinstance(sass, Sass) and spills_in_main_loops(sass, instruction):
        return f"{spilled}, used in the main loop"
    if sass.stack > (SPILLED_ONCE if isinstance(sass, Sass) else 0):  # disassembled if it has any, see facts_of
        return spilled
    # where ptxas cannot keep accumulators in flight ("wgmma serialized"), it waits after each instruction
    waits, matrix = sass.count("WARPGROUP.DEPBAR"), sass.count(instruction)
    serialized = instruction.endswith("GMMA") and asynchronous and waits >= matrix
    return f"serialized, {waits} waits for {matrix} {instruction}" if serialized else ""


def facts_of(code: bytes) -> Sass | Scanned:
    """Facts for :func:`check`: those of its bits or, of a kernel with local memory, its disassembled text."""
    scanned = scan(code)
    return disassemble(code) if scanned.stack else scanned


def spills_in_main_loops(sass: Sass, instruction: str) -> list[str]:
    """Loads and stores of local memory in the main loops."""
    loops = main_loops(sass, instruction)
    return sorted({line for loop in loops for line in loop if line.startswith(("LDL", "STL"))})


def main_loops(sass: Sass, instruction: str) -> list[list[str]]:
    """The instructions of the innermost loops around an ``instruction``; of a kernel without such a loop, all."""
    actual = []
    for function in sass.text.split("Function :"):
        lines = re.findall(r"^\s+/\*(\w+)\*/\s+(?:@!?U?P\w+ )?([A-Z].*?)\s*;", function, re.MULTILINE)
        code = [(int(address, 16), line) for address, line in lines]
        branches = [(at, re.search(r"0x(\w+)$", line)) for at, line in code if re.match(r"BRA\b", line)]
        loops = [(start, at) for at, to in branches if to and (start := int(to[1], 16)) < at]
        ends = (code[0][0], code[-1][0]) if code else (0, 0)
        innermost = set()
        for matrix in (at for at, line in code if re.match(rf"{instruction.split('.')[0]}\b", line)):
            around = [(start, end) for start, end in loops if start <= matrix <= end]
            innermost.add(min(around, key=lambda loop: loop[1] - loop[0], default=ends))
        actual += [[line for at, line in code if start <= at <= end] for start, end in sorted(innermost)]
    return actual


def _cubin(code: bytes) -> bytes:
    starts = [m.start() for m in re.finditer(b"\x7fELF", code)]
    cubins = [i for i in starts if int.from_bytes(code[i + 18 : i + 20], "little") == _EM_CUDA]
    assert len(cubins) == 1, f"wanted one cubin in the object, found {len(cubins)}"
    return code[cubins[0] :]


def _cuobjdump(*arguments: str) -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    wheels = [str(f) for folder in folders for f in sorted(folder.glob("cu*/bin"))]
    program = shutil.which("cuobjdump", path=":".join(wheels)) or shutil.which("cuobjdump")
    if program is None:
        raise RuntimeError("no cuobjdump; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    # it looks for nvdisasm on the path
    env = {"PATH": f"{Path(program).parent}:/usr/bin:/bin"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True, env=env).stdout
