"""Trains every recipe and writes one table: docs/quality.md.

    GIRIH_DATA=... python recipes/quality.py [--only frappe/deepfm] [--seeds 3] [--work DIRECTORY]

Each run is a ``girih train`` of a recipe's config with the overrides below. Finished runs in the work
directory are taken as they are, so an interrupted table goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from girih.cli.info import processor

RECIPES = Path(__file__).parent
PAGE = RECIPES.parent / "docs" / "quality.md"
MLP = {"hidden": [400, 400, 400], "dropout": 0.3, "batch_norm": True}
PREPARED = ("kuairand", "grocery")
"""Recipes whose ``prepare.py`` makes the data that a variable of their name leads to."""


@dataclass(frozen=True)
class Experiment:
    """One row of the table: a recipe's config, changed.

    Attributes:
        seeds: how many are trained, whatever the command says; as many as it says where None.
        least: what the mean test AUC over seeds must reach, or the command ends with status 1; None is a look at the table.
    """

    recipe: str
    name: str
    target: str
    sections: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    seeds: int | None = None
    least: float | None = None

    def config(self, seed: int) -> dict[str, Any]:
        """The config file's content."""
        config = tomllib.loads((RECIPES / self.recipe / f"{self.recipe}.toml").read_text())
        for section, value in self.sections.items():
            config[section] = value if section in ("model", "labels") else config.get(section, {}) | value
        config["features"] = [f for f in config["features"] if f["name"] not in self.without]
        config["train"]["seed"] = seed
        return config


def frappe(
    name: str, target: str, *, seeds: int | None = None, least: float | None = None, **sections: Any
) -> Experiment:
    sections = {"model": {"name": name, **MLP}} | sections
    return Experiment("frappe", name, target, sections, seeds=seeds, least=least)


PLATEAU: dict[str, Any] = {
    "epochs": 40,
    "lr_schedule": {"name": "ReduceLROnPlateau", "factor": 0.1, "patience": 0, "metric": "auc"},
}
"""BARS's schedule: a tenth of the rate after each epoch that is no better, until two in a row are not."""


def with_l2(l2: float) -> dict[str, dict[str, float]]:
    """L2 of all rows that a batch touches."""
    return {"sparse_optimizer": {"l2": l2}, "first_order_optimizer": {"l2": l2}}


GRAPH = ("with_item", "with_bought")


def grocery(
    model: str, target: str, name: str | None = None, without: tuple[str, ...] = GRAPH, **options: Any
) -> Experiment:
    """One of the models of sequences, with the options that all of them have alike."""
    same = tomllib.loads((RECIPES / "grocery" / "grocery.toml").read_text())["model"]
    return Experiment("grocery", name or model, target, {"model": same | {"name": model} | options}, without)


