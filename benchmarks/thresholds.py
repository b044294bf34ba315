"""The thresholds of decisions 0023 and 0046: ids of one table as they grow, and rows in place beside copies.

The first table times dedup alone, per id: one table with more ids from row to row, and 26 tables with 4,096 ids each. Above
8,192 ids, dedup first divides the ids of a table by their hash into parts. The threshold is right if an id costs no more above it
than below.

The second times pull and push of the sparse half with rows copied and totals formed ("copies"), and with rows read where they lie
and gradients summed while rows move ("in place"), for rows of several widths and batches of several repeats. The threshold is right
where "in place" wins for batches whose copies would be larger, and nowhere else.

    girih bench thresholds
"""

from __future__ import annotations

import argparse
import math
import sys

import harness
import numpy as np
import torch
from ids import Shape, Stream, num_unique
from numpy.typing import NDArray
from sparse_sides import Packed, fill_all, run_step

from girih.kernels.buffers import Buffers
from girih.kernels.cpu.dedup import MOST_TOGETHER
from girih.sparse.groups import shards

FEATURES, BATCH, WARMUP = 26, 4096, 3


def main() -> None:
    parser = harness.parser("thresholds", __doc__)
    parser.add_argument("--ids", type=int, nargs="+", default=[4096, 16384, 32768, 65536, 106496, 1064960])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--bag", type=int, nargs="+", default=[1, 10])
    parser.add_argument(
        "--rows-per-id",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1, 4],
        help="of a table, by ids of a batch",
    )
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--repeats", type=int, default=15, help="rounds that count")
    parser.add_argument("--threads", type=int, default=1, help="of the second table; a shard for each")
    parser.add_argument("--only", choices=["dedup", "in_place"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = harness.Report("thresholds", options)
    if options.only != "in_place":
        dedup_table(report, options)
    if options.only != "dedup":
        in_place_table(report, options)
    report.finish()


def dedup_table(report: harness.Report, options: argparse.Namespace) -> None:
    """Nanoseconds of dedup per id, one thread; all sizes take turns."""
    sizes = [*((1, count) for count in options.ids), (FEATURES, options.batch)]
    rng = np.random.default_rng(0)
    drawn = {
        "Zipf": lambda count: rng.zipf(1.2, count) - 1,
        "uniform": lambda count: rng.integers(0, 13_000_000, count),
    }
    batches = {
        (kind, *size): [draw(math.prod(size)) for _ in range(WARMUP + options.repeats)]
        for kind, draw in drawn.items()
        for size in sizes
    }
    contestants = {case: _deduped(case[1], of) for case, of in batches.items()}
    measured = harness.alternate(contestants, options.repeats, WARMUP)
    table = report.table(
        "Dedup alone, nanoseconds per id, one thread",
        {"tables": "{}", "ids of each": "{:,}", "parted": "{}", **dict.fromkeys(drawn, "{:.2f}")},
    )
    for tables, count in sizes:
        cost = {
            kind: 1e9 * harness.median(measured[kind, tables, count]) / (tables * count) for kind in drawn
        }
        parted = "yes" if count > MOST_TOGETHER else "no"
        table.row({"tables": tables, "ids of each": count, "parted": parted, **cost})


def _deduped(tables: int, batches: list[NDArray[np.int64]]) -> harness.Contestant:
    dedup, count = shards.Dedup(Buffers()), len(batches[0]) // tables
    offsets, numbers = np.arange(len(batches[0]) + 1, dtype=np.int32), np.arange(tables)
    inverse = np.empty(len(batches[0]), np.int32)

    def turn(number: int) -> tuple[float]:
        of = shards.Ids(batches[number], offsets, count, numbers, numbers.astype(np.int32))
        return (harness.seconds(lambda: dedup.unique(of, inverse)),)

    return turn


def in_place_table(report: harness.Report, options: argparse.Namespace) -> None:
    """Milliseconds of a step of the sparse half, by copies and in place."""
    table = report.table(
        f"Copies, or in place: {FEATURES} features × {options.batch:,} examples, row-wise Adagrad, threads: {options.threads}",
        {"columns": "{}", "ids": "{}", "bag": "{}", "ids per key": "{:.2f}", "MB of rows": "{:.1f}", "copies, ms": "{:.2f}",
         "in place, ms": "{:.2f}", "in place is x as fast": "{:.2f}", "chosen": "{}"},
    )  # fmt: skip
    most = math.ceil(max(options.rows_per_id) * max(options.bag) * options.batch)
    for dim in options.dims:
        side = Packed(
            Shape(FEATURES, options.batch, most), dim, "rowwise_adagrad", options.threads, spare_rows=1
        )
        fill_all([(side, most)])
        for bag in options.bag:
            for rows_per_id in options.rows_per_id:
                shape = Shape(FEATURES, options.batch, max(1, round(rows_per_id * bag * options.batch)), bag)
                kinds = ("uniform", "clipped") if rows_per_id == max(options.rows_per_id) else ("uniform",)
                for kind in kinds:
                    row = {"columns": dim, "ids": "Zipf" if kind == "clipped" else kind, "bag": bag}
                    table.row(row | _both_ways(side, shape, dim, kind, options.repeats))
        side.close()


def _both_ways(side: Packed, shape: Shape, dim: int, kind: str, repeats: int) -> dict[str, object]:
    stream = Stream(shape, kind, new=0.0)
    batches = [stream.next() for _ in range(WARMUP + repeats)]
    gradient = torch.randn(shape.features * shape.batch * dim)
    chosen = shards.COPIED_BYTES

    def contestant(copied_bytes: int) -> harness.Contestant:
        def turn(number: int) -> tuple[float, float]:
            shards.COPIED_BYTES = copied_bytes
            return run_step(side, side.prepare(batches[number], shape.bag), gradient)

        return turn

    try:
        measured = harness.alternate(
            {"copies": contestant(sys.maxsize), "in place": contestant(-1)}, repeats, WARMUP
        )
    finally:
        shards.COPIED_BYTES = chosen
    keys = round(sum(num_unique(ids, shape.features) for ids in batches) / len(batches))
    return {
        "ids per key": shape.num_ids / keys,
        "MB of rows": 4e-6 * keys * dim,
        "copies, ms": 1e3 * harness.median(measured["copies"]),
        "in place, ms": 1e3 * harness.median(measured["in place"]),
        "in place is x as fast": harness.ratio(measured["in place"], measured["copies"]),
        "chosen": "copies" if shards.copied(keys, dim) else "in place",
    }


if __name__ == "__main__":
    main()
