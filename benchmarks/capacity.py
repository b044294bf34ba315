"""Large tables: how long steps pause while the index grows, bytes a row, speed by size, LRU under new ids only.

Stores of 26 tables are filled to each of --rows; around each doubling of the index steps are the usual ones (26 ×
4,096 keys, lookup and update, --new of them new), elsewhere large ones that only fill. Then all stores take turns
at usual steps of known keys, any alike. Keys come distinct: reading files and dedup are not in these times.

    girih bench capacity                                1, 10 and 100 million rows of dim 8, or as many as fit
    girih bench capacity --rows 1000000 10000000        these
    girih bench capacity --dtype bfloat16 --optimizer adagrad
    girih bench capacity --only lru file                an hour of new ids; an arena in a file below --directory
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pages
from growth import FEATURES, WATCHED, KeyStream, Step, Watch, resident_bytes
from memory import AHEAD, read_lines

from girih import optim
from girih.report.text import size
from girih.store import ArenaOptions, File, GroupSpec, Heap, Segment, Store, TableSpec
from girih.store.accounting import row_bytes
from girih.tables import LRU, Normal, Zeros

PARTS = ("growth", "speed", "lru", "file")
OPTIMIZERS = {"rowwise_adagrad": optim.RowwiseAdagrad(lr=0.05), "adagrad": optim.Adagrad(lr=0.05)}
SPARE_BYTES = 2 << 30
INDEX_BYTES = 32  # the most that the index takes of a row, while it grows
PAUSES = {
    "rows": "{:,}",
    "arena": "{}",
    "fill s": "{:.1f}",
    "doublings": "{}",
    "steps": "{}",
    "at rest ms": "{:.1f}",
    "growing ms": "{:.1f}",
    "p99": "{:.1f}",
    "max": "{:.1f}",
    "longest pause ms": "{:.1f}",
}
LONGEST = {
    "rows": "{:,}",
    "arena": "{}",
    "growing": "{}",
    "step ms": "{:.1f}",
    "page faults": "{:,}",
    **{f"{name} ms": "{:.1f}" for name in WATCHED},
}
BYTES = {
    "rows": "{:,}",
    "arena": "{}",
    "weights": "{:.1f}",
    "state": "{:.1f}",
    "meta": "{:.1f}",
    "index": "{:.1f}",
    "padding": "{:.1f}",
    "other": "{:.2f}",
    "all": "{:.1f}",
    "resident": "{:.1f}",
    "beyond": "{:.1f}",
    "most at rest": "{:.1f}",
    "most growing": "{:.1f}",
}
SPEEDS = "Speed: usual steps, all keys known, uniform"
SPEED = {
    "rows": "{:,}",
    "step ms": "{:.2f}",
    "samples/s": "{:,.0f}",
    "of the size before": "{:.2f}",
    "M lines/s": "{:.0f}",
    "lines of the size before": "{:.2f}",
}
LRU_COLUMNS = {
    "max_rows": "{:,}",
    "new ids": "{:,}",
    "an hour at ids/s": "{:,.0f}",
    "step ms": "{:.1f}",
    "p99": "{:.1f}",
    "max": "{:.1f}",
    "evicted": "{:,}",
    "MB at start": "{:.1f}",
    "MB at end": "{:.1f}",
    "MB at most": "{:.1f}",
}


def main() -> None:
    options = arguments()
    report = harness.Report("capacity", options)
    report.not_identical(
        "large steps that only fill are not among the usual ones; the pause is the longest usual step in which the"
        " index grew, less the median of those in which it did not"
    )
    report.not_identical(
        "lines are random cache lines of the store's own rows, read by one thread: where they become slower with the"
        " size (address translation), steps must too"
    )
    report.not_identical(
        "bytes beyond are those beyond weights and state, as the store counts them; at most: since it had a quarter"
        " of its rows; resident is what the process really got since the store was opened"
    )
    warm_up(options)
    stores = []
    if {"growth", "speed"} & set(options.only):
        pauses, longest, in_memory = (
            report.table("Growth: usual steps", PAUSES),
            report.table("The longest usual steps, and where their time went", LONGEST),
            report.table(f"Bytes a row, dim {options.dim}, {options.dtype}, {options.optimizer}", BYTES),
        )
        all_stores = "speed" in options.only and not report.has(SPEEDS)
        for rows in fitting(options, report):
            is_kept = in_memory.has({"rows": rows})
            if is_kept and not all_stores:
                continue
            stores.append(filled(options, rows, Heap()))
            if is_kept:
                continue
            with report.group():
                for table, found in zip(
                    (pauses, longest, in_memory), figures(stores[-1], options), strict=True
                ):
                    add(table, found, rows=rows, arena="heap")
        if all_stores:
            with report.group():
                add(report.table(SPEEDS, SPEED), speeds(stores, options))
    for watch, _, _ in stores:
        watch.store.close()
    stores.clear()
    if "lru" in options.only and not report.has("LRU: "):
        add(report.table("LRU: all ids new, always", LRU_COLUMNS), [under_new_ids(options)])
    if "file" in options.only and not report.has("Arena in a file"):
        in_a_file(options, report)
    report.finish()


def arguments() -> argparse.Namespace:
    parser = harness.parser("capacity", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--rows", type=int, nargs="+", help="of each store; 1, 10, 100 million, or what fits")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--initializer", choices=["normal", "zeros"], default="normal")
    parser.add_argument("--batch", type=int, default=4096, help="examples of a usual step")
    parser.add_argument("--new", type=float, default=0.1, help="share of new ids in a usual step of growth")
    parser.add_argument("--fill", type=int, default=1 << 18, help="keys of a large step")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each store whose speed counts")
    parser.add_argument("--lru-rows", type=int, default=2_000_000)
    parser.add_argument("--lru-steps", type=int, default=700, help="of batch × 26 new ids each")
    parser.add_argument("--file-rows", type=int, default=3_500_000)
    parser.add_argument("--directory", type=Path, help="for --only file; temporary by default")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"{PARTS}"
    )
    options = parser.parse_args()
    options.chosen = options.rows is not None
    options.rows = sorted(options.rows or [1_000_000, 10_000_000, 100_000_000])
    short = harness.available_bytes() - sum(needed_bytes(options, rows) for rows in options.rows)
    if options.chosen and short < SPARE_BYTES and {"growth", "speed"} & set(options.only):
        parser.error(
            f"--rows {options.rows}: they take {size(sum(needed_bytes(options, rows) for rows in options.rows))},"
            f" {size(harness.available_bytes())} is free and {size(SPARE_BYTES)} should stay so; take fewer"
        )
    if options.directory is not None and not options.directory.is_dir():
        parser.error(f"--directory {options.directory}: no such directory; make it first")
    return options


def spec_of(options: argparse.Namespace, max_rows: int | None = None) -> GroupSpec:
    """26 tables; each evicts beyond its part of ``max_rows``."""
    initializer = Normal() if options.initializer == "normal" else Zeros()
    eviction = None if max_rows is None else LRU(max_rows=-(-max_rows // FEATURES))
    return GroupSpec(
        name="capacity",
        tables=tuple(TableSpec(f"t{n}", (initializer,), eviction=eviction) for n in range(FEATURES)),
        segments=(Segment("embedding", options.dim, OPTIMIZERS[options.optimizer]),),
        dtype=options.dtype,
    )


def row_parts(options: argparse.Namespace) -> dict[str, int]:
    """Bytes of a row by column."""
    with Store(spec_of(options), arena=Heap(reserve_rows=1)) as store:
        return row_bytes(store.state.layout.description)


def needed_bytes(options: argparse.Namespace, rows: int) -> int:
    """The most that so many rows take."""
    return rows * (sum(row_parts(options).values()) + INDEX_BYTES)


def fitting(options: argparse.Namespace, report: harness.Report) -> list[int]:
    """The sizes to fill: where memory is short, the largest of those by default shrink."""
    room = harness.available_bytes() - SPARE_BYTES
    chosen = []
    for rows in options.rows:
        most = room * rows // needed_bytes(options, rows)
        if most < rows:
            report.skip(f"{rows:,} rows", f"{size(max(0, room))} are free for them; {most:,} rows instead")
        if most <= (chosen[-1] if chosen else 0):
            break
        chosen.append(min(rows, most))
        room -= needed_bytes(options, chosen[-1])
    return chosen


def warm_up(options: argparse.Namespace) -> None:
    """Compiles, and brings up what memory Python takes anyway."""
    for max_rows in (None, 2000):
        with Store(spec_of(options, max_rows), arena=Heap(reserve_rows=40_000)) as store:
            watch, stream = Watch(store, 0, 4000), KeyStream()
            for _ in range(5):
                watch.run(stream.fresh(150))
            watch.run(stream.uniform(100, 10))


def filled(options: argparse.Namespace, rows: int, arena: ArenaOptions) -> tuple[Watch, KeyStream, float]:
    """A store of so many rows, with what its steps took, and the seconds of all."""
    before = resident_bytes()
    most_keys = max(options.fill, FEATURES * options.batch)
    watch, stream = Watch(Store(spec_of(options), arena=arena), before, most_keys), KeyStream()
    num_new = max(1, round(options.new * options.batch))
    watch.fill(stream, rows, options.batch, num_new, options.fill)
    return watch, stream, sum(step.seconds for step in watch.steps)


def figures(
    store: tuple[Watch, KeyStream, float], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], ...]:
    """Rows of the tables of pauses, of longest steps and of bytes."""
    watch, _, fill_s = store
    resting, growing = watch.usual(growing=False), watch.usual(growing=True)
    pauses: dict[str, Any] = {"fill s": fill_s, "steps": len(growing)}
    pauses["doublings"] = sum(
        now.growing and not before.growing for before, now in zip(watch.steps, watch.steps[1:], strict=False)
    )
    if resting and growing:
        times = sorted(1e3 * step.seconds for step in growing)
        pauses["at rest ms"] = 1e3 * statistics.median(step.seconds for step in resting)
        pauses["growing ms"] = statistics.median(times)
        pauses["p99"], pauses["max"] = times[int(0.99 * len(times))], times[-1]
        pauses["longest pause ms"] = pauses["max"] - pauses["at rest ms"]
    longest = [
        {
            "growing": "yes" if step.growing else "no",
            "step ms": 1e3 * step.seconds,
            "page faults": step.page_faults,
            **{f"{name} ms": 1e3 * step.within[name] for name in WATCHED},
        }
        for steps in (growing, resting)
        for step in sorted(steps, key=lambda step: -step.seconds)[:3]
    ]
    return [pauses], longest, [bytes_per_row(watch, options)]


def bytes_per_row(watch: Watch, options: argparse.Namespace) -> dict[str, Any]:
    """What the store says that a row takes, part by part, beside what the process really got."""
    rows = watch.store.num_rows
    used = {part: found["used"] / rows for part, found in watch.store.memory().items()}
    columns = row_parts(options)
    meta = ("ids", "tables", "last_used", "counts", "versions", "neighbours")
    state = [name for name in columns if name.startswith("embedding.")]
    found: dict[str, Any] = {
        "weights": used["embedding"],
        "state": sum(used[name] for name in state),
        "meta": sum(used[name] for name in meta),
        "index": used["index"] + used["next_index"],
        "padding": used["padding"],
        "all": sum(used.values()),
        "resident": watch.steps[-1].resident_bytes / rows,
    }
    own = found["weights"] + found["state"]
    found["beyond"] = found["all"] - own
    for column, growing in {"most at rest": False, "most growing": True}.items():
        most = watch.most_per_row(growing=growing, least_rows=rows // 4)
        found[column] = None if most is None else most - own
    named = ("weights", "state", "meta", "index", "padding")
    return {**found, "other": found["all"] - sum(found[name] for name in named)}


def speeds(
    stores: Sequence[tuple[Watch, KeyStream, float]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Steps of known keys, the stores in turns."""

    def contestant(watch: Watch, stream: KeyStream) -> harness.Contestant:
        return lambda _: (watch.run(stream.uniform(options.batch)),)

    contestants = {str(n): contestant(watch, stream) for n, (watch, stream, _) in enumerate(stores)}
    times = list(harness.alternate(contestants, options.rounds, warmup=5).values())
    lines = [lines_per_s(watch.store) for watch, _, _ in stores]
    return [
        {
            "rows": watch.store.num_rows,
            "step ms": 1e3 * harness.median(times[n]),
            "samples/s": options.batch / harness.median(times[n]),
            "of the size before": harness.ratio(times[n], times[n - 1]) if n else None,
            "M lines/s": lines[n] / 1e6,
            "lines of the size before": lines[n] / lines[n - 1] if n else None,
        }
        for n, (watch, _, _) in enumerate(stores)
    ]


