"""Files to batches: girih in order and shuffled, beside bare pyarrow scans of the same columns.

    girih bench data [--rows 3145728] [--repeats 5] [--only parquet lists csv libsvm training]

Files are made first, in a temporary directory (so they come from the page cache): Parquet with pyarrow's own
settings, of 26 int64 ids (Zipf), 13 float32 and a label; Parquet of five lists of ten ids; the first as CSV and
as libsvm. All take turns in one run; medians. ``one thread`` and ``own pool`` compare with the fastest scan to
batches that has one thread, or pyarrow's pool. Memory is how far each raises the peak of a process of its own.
``training`` trains on such Parquet: how long that waits for batches (reading.py).
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pages
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import reading

import girih
from girih.data import Dataset

BATCH, IDS, NUMBERS, LISTS, LIST_IDS, DISTINCT = 4096, 26, 13, 5, 10, 500_000
SHARES = {"parquet": 1, "lists": 2 / 3, "csv": 1 / 8, "libsvm": 1 / 8, "training": 1 / 3}  # of --rows
GIRIH = {"girih, in order": False, "girih, shuffled": True}
ONE, POOL, WHOLE = "one thread", "own pool", "whole row groups"
Scan = Callable[[str], Iterable[Any]]


def main() -> None:
    parser = harness.parser("data", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--rows", type=int, default=3 << 20, help="of the first file; others have fewer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(SHARES), choices=list(SHARES))
    arguments = parser.parse_args()
    report = harness.Report("data", arguments)
    report.not_identical(
        "scans end at Arrow arrays; girih checks every number, makes batches of its own layout, and shuffles"
    )
    report.not_identical(f"{WHOLE}: read_row_group, the fastest way to read everything, makes no batches")
    report.not_identical(
        "girih decodes Parquet with pyarrow's pool and does the rest on one thread; CSV and libsvm on one thread"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.only:
            if report.has(reading.TITLE if kind == "training" else f"{kind}: "):
                continue
            num_rows = max(BATCH, round(arguments.rows * SHARES[kind]))
            path = Path(folder, kind)
            write(kind, num_rows, path)
            with report.group():
                if kind == "training":
                    ordered, shuffled = (dataset(kind, path, shuffle=shuffle) for shuffle in (False, True))
                    reading.in_training(report, ordered, shuffled, max(1, arguments.repeats // 2))
                else:
                    compare(report, kind, num_rows, path, arguments.repeats)
            path.unlink()
    report.finish()


def compare(report: harness.Report, kind: str, num_rows: int, path: Path, repeats: int) -> None:
    """Adds one table: all that can read a file."""
    names = [*GIRIH, *scans(kind)]
    contestants = {name: timed(kind, name, path, num_rows) for name in names}
    measured = harness.alternate(contestants, rounds=repeats, warmup=1)
    walls = {name: [wall for wall, _ in rounds] for name, rounds in measured.items()}
    medians = {name: statistics.median(seconds) for name, seconds in walls.items()}
    title = f"{kind}: {num_rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB, batches of {BATCH:,}"
    table = report.table(
        title,
        {"what": "{}", "rows/s": "{:,.0f}", ONE: "{:.2f}×", POOL: "{:.2f}×",
         "CPU s/million": "{:.3f}", "peak MiB": "{:,.0f}"},
    )  # fmt: skip
    for name in names:
        row: dict[str, Any] = {"what": name, "rows/s": num_rows / medians[name]}
        for threads in (ONE, POOL) if name in GIRIH else ():
            rivals = [rival for rival in scans(kind) if rival.endswith(threads) and WHOLE not in rival]
            if rivals:
                fastest = walls[min(rivals, key=medians.__getitem__)]
                row[threads] = statistics.median(b / a for a, b in zip(walls[name], fastest, strict=True))
        row["CPU s/million"] = harness.median_part(measured[name], 1) / num_rows * 1e6
        row["peak MiB"] = peak_bytes(kind, name, path) / 2**20
        table.row(row)


def timed(kind: str, name: str, path: Path, num_rows: int) -> harness.Contestant:
    """One pass over a file: seconds, and seconds of processor time."""

    def read(_: int) -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        found = count_rows(kind, name, path)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        if found != num_rows:
            raise RuntimeError(f"{name} read {found} rows of {num_rows}")
        return seconds, cpu

    return read


def count_rows(kind: str, name: str, path: Path) -> int:
    """Reads all of a file."""
    if name in GIRIH:
        return sum(batch.num_examples for batch in dataset(kind, path, shuffle=GIRIH[name]))
    return sum(batch.num_rows for batch in scans(kind)[name](str(path)))


def peak_bytes(kind: str, name: str, path: Path) -> int:
    """How far one pass raises the peak of resident memory, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (kind, name, path))


def _peak(kind: str, name: str, path: Path) -> int:
    before = _most_resident_bytes()
    count_rows(kind, name, path)
    return _most_resident_bytes() - before


