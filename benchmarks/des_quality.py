"""DES's Tables 3 and 4: AUC and logloss of substitution beside asynchronous training, on public data.

    GIRIH_DATA=... girih bench des_quality [--quick] [--results FILE] [--data frappe kuairand] [--most N]

LR, W&D and DeepFM, one epoch, four trainers, the recipes' features; FTRL for first-order weights, the recipe's Adam or
Adagrad for embeddings, Adam for the network. A batch has 2,048 examples, as in Table 4: one of all trainers under
substitution, and under asynchronous training either one of each trainer, as the paper's workers have and which makes as
many updates, or one of all, of which each trainer's 512 are an update; beside that stands substitution with batches of
512. Quality only: what else the machine does changes no figure but the staleness that asynchronous training happens
to have.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import harness
from persia_runs import Results, Run, gap, markdown, spread
from persia_table2 import ROOT, find_data
from trainers import train_all

SEEDS, BATCH = 5, 2048
FOUR = {"trainers": 4}
SUBSTITUTION = {"name": "substitution", "dense": "replicated", **FOUR}
ASYNCHRONOUS = {"name": "asynchronous", "staleness": 4, **FOUR}
STRATEGIES: dict[str, dict[str, Any]] = {
    "asynchronous, 2,048 each": ASYNCHRONOUS,
    "asynchronous": ASYNCHRONOUS,
    "substitution": SUBSTITUTION,
    "substitution, batches of 512": SUBSTITUTION,
    "substitution, bfloat16": {**SUBSTITUTION, "wire_partials": "bfloat16"},
}
COMPARED = (
    ("substitution", "asynchronous, 2,048 each"),
    ("substitution", "asynchronous"),
    ("substitution, batches of 512", "asynchronous"),
    ("substitution, bfloat16", "substitution"),
)
DATA: dict[str, dict[str, Any]] = {
    "frappe": {"dropout": 0.3, "train": {"clip_norm": 10.0}},
    "kuairand": {"dropout": 0.2, "train": {}},
}
MODELS = ("lr", "wide_deep", "deepfm")
PAPER = {
    "lr": ("0.7353 → 0.7534", "0.5037 → 0.4823"),
    "wide_deep": ("0.7737 → 0.7822", "0.4753 → 0.4761"),
    "deepfm": ("0.7750 → 0.7924", "0.4747 → 0.4674"),
}
"""Table 4, Criteo: parameter servers → DES."""

HEADER = ["data", "model", "strategy", "seeds", "test AUC", "test logloss", "staleness: mean, most", "steps"]
GAPS = [
    "data", "model", "of", "less", "seeds", "AUC", "logloss", "no worse than one standard error", "the paper's AUC",
    "the paper's logloss",
]  # fmt: skip


def main() -> None:
    parser = harness.parser("des_quality", __doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, LR and frappe: shows that it runs")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="runs that are kept, and not trained again"
    )
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--most", type=int, help="train so many at most, and go on another time")
    options = parser.parse_args()
    report = harness.Report("des_quality", options)
    if "GIRIH_DATA" not in os.environ or "kuairand" in options.data:
        find_data(parser)
    kept = _trained(options)
    rows, gaps = _rows(kept), _gaps(kept)
    print(markdown(HEADER, rows))
    print(markdown(GAPS, gaps))
    for title, header, found in (("Tables 3 and 4", HEADER, rows), ("gaps", GAPS, gaps)):
        table = report.table(title, dict.fromkeys(header, "{}"))
        for row in found:
            table.row(dict(zip(header, row, strict=True)))
    report.finish()


Kept = Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]
"""(data, model, strategy) → seed → what is kept of the run."""


def _trained(options: argparse.Namespace) -> Kept:
    """Seed by seed, so that an experiment that is cut short has the same seeds of everything."""
    name = "runs/des/des-quality.json" if options.quick else ROOT / "docs" / "results" / "des-quality.json"
    results = Results(options.results or Path(name))
    wanted = {
        (data, model, strategy, seed): Run(
            f"{data}/{model}/{strategy}/{seed}",
            config(data, model, seed, batch_of(strategy)),
            told,
        )
        for data in (options.data[:1] if options.quick else options.data)
        for seed in range(1, 2 if options.quick else SEEDS + 1)
        for model in (MODELS[:1] if options.quick else MODELS)
        for strategy, told in STRATEGIES.items()
    }
    missing = [run for run in wanted.values() if not results.has(run)][: options.most]
    found_of = train_all([run.asked for run in missing], FOUR["trainers"]) if missing else ()
    for run, summary in zip(missing, found_of, strict=True):
        results.keep(run, summary)
    found: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for (data, model, strategy, seed), run in wanted.items():
        if results.has(run):
            found.setdefault((data, model, strategy), {})[seed] = results.runs[run.name]
    return found


def batch_of(strategy: str) -> int:
    """Examples of a step, of all trainers."""
    return 4 * BATCH if "each" in strategy else BATCH // 4 if "512" in strategy else BATCH


def config(data: str, model: str, seed: int, batch: int = BATCH) -> dict[str, Any]:
    """The recipe's config with this model, for one epoch."""
    made = tomllib.loads((ROOT / "recipes" / data / f"{data}.toml").read_text())
    made["features"] = [feature for feature in made["features"] if feature["kind"] != "sequence"]
    made["data"]["batch_size"] = batch
    deep = {"hidden": [128, 64], "dropout": DATA[data]["dropout"]} if model != "lr" else {}
    made["model"] = {"name": model, **deep}
    made["first_order_optimizer"] = {"name": "ftrl"}
    made["train"] = {"epochs": 1, "seed": seed, **DATA[data]["train"]}
    return made


def _rows(kept: Kept) -> list[list[str]]:
    rows = []
    for (data, model, strategy), by_seed in kept.items():
        runs = list(by_seed.values())
        stale = mean(run["staleness_mean"] for run in runs)
        rows.append(
            [
                data,
                model,
                strategy,
                str(len(runs)),
                spread([run["auc"] for run in runs]),
                spread([run["logloss"] for run in runs]),
                f"{stale:.1f}, {max(run['staleness_max'] for run in runs)}",
                " ".join(sorted({f"{run['steps']:,}" for run in runs})),
            ]
        )
    return rows


def _gaps(kept: Kept) -> list[list[str]]:
    """Differences seed by seed, of seeds that both have."""
    rows = []
    for (data, model, strategy), by_seed in kept.items():
        for of, less in COMPARED:
            others = kept.get((data, model, less), {})
            seeds = sorted(by_seed.keys() & others.keys())
            if strategy != of or not seeds:
                continue
            pairs = {
                name: ([by_seed[s][name] for s in seeds], [others[s][name] for s in seeds])
                for name in ("auc", "logloss")
            }
            paper = PAPER[model] if less == "asynchronous, 2,048 each" else ("", "")
            told = "yes" if not_worse(*pairs["auc"], 1) and not_worse(*pairs["logloss"], -1) else "no"
            shown = [gap(*pairs["auc"]), gap(*pairs["logloss"])]
            rows.append(
                [data, model, of, less, str(len(seeds)), *shown, told if len(seeds) > 1 else "–", *paper]
            )
    return rows


def not_worse(values: Sequence[float], others: Sequence[float], sign: int) -> bool:
    """Whether the mean difference is above minus one standard error; ``sign`` is -1 where less is better."""
    differences = [sign * (a - b) for a, b in zip(values, others, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return mean(differences) >= -error


if __name__ == "__main__":
    main()
