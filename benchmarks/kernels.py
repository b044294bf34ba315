"""The sparse half alone: lookup, backward and update, beside FBGEMM, TorchRec and nn.EmbeddingBag(sparse=True).

All get the same ids (fresh every batch), gradients (random, contiguous), sum pooling, learning rate, float32 and
threads, and take turns in one run. Times are medians; ``x FBGEMM`` is how many times as long FBGEMM takes for the
whole step on as many threads, paired round by round. ``of memory`` is the share of the random cache lines a
second, measured beside it, that the step's unavoidable lines account for (see memory.py).

    girih bench kernels                     D = 16, 64; row-wise Adagrad, at D = 16 Adagrad too; Zipf and uniform
                                            ids; bags of 1 and 10; the cost of an id from 26 to 208 features
    girih bench kernels --full              D = 128 and all optimizers too
    girih bench kernels --quick             D = 16, Zipf, bags of 1
    girih bench kernels --only features     the second table alone (or: cases)
    girih bench kernels --only packing      200 features, 8,192 examples: packed beside a group for each table
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import harness
import pages
import sparse_sides
import torch
from features import features_curve, packing_table
from ids import Shape, Stream, num_unique
from memory import lines_of_step, random_lines_per_s
from sparse_sides import OPTIMIZERS, STATE_COLUMNS, Side, run_step

FEATURES, BATCH, WARMUP = 26, 4096, 3
OVERHEAD_BYTES = 64  # of a row, beside its columns: index and metadata
COLUMNS = {
    "D": "{}",
    "optimizer": "{}",
    "ids": "{}",
    "bag": "{}",
    "threads": "{}",
    "what": "{}",
    "forward ms": "{:.2f}",
    "back + update ms": "{:.2f}",
    "step ms": "{:.2f}",
    "x FBGEMM": "{:.2f}",
    "x nn.EmbeddingBag": "{:.2f}",
    "of memory": "{:.0%}",
    "rows": "{:,}",
    "unique": "{:,}",
    "new ids": "{:.2%}",
}  # fmt: skip


def main() -> None:
    options = arguments()
    if options.huge_pages:
        harness.share_huge_pages()
    torch.set_num_threads(1)
    report = harness.Report("kernels", options)
    peers = {
        "FBGEMM": report.peer("fbgemm_gpu") is not None,
        "TorchRec": report.peer("torchrec") is not None,
    }
    say_differences(report)
    if options.only in (None, "cases"):
        table = report.table(f"Sparse half: {FEATURES} features × {options.batch:,} examples", COLUMNS)
        rates = line_rates(report, options)
        pairs = list(itertools.product(options.optimizers, options.dims))
        if not (options.quick or options.full or options.chosen):
            pairs.append(("adagrad", options.dims[0]))  # torch's sparse optimizer, beside all others
        for optimizer, dim in pairs:
            missing = [
                case for case in itertools.product(options.ids, options.bag)
                if not table.has({"optimizer": optimizer, "D": dim, "ids": case[0], "bag": case[1]})
            ]  # fmt: skip
            for rows in cases(optimizer, dim, missing, options, peers, rates) if missing else ():
                with report.group():
                    for row in rows:
                        table.row(row)
        best_of_threads(report, table)
    if options.only in (None, "features"):
        features_curve(report, options, peers)
    if options.only == "packing" or (options.full and options.only is None):
        packing_table(report, options, peers)
    report.finish()


def arguments() -> argparse.Namespace:
    parser = harness.parser("kernels", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--dims", type=int, nargs="+")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--ids", nargs="+", choices=["zipf", "clipped", "uniform"])
    parser.add_argument("--bag", type=int, nargs="+", help="ids a bag")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--features", type=int, nargs="+", default=[26, 52, 104, 208], help="of the curve")
    parser.add_argument(
        "--rows", type=int, default=13_000_000, help="of all tables; fewer where memory is short"
    )
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--repeats", type=int, default=15, help="rounds that count")
    parser.add_argument("--zipf", type=float, default=1.2, help="exponent")
    parser.add_argument("--new", type=float, default=0.01, help="share of new ids among uniform ones")
    parser.add_argument(
        "--memory-bytes", type=int, default=2 << 30, help="of the array that random lines are read from"
    )
    parser.add_argument("--huge-pages", action="store_true", help="for the peers' malloc too (glibc)")
    parser.add_argument("--only", choices=["cases", "features", "packing"])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a reduced grid")
    size.add_argument("--full", action="store_true", help="the whole grid, tens of minutes")
    options = parser.parse_args()
    options.chosen = options.optimizers is not None or options.dims is not None
    options.dims = options.dims or ([16] if options.quick else [16, 64, 128] if options.full else [16, 64])
    options.optimizers = options.optimizers or (list(OPTIMIZERS) if options.full else ["rowwise_adagrad"])
    options.ids = options.ids or (["zipf"] if options.quick else ["zipf", "uniform"])
    options.bag = options.bag or ([1] if options.quick else [1, 10])
    return options


def say_differences(report: harness.Report) -> None:
    """What the table cannot show."""
    for what in (
        "girih's tables grow: hashing, use marks, new rows and a check for NaN and infinity are in its time; FBGEMM, TorchRec"
        " and nn.EmbeddingBag have static tables and do none of it",
        "static tables cannot take unclipped ids: they get them modulo their rows, computed outside the timing",
        "girih's new rows take memory of rows that were evicted before; the first touch of fresh memory, which costs"
        " what the system takes for it, is in girih bench capacity",
        "girih asks for huge pages, the others live in malloc's memory; --huge-pages gives them huge pages too",
        "girih (packed), girih.nn.EmbeddingBagCollection and FBGEMM know 26 tables and give [B, F, D]; both EmbeddingBags hold"
        " the ids of all features in one table and give [F·B, D]",
        "FBGEMM and TorchRec have only row-wise Adagrad, Adagrad and SGD on CPU; torch has no sparse row-wise Adagrad"
        " and no FTRL",
        "two threads are two shards in girih, and two OpenMP threads in the others",
    ):
        report.not_identical(what)


def line_rates(report: harness.Report, options: argparse.Namespace) -> dict[int, float]:
    """Random cache lines per second by threads, the same for all rows."""
    table = report.table("Random cache lines from memory", {"threads": "{}", "M lines/s": "{:.0f}"})
    for number in options.threads:
        if not table.has({"threads": number}):
            rate = random_lines_per_s(number, options.memory_bytes)
            table.row({"threads": number, "M lines/s": rate / 1e6})
    return {row["threads"]: 1e6 * row["M lines/s"] for row in table.rows}


def cases(
    optimizer: str,
    dim: int,
    missing: Sequence[tuple[str, int]],
    options: argparse.Namespace,
    peers: Mapping[str, bool],
    rates: Mapping[int, float],
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each missing kind of ids and bag, over one set of filled tables."""
    sides = {("girih packed", n): sparse_sides.Packed for n in options.threads}
    sides |= {("girih.nn.EmbeddingBag", n): sparse_sides.Module for n in options.threads}
    sides |= {("girih.nn.EmbeddingBagCollection", n): sparse_sides.Collection for n in options.threads}
    per_row = OVERHEAD_BYTES + 4 * (dim + STATE_COLUMNS[optimizer](dim))
    bytes_a_row = len(sides) * per_row
    makers: dict[str, Callable[..., Side]] = {}
    if peers["FBGEMM"] and optimizer in sparse_sides.Fbgemm.OPTIMIZERS:
        makers["FBGEMM TBE"] = sparse_sides.Fbgemm
    if optimizer in sparse_sides.Torch.OPTIMIZERS:
        makers["nn.EmbeddingBag"] = sparse_sides.Torch
    bytes_a_row += len(makers) * (per_row - OVERHEAD_BYTES)
    rows = min(options.rows, int(0.75 * harness.available_bytes() / bytes_a_row)) // FEATURES
    shape = Shape(FEATURES, options.batch, rows)
    tell(f"D = {dim}, {optimizer}: filling {FEATURES} tables of {rows:,} rows")
    made: dict[tuple[str, int], Side] = {
        (name, n): kind(shape, dim, optimizer, n) for (name, n), kind in sides.items()
    }
    sparse_sides.fill_all([(side, rows) for side in made.values()])
    for name, make in makers.items():
        side = make(shape, dim, optimizer)
        made |= {(name, n): side for n in options.threads}
    for kind, bag in missing:
        yield one_case(optimizer, dim, kind, bag, shape, made, options, rates)
    for side in made.values():
        side.close()


