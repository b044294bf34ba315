"""Persia's headline: what hiding communication is worth over slow links, and what compression saves.

Persia's fully synchronous mode is the same embedding servers without any overlap: ``hybrid`` at τ = 0. Every process
has a host of its own (a network namespace), whose link has the bandwidth of ``--rates`` in each direction (``tc tbf``);
needs root; the transport is TCP. Bags of ``--bag`` ids. girih's ``synchronous``, which sends rows between trainers,
stands beside.

``limit`` is the least that a step could take: processor seconds of all processes / cores, or bytes of the busiest link
and direction / bandwidth, whichever is more. ``sum`` is what a step takes that overlaps nothing: processor seconds /
cores, and the rows, embeddings and gradients of a trainer's share, which cross its worker's link one after the other.
What is kept in ``--results`` is not run again.

    girih bench persia_wire
    girih bench persia_wire --rates 1gbit --compression-rates --ids uniform --bag 1 --batch 4096
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet
import harness
import network
import numpy as np
from experiments import RUNNING_PARTS, Results, Run, add_options, results

COMPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ids": {"compress_ids": True},
    "embeddings": {"wire_embeddings": "float16"},
    "gradients": {"wire_gradients": "float16"},
    "all": {"compress_ids": True, "wire_embeddings": "float16", "wire_gradients": "float16"},
}
COMPRESSED_STALENESS = 4
SYNCHRONOUS = "synchronous"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
QUICK = {"batch": 64, "cardinality": 1000, "rounds": 1, "warmup": 2, "steps": 2, "windows": 2}
KEPT = (
    "wire_bytes", "num_examples", "steps", "staleness_mean", "staleness_max", "server_load", "dense_staleness",
)  # fmt: skip

Found = Mapping[str, Any]


def main() -> None:
    parser = harness.parser("persia_wire", __doc__)
    add_options(parser, pictures=False)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--ids", nargs="+", default=["zipf"], choices=["zipf", "uniform"])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument(
        "--compression-rates", nargs="*", default=["200mbit"], help="where each is tried alone"
    )
    parser.add_argument("--compressions", nargs="+", default=list(COMPRESSIONS), choices=list(COMPRESSIONS))
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512, help="examples of a trainer")
    parser.add_argument("--bag", type=int, default=10, help="ids of a feature")
    parser.add_argument("--cardinality", type=int, default=50_000, help="ids that a feature may have")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    fleet.add_windows(parser)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    report = harness.Report("persia_wire", options)
    reason = network.missing()
    if reason is None:
        kept = results(options, "persia-wire", parts=RUNNING_PARTS)
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(options, kept, Path(directory))
            bench.run_all()
        _show_speed(report, options, bench)
        _show_compression(report, options, bench)
        print(kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def contestants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name → ``[strategy]``, for the comparison of speed."""
    return {SYNCHRONOUS: {"name": SYNCHRONOUS, "trainers": options.trainers}} | {
        f"hybrid, τ = {staleness}": hybrid(options, staleness) for staleness in options.staleness
    }


