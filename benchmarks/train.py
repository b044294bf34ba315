"""Whole training steps, Criteo-shaped, beside TorchRec, DeepCTR-Torch and the dense half alone.

13 numeric and 26 categorical features; DLRM (512-256-D, 512-256-1) and DeepFM (400-400-400); Adam for the network,
row-wise Adagrad for rows. Contestants take turns of a few steps in one run; samples/s are medians over turns, and
ratios are of turns that follow each other. ``dense alone`` has the embeddings given: plain eager PyTorch, which no
trainer can beat on this machine without changing the network.

    girih bench train                                   both models, D = 16, 64, bags of 1 and 10, float32 and bfloat16
    girih bench train --models dlrm --dims 16 --bag 1 --precision float32
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import harness
import numpy as np
import pages
import torch
import train_sides
from deepctr_side import DeepCTR, prevent_version_check
from ids import Shape, Stream, static
from train_sides import NUMERIC, Side, Task

from girih.data import Batch

FEATURES, BATCH, WARMUP = 26, 4096, 1


def main() -> None:
    parser = harness.parser("train", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--models", nargs="+", default=["dlrm", "deepfm"], choices=["dlrm", "deepfm"])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--bag", type=int, nargs="+", default=[1, 10], help="ids a bag")
    parser.add_argument(
        "--precision", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shards", type=int, help="of girih's tables; default: as a trainer has them")
    parser.add_argument("--rows", type=int, default=500_000, help="of each feature's table")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=8, help="turns that count")
    parser.add_argument("--steps", type=int, default=2, help="of each turn")
    parser.add_argument("--huge-pages", action="store_true", help="for the peers' malloc too (glibc)")
    options = parser.parse_args()
    if options.huge_pages:
        harness.share_huge_pages()
    torch.set_num_threads(options.threads)
    report = harness.Report("train", options)
    prevent_version_check()
    peers = {name: report.peer(name) is not None for name in ("fbgemm_gpu", "torchrec", "deepctr_torch")}
    report.skip(
        "FuxiCTR",
        "its wheel holds layers but no models, and needs ray[data], polars, pandas and h5py to be imported",
    )
    say_differences(report)
    table = report.table(
        f"Training: {FEATURES} categorical and {NUMERIC} numeric features, {options.batch:,} examples a step,"
        f" {options.threads} threads",
        {
            "model": "{}", "D": "{}", "bag": "{}", "precision": "{}", "what": "{}", "samples/s": "{:,.0f}",
            "girih is x as fast": "{:.2f}", "of dense alone": "{:.1%}", "x its float32": "{:.2f}",
        },
    )  # fmt: skip
    for model, dim in itertools.product(options.models, options.dims):
        if any(not table.has({"model": model, "D": dim, "bag": bag}) for bag in options.bag):
            add_rows(table, model, dim, options, report, peers)
    report.finish()


def say_differences(report: harness.Report) -> None:
    """What the table cannot show."""
    for what in (
        "girih's tables grow, those of TorchRec and DeepCTR-Torch are static; ids stay below their rows, so that all of"
        " them read and move the same rows",
        "girih's float32 linear layers go through oneDNN where that is faster, those of all others through plain PyTorch",
        "girih looks for NaN and infinity in the loss and in every gradient at each step; the others do not",
        "TorchRec runs FusedEmbeddingBagCollection; 'TorchRec tables' puts girih's own network over it, 'TorchRec DLRM' is"
        " its own model of the same layers",
        "first-order weights of DeepFM over TorchRec are a column of rows D + 4 wide, as FBGEMM wants multiples of 4, and"
        " share the row's accumulator",
        "DeepCTR-Torch has no DLRM and no bfloat16; one optimizer moves everything (Adagrad), gradients of its"
        " tables are dense, its network has L2 terms by default, and its ids travel as float32",
        "girih's tables ask for huge pages, the others live in malloc's memory; --huge-pages gives them huge pages too",
        "batches are made beforehand, each in the shape that its contestant's data loader would give",
    ):
        report.not_identical(what)


def add_rows(
    table: harness.ResultTable,
    model: str,
    dim: int,
    options: argparse.Namespace,
    report: harness.Report,
    peers: Mapping[str, bool],
) -> None:
    """All bags and precisions of one model over one set of filled tables."""
    print(f"{model}, D = {dim}", file=sys.stderr, flush=True)
    shape = Shape(FEATURES, options.batch, options.rows)
    task = Task(model, dim, shape)
    sides: dict[str, Side] = {
        "girih": train_sides.Girih(task, options.shards),
        "dense alone": train_sides.DenseAlone(task),
        "dense alone, girih's Replica": train_sides.ReplicaAlone(task),
    }
    if peers["fbgemm_gpu"] and peers["torchrec"]:
        sides["TorchRec tables"] = train_sides.TorchRecTables(task)
        if model == "dlrm":
            sides["TorchRec DLRM"] = train_sides.TorchRecDLRM(task)
    for bag in options.bag:
        if table.has({"model": model, "D": dim, "bag": bag}):
            continue
        bags = Shape(FEATURES, options.batch, options.rows, bag)
        batches = make_batches(bags, options.steps * (WARMUP + options.rounds), options.zipf)
        contestants = {
            (name, precision): turns(side, precision, options.steps, batches)
            for precision in options.precision
            for name, side in sides.items()
        }
        if peers["deepctr_torch"] and model == "deepfm" and "float32" in options.precision:
            side = deepctr(Task(model, dim, bags), report)
            contestants["DeepCTR-Torch", "float32"] = turns(side, "float32", 1, batches)
        measured = harness.alternate(contestants, options.rounds, WARMUP)
        with report.group():
            for row in compared(measured, options.batch):
                table.row({"model": model, "D": dim, "bag": bag, **row})
    for side in sides.values():
        side.close()


def turns(side: Side, precision: str, steps: int, batches: list[Batch]) -> harness.Contestant:
    """A contestant that takes some steps a turn; measures seconds a step."""

    def turn(number: int) -> tuple[float]:
        side.precision = precision
        prepared = [side.prepare(batches[(number * steps + i) % len(batches)]) for i in range(steps)]
        return (harness.seconds(lambda: [side.step(each) for each in prepared]) / steps,)

    return turn


def compared(
    measured: Mapping[tuple[str, str], list[tuple[float, ...]]], batch: int
) -> Iterator[dict[str, object]]:
    """Rates, and ratios of turns that follow each other."""
    for (name, precision), times in measured.items():
        row: dict[str, object] = {
            "precision": precision,
            "what": name,
            "samples/s": batch / harness.median(times),
            "of dense alone": harness.ratio(times, measured["dense alone", precision]),
        }
        if name != "girih":
            row["girih is x as fast"] = harness.ratio(measured["girih", precision], times)
        if precision != "float32" and (name, "float32") in measured:
            row["x its float32"] = harness.ratio(times, measured[name, "float32"])
        yield row


def deepctr(task: Task, report: harness.Report) -> DeepCTR:
    """With tables of 4 GB at most, gradients and optimizer included: each of its steps moves all of them."""
    bytes_a_row = DeepCTR.BYTES_A_COLUMN * (task.dim + 1) * task.shape.features
    rows = min(task.shape.rows, (4 << 30) // bytes_a_row)
    if rows < task.shape.rows:
        report.not_identical(
            f"DeepCTR-Torch at D = {task.dim} has tables of {rows:,} rows, in its favour: a step moves every row"
        )
    return DeepCTR(task, rows)


def make_batches(shape: Shape, count: int, zipf: float) -> list[Batch]:
    rng, stream = np.random.default_rng(0), Stream(shape, "zipf", zipf=zipf)
    return [
        Batch(
            ids=static(stream.next(), shape.rows),
            offsets=shape.offsets.astype(np.int32),
            numeric=rng.normal(size=(shape.batch, NUMERIC)).astype(np.float32),
            labels=(rng.random((shape.batch, 1)) < 0.25).astype(np.float32),
        )
        for _ in range(count)
    ]


MODELS = {"dlrm": "DLRM", "deepfm": "DeepFM"}
PEERS = {
    "TorchRec tables": "the same network with TorchRec's tables",
    "TorchRec DLRM": "TorchRec's DLRM",
    "DeepCTR-Torch": "DeepCTR-Torch's DeepFM",
}


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    lines: list[list[str]] = []
    ratios: dict[str, list[float | None]] = {}
    of_dense: dict[int, list[float]] = {}
    for precision in ("float32", "bfloat16"):
        found = pages.rows(results, "Training", precision=precision)
        for case, those in pages.grouped(found, "model", "D", "bag"):
            by_name = {row["what"]: row for row in those}
            rates, times = (
                {name: row.get(column) for name, row in by_name.items()}
                for column in ("samples/s", "girih is x as fast")
            )
            for name in PEERS:
                ratios.setdefault(name, []).append(times.get(name))
            if times.get("dense alone"):
                of_dense.setdefault(case["bag"], []).append(1 / times["dense alone"])
            lines.append([
                f"{precision}, {MODELS[case['model']]}, D = {case['D']}, {pages.bags(case['bag'])}",
                _thousands(rates.get("girih")), _thousands(rates.get("dense alone")), pages.shown(times.get("dense alone"), "{:.2f}"),
                _thousands(rates.get("TorchRec tables")), pages.times(times.get("TorchRec tables")),
                _thousands(rates.get("TorchRec DLRM")), _thousands(rates.get("DeepCTR-Torch")),
            ])  # fmt: skip
    header = ("", "girih", "dense alone", "×", "TorchRec's tables", "×", "TorchRec's DLRM", "DeepCTR-Torch")
    compared = {name: pages.compared(ratios.get(name, ()), peer) for name, peer in PEERS.items()}
    steps = (
        f"With {pages.bags(bag)}, a step of girih takes {pages.span(values, '{:.1f}')} times as long as PyTorch's network without tables."
        for bag, values in of_dense.items()
    )
    return {
        "speeds": pages.table(header, lines),
        "sentences": pages.sentences(f"{pages.measured(results)}.", *compared.values(), *steps)
        if lines
        else None,
        "summary": f"- Whole steps: {compared['TorchRec tables']} {pages.measured(results)}."
        if lines
        else None,
    }


def _thousands(rate: float | None) -> str:
    return pages.shown(rate, "{:.1f}", 1e-3)


if __name__ == "__main__":
    main()
