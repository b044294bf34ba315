"""DES's Table 5 and Figure 7: throughput, and computation and communication time a step, beside other strategies.

Four trainers, a network namespace each (needs root), links of ``--rates``; generated wide data (``wide.py``), the same
batches for all. Asynchronous training has an embedding worker and server on each trainer's host, as a mesh has; its
loader is on a fifth. What is kept is not run again: --results.

    girih bench des_table5
    girih bench des_table5 --rates 1gbit --models lr --minutes 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import fleet
import harness
import network
import tomli_w
import wide
from trainers import train_all

from girih.cluster.hosts import HostSpec

ROOT = Path(__file__).resolve().parents[1]
TRAINERS, EACH = 4, 1.6
MODELS = ("lr", "wide_deep", "deepfm")
PAPER = {"lr": (2.7, 1.55), "wide_deep": (2.3, 4.52), "deepfm": (3.2, 3.91)}
"""How many times less communication time, and more samples/s, than DiFacto."""
SUBSTITUTION, SYNCHRONOUS = "substitution", "synchronous"
TCP = {
    "name": "asynchronous",
    "transport": "tcp",
    "embedding_workers": TRAINERS,
    "embedding_servers": TRAINERS,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    SUBSTITUTION: {"name": SUBSTITUTION, "dense": "replicated"},
    "substitution, split": {"name": SUBSTITUTION, "dense": "split"},
    SYNCHRONOUS: {"name": SYNCHRONOUS},
    "asynchronous, τ = 0": {**TCP, "staleness": 0},
    "asynchronous, τ = 4": {**TCP, "staleness": 4},
}
WAITING = {
    SUBSTITUTION: ("in collectives",),
    SYNCHRONOUS: ("in collectives", "allreduce"),
    "asynchronous": ("wait for rows", "wait for update"),
}
"""Phases of the first trainer that count as communication, waiting for others included; ``allreduce`` partly runs beside the backward pass."""
BYTES_PER_S = {"1gbit": 125e6}


def main() -> None:
    parser = harness.parser("des_table5", __doc__)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "none"], choices=["1gbit", "none"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--features", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4096, help="examples of all trainers")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", default=ROOT / "docs" / "results" / "des-table5.json"
    )
    options = parser.parse_args()
    report = harness.Report("des_table5", options)
    reason = network.missing()
    if reason is None:
        with tempfile.TemporaryDirectory() as directory:
            _show(report, options, _found(options, Path(directory)))
    else:
        report.skip("all", reason)
    report.finish()


Found = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""(rate, model, strategy) → what was measured."""


def _found(options: argparse.Namespace, directory: Path) -> Found:
    asked = {"features": options.features, "batch": options.batch}
    kept = json.loads(options.results.read_text()) if options.results.exists() else {}
    kept = kept if kept.get("asked") == asked else {"asked": asked, "runs": {}}
    began = time.perf_counter()
    wide.write_wide(directory, 2 * options.batch, [], options.features, EACH)
    for rate in options.rates:
        wanted = [
            (model, name)
            for model in options.models
            for name in STRATEGIES
            if f"{rate}/{model}/{name}" not in kept["runs"]
            and not (rate == "none" and name.endswith("τ = 0"))
        ]
        for model, name, found in _runs(options, directory, rate, wanted):
            kept["runs"][f"{rate}/{model}/{name}"] = _short(found)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")
            rates = [f"{window['samples_per_s']:,.0f}" for window in found["windows"]]
            print(f"{rate:6} {model:10} {name:20} samples/s {' '.join(rates)}", flush=True)
            if options.minutes is not None and time.perf_counter() - began > 60 * options.minutes:
                break
    return {
        (rate, model, name): kept["runs"][key]
        for rate in options.rates
        for model in options.models
        for name in STRATEGIES
        if (key := f"{rate}/{model}/{name}") in kept["runs"]
    }


