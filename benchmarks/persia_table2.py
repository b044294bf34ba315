"""Persia's Table 2 and Figure 7: AUC of hybrid and asynchronous training beside synchronous, on public data.

    GIRIH_DATA=... girih bench persia_table2 [--quick] [--results FILE] [--docs DIRECTORY]

Frappe and KuaiRand-Pure with the recipes' features and optimizers and a smaller network; four trainers, the same
batches, epochs and options for all. On Frappe it goes on to ask what makes the gap: staleness, or that each
trainer's share moves rows by itself; on both, whether it shrinks with more steps of fewer examples. Writes tables to the terminal and persia-fig7.svg to ``--docs``. Quality only:
what else the machine does changes no figure but the staleness that the asynchronous ones happen to have.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
from persia_runs import Results, Run, gap, markdown, mean_curve, spread
from pictures import Chart, write_picture

ROOT = Path(__file__).resolve().parents[1]
FOUR = {"trainers": 4}
STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {"name": "synchronous", **FOUR},
    "hybrid, τ = 4": {"name": "hybrid", "staleness": 4, **FOUR},
    "asynchronous": {"name": "asynchronous", "staleness": 4, **FOUR},
}
DATA: dict[str, dict[str, Any]] = {
    "frappe": {
        "model": {"name": "dnn", "hidden": [128, 64], "dropout": 0.3, "batch_norm": True},
        "train": {"epochs": 10, "evaluate_every_steps": 50, "clip_norm": 10.0},
    },
    "kuairand": {
        "model": {"name": "dnn", "hidden": [128, 64], "dropout": 0.2},
        "train": {"epochs": 3, "evaluate_every_steps": 25},
    },
}
"""Sections that replace the recipe's."""

HYBRID = STRATEGIES["hybrid, τ = 4"]
CAUSES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("synchronous", STRATEGIES["synchronous"], {}, ""),
    ("synchronous, one trainer", {"name": "synchronous", "trainers": 1}, {}, "synchronous"),
    ("hybrid, τ = 4, one trainer", {**HYBRID, "trainers": 1}, {}, "synchronous"),
    ("hybrid, τ = 4", HYBRID, {}, "synchronous"),
]
"""On Frappe: a name, a strategy, a sparse optimizer in place of the recipe's Adam with L2, what to compare with."""

SMALLER: dict[str, tuple[int, int]] = {"frappe": (512, 3), "kuairand": (512, 3)}
"""A global batch that makes more steps of the same epochs, and with how many seeds it is compared with the recipe's."""


def config(
    data: str, seed: int, quick: bool, sparse: Mapping[str, Any] | None = None, batch: int | None = None
) -> dict[str, Any]:
    """The recipe's config, smaller; evaluated as often with a batch of another size."""
    made = tomllib.loads((ROOT / "recipes" / data / f"{data}.toml").read_text())
    made["features"] = [feature for feature in made["features"] if feature["kind"] != "sequence"]
    made |= DATA[data]
    made["train"] = {**made["train"], "seed": seed} | ({"epochs": 1} if quick else {})
    if sparse:
        made["sparse_optimizer"] = dict(sparse)
    if batch:
        every = made["train"]["evaluate_every_steps"] * made["data"]["batch_size"] // batch
        made["train"]["evaluate_every_steps"], made["data"]["batch_size"] = every, batch
    return made


def main() -> None:
    parser = harness.parser("persia_table2", __doc__)
    add_options(parser)
    arguments = parser.parse_args()
    report = harness.Report("persia_table2", arguments)
    find_data(parser)
    results = Results(arguments.results or default_results(arguments.quick, "persia-table2.json"))
    docs = arguments.docs or (Path("runs/persia") if arguments.quick else ROOT / "docs")
    seeds = range(1, 2 if arguments.quick else 4)
    charts = []
    rows = []
    for data in DATA:
        kept = {
            name: results.train(
                [Run(f"{data}/{name}/{s}", config(data, s, arguments.quick), strategy) for s in seeds]
            )
            for name, strategy in STRATEGIES.items()
        }
        rows += table2(data, kept)
        series = {name: mean_curve(runs) for name, runs in kept.items()}
        charts.append(Chart(data, "steps", "AUC on validation data", series))
    write_picture(docs / "persia-fig7.svg", charts)
    print(markdown(HEADER, rows))
    if not arguments.quick:
        print(markdown(["frappe", *HEADER[2:]], causes(results, range(1, 2))))
        steps = {data: by_steps(results, data) for data in DATA}
        print(markdown(STEPS_HEADER, [row for rows, _ in steps.values() for row in rows]))
        write_picture(docs / "persia-steps.svg", [chart for _, chart in steps.values()])
    table = report.table("Table 2", dict.fromkeys(HEADER, "{}"))
    for row in rows:
        table.row(dict(zip(HEADER, row, strict=True)))
    report.finish()


