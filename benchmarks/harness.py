"""What all benchmarks share: contestants that take turns in one run, a table, JSON, peers that may be missing.

A benchmark is one file here with a ``main()``; its docstring's first line is what ``girih bench`` lists:

    def main() -> None:
        parser = harness.parser("kernels", __doc__)         # has --json; with resumes=True --resume too
        parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
        report = harness.Report("kernels", parser.parse_args())
        torchrec = report.peer("torchrec")                  # a module, or None: skipped, with the reason
        report.not_identical("girih's tables grow, those of torch are static")
        times = harness.alternate({"girih": ours, "torch": theirs}, rounds=15)
        table = report.table("title", {"what": "{}", "ms": "{:.2f}", "of torch": "{:.2f}×"})
        table.row({"what": "girih", "ms": 1e3 * harness.median(times["girih"]), ...})
        report.finish()                                     # prints, and writes the JSON
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table as RichTable

from girih.files.whole import disk_full, write_whole

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "tests")
)  # for tests/support, which some benchmarks use

PACKAGES = (
    "girih", "torch", "triton", "numba", "numpy", "pyarrow", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "deepctr-torch", "fuxictr",
    "rocksdict", "pyzmq",
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]

SELECTING = ("parts", "counts", "contestants", "no_peers", "page", "from_results")
"""Options that choose parts of a run, and change no row of the other parts."""

ENVIRONMENT = ("GLIBC_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NUMBA_", "OMP_")
"""Variables of the environment that change what is measured begin with one of these."""

Contestant = Callable[[int], Sequence[float] | None]
"""Does its work for one round; returns what it measured itself, or None to have the whole call timed."""


def alternate(
    contestants: Mapping[str, Contestant], rounds: int, warmup: int = 2
) -> dict[str, list[tuple[float, ...]]]:
    """Lets contestants take turns, A B C A B C …, so that a machine that slows down slows them all.

    Args:
        contestants: called with the number of the round, 0 to ``warmup + rounds - 1``; rounds beyond the
            warm-up count. Every other round goes backwards, so that nobody always follows the same one.

    Returns:
        Of each, a tuple a round: seconds of the call, or what the contestant returned.
    """
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            parts = contestants[name](number)
            whole = time.perf_counter() - start
            if number >= warmup:
                times[name].append((whole,) if parts is None else tuple(parts))
    return times


def median(times: Sequence[Sequence[float]]) -> float:
    """The median over rounds of each round's sum."""
    return statistics.median(sum(parts) for parts in times)


def median_part(times: Sequence[Sequence[float]], part: int) -> float:
    """The median over rounds of one part."""
    return statistics.median(parts[part] for parts in times)


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """How many times as long they took: the median of each round's own ratio, so that drift cancels."""
    return statistics.median(sum(b) / sum(a) for a, b in zip(ours, theirs, strict=True))


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def threads(number: int) -> Iterator[None]:
    """``torch.set_num_threads``, put back afterwards; FBGEMM and torch's OpenMP loops obey it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_huge_pages() -> None:
    """Starts this program anew with a malloc that asks for huge pages, as girih's tables do by themselves."""
    if "malloc.hugetlb" not in os.environ.get("GLIBC_TUNABLES", ""):
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