def compressed(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name → ``[strategy]``, with each compression alone and all together."""
    name, base = f"hybrid, τ = {COMPRESSED_STALENESS}", hybrid(options, COMPRESSED_STALENESS)
    return {
        name if each == "none" else f"{name}, {each} compressed": base | COMPRESSIONS[each]
        for each in options.compressions
    }


def hybrid(options: argparse.Namespace, staleness: int) -> dict[str, Any]:
    """``[strategy]`` with every process on a host of its own."""
    return {
        "name": "hybrid",
        "staleness": staleness,
        "trainers": options.trainers,
        "embedding_workers": options.workers,
        "embedding_servers": options.servers,
        "transport": "tcp",
    }


@dataclass
class Bench:
    """Runs, kept ones among them.

    Attributes:
        found: (ids, rate, contestant) → its runs, one a round.
    """

    options: argparse.Namespace
    kept: Results
    directory: Path
    found: dict[tuple[str, str, str], list[Found]] = field(default_factory=dict)

    def run_all(self) -> None:
        """All rounds; in each, contestants take turns."""
        options = self.options
        for number in range(options.rounds):
            for ids, rate in ((ids, rate) for ids in options.ids for rate in options.rates):
                for name, strategy in contestants(options).items():
                    self._run(ids, rate, name, strategy, number)
            for rate in options.compression_rates:
                for name, strategy in compressed(options).items():
                    self._run(options.ids[0], rate, name, strategy, number)

    def _run(self, ids: str, rate: str, name: str, strategy: Mapping[str, Any], number: int) -> None:
        runs = self.found.setdefault((ids, rate, name), [])
        if len(runs) > number:  # it is in both tables
            return
        options = self.options
        task = {key: getattr(options, key) for key in ("batch", "bag", "cardinality", "dim")} | {"ids": ids}
        conditions = fleet.windows_of(vars(options)) | {"rate": rate}
        title = f"{ids}, bags of {options.bag}, dim {options.dim}/{rate}/{name}/{number}"
        run = Run(title, task, strategy, conditions)
        runs.append(self.kept.measure(run, self._measured))

    def _measured(self, run: Run) -> dict[str, Any]:
        options, strategy, rate = self.options, run.strategy, run.conditions["rate"]
        roles = {
            "trainer": strategy["trainers"],
            "embedding-worker": strategy.get("embedding_workers", 0),
            "embedding-server": strategy.get("embedding_servers", 0),
            "loader": 0 if strategy["name"] == SYNCHRONOUS else 1,
        }
        config = self._config(run.config["ids"])
        batch = options.batch * options.trainers
        with network.network(network.names_apart(roles), rate) as hosts:
            plan = fleet.Plan(
                str(config),
                (fleet.strategy_override(strategy), f"data.batch_size = {batch}"),
                **fleet.windows_of(vars(options)),
                hosts=network.apart(hosts),
                links=tuple(hosts.links.values()),
            )
            found = fleet.measure(plan, timeout_s=900.0, tries=1 if options.quick else fleet.TRIES)
        return short(found, hosts)

    def _config(self, ids: str) -> Path:
        """Data for one epoch that is as long as a run: at an epoch's end there would be nothing to overlap."""
        options = self.options
        file = self.directory / ids / "config.toml"
        if not file.exists():
            steps = options.warmup + options.steps * options.windows + max(options.staleness) + 8
            fleet.write_task(
                file.parent, rows=steps * options.batch * options.trainers, cardinality=options.cardinality,
                dim=options.dim, zipf=1.2 if ids == "zipf" else None, bag=options.bag, shuffle=False,
            )  # fmt: skip
        return file


def short(found: Mapping[str, Any], hosts: network.Hosts) -> dict[str, Any]:
    """What is kept of a run: of links, (bytes sent, bytes got) a step by host."""
    host_of = {link: name for name, link in hosts.links.items()}
    windows = [
        {
            **{
                key: window[key]
                for key in ("samples_per_s", "step_s", "cpu_s", "cpu_s_each", "machine_cpu_s")
            },
            "link_bytes": {host_of[link]: both for link, both in window["link_bytes"].items()},
        }
        for window in found["windows"]
    ]
    summary = {key: found["summary"][key] for key in KEPT if key in found["summary"]}
    return {"tries": found["tries"], "windows": windows, "summary": summary}


def _show_speed(report: harness.Report, options: argparse.Namespace, bench: Bench) -> None:
    table = report.table(
        f"steps over slow links, bags of {options.bag}",
        {"ids": "{}", "link": "{}", "strategy": "{}", "samples/s": "{:,.0f}", "step ms": "{:.0f}",
         "CPU / cores ms": "{:.0f}", "wire ms": "{:.0f}", "limit ms": "{:.0f}", "step / limit": "{:.2f}",
         "sum ms": "{:.0f}", "step / sum": "{:.2f}", "staleness": "{:.2f}", "of τ = 0": "{:.2f}×", **fleet.DISTURBED},
    )  # fmt: skip
    rows = {
        (ids, rate, name): parts(bench.found[ids, rate, name], rate)
        for ids in options.ids
        for rate in options.rates
        for name in contestants(options)
    }
    for (ids, rate, name), row in rows.items():
        base = rows.get((ids, rate, "hybrid, τ = 0"))
        shown = {"ids": ids, "link": rate, "strategy": name, **row}
        shown |= fleet.disturbance(*bench.found[ids, rate, name])
        table.row(shown | ({"of τ = 0": row["samples/s"] / base["samples/s"]} if base else {}))
    speedup = report.table(
        "hybrid beside the same servers without overlap (τ = 0): Persia has 2.6 (100 trillion parameters) to 3.8 (Kwai)",
        {"ids": "{}", "link": "{}", "τ": "{}", "samples/s of τ = 0": "{:,.0f}", "samples/s": "{:,.0f}", "times": "{:.2f}×",
         "sum / limit": "{:.2f}×", "step of τ = 0 / limit": "{:.2f}×"},
    )  # fmt: skip
    for ids, rate in ((ids, rate) for ids in options.ids for rate in options.rates):
        base = rows.get((ids, rate, "hybrid, τ = 0"))
        for staleness in (each for each in options.staleness if each and base):
            row = rows[ids, rate, f"hybrid, τ = {staleness}"]
            speedup.row(
                {
                    "ids": ids,
                    "link": rate,
                    "τ": staleness,
                    "samples/s of τ = 0": base["samples/s"],
                    "samples/s": row["samples/s"],
                    "times": row["samples/s"] / base["samples/s"],
                    "sum / limit": base["sum ms"] / row["limit ms"],
                    "step of τ = 0 / limit": base["step ms"] / row["limit ms"],
                }
            )


def _show_compression(report: harness.Report, options: argparse.Namespace, bench: Bench) -> None:
    counted = ("ids", "embeddings", "gradients", "dense")
    ways = {
        "trainer gets": ("t", 1),
        "trainer sends": ("t", 0),
        "worker gets": ("w", 1),
        "worker sends": ("w", 0),
    }
    table = report.table(
        "each compression: bytes a sample, by kind of all processes, by link and direction as the kernel counts",
        {"link": "{}", "compressed": "{}", "samples/s": "{:,.0f}", "of none": "{:.2f}×", "step ms": "{:.0f}",
         **dict.fromkeys((*counted, *ways, "busiest link"), "{:,.0f}"), "limit ms": "{:.0f}",
         "step / limit": "{:.2f}", **fleet.DISTURBED},
    )  # fmt: skip
    batch = options.batch * options.trainers
    for rate in options.compression_rates:
        base = None
        for each, name in zip(options.compressions, compressed(options), strict=True):
            runs = bench.found[options.ids[0], rate, name]
            row, summary = parts(runs, rate), runs[0]["summary"]
            base = base or row["samples/s"]
            shown = {key: row[key] for key in ("samples/s", "step ms", "limit ms", "step / limit")}
            shown |= {kind: summary["wire_bytes"][kind] / summary["num_examples"] for kind in counted}
            shown |= {
                title: middle(runs, lambda window, way=way: _of_hosts(window, *way)) / batch
                for title, way in ways.items()
            }
            shown |= {"busiest link": middle(runs, busiest) / batch, **fleet.disturbance(*runs)}
            table.row({"link": rate, "compressed": each, "of none": row["samples/s"] / base, **shown})


def parts(runs: Sequence[Found], rate: str) -> dict[str, float]:
    """A step, and what it consists of: medians over all windows of all rounds."""
    step = middle(runs, lambda window: window["step_s"])
    compute = middle(runs, lambda window: window["machine_cpu_s"]) / fleet.CORES
    wire = middle(runs, busiest) / bytes_per_s(rate)
    limit, whole = max(compute, wire), compute + _in_turn(runs) / bytes_per_s(rate)
    return {
        "samples/s": middle(runs, lambda window: window["samples_per_s"]),
        "step ms": 1e3 * step,
        "CPU / cores ms": 1e3 * compute,
        "wire ms": 1e3 * wire,
        "limit ms": 1e3 * limit,
        "step / limit": step / limit,
        "sum ms": 1e3 * whole,
        "step / sum": step / whole,
        "staleness": float(np.mean([run["summary"]["staleness_mean"] for run in runs])),
    }


def busiest(window: Mapping[str, Any]) -> float:
    """Bytes a step of the link and direction that carries most."""
    return float(max(max(both) for both in window["link_bytes"].values()))


def _in_turn(runs: Sequence[Found]) -> float:
    """Bytes a step that cross one link one after the other where nothing overlaps.

    Of a trainer's share its worker gets rows, sends embeddings, gets their gradients and sends those of rows. Trainers that
    send each other rows do so in both directions at once.
    """
    strategy, summary = runs[0]["asked"]["strategy"], runs[0]["summary"]
    if strategy["name"] == SYNCHRONOUS:
        return middle(runs, busiest)
    sent = summary["wire_bytes"]["embeddings"] + summary["wire_bytes"]["gradients"]
    return float(sent / summary["steps"] / strategy["trainers"])


def _of_hosts(window: Mapping[str, Any], letter: str, way: int) -> float:
    """Bytes a step that all hosts of a letter sent (way 0) or got (1)."""
    return float(sum(both[way] for host, both in window["link_bytes"].items() if host[0] == letter))


def bytes_per_s(rate: str) -> float:
    """What ``tc`` makes of a rate."""
    unit = next(unit for unit in BITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * BITS[unit] / 8


def middle(runs: Sequence[Found], of: Callable[[Mapping[str, Any]], float]) -> float:
    """The median over all windows of all runs."""
    return float(np.median([of(window) for run in runs for window in run["windows"]]))


if __name__ == "__main__":
    main()
