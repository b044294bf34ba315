"""AUC and logloss by strategy: Persia's Table 2 and Figure 7, DES's Table 4, on public and generated data.

    GIRIH_DATA=... girih bench strategy_quality [--cases frappe/dnn ...] [--factor 0.5] [--quick] [--results FOLDER] [--docs FOLDER]

Every arm of a case makes equally many updates, each of equally many examples: a trainer of ``asynchronous`` takes as many
examples per step as all trainers of the others together, since each of its steps is an update. "One process" makes the same
updates without any distribution. Learning rates (sparse and dense by one factor) are chosen for each arm by itself, but for
``synchronous`` and ``substitution``, which take those of one process: the best validation AUC of seed 1; seeds 2 to 4 are
reported (to 6 in frappe/dnn, whose differences are near their errors), with the weights that were best on validation data.
Quality only: what else the machine does changes staleness, and with it the AUC of ``hybrid``, within τ, and of
``asynchronous``, and nothing else. Writes persia-fig7.svg to ``--docs``, AUC by updates of cases with ``hybrid``, unless all
have one ``--factor``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import pyarrow.parquet as pq
from experiments import (
    ROOT,
    Results,
    Run,
    add_options,
    best_valid,
    find_data,
    gap,
    last_valid,
    mean_curve,
    pictures,
    results,
    show,
    spread,
    tried,
    tuned,
)
from pictures import Chart, write_picture

from girih.data.click_log import click_log

TUNED, REPORTED = 1, (2, 3, 4)
FACTORS = (0.5, 1.0, 2.0)
# asynchronous training of DeepFM has a lower summit at 1, where a climb from FACTORS would end
WIDE_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
MOST_FACTORS = 9
EVALUATIONS = 10
TRAINERS = 4


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        per_step: examples of a step of all trainers, in updates' worth.
        train: options of ``[train]`` beside those of all arms.
    """

    strategy: Mapping[str, Any]
    per_step: int = 1
    train: Mapping[str, Any] = field(default_factory=dict)


ONE = Arm({"name": "local"})
SUBSTITUTION = Arm({"name": "substitution", "dense": "replicated", "trainers": TRAINERS})


def _asynchronous(trainers: int) -> Arm:
    return Arm({"name": "asynchronous", "staleness": 4, "trainers": trainers}, per_step=trainers)


def _persia(trainers: int) -> dict[str, Arm]:
    return {
        "one process": ONE,
        "synchronous": Arm({"name": "synchronous", "trainers": trainers}),
        "hybrid, τ = 4": Arm({"name": "hybrid", "staleness": 4, "trainers": trainers}),
        "asynchronous, τ = 4": _asynchronous(trainers),
    }


PERSIA = _persia(TRAINERS)
DES = {"one process": ONE, "substitution": SUBSTITUTION, "asynchronous, τ = 4": _asynchronous(TRAINERS)}
FTRL = {"name": "ftrl", "lr": 1.0}


