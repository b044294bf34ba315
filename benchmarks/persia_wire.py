"""What hiding communication is worth: strategies over slow links, and what compression saves.

Every trainer is a host of its own (a network namespace), loader, worker and server share another; links have the
bandwidth of ``--rates`` in each direction (``tc tbf``). Needs root; the transport is TCP. Beside each step stands
the least that it could take: CPU seconds of all processes / cores, or bytes of the busiest link / bandwidth,
whichever is more. ``sum`` is both added up: what a step pays that hides nothing.

    girih bench persia_wire
    girih bench persia_wire --rates 200mbit --compressions none all
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fleet
import harness
import network
import numpy as np

COMPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ids": {"compress_ids": True},
    "embeddings": {"wire_embeddings": "float16"},
    "gradients": {"wire_gradients": "float16"},
    "all": {"compress_ids": True, "wire_embeddings": "float16", "wire_gradients": "float16"},
}
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main() -> None:
    parser = harness.parser("persia_wire", __doc__)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="examples of a trainer")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--ids", nargs="+", default=["zipf", "uniform"], choices=["zipf", "uniform"])
    parser.add_argument("--compressions", nargs="*", default=list(COMPRESSIONS), choices=list(COMPRESSIONS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of a window; there are three")
    options = parser.parse_args()
    report = harness.Report("persia_wire", options)
    reason = network.missing()
    if reason is None:
        with tempfile.TemporaryDirectory() as directory:
            _measure(report, options, Path(directory))
    else:
        report.skip("all", reason)
    report.finish()


def _measure(report: harness.Report, options: argparse.Namespace, directory: Path) -> None:
    configs = {
        kind: fleet.write_task(
            directory / kind, rows=400_000, cardinality=500_000, dim=options.dim,
            zipf=1.2 if kind == "zipf" else None,
        )
        for kind in options.ids
    }  # fmt: skip
    hybrid = {"staleness": max(options.staleness), "transport": "tcp"}
    speed = report.table(
        "steps over slow links",
        {"ids": "{}", "link": "{}", "strategy": "{}", "samples/s": "{:,.0f}", "step ms": "{:.0f}",
         "CPU / cores ms": "{:.0f}", "wire ms": "{:.0f}", "sum ms": "{:.0f}", "of the larger": "{:.2f}×",
         "of the sum": "{:.2f}×", **fleet.DISTURBED},
    )  # fmt: skip
    for ids, rate in ((ids, rate) for ids in options.ids for rate in options.rates):
        contestants = {
            "synchronous": ("synchronous", {}),
        } | {f"hybrid, τ = {n}": ("hybrid", {**hybrid, "staleness": n}) for n in options.staleness}
        for name, found in _alternate(contestants, configs[ids], rate, options):
            speed.row(
                {
                    "ids": ids,
                    "link": rate,
                    "strategy": name,
                    **parts(found, rate),
                    **fleet.disturbance(*found),
                }
            )
    compression = report.table(
        "compression",
        {"link": "{}", "float16 / compressed": "{}", "samples/s": "{:,.0f}", "of none": "{:.2f}×",
         "ids B/sample": "{:.0f}", "embeddings": "{:.0f}", "gradients": "{:.0f}", "dense": "{:.0f}",
         "busiest link B/sample": "{:.0f}", "step ms": "{:.0f}", "CPU / cores ms": "{:.0f}", "wire ms": "{:.0f}", "of the larger": "{:.2f}×", **fleet.DISTURBED},
    )  # fmt: skip
    for rate in options.rates if options.compressions else ():
        chosen = {name: ("hybrid", {**hybrid, **COMPRESSIONS[name]}) for name in options.compressions}
        base = None
        for name, found in _alternate(chosen, configs[options.ids[0]], rate, options):
            row = parts(found, rate)
            base = base or row["samples/s"]
            batch = options.batch * options.trainers
            row = {
                key: row[key]
                for key in ("samples/s", "step ms", "CPU / cores ms", "wire ms", "of the larger")
            }
            sent = found[0]["summary"]["wire_bytes"]
            examples = found[0]["summary"]["num_examples"]
            row |= {kind: sent[kind] / examples for kind in ("embeddings", "gradients", "dense")}
            row["ids B/sample"] = sent["ids"] / examples
            row["busiest link B/sample"] = _middle(found, busiest) / batch
            row |= {"of none": row["samples/s"] / base, "link": rate, "float16 / compressed": name}
            row |= fleet.disturbance(*found)
            compression.row(row)


def _alternate(
    contestants: Mapping[str, tuple[str, Mapping[str, Any]]],
    config: Path,
    rate: str,
    options: argparse.Namespace,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each contestant's runs, one a round, taken by turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, (strategy, told) in contestants.items():
            found[name].append(run(config, rate, strategy, told, options))
    yield from found.items()


def run(
    config: Path, rate: str, strategy: str, told: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """One run over links of a bandwidth."""
    trainers = [f"t{rank}" for rank in range(options.trainers)]
    with network.network(["s", *trainers], rate) as hosts:
        told = {"name": strategy, "trainers": options.trainers, **told}
        spelled = ", ".join(f"{key} = {json.dumps(value)}" for key, value in told.items())
        plan = fleet.Plan(
            str(config),
            (f"strategy = {{{spelled}}}", f"data.batch_size = {options.batch * options.trainers}"),
            warmup=6,
            steps=options.steps,
            windows=3,
            hosts=network.trainers_apart(hosts, options.trainers),
            links=tuple(hosts.links.values()),
        )
        return fleet.measure(plan)


def parts(found: list[dict[str, Any]], rate: str) -> dict[str, float]:
    """All parts of the formula: step ≤ 1.15 × max(CPU seconds / cores, bytes / bandwidth)."""
    step = _middle(found, lambda window: window["step_s"])
    compute = _middle(found, lambda window: window["machine_cpu_s"]) / fleet.CORES
    wire = _middle(found, busiest) / bytes_per_s(rate)
    return {
        "samples/s": _middle(found, lambda window: window["samples_per_s"]),
        "step ms": 1e3 * step,
        "CPU / cores ms": 1e3 * compute,
        "wire ms": 1e3 * wire,
        "sum ms": 1e3 * (compute + wire),
        "of the larger": step / max(compute, wire),
        "of the sum": step / (compute + wire),
    }


def busiest(window: Mapping[str, Any]) -> float:
    """Bytes a step of the link and direction that carries most."""
    return max(max(both) for both in window["link_bytes"].values())


def bytes_per_s(rate: str) -> float:
    """What ``tc`` makes of a rate."""
    unit = next(unit for unit in BITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * BITS[unit] / 8


def _middle(found: list[dict[str, Any]], of: Any) -> float:
    return float(np.median([of(window) for each in found for window in each["windows"]]))


if __name__ == "__main__":
    main()
