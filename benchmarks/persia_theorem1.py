"""Persia's Theorem 1 as an experiment: what staleness τ costs, by how often the most frequent id comes (α).

    girih bench persia_theorem1 [--quick] [--results FOLDER] [--docs FOLDER]

The theorem is of SGD, and its third term grows with τ and with α. So: one trainer with ``hybrid``, whose staleness is at most τ
(its mean is told beside) and nothing else differs from τ = 0; plain SGD on rows; a generated click log of two id
features with Zipf exponents from steep to flat. The rate is the best of ``RATES`` at τ = 0 for each log by itself, by the
AUC on validation data with seed 1; seeds 2 to 4 are reported, on test data, at the least of these rates too, so that logs are
compared at one. Writes persia-theorem1.svg to ``--docs``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from experiments import Results, Run, add_options, best_valid, gap, pictures, results, show, spread
from pictures import Chart, write_picture

from girih.data.click_log import click_log

EXPONENTS = (2.0, 1.2, 0.6)
STALENESS = (0, 4, 16, 64)
RATES = (0.3, 3.0, 30.0, 300.0)
UNMOVED = 1e-6
"""A rate at which rows stay what they were: what a log gains by the ids, and so what staleness can cost at all."""
NUM_IDS, BATCH, NUM_STEPS, NUM_HELD_OUT = 5_000, 256, 800, 60_000
TUNED = 1
FEATURES = ("user", "item")


def main() -> None:
    parser = harness.parser("persia_theorem1", __doc__)
    add_options(parser)
    parser.add_argument("--seeds", type=int, default=3, help="that are reported, from 2 on")
    arguments = parser.parse_args()
    report = harness.Report("persia_theorem1", arguments)
    quick = arguments.quick
    kept_runs = results(arguments, "persia-theorem1")
    seeds = range(TUNED + 1, TUNED + 1 + (1 if quick else arguments.seeds))
    steps = 50 if quick else NUM_STEPS
    series, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="girih-click-log-") as folder:
        os.environ["CLICKLOG"] = folder
        alphas = {exponent: write_log(Path(folder), exponent, steps) for exponent in EXPONENTS}
        rates = {
            exponent: tuned(kept_runs, exponent, RATES[: 1 if quick else None]) for exponent in EXPONENTS
        }
        for exponent, alpha in alphas.items():
            unmoved = kept_runs.train([experiment(exponent, 0, UNMOVED, seed) for seed in seeds])
            unmoved_auc = spread([run["auc"] for run in unmoved])
            for rate in sorted({rates[exponent], min(rates.values())}, reverse=True):
                kept = [
                    kept_runs.train([experiment(exponent, staleness, rate, seed) for seed in seeds])
                    for staleness in STALENESS
                ]
                rows.append([f"{exponent:g}", f"{alpha:.4f}", f"{rate:g}", unmoved_auc, *cells(kept)])
                if rate == rates[exponent]:
                    points = [
                        (np.log2(t + 1), gap_of(runs, kept[0]))
                        for t, runs in zip(STALENESS, kept, strict=True)
                    ]
                    series[f"α = {alpha:.3f} (Zipf {exponent:g})"] = points
    x_title = f"log2(τ + 1), τ = {', '.join(map(str, STALENESS))}"
    chart = Chart("SGD", x_title, "test AUC less that of τ = 0", series)
    write_picture(pictures(arguments) / "persia-theorem1.svg", [chart])
    header = [
        "Zipf exponent",
        "α",
        "rate",
        "AUC, rows unmoved",
        "AUC at τ = 0",
        *(f"τ = {each}" for each in STALENESS[1:]),
    ]
    show(report, "test AUC less that of τ = 0", header, rows)
    print(kept_runs.told())
    report.finish()


def tuned(kept_runs: Results, exponent: float, rates: Sequence[float]) -> float:
    """The rate with the best validation AUC at τ = 0."""
    tried = {rate: best_valid(kept_runs.train([experiment(exponent, 0, rate, TUNED)])[0]) for rate in rates}
    print(f"Zipf {exponent:g}:", ", ".join(f"rate {each:g}: {auc:.4f}" for each, auc in tried.items()))
    return max(tried, key=lambda each: tried[each])


def write_log(folder: Path, exponent: float, steps: int) -> float:
    """Writes train, valid and test; returns α, the largest share of training examples that one id is in."""
    parts, start = {}, 0
    for name, size in {"train": steps * BATCH, "valid": NUM_HELD_OUT, "test": NUM_HELD_OUT}.items():
        parts[name], _ = click_log(size, cardinality=NUM_IDS, zipf=exponent, start=start)
        start += size
        columns = parts[name].select([*FEATURES, "x0", "x1", "click"])
        pq.write_table(columns, folder / f"{name}-{exponent:g}.parquet")
    return max(_largest_share(parts["train"][feature]) for feature in FEATURES)


def _largest_share(ids: pa.ChunkedArray) -> float:
    _, counts = np.unique(ids.to_numpy(), return_counts=True)
    return float(counts.max() / counts.sum())


def experiment(exponent: float, staleness: int, rate: float, seed: int) -> Run:
    """One run."""
    ids = [{"name": feature, "kind": "categorical", "dim": 16} for feature in FEATURES]
    config: dict[str, Any] = {
        "data": {
            "format": "parquet",
            **{part: f"${{CLICKLOG}}/{part}-{exponent:g}.parquet" for part in ("train", "valid", "test")},
            "batch_size": BATCH,
        },
        "features": [*ids, *({"name": name, "kind": "numeric", "transform": "standardize"} for name in ("x0", "x1"))],
        "labels": {"names": ["click"]},
        "model": {"name": "dnn", "hidden": [64, 32]},
        "sparse_optimizer": {"name": "sgd", "lr": rate},
        "dense_optimizer": {"name": "adam", "lr": 1e-3},
        "train": {"epochs": 1, "seed": seed},
    }  # fmt: skip
    strategy = {"name": "hybrid", "staleness": staleness, "trainers": 1}
    return Run(f"zipf {exponent:g}/τ {staleness}/lr {rate:g}/{seed}", config, strategy)


def gap_of(runs: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float:
    """Mean over seeds."""
    return float(np.mean([run["auc"] - other["auc"] for run, other in zip(runs, reference, strict=True)]))


def cells(kept: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """AUC at τ = 0, then the gaps (± standard error of seeds), with the mean staleness that there was."""
    reference = [run["auc"] for run in kept[0]]
    gaps = [
        f"{gap([run['auc'] for run in runs], reference)} ({np.mean([run['staleness_mean'] for run in runs]):.1f})"
        for runs in kept[1:]
    ]
    return [spread(reference), *gaps]


if __name__ == "__main__":
    main()
