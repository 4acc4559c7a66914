"""PTX of one kernel, as the compiler writes it: its instructions and registers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from emulator.numbers import DTYPES


class Address(NamedTuple):
    """An operand in brackets."""

    base: str
    offset: int
    coordinates: tuple[str, ...] = ()
    """Coordinates in a tensor map, the column first."""


class Instruction(NamedTuple):
    """A statement of PTX."""

    guard: str
    """Predicate register, or the empty string."""
    if_true: bool
    """Value of the predicate with which it is executed."""
    opcode: tuple[str, ...]
    operands: tuple[Any, ...]
    """Names of registers, labels and numbers as text; tuples of them; addresses."""
    text: str

    def names(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Those in operands start .. stop - 1."""
        for operand in self.operands[start:stop]:
            if isinstance(operand, Address):
                yield from (operand.base, *operand.coordinates)
            else:
                yield from operand if isinstance(operand, tuple) else (operand,)


class Program(NamedTuple):
    """The one kernel of a PTX file."""

    threads: int
    """Threads of a CTA."""
    parameters: dict[str, int]
    """Bytes by name, in order."""
    registers: dict[str, str]
    """Kind by name."""
    code: list[Instruction]
    labels: dict[str, int]

    def computed_from(self, opcode: str) -> set[str]:
        """Registers whose values depend on what instructions whose opcode begins so return."""
        computing = [i for i in self.code if i.operands and not isinstance(i.operands[0], Address)]
        registers = {i.operands[0] for i in computing if ".".join(i.opcode).startswith(opcode)} - {"_"}
        while more := {r for i in computing if registers & {*i.names(1)} for r in i.names(0, 1)} - registers:
            registers |= more
        return registers


def ptx_of(unit: Any) -> str:
    """The PTX of a :class:`w4gemm.jit.Unit`."""
    import cutlass.cute as cute

    program = unit.program()
    # the machine code made from the PTX is not used, so that ptxas need not try hard
    options = f"--enable-tvm-ffi --gpu-arch {unit.arch} --keep-ptx --ptxas-options -O1"
    # the DSL cuts names of files: in one folder, processes would read each other's PTX
    with tempfile.TemporaryDirectory() as folder:
        options += f" --dump-dir {folder}"
        return str(cute.compile(program.entry, *program.arguments(), options=options, no_jit_engine=True).__ptx__)


def kernels(ptx: str) -> list[Program]:
    """Read a PTX file, kernel by kernel."""
    return [parse(kernel) for kernel in re.split(r"(?=\.visible \.entry)", ptx)[1:]]


def parse(ptx: str) -> Program:
    """Read a PTX file with one kernel."""
    text = re.sub(r"//.*", "", ptx)
    head = re.search(r"\.entry\s+\w+\((.*?)\)(.*?)\{(.*)\}", text, re.DOTALL)
    assert head, "wanted a kernel in the PTX"
    parameters = {}
    for kind, name, size in re.findall(r"\.(\w+)\s+(\w+_param_\d+)(?:\[(\d+)\])?", head[1]):
        parameters[name] = int(size) if size else DTYPES[kind]().itemsize
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", head[2])
    assert threads, "wanted a kernel with a number of threads"
    program = Program(int(threads[1]), parameters, {}, [], {})
    scopes: list[dict[str, str]] = [{}]
    for number, statement in enumerate(head[3].split(";")):
        _read(statement.strip(), program, scopes, number)
    return program


def _read(statement: str, program: Program, scopes: list[dict[str, str]], number: int) -> None:
    """Add a statement, in front of which scopes may begin and end. Names of an inner scope get its number."""
    while match := re.match(r"([{}])\s*|([$\w]+):\s*", statement):
        statement = statement[match.end() :]
        if match[1] == "{":
            scopes.append({"": str(number)})
        elif match[1] == "}":
            scopes.pop()
        else:
            program.labels[_scoped(match[2], scopes)] = len(program.code)
    if not statement or statement.startswith(".pragma"):
        return
    if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL):
        for name in match[2].split(","):
            if counted := re.match(r"\s*(%\w+)<(\d+)>", name):
                program.registers.update({f"{counted[1]}{i}": match[1] for i in range(int(counted[2]))})
            else:
                local = f"{name.strip()}@{number}"
                scopes[-1][name.strip()] = local
                program.registers[local] = match[1]
        return
    match = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    assert match, f"cannot read {statement!r}"
    operands = tuple(_operand(o, scopes) for o in _split(match[4]))
    guard = _scoped(match[2], scopes) if match[2] else ""
    program.code.append(
        Instruction(guard, not match[1], tuple(match[3].split(".")), operands, " ".join(statement.split()))
    )


def _scoped(name: str, scopes: list[dict[str, str]]) -> str:
    """The name with its scope; a label of inline PTX is one of the innermost scope."""
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return f"{name}@{scopes[-1]['']}" if len(scopes) > 1 and re.fullmatch(r"[A-Z_]+", name) else name


def _split(text: str) -> list[str]:
    """The operands, which commas separate outside brackets and braces."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, scopes: list[dict[str, str]]) -> Any:
    if text.startswith("{"):
        return tuple(_scoped(name, scopes) for name in _split(text[1:-1]))
    if text.startswith("["):
        base, *coordinates = _split(text[1:-1])
        base, _, offset = base.partition("+")
        names = tuple(_scoped(name, scopes) for name in _split(coordinates[0][1:-1])) if coordinates else ()
        return Address(_scoped(base, scopes), int(offset or 0), names)
    if "|" in text:
        return tuple(_scoped(name, scopes) for name in text.split("|"))
    return _scoped(text, scopes)