def one_case(
    optimizer: str,
    dim: int,
    kind: str,
    bag: int,
    shape: Shape,
    sides: Mapping[tuple[str, int], Side],
    options: argparse.Namespace,
    rates: Mapping[int, float],
) -> list[dict[str, Any]]:
    tell(f"D = {dim}, {optimizer}, {kind} ids, bags of {bag}")
    shape = Shape(shape.features, shape.batch, shape.rows, bag)
    stream = Stream(shape, kind, zipf=options.zipf, new=options.new, seed=bag)
    batches = [stream.next() for _ in range(WARMUP + options.repeats)]
    gradient = torch.randn(shape.features * shape.batch * dim)
    packed = sides["girih packed", options.threads[0]]
    before: list[int] = []

    def contestant(side: Side, threads: int) -> harness.Contestant:
        def turn(number: int) -> Sequence[float]:
            if side is packed and number == WARMUP:
                before.append(packed.num_new())
            with harness.threads(threads):
                return run_step(side, side.prepare(batches[number], bag), gradient)

        return turn

    measured = harness.alternate(
        {key: contestant(side, key[1]) for key, side in sides.items()}, options.repeats, WARMUP
    )
    unique = sum(num_unique(ids, shape.features) for ids in batches[WARMUP:]) // options.repeats
    new_ids = (packed.num_new() - before[0]) / (options.repeats * shape.num_ids)
    lines = lines_of_step(unique, dim, STATE_COLUMNS[optimizer](dim))
    found = []
    for (what, threads), times in measured.items():
        seconds = harness.median(times)
        row = {
            "D": dim, "optimizer": optimizer, "ids": kind, "bag": bag, "threads": threads, "what": what,
            "forward ms": 1e3 * harness.median_part(times, 0),
            "back + update ms": 1e3 * harness.median_part(times, 1),
            "step ms": 1e3 * seconds, "rows": shape.features * shape.rows, "unique": unique, "new ids": new_ids,
        }  # fmt: skip
        for column, peer in (("x FBGEMM", "FBGEMM TBE"), ("x nn.EmbeddingBag", "nn.EmbeddingBag")):
            if (peer, threads) in measured and what != peer:
                row[column] = harness.ratio(times, measured[peer, threads])
        if what.startswith("girih"):
            row["of memory"] = lines / seconds / rates[threads]
        found.append(row)
    return found