def _most_resident_bytes() -> int:
    """Of this process; ``ru_maxrss`` would be that of the process which started it, where that had more."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    most = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return most[0] if most else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def scans(kind: str) -> dict[str, Scan]:
    """What pyarrow offers to read a file with."""
    if kind == "libsvm":
        return {}
    if kind == "csv":
        types = pacsv.ConvertOptions(
            column_types={f"c{i}": pa.int64() for i in range(IDS)}
            | {f"x{i}": pa.float32() for i in range(NUMBERS)}
        )
        one = pacsv.ReadOptions(use_threads=False)
        return {
            f"csv.open_csv, {ONE}": lambda p: pacsv.open_csv(p, read_options=one, convert_options=types),
            f"csv.read_csv, {ONE}": lambda p: [pacsv.read_csv(p, read_options=one, convert_options=types)],
            f"csv.read_csv, {POOL}": lambda p: [pacsv.read_csv(p, convert_options=types)],
        }
    found: dict[str, Scan] = {}
    for words, pooled in ((ONE, False), (POOL, True)):
        options: dict[str, Any] = {"batch_size": BATCH, "use_threads": pooled}
        found[f"iter_batches, {words}"] = lambda p, o=options: pq.ParquetFile(p).iter_batches(**o)
        found[f"dataset.to_batches, {words}"] = lambda p, o=options: pads.dataset(p).to_batches(**o)
        found[f"{WHOLE}, {words}"] = lambda p, t=pooled: row_groups(pq.ParquetFile(p), t)
    return found


def row_groups(file: pq.ParquetFile, use_threads: bool) -> Iterable[pa.Table]:
    return (file.read_row_group(i, use_threads=use_threads) for i in range(file.num_row_groups))


def dataset(kind: str, path: Path, *, shuffle: bool) -> Dataset:
    """girih's reader of a file."""
    if kind == "lists":
        features: list[girih.Feature] = [girih.Categorical(name=f"c{i}") for i in range(LISTS)]
    else:
        features = [girih.Categorical(name=f"c{i}", dim=16) for i in range(IDS)]
        features += [girih.Numeric(name=f"x{i}") for i in range(NUMBERS)]
    readers = {"csv": girih.read_csv, "libsvm": girih.read_libsvm}
    read = readers.get(kind, girih.read_parquet)
    return read(path, girih.Schema(features, "click"), batch_size=BATCH, shuffle=shuffle)


def write(kind: str, num_rows: int, path: Path) -> None:
    """Makes a file."""
    rng = np.random.default_rng(0)
    label = {"click": (rng.random(num_rows) < 0.25).astype(np.int64)}
    if kind == "lists":
        bounds = np.arange(0, LIST_IDS * num_rows + 1, LIST_IDS, dtype=np.int32)
        lists = (pa.ListArray.from_arrays(bounds, zipf(rng, LIST_IDS * num_rows)) for _ in range(LISTS))
        pq.write_table(pa.table({f"c{i}": column for i, column in enumerate(lists)} | label), path)
        return
    ids = {f"c{i}": zipf(rng, num_rows) for i in range(IDS)}
    numbers = {f"x{i}": rng.normal(size=num_rows).astype(np.float32).round(4) for i in range(NUMBERS)}
    if kind in ("parquet", "training"):
        pq.write_table(pa.table(ids | numbers | label), path)
    elif kind == "csv":
        pacsv.write_csv(pa.table(ids | numbers | label), path)
    else:
        pairs = [[f"{i}:1" for i in column.tolist()] for column in ids.values()]
        pairs += [[f"1:{x:.4g}" for x in column.tolist()] for column in numbers.values()]
        lines = (" ".join(words) for words in zip(map(str, label["click"]), *pairs, strict=True))
        path.write_text("\n".join(lines) + "\n")


def zipf(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ids as logs have them: few that are frequent, many that are rare."""
    ids: np.ndarray = (rng.zipf(1.2, count) % DISTINCT).astype(np.int64)
    return ids


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    lines = [
        [
            row["what"], _millions(row.get("rows/s")), pages.times(row.get(ONE)), pages.times(row.get(POOL)),
            pages.shown(row.get("CPU s/million"), "{:.2f}"), pages.shown(row.get("peak MiB"), "{:,.0f}"),
        ]
        for row in pages.rows(results, "parquet: ")
    ]  # fmt: skip
    header = (
        "", "million rows/s", "× fastest scan to batches, one thread", "× with pyarrow's pool", "CPU s per million rows",
        "peak, MiB",
    )  # fmt: skip
    other = [
        _other_file(results, kind) for kind in ("lists", "csv", "libsvm") if pages.rows(results, f"{kind}: ")
    ]
    training = [
        [
            row["what"], pages.shown(row.get("samples/s"), "{:,.0f}"),
            *(pages.shown(row.get(name), "{:.2%}").replace("%", " %") for name in ("waits", "waits after it")),
            pages.shown(row.get("first batch ms"), "{:.0f}"), pages.shown(row.get("of batches given, after it"), "{:.2f}"),
        ]
        for row in pages.rows(results, reading.TITLE) if row.get("waits") is not None
    ]  # fmt: skip
    waits = ("", "samples/s", "waits", "after the first batch", "first batch, ms", "× batches from memory")
    return {
        "parquet": pages.paragraphs(
            f"{pages.measured(results)}. Bold ratios are below 1: girih is slower there.",
            pages.table(header, lines),
        ),
        "other files": "\n".join(other) or None,
        "training": pages.paragraphs(f"{pages.measured(results)}:", pages.table(waits, training)),
    }


def _other_file(results: Mapping[str, Any], kind: str) -> str:
    """An item of a list: the rates of girih, and of the fastest scans."""
    rates = {row["what"]: row["rows/s"] for row in pages.rows(results, f"{kind}: ")}
    ours = (_millions(rates.get(name)) for name in GIRIH)
    theirs = {
        threads: max(rate for name, rate in rates.items() if name.endswith(threads) and WHOLE not in name)
        for threads in (ONE, POOL) if any(name.endswith(threads) for name in rates)
    }  # fmt: skip
    fastest = "; ".join(
        f"pyarrow's fastest scan, {threads}: {_millions(rate)}" for threads, rate in theirs.items()
    )
    return f"- {kind}: girih {next(ours)} in order, {next(ours)} shuffled" + (
        f"; {fastest}" if fastest else ""
    )


def _millions(rate: float | None) -> str:
    return pages.shown(rate, "{:.2f}", 1e-6)


if __name__ == "__main__":
    main()
