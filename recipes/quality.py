"""Trains every recipe and writes the table of docs/quality.md.

    GIRIH_DATA=... python recipes/quality.py [--only frappe/deepfm] [--seeds 3] [--work DIRECTORY]

Each run is a ``girih train`` of a recipe's config with the overrides below. Finished runs in the work
directory are used again, so an interrupted table continues where it stopped.

Without ``--only``, it replaces two parts of the page: the paragraph that begins with "Made", and the table. Everything
else on the page is written by hand and stays. With ``--only``, it prints rows and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
HEADER = ("| data | model | test AUC | test logloss | to reach | s |", "|---|---|---|---|---|---|")
MADE = re.compile(r"^Made .*?$(?=\n\n)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(rf"^{re.escape(HEADER[0])}\n(?:\|.*(?:\n(?=\|))?)+", re.MULTILINE)
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
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), rows, arguments.seeds), encoding="utf-8")
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
        name += f", {len(summaries)} seeds" if experiment.seeds and len(summaries) > 1 else ""
        lines.append(
            f"| {experiment.recipe} | {name} | {spread(auc)} | {spread(logloss)} | {experiment.target} | {duration:,.0f} |"
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


def updated(text: str, rows: list[str], seeds: int) -> str:
    """The page with a new table, and a new paragraph about how it was made. All other text stays.

    Raises:
        SystemExit: the page lacks the paragraph or the table.
    """
    made = (
        f"Made by `GIRIH_DATA=... python recipes/quality.py --seeds {seeds}` on {processor()}, {os.cpu_count()} cores,"
        " CPU only, float32."
    )
    for pattern, new in ((MADE, made), (TABLE, "\n".join([*HEADER, *rows]))):
        text, found = pattern.subn(lambda _, new=new: new, text)
        if found != 1:
            sys.exit(f"{PAGE}: expected one part that matches {pattern.pattern!r}, found {found}; restore it")
    return text


if __name__ == "__main__":
    sys.exit(main())
