"""Where a step of the sparse half spends its time: each kernel of the steps that ``girih bench kernels`` measures.

A timer is put around every kernel. Times are processor time of all threads, in milliseconds per step, without the
gaps between kernels. The lines that a kernel cannot avoid are not counted here: see ``kernels``, column ``of memory``.

    girih bench kernel_times
    girih bench kernel_times --dims 64 --bag 10 --optimizers adagrad
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import harness
import pages
import torch
from ids import Shape, Stream
from sparse_sides import OPTIMIZERS, Packed, run_step

from girih.kernels.cpu.jit import KERNELS

FEATURES, BATCH, WARMUP, SHOWN = 26, 4096, 3, 8
REST = "others"


class Clock:
    """Wraps the kernels that girih's modules hold, and adds up their times while it is on."""

    def __init__(self) -> None:
        self.on, self.seconds, self._lock = False, Counter[str](), threading.Lock()
        names = {id(kernel.dispatcher): name for name, kernel in KERNELS.items()}
        for module in [each for name, each in sys.modules.items() if name.startswith("girih.")]:
            for holder in (vars(module), *(each for each in vars(module).values() if isinstance(each, dict))):
                for key, value in list(holder.items()):
                    if id(value) in names:
                        holder[key] = self._timed(value, names[id(value)])

    def _timed(self, kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not self.on:
                return kernel(*arguments)
            start = time.thread_time()
            result = kernel(*arguments)
            with self._lock:
                self.seconds[name] += time.thread_time() - start
            return result

        return call


def main() -> None:
    parser = harness.parser("kernel_times", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--dims", type=int, nargs="+", default=[16])
    parser.add_argument("--optimizers", nargs="+", default=["rowwise_adagrad"], choices=list(OPTIMIZERS))
    parser.add_argument(
        "--ids", nargs="+", default=["zipf", "uniform"], choices=["zipf", "clipped", "uniform"]
    )
    parser.add_argument("--bag", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=13_000_000, help="of all tables")
    parser.add_argument("--repeats", type=int, default=15, help="steps that count")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, clock = harness.Report("kernel_times", options), Clock()
    table = report.table(
        f"Kernels of a step: {FEATURES} features × {BATCH:,} examples",
        {"D": "{}", "optimizer": "{}", "ids": "{}", "bag": "{}", "threads": "{}", "kernel": "{}", "ms": "{:.2f}",
         "of the step": "{:.0%}", "step ms": "{:.1f}"},
    )  # fmt: skip
    for dim, optimizer, threads in itertools.product(options.dims, options.optimizers, options.threads):
        case = {"D": dim, "optimizer": optimizer, "threads": threads}
        wanted = [each for each in itertools.product(options.ids, options.bag)
                  if not table.has(case | {"ids": each[0], "bag": each[1]})]  # fmt: skip
        if not wanted:
            continue
        rows = options.rows // FEATURES
        side = Packed(Shape(FEATURES, BATCH, rows), dim, optimizer, threads)
        side.fill(rows)
        for kind, bag in wanted:
            with report.group():
                for row in measured(side, clock, Shape(FEATURES, BATCH, rows, bag), kind, options):
                    table.row(case | {"ids": kind, "bag": bag} | row)
        side.close()
    report.finish()


def measured(
    side: Packed, clock: Clock, shape: Shape, kind: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one case: the kernels that take most, and the rest of the step."""
    stream = Stream(shape, kind, seed=shape.bag)
    dim = next(store.spec.dim for _, store in side.stores())
    gradient = torch.randn(shape.features * shape.batch * dim)
    steps: list[float] = []
    clock.seconds.clear()
    for number in range(WARMUP + options.repeats):
        prepared = side.prepare(stream.next(), shape.bag)
        clock.on = number >= WARMUP
        seconds = sum(run_step(side, prepared, gradient))
        clock.on = False
        if number >= WARMUP:
            steps.append(seconds)
    step_ms = 1e3 * statistics.median(steps)
    times = {name: 1e3 * each / options.repeats for name, each in clock.seconds.most_common()}
    most = dict(itertools.islice(times.items(), SHOWN))
    whole = sum(times.values())
    if len(times) > SHOWN:
        most[REST] = whole - sum(most.values())
    return [
        {"kernel": name, "ms": each, "of the step": each / whole, "step ms": step_ms}
        for name, each in most.items()
    ]


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    rows = pages.rows(results, "Kernels of a step")
    keys = ("D", "optimizer", "ids", "bag", "threads")
    cases = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    names = list(dict.fromkeys(row["kernel"] for row in sorted(rows, key=lambda row: row["kernel"] == REST)))
    lines = []
    for case in cases:
        mine = {row["kernel"]: row for row in rows if tuple(row[key] for key in keys) == case}
        shown = [pages.shown(mine.get(name, {}).get("ms"), "{:.1f}") for name in names]
        _, _, ids, bag, threads = case
        title = f"{ids}, {pages.bags(bag)}, {threads} thread{'s' * (threads != 1)}"
        lines.append([title, pages.shown(next(iter(mine.values()))["step ms"], "{:.1f}"), *shown])
    header = ("ms", "step", *(name.partition(".")[2] or name for name in names))
    return {"table": pages.paragraphs(f"{pages.measured(results)}:", pages.table(header, lines))}


if __name__ == "__main__":
    main()
