"""What an id costs as features grow, the rows of all tables together fixed; and what packing many of them is worth."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence

import harness
import torch
from ids import Shape, Stream
from sparse_sides import Fbgemm, Packed, Side, TorchRec, Unpacked, fill_all, run_step

DIM, OPTIMIZER, WARMUP = 16, "rowwise_adagrad", 2
PACKING_OPTIMIZERS = ("rowwise_adagrad", "adagrad")
MANY_FEATURES, LARGE_BATCH, SPARE_ROWS = 200, 8192, 20_000


def features_curve(report: harness.Report, options: argparse.Namespace, peers: Mapping[str, bool]) -> None:
    """Nanoseconds an id, forward, backward and update, Zipf ids, one thread; all points take turns."""
    rows = max(1, options.rows // len(options.features))  # all sets of tables are in memory at once
    table = report.table(
        f"Sparse half as features grow: D = {DIM}, {OPTIMIZER}, {options.batch:,} examples, one id a bag,"
        f" {rows:,} rows in all, nanoseconds an id, one thread",
        {
            "features": "{}",
            "girih packed": "{:.1f}",
            "FBGEMM TBE": "{:.1f}",
            "TorchRec": "{:.1f}",
            "girih, of its first": "{:.2f}",
            "TorchRec, of its first": "{:.2f}",
        },
    )
    if table.rows:
        return
    sides: dict[str, type[Side]] = {"girih packed": Packed}
    if peers["FBGEMM"]:
        sides["FBGEMM TBE"] = Fbgemm
    if peers["FBGEMM"] and peers["TorchRec"]:
        sides["TorchRec"] = TorchRec
    contestants: dict[str, harness.Contestant] = {}
    made: list[tuple[Side, int]] = []
    for features in options.features:
        shape = Shape(features, options.batch, max(1, rows // features))
        stream = Stream(shape, "zipf", zipf=options.zipf)
        batches = [stream.next() for _ in range(WARMUP + options.repeats)]
        gradient = torch.randn(features * shape.batch * DIM)
        for name, kind in sides.items():
            side = kind(shape, DIM, OPTIMIZER)
            made.append((side, shape.rows))
            contestants[f"{name} {features}"] = _contestant(side, batches, gradient)
    fill_all(made)
    measured = harness.alternate(contestants, options.repeats, WARMUP)
    with report.group():
        for features in options.features:
            first = options.features[0]
            cost = {
                name: 1e9 * harness.median(measured[f"{name} {features}"]) / (features * options.batch)
                for name in sides
            }
            for name, column in (("girih packed", "girih"), ("TorchRec", "TorchRec")):
                if name in sides:
                    growth = harness.ratio(measured[f"{name} {first}"], measured[f"{name} {features}"])
                    cost[f"{column}, of its first"] = growth * first / features
            table.row({"features": features, **cost})
    for side, _ in made:
        side.close()


def packing_table(report: harness.Report, options: argparse.Namespace, peers: Mapping[str, bool]) -> None:
    """Lookup, pooling, backward and update of 200 features: packed, a group for each table, and FBGEMM's TBE."""
    rows = max(1, options.rows // MANY_FEATURES)
    shape = Shape(MANY_FEATURES, LARGE_BATCH, rows)
    table = report.table(
        f"Packing: {MANY_FEATURES} features of D = {DIM}, {LARGE_BATCH:,} examples, one id a bag, Zipf,"
        f" {rows * MANY_FEATURES:,} rows in all",
        {"optimizer": "{}", "threads": "{}", "what": "{}", "forward ms": "{:.1f}", "back + update ms": "{:.1f}", "step ms": "{:.1f}",
         "packed is x as fast": "{:.2f}"},
    )  # fmt: skip
    stream = Stream(shape, "zipf", zipf=options.zipf)
    batches = [stream.next() for _ in range(WARMUP + options.repeats)]
    gradient = torch.randn(shape.num_ids * DIM)
    for optimizer, threads in itertools.product(PACKING_OPTIMIZERS, options.threads):
        if table.has({"optimizer": optimizer, "threads": threads}):
            continue
        sides: dict[str, Side] = {
            "girih packed": Packed(shape, DIM, optimizer, threads, spare_rows=SPARE_ROWS),
            "girih unpacked": Unpacked(shape, DIM, optimizer, threads, spare_rows=SPARE_ROWS),
        }
        if peers["FBGEMM"]:
            sides["FBGEMM TBE"] = Fbgemm(shape, DIM, optimizer)
        fill_all([(side, shape.rows) for side in sides.values()])
        with harness.threads(threads):
            contestants = {name: _contestant(side, batches, gradient) for name, side in sides.items()}
            measured = harness.alternate(contestants, options.repeats, WARMUP)
        with report.group():
            for name, times in measured.items():
                forward, backward = (1e3 * harness.median_part(times, part) for part in (0, 1))
                table.row({
                    "optimizer": optimizer, "threads": threads, "what": name, "forward ms": forward, "back + update ms": backward,
                    "step ms": 1e3 * harness.median(times), "packed is x as fast": harness.ratio(measured["girih packed"], times),
                })  # fmt: skip
        for side in sides.values():
            side.close()


def _contestant(side: Side, batches: Sequence, gradient: torch.Tensor) -> harness.Contestant:
    return lambda number: run_step(side, side.prepare(batches[number], 1), gradient)
