"""PICASSO's Table VI: hit ratio and samples/s against the size of the hot tier, beside the best ratio that the trace allows.

``zipf`` is the paper's W&D workload (``picasso.py``), all batches distinct; ``kuairand`` are KuaiRand's ids. One process;
the hot tier is chosen once the warm-up has counted, and then after each window.

A hit is a unique key of a batch whose row is there and in the hot tier, of all whose row is there. The best possible ratio is that of a hot set which
never changes and knows the whole trace: the keys that most batches read (the true top-k). What changes its set may be
better; what has to learn it from the past may not.

    girih bench picasso_table6 [--data zipf] [--quick]         # kuairand needs GIRIH_DATA
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import picasso
import tomli_w
from experiments import ROOT, Run, find_data, pictures, show
from numpy.typing import NDArray
from picasso import Found
from pictures import Chart, write_picture

from girih.app.run_config import RunConfig

DATA = ("zipf", "kuairand")
PAPER = {"256 MB": 0.09, "512 MB": 0.18, "1 GB": 0.24, "2 GB": 0.28, "4 GB": 0.31}
"""Hot storage → hit ratio of W&D."""
QUICK = {"shares": [0.1, 1.0]}


def main() -> None:
    parser = picasso.parser("picasso_table6", __doc__, batch=1024, gpu=True)
    parser.set_defaults(warmup=40, steps=20, windows=5)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.01, 0.03, 0.1, 0.3, 1.0],
        help="of the trace's keys that are hot",
    )
    options = picasso.parsed(parser, QUICK)
    report = harness.Report("picasso_table6", options)
    bench = picasso.Bench.of(options, "picasso-table6", trainers=1)
    traces: dict[str, Trace] = {}
    cases: dict[tuple[str, float | None], Run] = {}
    for data in options.data:
        if data == "kuairand" and "GIRIH_DATA" not in os.environ and "KUAIRAND" not in os.environ:
            report.skip(data, "set GIRIH_DATA to the directory of the public data sets")
            continue
        made = _kuairand(parser, options) if data == "kuairand" else _zipf(bench)
        traces[data] = trace_of(made, options.warmup, options.warmup + options.steps * options.windows)
        for share in (None, *options.shares):
            rows = 0 if share is None else hot_rows(traces[data], share)
            sections = {"store": picasso.store(options, rows)}
            cases[data, share] = bench.run(f"{data}/{rows}", {**made, **sections})
    found = bench.measured(cases)
    _show(report, traces, found)
    _draw(options, traces, found)
    report.not_identical(
        "the paper's hot storage takes GPU memory from the batch, which makes large ones slower again; here it takes memory that"
        " nothing else wants"
    )
    report.not_identical(
        "beside its hot rows the tier keeps those of the last few batches; what it answers with no hot rows is theirs"
    )
    report.not_identical(
        "the paper sizes by bytes of a trillion parameters; here sizes are shares of the keys that the trace has"
    )
    print(bench.kept.told())
    report.finish()


def _zipf(bench: picasso.Bench) -> dict[str, Any]:
    options, workload = bench.options, bench.workload(picasso.WIDE_DEEP)
    files = options.warmup + options.steps * options.windows + picasso.MORE_FILES
    train = picasso.write_epoch(workload, options.batch, files, distinct=files)
    return picasso.config(workload, train, options.batch)


def _kuairand(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    find_data(parser)
    os.environ["PICASSO"] = str(picasso.ROOT.resolve())
    made = tomllib.loads((ROOT / "recipes" / "kuairand" / "kuairand.toml").read_text())
    made["data"] = {"train": made["data"]["train"], "batch_size": options.batch, "shuffle": False}
    made["model"] = {"name": "din", "hidden": [128, 64]}
    return made | {"train": {"seed": 1, "epochs": 1000}}


@dataclass(frozen=True)
class Trace:
    """What some batches read of each key, most reads first.

    Attributes:
        reads: int64[keys], batches that read its row; the first read of a key finds none, and so does not count, as tiers
            do not count it.
        ids: int64[keys], ids of these batches that are it.
    """

    reads: NDArray[np.int64]
    ids: NDArray[np.int64]

    def best_ratio(self, rows: int) -> float:
        """The hit ratio of the so many keys that most batches read: no set that never changes has a better one."""
        return float(self.reads[:rows].sum() / self.reads.sum())

    def most_ids_ratio(self, rows: int) -> float:
        """The hit ratio of the so many keys that have most ids, as Algorithm 1 counts."""
        return float(self.reads[np.argsort(-self.ids, kind="stable")[:rows]].sum() / self.reads.sum())


def trace_of(config: Mapping[str, Any], begin: int, end: int) -> Trace:
    """What batches ``begin`` to ``end - 1`` read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(tomli_w.dumps(config))
        settings = RunConfig.load(file)
    data, features = settings.dataset("train"), settings.schema.sparse
    known: dict[str, list[NDArray[np.int64]]] = {feature.table_name: [] for feature in features}
    keys, counts = ({table: [] for table in known} for _ in range(2))
    epochs = itertools.chain.from_iterable(iter(data) for _ in itertools.count())
    for number, batch in enumerate(itertools.islice(epochs, end)):
        of_table: dict[str, list[NDArray[np.int64]]] = {}
        for place, feature in enumerate(features):
            first, last = (int(batch.offsets[n * batch.num_examples]) for n in (place, place + 1))
            of_table.setdefault(feature.table_name, []).append(batch.ids[first:last])
        for table, parts in of_table.items():
            here, times = np.unique(np.concatenate(parts), return_counts=True)
            if number < begin:
                known[table].append(here)
            else:
                keys[table].append(here)
                counts[table].append(times)
    reads, ids = [], []
    for table, parts in keys.items():
        unique, inverse, batches = np.unique(np.concatenate(parts), return_inverse=True, return_counts=True)
        reads.append(batches - ~np.isin(unique, np.concatenate([unique[:0], *known[table]])))
        ids.append(np.bincount(inverse, np.concatenate(counts[table])).astype(np.int64))
    all_reads, all_ids = np.concatenate(reads), np.concatenate(ids)
    order = np.argsort(-all_reads, kind="stable")[: int((all_reads > 0).sum())]
    return Trace(all_reads[order], all_ids[order])