HEADER = [
    "data", "strategy", "test AUC, last weights", "less synchronous", "best validation AUC", "less synchronous's",
    "test logloss", "staleness: mean, most", "dense, most", "steps",
]  # fmt: skip


def table2(data: str, kept: Mapping[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A line of the table for each strategy."""
    reference = kept["synchronous"]
    return [
        [data, name, *line(runs, None if runs is reference else reference)] for name, runs in kept.items()
    ]


def line(runs: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> list[str]:
    """What is told of some seeds."""
    mean = sum(run["staleness_mean"] for run in runs) / len(runs)
    return [
        *beside([run["auc"] for run in runs], reference and [run["auc"] for run in reference]),
        *beside([best(run) for run in runs], reference and [best(run) for run in reference]),
        spread([run["logloss"] for run in runs]),
        f"{mean:.1f}, {max(run['staleness_max'] for run in runs)}",
        str(max(run["dense_staleness_max"] for run in runs)),
        " ".join(sorted({f"{run['steps']:,}" for run in runs})),
    ]


def beside(values: list[float], reference: list[float] | None) -> list[str]:
    """Mean, and gap."""
    return [spread(values), "" if reference is None else gap(values, reference)]


def best(run: Mapping[str, Any]) -> float:
    """What early stopping would have kept."""
    return float(max(auc for _, auc in run["curve"]))


def causes(results: Results, seeds: range) -> list[list[str]]:
    """Frappe again, one thing changed at a time."""
    lines = []
    kept: dict[str, list[dict[str, Any]]] = {}
    for name, strategy, sparse, reference in CAUSES:
        runs = [Run(f"frappe/{name}/{s}", config("frappe", s, False, sparse), strategy) for s in seeds]
        kept[name] = results.train(runs)  # what Table 2 has trained is kept under the same name
        lines.append([name, *line(kept[name], kept.get(reference))])
    return lines


STEPS_HEADER = [
    "data", "batch", "steps", "synchronous", "hybrid, τ = 4", "less synchronous", "best validation AUC: synchronous",
    "hybrid", "less synchronous's", "test logloss: synchronous", "hybrid",
]  # fmt: skip


def by_steps(results: Results, data: str) -> tuple[list[list[str]], Chart]:
    """Whether hybrid loses less where staleness is a smaller part of all steps: one line a batch size."""
    rows, series = [], {}
    smaller, num_seeds = SMALLER[data]
    for batch in (None, smaller):
        pairs = [
            results.train([_of_batch(data, batch, name, seed) for name in ("synchronous", "hybrid, τ = 4")])
            for seed in range(1, 1 + num_seeds)
        ]
        synchronous, hybrid = ([pair[place] for pair in pairs] for place in (0, 1))
        steps = synchronous[0]["steps"]
        row = [data, f"{synchronous[0]['asked']['config']['data']['batch_size']:,}", f"{steps:,}"]
        for of in (_last, best):
            values, reference = [of(run) for run in hybrid], [of(run) for run in synchronous]
            row += [spread(reference), *beside(values, reference)]
        rows.append(row + [spread([run["logloss"] for run in runs]) for runs in (synchronous, hybrid)])
        both = zip(mean_curve(synchronous), mean_curve(hybrid), strict=True)
        points = [(step / steps, auc - other) for (step, other), (_, auc) in both]
        series[f"{steps:,} steps"] = points
    return rows, Chart(data, "share of all steps", "validation AUC of hybrid less synchronous", series)


def _of_batch(data: str, batch: int | None, strategy: str, seed: int) -> Run:
    of = data if batch is None else f"{data}, batches of {batch}"
    return Run(f"{of}/{strategy}/{seed}", config(data, seed, False, batch=batch), STRATEGIES[strategy])


def _last(run: Mapping[str, Any]) -> float:
    return float(run["auc"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both experiments take."""
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: shows that it runs")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="runs that are kept, and not trained again"
    )
    parser.add_argument("--docs", type=Path, metavar="DIRECTORY", help="where pictures go")


def default_results(quick: bool, name: str) -> Path:
    """Beside the pictures; those of ``--quick`` are nobody's results."""
    return Path("runs", "persia", name) if quick else ROOT / "docs" / "results" / name


def find_data(parser: argparse.ArgumentParser) -> None:
    """Sees that the data are there, and KuaiRand joined."""
    if "GIRIH_DATA" not in os.environ:
        parser.error("set GIRIH_DATA to the directory of the public data sets")
    prepared = Path(os.environ.setdefault("KUAIRAND", str(Path("runs/persia/kuairand").resolve())))
    if not (prepared / "test.parquet").exists():
        script = ROOT / "recipes" / "kuairand" / "prepare.py"
        subprocess.run([sys.executable, script, prepared], check=True)


if __name__ == "__main__":
    main()