def best_of_threads(report: harness.Report, table: harness.ResultTable) -> None:
    """The whole step at the best number of threads of either."""
    columns = ("D", "optimizer", "ids", "bag")
    summary = report.table(
        "Whole step at the best number of threads of either, times as long as girih",
        {
            **{name: COLUMNS[name] for name in columns},
            "what": "{}",
            "FBGEMM TBE": "{:.2f}",
            "nn.EmbeddingBag": "{:.2f}",
        },
    )
    summary.rows.clear()
    best: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in table.rows:
        steps = best.setdefault(tuple(row[name] for name in columns), {})
        steps[row["what"]] = min(row["step ms"], steps.get(row["what"], float("inf")))
    for case, steps in best.items():
        for what in ("girih packed", "girih.nn.EmbeddingBag", "girih.nn.EmbeddingBagCollection"):
            ratios = {p: steps[p] / steps[what] for p in ("FBGEMM TBE", "nn.EmbeddingBag") if p in steps}
            summary.row({**dict(zip(columns, case, strict=True)), "what": what, **ratios})


def tell(what: str) -> None:
    """Progress, on standard error."""
    print(what, file=sys.stderr, flush=True)


NAMES = {"rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad", "zipf": "Zipf"}
"""Optimizers and kinds of ids, as pages name them."""
CASE = ("optimizer", "D", "ids", "bag")


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    found = pages.rows(results, "Sparse half: ")
    best = pages.rows(results, "Whole step")
    threads = sorted({row["threads"] for row in found})
    compared = [
        pages.compared(
            [row.get("FBGEMM TBE") for row in those if row["what"] == "girih packed"],
            f"FBGEMM with {NAMES.get(of['optimizer'], of['optimizer'])}",
            ", each at its best number of threads",
        )
        for of, those in pages.grouped(best, "optimizer")
    ]
    one = [row.get("x FBGEMM") for row in found if row["what"] == "girih packed" and row["threads"] == 1]
    torch_ratios = [row.get("nn.EmbeddingBag") for row in best if row["what"] == "girih packed"]
    header = (
        "", "girih", "`girih.nn.EmbeddingBag`", "`EmbeddingBagCollection`", "FBGEMM, static tables", "× one thread", "× best",
        "module × best", "of memory",
    )  # fmt: skip
    return {
        "steps": pages.table(header, _lines(found, best, threads)),
        "sentences": pages.sentences(
            f"{pages.measured(results)}. Milliseconds are those of {' and '.join(map(str, threads))} threads.",
            *compared,
            pages.compared(one, "FBGEMM", ", both on one thread"),
            pages.compared(
                torch_ratios,
                "PyTorch's `nn.EmbeddingBag(sparse=True)`",
                ", each at its best number of threads",
            ),
        )
        if found
        else None,
        "features": _features(results),
        "summary": _summary(best) if found else None,
    }