def hot_rows(trace: Trace, share: float) -> int:
    """Rows of a hot tier for this share of the keys."""
    return max(1, round(share * len(trace.reads)))


def hit_ratio(runs: Sequence[Found]) -> float:
    """Of the hot tier, after the warm-up."""
    return float(np.mean([picasso.hot_ratio(run) or 0.0 for run in runs]))


Traces = Mapping[str, Trace]
Cases = Mapping[tuple[str, float | None], Sequence[Found]]


def _show(report: harness.Report, traces: Traces, found: Cases) -> None:
    rows = []
    for (data, share), runs in found.items():
        trace, ours = traces[data], hit_ratio(runs)
        size = 0 if share is None else hot_rows(trace, share)
        room = max(window["room_rows"] for run in runs for window in run["windows"])
        row = {"data": data, "hot, of the keys": f"{share or 0:.0%}", "hot rows": f"{size:,}"}
        row |= {"hit ratio": f"{ours:.1%}", "best possible": f"{trace.best_ratio(size):.1%}"}
        row |= {"of most ids": f"{trace.most_ids_ratio(size):.1%}", "rows in memory": f"{room:,}"}
        row |= {
            "best possible with these": f"{trace.best_ratio(room):.1%}",
            "of it": f"{ours / trace.best_ratio(room):.2f}",
        }
        row |= picasso.columns(runs)
        row["of no hot rows"] = f"{picasso.beside(runs, found[data, None]):.2f}"
        rows.append(row)
    show(
        report,
        "hit ratio and samples/s by the size of the hot tier",
        list(rows[0]),
        [list(r.values()) for r in rows],
    )
    paper = ", ".join(f"{size} {ratio:.0%}" for size, ratio in PAPER.items())
    print(f"the paper, W&D: {paper}\n")


def _draw(options: argparse.Namespace, traces: Traces, found: Cases) -> None:
    charts = []
    for data, trace in traces.items():
        shares = [share for share in options.shares if (data, share) in found]
        series = {
            "hot tier": [(share, hit_ratio(found[data, share])) for share in shares],
            "best possible": [(share, trace.best_ratio(hot_rows(trace, share))) for share in shares],
        }
        charts.append(Chart(data, "share of the keys that is hot", "hit ratio", series))
    if charts:
        write_picture(pictures(options) / "picasso-table6.svg", charts)


if __name__ == "__main__":
    main()