EXPERIMENTS = [
    frappe(
        "lr", "0.935 ± 0.002 (BARS 0.9356)",
        model={"name": "lr"},
        first_order_optimizer={"lr": 0.03, "l2": 0.0},
        train={"epochs": 20},
    ),
    frappe(
        "fm", "≥ 0.966 (BARS 0.9671)",
        model={"name": "fm"},
        sparse_optimizer={"lr": 0.01, "l2": 0.0},
        first_order_optimizer={"lr": 0.01, "l2": 0.0},
        train={"epochs": 20},
    ),
    frappe("dnn", "≥ 0.982 (BARS 0.9840)"),
    frappe("wide_deep", "≥ 0.982 (BARS 0.9831)"),
    frappe("deepfm", "≥ 0.982 (BARS 0.9839)"),
    frappe("dcn", "≥ 0.982 (BARS 0.9834)"),
    frappe("dcnv2", "≥ 0.982 (BARS 0.9838)"),
    frappe("dlrm", "≥ 0.982 (BARS 0.9840)"),
    frappe(
        "xdeepfm", "≥ 0.9830 (BARS 0.98414 ± 0.00037)",
        model={"name": "xdeepfm", "cin_layers": [64], **MLP, "dropout": 0.2}, least=0.9830, seeds=5,
        train=PLATEAU, **with_l2(0.1),
    ),
    frappe(
        "two_tower", "≥ 0.9819 (BARS's DSSM 0.98322)",
        model={
            "name": "two_tower",
            "user": ["user", "daytime", "weekday", "isweekend", "homework", "weather", "country", "city"],
            "item": ["item", "cost"],
            "hidden": [400, 400], "tower_dim": 400, "dropout": 0.2, "batch_norm": True,
        },
        least=0.9819, seeds=5,
        train=PLATEAU, **with_l2(0.2),
    ),
    Experiment(
        "kuairand", "dnn without histories", "≥ 0.7315 (logistic 0.7215)",
        {"model": {"name": "dnn", "hidden": [200, 80], "dropout": 0.2}}, without=("clicked",),
    ),
    Experiment("kuairand", "din with histories", "above dnn"),
    Experiment(
        "kuairand", "dnn without histories, long_view", "≥ 0.7298 (logistic 0.7198)",
        {"model": {"name": "dnn", "hidden": [200, 80], "dropout": 0.2}, "labels": {"names": ["long_view"]}},
        without=("clicked",),
    ),
    Experiment("kuairand", "din with histories, long_view", "above dnn", {"labels": {"names": ["long_view"]}}),
    Experiment(
        "kuairand", "mmoe, both labels", "is_click ≥ 0.7315, long_view ≥ 0.7298",
        {
            "model": {"name": "mmoe", "expert_hidden": [128, 64], "tower_hidden": [32], "dropout": 0.2},
            "labels": {"names": ["is_click", "long_view"]},
        },
    ),
    grocery("din", "no figure is published"),
    grocery("dien", "above din"),
    grocery("dien", "above din", "dien without auxiliary loss", auxiliary=0.0),
    grocery("dsin", "compared with din", session_length=5, max_sessions=10),
    grocery("atbrg", "compared with din", without=(), relations={"with_item": "item_id", "with_bought": "bought"}),
    Experiment("adult", "dnn", "≥ 0.89 (PERSIA 0.8928)"),
    Experiment("criteo", "dlrm", "runs (8,000 rows)", seeds=1),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="recipe or recipe/name; repeatable")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    arguments = parser.parse_args()
    if "GIRIH_DATA" not in os.environ:
        print("set GIRIH_DATA to the directory of the public data sets", file=sys.stderr)
        return 2
    work = arguments.work.resolve()
    chosen = [
        e
        for e in EXPERIMENTS
        if not arguments.only or {e.recipe, f"{e.recipe}/{e.name}"} & set(arguments.only)
    ]
    for recipe in PREPARED:
        prepared = work / f"{recipe}-data"
        if any(e.recipe == recipe for e in chosen) and not (prepared / "test.parquet").exists():
            subprocess.run([sys.executable, RECIPES / recipe / "prepare.py", prepared], check=True)
        os.environ[recipe.upper()] = str(prepared)
    rows: list[str] = []
    missed: list[str] = []
    for experiment in chosen:
        seeds = range(1, 1 + (experiment.seeds or arguments.seeds))
        summaries = [run(experiment, seed, work) for seed in seeds]
        rows += table_rows(experiment, summaries)
        print("\n".join(table_rows(experiment, summaries)), flush=True)
        missed += short_of(experiment, summaries)
    if not arguments.only:
        PAGE.write_text(page(rows, arguments.seeds), encoding="utf-8")
        print(f"wrote {PAGE}")
    for line in missed:
        print(line, file=sys.stderr)
    return int(bool(missed))