def _lines(
    found: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]], threads: Sequence[int]
) -> Iterator[list[str]]:
    bests = {
        tuple(of.values()): {row["what"]: row for row in those} for of, those in pages.grouped(best, *CASE)
    }
    for case, those in pages.grouped(found, *CASE):
        by = {(row["what"], row["threads"]): row for row in those}
        best_of = bests.get(tuple(case.values()), {})
        one = by.get(("girih packed", 1), {})
        optimizer, ids = (NAMES.get(case[name], case[name]) for name in ("optimizer", "ids"))
        yield [
            f"{optimizer}, D = {case['D']}, {ids}, {pages.bags(case['bag'])}",
            *(
                ", ".join(pages.shown(by.get((what, n), {}).get("step ms"), "{:.1f}") for n in threads)
                for what in ("girih packed", "girih.nn.EmbeddingBag", "girih.nn.EmbeddingBagCollection", "FBGEMM TBE")
            ),
            pages.times(one.get("x FBGEMM")),
            *(pages.times(best_of.get(what, {}).get("FBGEMM TBE")) for what in ("girih packed", "girih.nn.EmbeddingBag")),
            pages.shown(one.get("of memory"), "{:.0%}"),
        ]  # fmt: skip


def _features(results: Mapping[str, Any]) -> str | None:
    found = pages.rows(results, "Sparse half as")
    if len(found) < 2:
        return None
    first, *others = found
    costs = (
        f"{what} costs {pages.span(row.get(column) for row in others)} times as much"
        for what, column in (("An id", "girih, of its first"), ("With TorchRec it", "TorchRec, of its first"))
    )
    features = pages.span((row["features"] for row in others), "{}")
    return (
        f"{pages.measured(results)}. {next(costs)} with {features} features as with {first['features']}."
        f" {next(costs)}."
    )


def _summary(best: Sequence[dict[str, Any]]) -> str:
    ratios = [row.get("FBGEMM TBE") for row in best if row["what"] == "girih packed"]
    return "- The sparse half alone: " + pages.compared(ratios, "FBGEMM's static tables")


if __name__ == "__main__":
    main()