def _runs(
    options: argparse.Namespace, directory: Path, rate: str, wanted: list[tuple[str, str]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Trainers alone do all their runs in one context; each asynchronous run starts its own processes."""
    times = {"warmup": 3, "steps": 3, "windows": 3}
    names = ["s", *(f"t{rank}" for rank in range(TRAINERS))]
    bound = None if rate == "none" else rate
    together = [(model, name) for model, name in wanted if "asynchronous" not in name]
    with network.network(names, bound) as hosts:
        links = {"links": [hosts.links[f"t{rank}"] for rank in range(TRAINERS)]}
        asked = [
            {"config": _config(options, directory, m), "strategy": {**STRATEGIES[n], "trainers": TRAINERS}}
            for m, n in together
        ]
        found = train_all([{**each, **times, **links} for each in asked], TRAINERS, _places(hosts))
        for (model, name), each in zip(together, found, strict=True) if together else ():
            yield model, name, each
    for model, name in (each for each in wanted if each not in together):
        with network.network(names, bound) as hosts:
            file = directory / "config.toml"
            file.write_text(
                tomli_w.dumps(
                    {
                        **_config(options, directory, model),
                        "strategy": {**STRATEGIES[name], "trainers": TRAINERS},
                    }
                )
            )
            plan = fleet.Plan(
                str(file), ("train.epochs=10000",), places=_places(hosts),
                links=tuple(hosts.links[f"t{rank}"] for rank in range(TRAINERS)), **times,
            )  # fmt: skip
            yield model, name, fleet.measure(plan, tries=1)


def _config(options: argparse.Namespace, directory: Path, model: str) -> dict[str, Any]:
    told = {"name": model} if model == "lr" else {"name": model, "hidden": [256, 64]}
    return wide.config(directory, options.batch, told, features=options.features, each=EACH)


def _places(hosts: network.Hosts) -> dict[str, HostSpec]:
    """Trainer, embedding worker and embedding server i on the host ``t<i>``."""
    roles = ("trainer", "embedding-worker", "embedding-server")
    places = {f"{role} {rank}": hosts.places[f"t{rank}"] for rank in range(TRAINERS) for role in roles}
    return places | {"loader": hosts.places["s"]}


def _short(found: Mapping[str, Any]) -> dict[str, Any]:
    summary = {name: found["summary"][name] for name in ("wire_bytes", "steps", "staleness_mean")}
    kinds = ("samples_per_s", "step_s", "machine_cpu_s", "link_bytes", "phases_s")
    return {
        "windows": [{kind: window[kind] for kind in kinds} for window in found["windows"]],
        "summary": summary,
    }


def _show(report: harness.Report, options: argparse.Namespace, found: Found) -> None:
    table = report.table(
        "a step",
        {"link": "{}", "model": "{}", "strategy": "{}", "samples/s": "{:,.0f}", "of asynchronous": "{:.2f}×",
         "ms": "{:,.0f}", "communication ms": "{:,.0f}", "reading ms": "{:,.0f}", "computation ms": "{:,.0f}",
         "CPU / cores ms": "{:,.0f}", "MB of the busiest trainer": "{:.2f}", "wire ms": "{:.0f}"},
    )  # fmt: skip
    rows = {case: _parts(case, each) for case, each in found.items()}
    for (rate, model, name), row in rows.items():
        base = rows.get((rate, model, "asynchronous, τ = 4"))
        of = {"of asynchronous": row["samples/s"] / base["samples/s"]} if base else {}
        table.row({"link": rate, "model": model, "strategy": name, **row, **of})
    beside = report.table(
        "times less communication time than asynchronous training (Figure 7), times its samples/s (Table 5)",
        {"link": "{}", "model": "{}", "strategy": "{}", "beside": "{}", "waiting": "{:.2f}×", "bytes": "{:.2f}×",
         "paper ": "{:.1f}×", "samples/s": "{:.2f}×", "paper": "{:.2f}×"},
    )  # fmt: skip
    for (rate, model, name), row in rows.items():
        for other in ("synchronous", "asynchronous, τ = 0", "asynchronous, τ = 4"):
            base = rows.get((rate, model, other))
            if base is None or not name.startswith(SUBSTITUTION):
                continue
            mb = "MB of the busiest trainer"
            beside.row(
                {
                    "link": rate,
                    "model": model,
                    "strategy": name,
                    "beside": other,
                    "waiting": base["communication ms"] / row["communication ms"],
                    "bytes": base[mb] / row[mb],
                    "paper ": PAPER[model][0],
                    "samples/s": row["samples/s"] / base["samples/s"],
                    "paper": PAPER[model][1],
                }
            )


def _parts(case: tuple[str, str, str], found: Mapping[str, Any]) -> dict[str, float]:
    rate, _, name = case
    step = fleet.median(found, "step_s")
    waited = _middle(found, lambda window: _phases(window, WAITING[name.split(",")[0]]))
    read = _middle(found, lambda window: _phases(window, ("read",)))
    sent = _middle(found, lambda window: max(map(max, window["link_bytes"].values())))
    shown = {
        "samples/s": fleet.median(found, "samples_per_s"),
        "ms": 1e3 * step,
        "communication ms": 1e3 * waited,
        "reading ms": 1e3 * read,
        "computation ms": 1e3 * (step - waited - read),
        "CPU / cores ms": 1e3 * fleet.median(found, "machine_cpu_s") / fleet.CORES,
        "MB of the busiest trainer": sent / 1e6,
    }
    return shown | ({"wire ms": 1e3 * sent / BYTES_PER_S[rate]} if rate in BYTES_PER_S else {})


def _middle(found: Mapping[str, Any], of: Callable[[Mapping[str, Any]], float]) -> float:
    return median(of(window) for window in found["windows"])


def _phases(window: Mapping[str, Any], names: Sequence[str]) -> float:
    return sum(window["phases_s"].get(name, 0.0) for name in names)


if __name__ == "__main__":
    main()