def lines_per_s(store: Store) -> float:
    """Random cache lines a second that this memory gives: what is lost there, no program can keep."""
    words = store.state.memory.arrays.keys[: store.num_rows].reshape(-1)
    lines = words[: len(words) // 8 * 8].reshape(-1, 8)
    order = np.random.default_rng(0).integers(0, len(lines), 1 << 20, dtype=np.int32)
    read_lines(lines, order[:64], 8)
    seconds = min(
        statistics.median(harness.seconds(lambda: read_lines(lines, order, ahead)) for _ in range(5))  # noqa: B023
        for ahead in AHEAD
    )
    return len(order) / seconds


def under_new_ids(options: argparse.Namespace) -> dict[str, Any]:
    """A full LRU table under a stream of ids none of which was there before."""
    before = resident_bytes()
    with Store(spec_of(options, options.lru_rows)) as store:
        keys = max(options.fill, FEATURES * options.batch)
        watch, stream = Watch(store, before, keys), KeyStream()
        while store.num_rows < options.lru_rows:
            watch.run(stream.fresh(max(1, options.fill // FEATURES)), usual=False)
        watch.run(stream.fresh(options.batch))
        filling = len(watch.steps)
        for _ in range(options.lru_steps):
            watch.run(stream.fresh(options.batch))
        steps: list[Step] = watch.steps[filling:]
        times = sorted(1e3 * step.seconds for step in steps)
        resident = [step.resident_bytes / 1e6 for step in steps]
        new_ids = FEATURES * options.batch * options.lru_steps
        return {
            "max_rows": options.lru_rows,
            "new ids": new_ids,
            "an hour at ids/s": new_ids / 3600,
            "step ms": statistics.median(times),
            "p99": times[int(0.99 * len(times))],
            "max": times[-1],
            "evicted": store.counters()["evicted"],
            "MB at start": watch.steps[filling - 1].resident_bytes / 1e6,
            "MB at end": resident[-1],
            "MB at most": max(resident),
        }


def in_a_file(options: argparse.Namespace, report: harness.Report) -> None:
    """The same growth where the arena is a file."""
    with tempfile.TemporaryDirectory(prefix="girih-bench-", dir=options.directory) as directory:
        path = Path(directory) / "arena"
        store = filled(options, options.file_rows, File(path=str(path)))
        tables = (
            report.table("Arena in a file: usual steps", PAUSES),
            report.table("Arena in a file: the longest usual steps", LONGEST),
            report.table("Arena in a file: bytes a row", {**BYTES, "on disk": "{:.1f}"}),
        )
        found = figures(store, options)
        found[2][0]["on disk"] = path.stat().st_blocks * 512 / options.file_rows
        with report.group():
            for table, lines in zip(tables, found, strict=True):
                add(table, lines, rows=options.file_rows, arena="file")
        store[0].store.close()


def add(table: harness.ResultTable, found: Sequence[dict[str, Any]], **common: Any) -> None:
    """Adds rows to a table."""
    for row in found:
        table.row({**common, **row})


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    growth, in_memory, speed = (
        pages.rows(results, title) for title in ("Growth: ", "Bytes a row", "Speed: ")
    )
    lines = [
        [
            pages.shown(pause["rows"], "{:,}"),
            *(pages.shown(part.get(name), "{:.1f}") for name in ("all", "beyond", "most growing")),
            *(pages.shown(pause.get(name), "{:.0f}") for name in ("at rest ms", "growing ms", "p99", "max")),
            pages.shown(steps.get("samples/s"), "{:,.0f}"),
            *(pages.shown(steps.get(name), "{:.2f}") for name in ("of the size before", "lines of the size before")),
        ]
        for pause, part, steps in itertools.zip_longest(growth, in_memory, speed, fillvalue={})
    ]  # fmt: skip
    header = (
        "rows", "bytes per row", "not weights or state", "at most", "step at rest, ms", "while growing, ms", "99 %", "longest",
        "samples/s", "of the size before", "random reads, of the size before",
    )  # fmt: skip
    options, lru = results["options"], pages.row(results, "LRU: ")
    ids = FEATURES * options["batch"]
    caption = f"{pages.measured(results)}. Rows have dim {options['dim']}. A step has {ids:,} ids."
    flat = (
        f"With LRU, the process has {lru['MB at start']:.1f} MB at the start. After {lru['new ids'] / 1e6:.1f} million new ids it has"
        f" {lru['MB at end']:.1f} MB, and at most {lru['MB at most']:.1f} MB."
        if lru
        else ""
    )
    summary = None
    if in_memory:
        last = in_memory[-1]
        summary = (
            f"- {last['rows'] / 1e6:g} million rows of dim {options['dim']}: {pages.shown(last.get('all'), '{:.1f}')} bytes per row, with"
            " optimizer."
        )
    return {
        "sizes": pages.paragraphs(pages.sentences(caption, flat), pages.table(header, lines)),
        "summary": summary,
    }


if __name__ == "__main__":
    main()