def run(experiment: Experiment, seed: int, work: Path) -> dict[str, Any]:
    """Trains one seed, unless it was trained before; returns its summary."""
    path = work / f"{experiment.recipe}-{experiment.name.replace(',', '').replace(' ', '-')}-{seed}"
    summary = path / "summary.json"
    if not summary.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        config = path.with_suffix(".toml")
        config.write_text(tomli_w.dumps(experiment.config(seed)))
        command = [sys.executable, "-m", "girih", "train", config, "--run", path, "--resume"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def table_rows(experiment: Experiment, summaries: list[dict[str, Any]]) -> list[str]:
    """A line of the table for each label."""
    lines = []
    for label in summaries[0]["by_label"]:
        auc, logloss = ([s["by_label"][label][metric] for s in summaries] for metric in ("auc", "logloss"))
        duration = statistics.median(s["duration_s"] for s in summaries)
        name = experiment.name if len(summaries[0]["by_label"]) == 1 else f"{experiment.name}: {label}"
        lines.append(
            f"| {experiment.recipe} | {name} | {spread(auc)} | {spread(logloss)} | {experiment.target} | {duration:.0f} |"
        )
    return lines


def short_of(experiment: Experiment, summaries: list[dict[str, Any]]) -> list[str]:
    """A line for each label whose mean test AUC is less than the experiment must reach."""
    lines = []
    for label in summaries[0]["by_label"]:
        mean = statistics.mean(s["by_label"][label]["auc"] for s in summaries)
        if experiment.least is not None and mean < experiment.least:
            lines.append(
                f"{experiment.recipe}/{experiment.name}: AUC of {label} is {mean:.5f}; expected {experiment.least}"
            )
    return lines


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    mean = statistics.mean(values)
    return f"{mean:.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"


def page(rows: list[str], seeds: int) -> str:
    """The page with the table and how it was made."""
    table = "\n".join(rows)
    return f"""# Quality on public data

This page compares the test quality of girih's models on public data with published results. It is for readers who want to know whether the models learn as
they should.

Made by `GIRIH_DATA=... python recipes/quality.py --seeds {seeds}` on {processor()}, {os.cpu_count()} cores, CPU only, float32.

- **Test AUC and logloss** are measured with the weights of the best validation AUC: mean ± standard deviation over the seeds 1 to {seeds}.
- **Seconds** (s) are the median of whole runs, on a shared machine. They are not a benchmark.

| data | model | test AUC | test logloss | to reach | s |
|---|---|---|---|---|---|
{table}

- **frappe**: the split of BARS `frappe_x1` (train is a reconstruction of the published file). Embeddings have dim 10. The MLP is
  400-400-400 with batch norm and dropout 0.3. The optimizer is lazy Adam with L2 0.05 on touched rows, and a tenth of the rate after epoch 8. BARS
  trains with a dense penalty on whole tables. The numbers in brackets are BARS's means over five seeds, or its single run.
- **xdeepfm, two_tower** (`--only frappe/xdeepfm`, `--only frappe/two_tower`): five seeds, with the sizes of BARS. The sizes are CIN 64, and towers of
  400-400-400 on [user, daytime, weekday, isweekend, homework, weather, country, city] and [item, cost].
  - The test AUC must reach BARS's mean less three standard deviations over seeds, otherwise the command ends with status 1. For xDeepFM this is BARS's own deviation
    (0.00037). BARS has only one run of DSSM, so for DSSM it is the deviation of DCN-V2 (0.00043).
  - If the table has no such rows, the models were not run yet.
- **kuairand**: KuaiRand-Pure, split by day. `prepare.py` joins users, videos and each user's earlier clicks. The logistic
  baseline is one-hot logistic regression on the same features without histories.
- **grocery**: Amazon's grocery reviews. Each user's last purchase and one drawn item are the test data, and the previous ones are validation data.
  The graph of ATBRG is a later snapshot of items that are bought together, and may know the item that the model must predict.
- **adult**: census income, the published train and test files.
- **criteo**: 8,000 rows. They only show that the format works.

We do not ship the data sets, because their terms do not allow it. The config of each recipe says where to get its data.
"""


if __name__ == "__main__":
    sys.exit(main())
