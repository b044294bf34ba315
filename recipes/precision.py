"""bfloat16 against float32, seed by seed: docs/precision.md.

    GIRIH_DATA=... OMP_NUM_THREADS=1 python recipes/precision.py [--only frappe] [--seeds 10] [--work DIRECTORY]

Each pair is two ``girih train`` of one recipe's config that differ in ``train.precision`` alone: the same
seed gives both the same initial values, order of data and dropout. Finished runs in the work directory are
taken as they are.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from quality import EXPERIMENTS, RECIPES, Experiment, run

PAGE = RECIPES.parent / "docs" / "precision.md"
STUDENT = {5: 2.776, 10: 2.262, 20: 2.093}  # the 97.5 % point of Student's t, by number of pairs
RUNS = {
    "frappe": ("deepfm", {"epochs": 10, "lr_schedule": {"name": "StepLR", "step_size": 6, "gamma": 0.1}}),
    "kuairand": ("dnn without histories", {"epochs": 2}),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(RUNS))
    parser.add_argument("--seeds", type=int, default=10, choices=sorted(STUDENT))
    parser.add_argument("--work", type=Path, default=Path("runs/precision"))
    arguments = parser.parse_args()
    if "GIRIH_DATA" not in os.environ:
        print("set GIRIH_DATA to the directory of the public data sets", file=sys.stderr)
        return 2
    work = arguments.work.resolve()
    os.environ["KUAIRAND"] = str(work / "kuairand-data")
    sections = []
    for recipe in RUNS if arguments.only is None else [arguments.only]:
        if recipe == "kuairand" and not (work / "kuairand-data" / "test.parquet").exists():
            prepare = [sys.executable, RECIPES / "kuairand" / "prepare.py", work / "kuairand-data"]
            subprocess.run(prepare, check=True)
        sections.append(section(recipe, arguments.seeds, work))
        print(sections[-1], flush=True)
    if arguments.only is None:
        PAGE.write_text(page(sections, arguments.seeds), encoding="utf-8")
        print(f"wrote {PAGE}")
    return 0


def section(recipe: str, seeds: int, work: Path) -> str:
    """A data set's table: both AUC of each seed, their difference, its mean and 95 % interval."""
    lines, differences = [], []
    for seed in range(1, seeds + 1):
        auc = {p: run(experiment(recipe, p), seed, work)["auc"] for p in ("float32", "bfloat16")}
        differences.append(auc["bfloat16"] - auc["float32"])
        lines.append(f"| {seed} | {auc['float32']:.5f} | {auc['bfloat16']:.5f} | {differences[-1]:+.5f} |")
    mean = statistics.mean(differences)
    half = STUDENT[seeds] * statistics.stdev(differences) / seeds**0.5
    name, options = RUNS[recipe]
    return f"""## {recipe}: {name}, {options["epochs"]} epochs

Mean difference of test AUC **{mean:+.5f}**, 95 % interval **[{mean - half:+.5f}, {mean + half:+.5f}]**.

| seed | float32 | bfloat16 | difference |
|---|---|---|---|
""" + "\n".join(lines)


def experiment(recipe: str, precision: str) -> Experiment:
    """The experiment of quality.py, shorter, in one precision."""
    name, options = RUNS[recipe]
    base = next(e for e in EXPERIMENTS if (e.recipe, e.name) == (recipe, name))
    train = base.sections.get("train", {}) | options | {"precision": precision}
    return replace(base, name=f"{name} {precision}", sections=base.sections | {"train": train})


def page(sections: list[str], seeds: int) -> str:
    """The page with the tables and how they were made."""
    tables = "\n\n".join(sections)
    return f"""# bfloat16 against float32

This page compares the test AUC of training in bfloat16 and in float32. Read it before you set `train.precision = "bfloat16"`.

Made by `GIRIH_DATA=... OMP_NUM_THREADS={torch.get_num_threads()} python recipes/precision.py --seeds {seeds}` on
{processor()}, CPU only. Models and data are those of [quality.md](quality.md), with fewer epochs. The test AUC is that of the
weights with the best validation AUC. The two runs of a pair differ only in `train.precision`. The interval is Student's t
over the differences of the pairs.

{tables}
"""


def processor() -> str:
    """The machine's processor, by its name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
