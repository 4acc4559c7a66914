"""``w4gemm cache``: what is kept on disk, compiled kernels and tuned configs."""

from __future__ import annotations

import argparse
import json
import sys

from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import Record, effective, parse_lines
from w4gemm.console.errors import read_text
from w4gemm.console.progress import counted, say
from w4gemm.core import environment, trust
from w4gemm.core.errors import FormatError
from w4gemm.jit import disk
from w4gemm.kernels import kernel_named


def run(args: argparse.Namespace) -> int:
    folder = environment.cache_dir()
    if folder is None and args.action != "list":
        raise FileNotFoundError(f"{environment.why_nothing_is_kept()}: nothing is kept")
    if folder is not None and args.action != "path" and (why := trust.refusal(folder)):
        if args.action != "list":
            raise OSError(why)
        trust.warn(why)  # without which the list looks like an empty folder's
    if args.action == "path":
        print(folder)
        return 0
    actions = {"list": _list, "clear": _clear, "export": _export, "import": _import}
    actions[args.action](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    if args.json:
        tables = [*(path for path in (table.user_path(),) if path), *(table.shipped_tables() if args.all else ())]
        records = [json.loads(record.line()) for path in tables for record in effective(table.read(path))]
        facts = {"folder": str(environment.cache_dir() or ""), "kernels": len(disk.stored()), "bytes": disk.size()}
        print(json.dumps(facts | {"tuned": records}, indent=2))
        return
    kernels = counted(len(disk.stored()), "compiled kernel")
    print(f"{environment.cache_dir() or 'nothing is kept'}: {kernels}, {disk.size() / 2**20:.1f} MiB")
    for name, path in (("tuned", table.user_path()), *(("shipped", path) for path in table.shipped_tables())):
        records = effective(table.read(path)) if path else []
        print(f"{name}: {path or 'no file'}, {counted(len(records), 'config')}")
        for record in records if name == "tuned" or args.all else ():
            print(f"  {_line(record)}")


def _line(record: Record) -> str:
    key, span = record.key, choice.span(*record.m)
    fused = f", {key.epilogue}" * bool(key.epilogue) + ", batch invariant" * key.batch_invariant
    threads = f" with {counted(key.sms, 'thread')}" * record.kernel.startswith("cpu_")
    what = f"{key.device}{threads}, {key.dtype} x {key.format}, n {key.n}, k {key.k}, {span}{fused}"
    stale = "" if is_current(record) else " (stale)"
    return f"{what}: {record.choice}, {record.us:.1f} us, {record.date}{stale}"


def is_current(record: Record) -> bool:
    """True if the kernel of a record still has the revision that was measured."""
    try:
        return record.revision == kernel_named(record.kernel).revision
    except ValueError:  # the kernel is gone
        return False


def _clear(args: argparse.Namespace) -> None:
    folder = environment.cache_dir()
    say(f"deleted {counted(disk.clear(), 'compiled kernel')} of {folder}")
    if args.tuned:
        say(f"deleted {counted(table.clear(), 'tuned config')} of {folder}")
    elif (path := table.user_path()) and (records := table.read(path)):
        say(f"kept {counted(len(records), 'tuned config')}; --tuned deletes them too")


def _export(args: argparse.Namespace) -> None:
    path = table.user_path()
    if path and path.exists():
        with open(path, "rb", opener=trust.opener):  # one that is not read must not replace FILE by nothing
            pass
    records = effective(table.read(path)) if path else []
    text = "".join(record.line() for record in records)
    if args.file is None:
        sys.stdout.write(text)
        return
    if args.file.exists() and not args.file.is_file():  # a pipe
        try:
            args.file.write_text(text)
        except OSError as e:  # which names no file if it is full
            raise OSError(e.errno, e.strerror, str(args.file)) from e
    else:
        table.replace_table(args.file.resolve() if args.file.is_symlink() else args.file, records)
    say(f"wrote {counted(len(records), 'tuned config')} to {args.file}")


def _import(args: argparse.Namespace) -> None:
    path = table.user_path()
    assert path is not None
    if not args.file.exists():  # it may be a pipe
        raise FileNotFoundError(f"FILE: no file {str(args.file)!r}")
    records, bad = parse_lines(read_text("FILE", args.file).splitlines())
    added = table.add_missing(path, records)
    same = f" (there already: {len(records) - added})" if added < len(records) else ""
    say(f"added {counted(added, 'tuned config')} to {path}{same}")
    if bad:
        number, reason = bad[0]
        raise FormatError(f"{args.file}: skipped {counted(len(bad), 'unreadable line')}; line {number}: {reason}")