class OneLineParser(argparse.ArgumentParser):
    """Mistakes are one line and status 2, as in all of girih."""

    def error(self, message: str) -> NoReturn:
        print(f"girih: {self.prog.removeprefix('girih ')}: {message}; see --help", file=sys.stderr)
        sys.exit(2)


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """A fingerprint of the code of files below a folder; comments, docstrings and layout do not change it."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder)}\0{ast.dump(_undocumented(file))}".encode())
    return digest.hexdigest()[:16]


def _undocumented(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return tree


def _tag(text: str) -> str:
    """The tag of ``--resume``; without one, the fingerprint of the library and the benchmarks."""
    folders = (ROOT / "src" / "girih", ROOT / "benchmarks")
    return text or fingerprint(ROOT, (file for folder in folders for file in sorted(folder.rglob("*.py"))))


def parser(name: str, doc: str | None, *, resumes: bool = False) -> argparse.ArgumentParser:
    """A parser that knows ``--json``; options must be written out.

    Args:
        resumes: it also knows ``--resume``. The benchmark must then skip the rows that its tables already have.
    """
    made = OneLineParser(
        prog=f"girih bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--json", type=Path, default=Path("runs", "bench", f"{name}.json"), metavar="FILE")
    if resumes:
        made.add_argument(
            "--resume", nargs="?", const="", type=_tag, metavar="TAG",
            help="keep rows of --json that were measured with this option, the same code, machine and options; TAG names the code",
        )  # fmt: skip
    return made


class ResultTable:
    """Rows of raw values, shown by one format a column; None is shown as a dash."""

    def __init__(
        self, title: str, columns: Mapping[str, str], on_row: Callable[[], None] = lambda: None
    ) -> None:
        self.title = title
        self.columns = dict(columns)
        self.rows: list[dict[str, Any]] = []
        self._on_row = on_row

    def row(self, values: Mapping[str, Any]) -> None:
        """Adds a row; a column that is left out is None.

        Raises:
            KeyError: a value of no column.
        """
        unknown = set(values) - set(self.columns)
        if unknown:
            raise KeyError(f"{self.title}: no column {sorted(unknown)}; columns: {list(self.columns)}")
        self.rows.append({name: values.get(name) for name in self.columns})
        self._on_row()

    def has(self, values: Mapping[str, Any]) -> bool:
        """True if a row has all these values, such as one that an earlier run measured."""
        return any(all(row.get(name) == value for name, value in values.items()) for row in self.rows)

    def shown(self) -> RichTable:
        """For the terminal: words to the left, numbers to the right; columns of one value stand in the title."""
        cells = {
            name: ["–" if row[name] is None else form.format(row[name]) for row in self.rows]
            for name, form in self.columns.items()
        }
        same = {name for name, texts in cells.items() if len(texts) > 1 and len(set(texts)) == 1}
        title = [self.title, ", ".join(f"{name} {cells[name][0]}" for name in self.columns if name in same)]
        table = RichTable(title="\n".join(line for line in title if line), title_justify="left")
        varying = [name for name in self.columns if name not in same]
        for name in varying:
            words = any(isinstance(row[name], str) for row in self.rows)
            table.add_column(name, justify="left" if words else "right", overflow="fold")
        for number in range(len(self.rows)):
            table.add_row(*(cells[name][number] for name in varying))
        return table


class Report:
    """What one run of a benchmark found, with all that is needed to judge or repeat it.

    Args:
        arguments: if they have a ``resume``, the JSON is written after every row or group of rows. If it is a tag, rows of an
            earlier run are kept if its tag, options, machine and versions are the same.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self._writes_rows = "resume" in arguments
        self.file: Path = arguments.json
        self.options = {key: _plain(value) for key, value in vars(arguments).items() if key != "json"}
        self.skipped: dict[str, str] = {}
        self.tables: list[ResultTable] = []
        self.differences: list[str] = []
        self._earlier: dict[str, ResultTable] = {}
        self._start = time.perf_counter()
        if getattr(arguments, "resume", None) is not None and self.file.is_file():
            with suppress(ValueError, KeyError, TypeError):  # another kind of file
                self._keep(json.loads(self.file.read_text()))

    def _keep(self, earlier: Mapping[str, Any]) -> None:
        """Takes rows of an earlier run, unless its tag, options, machine or packages were others."""
        now = self.as_dict()
        options = {name for name in earlier["options"].keys() | self.options.keys() if name not in SELECTING}
        if (
            any(earlier["options"].get(name) != self.options.get(name) for name in options)
            or any(
                earlier["machine"][name] != now["machine"][name] for name in ("processor", "cores", "gpus")
            )
            or earlier["versions"] != now["versions"]
        ):
            return
        for kept in earlier["tables"]:
            table = self.table(kept["title"], dict.fromkeys(kept["columns"], "{}"))
            table.rows = kept["rows"]
            self._earlier[table.title] = table
        self.skipped |= earlier["skipped"]
        self.differences += earlier["not_identical"]
        self._start -= earlier["duration_s"]

    def peer(self, module: str, mend: str = "make bench-peers installs it") -> ModuleType | None:
        """Imports a peer's module. If that fails, returns None and reports the reason."""
        try:
            return importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:  # a wheel of another torch fails in its loader
            self.skip(module, f"{' '.join(str(error).split())}; {mend}")
            return None

    def skip(self, what: str, reason: str) -> None:
        """Says that something was left out, and why."""
        self.skipped.setdefault(what, reason)

    def forget(self, part: str) -> None:
        """Drops what an earlier run left out of a part: names that are ``part`` or begin with ``part: ``."""
        self.skipped = {
            what: reason
            for what, reason in self.skipped.items()
            if what != part and not what.startswith(f"{part}: ")
        }

    def not_identical(self, what: str) -> None:
        """Says where the contestants' work differs."""
        if what not in self.differences:
            self.differences.append(what)

    def table(self, title: str, columns: Mapping[str, str]) -> ResultTable:
        """A new table; ``columns`` is name → format, as in ``{"D": "{}", "ms": "{:.2f}"}``."""
        table = ResultTable(title, columns, self._row_added)
        earlier = self._earlier.pop(title, None)
        if earlier is not None:
            table.rows = earlier.rows
            self.tables[self.tables.index(earlier)] = table
            return table
        self.tables.append(table)
        return table

    def has(self, title: str) -> bool:
        """True if a table whose title begins so has rows."""
        return any(table.rows and table.title.startswith(title) for table in self.tables)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Rows that are added inside are written together, so that a run that is resumed has all of them or none."""
        self._writes_rows, before = False, self._writes_rows
        yield
        self._writes_rows = before
        self._row_added()

    def _row_added(self) -> None:
        if self._writes_rows and not self.file.is_fifo():  # a pipe gets the whole once
            self._write()

    def finish(self) -> None:
        """Prints tables, what was skipped and what was not identical; writes the JSON."""
        console = Console(width=None if sys.stdout.isatty() else 180)
        for table in self.tables:
            console.print(table.shown())
        for what in self.differences:
            console.print(f"not identical: {what}", highlight=False, markup=False, soft_wrap=True)
        for what, reason in self.skipped.items():
            console.print(f"skipped: {what}: {reason}", highlight=False, markup=False, soft_wrap=True)
        self._write()
        console.print(str(self.file), highlight=False, markup=False, soft_wrap=True)

    def _write(self) -> None:
        """Writes the JSON; a process that is killed meanwhile leaves the one before.

        A file that cannot be written ends the benchmark with one line and status 1.
        """
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.exists() and not self.file.is_file():  # a device or a pipe
                self.file.write_text(text)
            else:
                write_whole(self.file, text)
        except OSError as error:
            sys.exit(f"girih: bench {self.name}: {disk_full(error, self.file) or error}")

    def as_dict(self) -> dict[str, Any]:
        """The JSON: tables with raw values, and where they come from."""
        return {
            "benchmark": self.name,
            "command": f"girih bench {' '.join([self.name, *sys.argv[1:]])}",
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "duration_s": round(time.perf_counter() - self._start, 1),
            "machine": machine(),
            "versions": {"python": platform.python_version(), **versions()},
            "options": self.options,
            "tables": [{"title": t.title, "columns": list(t.columns), "rows": t.rows} for t in self.tables],
            "not_identical": self.differences,
            "skipped": self.skipped,
        }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, huge pages, GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "huge_pages": pages.read_text().strip() if pages.is_file() else "unknown",
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT)},
    }


def gpus() -> list[dict[str, Any]]:
    """Name, memory, capability and multiprocessors of each GPU that torch can use."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(each) for each in range(number)]
    return [
        {
            "name": own.name,
            "memory_bytes": own.total_memory,
            "capability": f"{own.major}.{own.minor}",
            "multiprocessors": own.multi_processor_count,
        }
        for own in found
    ]


def available_bytes() -> int:
    """Memory that is free or could be; half of all where the system does not say."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in file.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def versions() -> dict[str, str]:
    """Versions of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """An option as JSON has it; files of the checkout as they are called there."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