@dataclass(frozen=True)
class Case:
    """One data set and model.

    Attributes:
        update: examples of an update; passes: epochs.
        seeds: those that are reported.
        arms: by name, the reference first; ``same`` maps an arm to one whose rate it takes: the two are proven equal
            but for dropout and batch norm, in which trainers of ``synchronous`` have masks and moments of their own.
    """

    data: str
    model: Mapping[str, Any]
    update: int
    passes: int
    arms: Mapping[str, Arm]
    sections: Mapping[str, Any] = field(default_factory=dict)
    factors: tuple[float, ...] = FACTORS
    seeds: tuple[int, ...] = REPORTED
    same: Mapping[str, str] = field(
        default_factory=lambda: {"synchronous": "one process", "substitution": "one process"}
    )

    def config(self, arm: Arm, factor: float, seed: int, *, quick: bool) -> dict[str, Any]:
        """The config of one run."""
        made = _base(self.data) | {"model": dict(self.model)}
        for section, value in self.sections.items():
            made[section] = made.get(section, {}) | value
        made["data"]["batch_size"] = self.update * arm.per_step
        for section in ("sparse_optimizer", "first_order_optimizer", "dense_optimizer"):
            if section in made:
                made[section] = made[section] | {"lr": made[section]["lr"] * factor}
        updates = NUM_TRAIN[self.data] * self.passes // self.update
        every = max(1, updates // arm.per_step // EVALUATIONS)
        made["train"] = {
            **({"clip_norm": 10.0} if self.data == "frappe" else {}),
            "epochs": self.passes,
            "seed": seed,
            "evaluate_every_steps": every,
            "early_stopping": {"metric": "auc", "patience": 1000},
            **arm.train,
        }
        if quick:
            made["train"] |= {"max_steps": 40 // arm.per_step, "evaluate_every_steps": 20 // arm.per_step}
        return made


NUM_TRAIN = {"frappe": 202_005, "kuairand": 154_071, "generated": 5_000_000}
NET = {"hidden": [128, 64], "dropout": 0.2}
BN_NET = {"hidden": [128, 64], "dropout": 0.3, "batch_norm": True}
CASES = {
    "frappe/dnn": Case("frappe", {"name": "dnn", **BN_NET}, 512, 6, PERSIA, seeds=(*REPORTED, 5, 6)),
    "kuairand/dnn": Case("kuairand", {"name": "dnn", **NET}, 128, 2, PERSIA),
    "generated/dnn": Case("generated", {"name": "dnn", **NET, "dropout": 0.0}, 2048, 1, PERSIA),
    "kuairand/ffnn": Case(
        "kuairand", {"name": "dnn", "hidden": [4096, 2048, 1024, 512, 256], "dropout": 0.2}, 128, 1, _persia(2),
        factors=(0.25, 1.0),
    ),
    **{
        f"{data}/{model}": Case(data, {"name": model, **net}, update, passes, DES, {"first_order_optimizer": FTRL},
                                factors=WIDE_FACTORS if net else FACTORS)
        for data, update, passes, full in (
            ("frappe", 512, 6, BN_NET), ("kuairand", 128, 2, NET), ("generated", 2048, 1, NET | {"dropout": 0.0}),
        )
        for model, net in (("lr", {}), ("wide_deep", full), ("deepfm", full))
    },
}  # fmt: skip


def main() -> None:
    parser = harness.parser("strategy_quality", __doc__)
    add_options(parser)
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument(
        "--factor", type=float, help="of the rates of every arm, in place of each one's own best"
    )
    arguments = parser.parse_args()
    report = harness.Report("strategy_quality", arguments)
    if any(not case.startswith("generated") for case in arguments.cases):
        find_data(parser)
    kept = results(arguments, "strategy-quality")
    rows, rates, charts = [], [], []
    for name in arguments.cases:
        case = CASES[name]
        if case.data == "generated":
            generate()
        runs, factors = _trained(name, case, kept, arguments.factor, quick=arguments.quick)
        rows += _rows(name, case, runs, factors)
        rates += [
            [name, arm, tried(kept, f"{name}/{arm}", TUNED, _valid_and_test)]
            for arm in runs
            if arm not in case.same
        ]
        if "hybrid, τ = 4" in case.arms and arguments.factor is None:
            curves = {arm: _curve(case, arm, of) for arm, of in runs.items()}
            charts.append(Chart(name, "updates", "AUC on validation data", curves))
    show(report, "quality by strategy", HEADER, rows)
    show(report, f"how rates were chosen, seed {TUNED}", RATES, rates)
    print(kept.told())
    if charts:
        write_picture(pictures(arguments) / "persia-fig7.svg", charts)
    report.finish()


HEADER = [
    "case", "strategy", "rates ×", "updates", "test AUC", "less one process", "test logloss", "less one process's",
    "last validation AUC", "staleness: mean, most", "updates since read: mean, most", "dense, most",
]  # fmt: skip
RATES = ["case", "strategy", "rates ×: best validation AUC (test AUC)"]


def _trained(
    name: str, case: Case, kept: Results, factor: float | None, *, quick: bool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Arm → runs of the reported seeds; arm → its factor, which is ``factor`` for all where it is given."""

    def run(arm: str, factor: float, seed: int) -> Run:
        config = case.config(case.arms[arm], factor, seed, quick=quick)
        return Run(f"{name}/{arm}/x{factor:g}/{seed}", config, case.arms[arm].strategy)

    factors: dict[str, float] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for arm in case.arms:
        like = case.same.get(arm)
        if factor is not None:
            factors[arm] = factor
        elif like in factors:
            factors[arm] = factors[like]
        else:
            factors[arm] = tuned(
                lambda factor, arm=arm: best_valid(kept.train([run(arm, factor, TUNED)])[0]),
                case.factors[: 1 if quick else None],
                MOST_FACTORS,
                grow=not quick,
            )
        runs[arm] = kept.train([run(arm, factors[arm], seed) for seed in case.seeds[: 1 if quick else None]])
    return runs, factors


def _rows(
    name: str, case: Case, runs: Mapping[str, list[dict[str, Any]]], factors: Mapping[str, float]
) -> list[list[str]]:
    reference = next(iter(runs.values()))
    rows = []
    for arm, of in runs.items():
        cells = []
        for key in ("auc", "logloss"):
            values = [run[key] for run in of]
            cells += [spread(values), "" if of is reference else gap(values, [run[key] for run in reference])]
        rows.append(
            [
                name, arm, f"{factors[arm]:g}", f"{of[0]['steps'] * case.arms[arm].per_step:,}", *cells,
                spread([last_valid(run) for run in of]), _mean_most(of, "staleness"), _mean_most(of, "updates_since_read"),
                str(max(run["dense_staleness_max"] for run in of)),
            ]
        )  # fmt: skip
    return rows


def _valid_and_test(run: Mapping[str, Any]) -> str:
    return f"{best_valid(run):.4f} ({run['auc']:.4f})"


def _mean_most(runs: list[dict[str, Any]], of: str) -> str:
    if f"{of}_mean" not in runs[0]:
        return "–"
    return f"{mean(run[f'{of}_mean'] for run in runs):.1f}, {max(run[f'{of}_max'] for run in runs)}"


def _curve(case: Case, arm: str, runs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(step * case.arms[arm].per_step, auc) for step, auc in mean_curve(runs)]


def _base(data: str) -> dict[str, Any]:
    """Data, features, labels and optimizers."""
    if data == "generated":
        return {
            "data": {part: f"${{CLICKLOG}}/{part}.parquet" for part in ("train", "valid", "test")},
            "features": [
                *({"name": name, "kind": "categorical", "dim": 16} for name in ("user", "item", "context", "tags")),
                *({"name": name, "kind": "numeric", "transform": "standardize"} for name in ("x0", "x1")),
            ],
            "labels": {"names": ["click"]},
            "sparse_optimizer": {"name": "adagrad", "lr": 0.05},
            "dense_optimizer": {"name": "adam", "lr": 1e-3},
        }  # fmt: skip
    made = tomllib.loads((ROOT / "recipes" / data / f"{data}.toml").read_text())
    made["features"] = [feature for feature in made["features"] if feature["kind"] != "sequence"]
    if "lr_schedule" in made["train"]:
        del made["train"]
    return made


def generate() -> None:
    """Writes the log once; about half a GB."""
    folder = Path(os.environ.setdefault("CLICKLOG", str(Path("runs/click-log-5m").resolve())))
    if (folder / "test.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"train": NUM_TRAIN["generated"], "valid": 200_000, "test": 400_000}
    start, part = 0, 500_000
    for name, size in sizes.items():
        draft = folder / f"{name}.draft"
        writer = None
        for first in range(0, size, part):
            table, _ = click_log(min(part, size - first), start=start + first)
            writer = writer or pq.ParquetWriter(draft, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
        draft.rename(folder / f"{name}.parquet")
        start += size


if __name__ == "__main__":
    main()
