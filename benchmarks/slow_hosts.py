"""Strategies and other systems on hosts that each have a tenth of a core, and on hosts of other speeds.

A host is a network namespace, a link with its rate, its delay and a buffer of 1 MB, and a quota of processor time. ``--hosts`` says
what hosts there are and which roles they run; N is the number of trainers, and the other hosts follow in proportion. Needs root.

    girih bench slow_hosts --parts proportion    N = 2: samples/s by cores, with links that are slower by the same factor
    girih bench slow_hosts --parts systems       N = 2, 4, 8, 16: every strategy, TorchRec over gloo, and DDP with sparse gradients
    girih bench slow_hosts --parts systems --hosts benchmarks/slow_hosts_apart.toml --counts 8    Persia's roles on hosts of their own
    girih bench slow_hosts_quality               AUC of hybrid and asynchronous at N = 8 and 16

The model is a DLRM (512-256-D, 512-256-1) with 26 categorical and 13 numeric features. Batches are of ``--batch`` examples for each
trainer. All parts write the same ``--json``; with ``--resume`` a row that is there is not measured again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import harness
import hosts_file
import network
import pages
import slow_peers
import slow_runs
from hosts_file import Kinds
from slow_pages import page_parts
from slow_runs import Bench, Row

PARTS = ("proportion", "systems")
HOSTS = Path(__file__).with_suffix(".toml")
IN_PROPORTION = ("synchronous", "hybrid, τ = 4")


def main() -> None:
    parser = harness.parser("slow_hosts", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--hosts", type=Path, default=HOSTS, metavar="FILE")
    parser.add_argument("--cores", type=float, nargs="+", default=[1.0, 0.5, 0.2, 0.1], help="of proportion")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16], help="N of systems")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="of systems; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of proportion; systems have one")
    parser.add_argument("--batch", type=int, default=512, help="examples of a trainer")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cardinality", type=int, default=20_000, help="ids that a feature may have")
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tries", type=int, default=1, help="of a run that others disturb")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of a run")
    options = parser.parse_args()
    try:
        kinds = hosts_file.load(options.hosts)
    except (OSError, ValueError) as error:
        parser.error(f"--hosts: {error}")
    report = harness.Report("slow_hosts", options)
    reason = network.missing(delay=any(kind.delay_ms for kind in kinds), cores=True)
    if reason is None:
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(options, Path(directory))
            _say(report)
            for part, fill in (("proportion", _proportion), ("systems", _systems)):
                if part in options.parts:
                    fill(report, bench, kinds)
    else:
        report.skip("all", reason)
    report.finish()


def _say(report: harness.Report) -> None:
    for what in (
        "caches, memory bandwidth, huge pages and the kernel's own work for links are those of the whole machine at every speed",
        "TorchRec's and DDP's tables are static and have all rows from the beginning; girih's grow",
        "DDP has one table for all features, and Adagrad with a number for each column; the others have row-wise Adagrad",
        "girih looks for NaN and infinity in the loss and in every gradient at each step; TorchRec and DDP do not",
    ):
        report.not_identical(what)


class Pair:
    """Two tables of the same runs: rates, and the use of processors and links. A run is in both or in none."""

    def __init__(self, report: harness.Report, title: str, keys: Sequence[str]) -> None:
        self._report = report
        self._keys = {**dict.fromkeys(keys, "{}"), **slow_runs.WHERE}
        self._rates = report.table(title, {**self._keys, **slow_runs.RATES, **slow_runs.COST})
        self._use = report.table(f"use, {title}", {**self._keys, **slow_runs.USE})

    def add(self, key: Row, measure: Callable[[], Row]) -> None:
        """Adds a run unless an earlier one is there. A run that fails is skipped, with the reason."""
        title = " ".join(map(str, key.values()))
        if self._use.has(key):
            return
        self._report.forget(title)
        start = time.perf_counter()
        try:
            row = {**key, **measure(), "wall s": time.perf_counter() - start}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self._report.skip(title, " ".join(str(error).split())[-400:])
            print(f"{title}: failed, {error}", file=sys.stderr, flush=True)
            return
        print(f"{title}: {row['samples/s']:,.0f} samples/s, {row['wall s']:.0f} s", flush=True)
        with self._report.group():
            for table in (self._rates, self._use):
                table.row({name: row.get(name) for name in table.columns})


def _proportion(report: harness.Report, bench: Bench, kinds: Kinds) -> None:
    pair = Pair(
        report, "proportion: two trainers, links slower by the factor of the cores", ("strategy", "round")
    )
    for number in range(bench.options.rounds):
        for cores in bench.options.cores:
            hosts = hosts_file.at_cores(hosts_file.for_trainers(kinds, 2), cores)
            for name in IN_PROPORTION:
                strategy = slow_runs.contestants(hosts)[name]
                key = {"strategy": name, "round": number, **slow_runs.where(hosts)}
                pair.add(key, partial(bench.girih, strategy, hosts))


def _systems(report: harness.Report, bench: Bench, kinds: Kinds) -> None:
    pair = Pair(report, "systems by the number of trainers", ("system", "contestant"))
    sharded = all(report.peer(module) is not None for module in ("fbgemm_gpu", "torchrec"))
    for count in bench.options.counts:
        hosts = hosts_file.for_trainers(kinds, count)
        for name, strategy in slow_runs.contestants(hosts).items():
            if bench.chosen(name):
                key = {"system": "girih", "contestant": name, **slow_runs.where(hosts)}
                pair.add(key, partial(bench.girih, strategy, hosts))
        for name in filter(bench.chosen, slow_peers.PEERS):
            if sharded or name not in slow_peers.SHARDINGS:
                key = {"system": name.partition(",")[0], "contestant": name, **slow_runs.where(hosts)}
                pair.add(key, partial(bench.peer, name, hosts))


if __name__ == "__main__":
    main()
