"""Simulated cases give recorded results: those of ``girih bench prediction``, with fewer steps.

A difference is no mistake by itself. If it is meant, look at ``girih bench prediction`` and record again:

    python tests/planner/test_recorded.py
"""

import json
from pathlib import Path

import pytest

from girih.planner.calibration import Calibration
from girih.planner.facts import AccessProfile, DenseCost, Facts, GroupFacts, ModelFacts, OperatorFacts
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.schema import Categorical, Numeric, Schema
from girih.strategies import BY_NAME
from girih.strategies.strategy import price

FILE = Path(__file__).with_name("recorded.json")
CALIBRATION = Path(__file__).parents[2] / "docs" / "results" / "prediction" / "calibration.json"
GBIT = {"200mbit": 0.2, "1gbit": 1.0}
STRATEGIES = {
    "local": BY_NAME["local"](),
    "synchronous": BY_NAME["synchronous"](trainers=2),
    "substitution": BY_NAME["substitution"](trainers=2),
    "hybrid, τ = 0": BY_NAME["hybrid"](trainers=2, staleness=0, transport="tcp"),
    "hybrid, τ = 4": BY_NAME["hybrid"](trainers=2, staleness=4, transport="tcp"),
    "asynchronous": BY_NAME["asynchronous"](trainers=2, staleness=4, transport="tcp"),
    "two replicas": BY_NAME["hierarchical"](groups=2, nets=2, transport="tcp"),
}
RECORDED = json.loads(FILE.read_text())


def facts(known, calibration):
    """Facts of a run, with one table for each group of tables."""
    (group,) = known["groups"]
    counts = {name: group[name] for name in ("rows", "rows_of_share", "ids")}
    model = dict(known["model"])
    operators = [
        OperatorFacts(name=name, aggregation=way, columns=columns)
        for name, way, columns in model.pop("operators")
    ]
    pass_s, example_s, update_s, busy_threads = known["pass"]
    features = [Numeric(name=f"x{number}") for number in range(known["num_numeric"])]
    return Facts(
        schema=Schema([Categorical(name="all", dim=8), *features], labels="click"),
        model=ModelFacts(operators=tuple(operators), **model),
        groups=(
            GroupFacts(
                name="all",
                tables=("all",),
                **{name: group[name] for name in ("dim", "output_vectors", "output_numbers", "optimizer")},
            ),
        ),
        num_trainers=known["num_trainers"],
        seed=1,
        batch_size=known["batch_size"],
        threads=known["threads"],
        profile=AccessProfile(
            rows={"all": counts["rows"]},
            rows_of_share={"all": counts["rows_of_share"]},
            widths={"all": group["dim"]},
            ids=counts["ids"],
            ids_of_tables={"all": counts["ids"]},
        ),
        dense_cost=DenseCost(0.0, 1e10, pass_s, example_s, update_s, 4.0, busy_threads),
        calibration=calibration,
        links=calibration.links,
    )


def result(case):
    """The result of one case: model, size, strategy, link. Numbers have six digits."""
    model, size, strategy, link = case.split("/")
    calibration, hosts = Calibration.read(CALIBRATION), None
    if link != "none":
        calibration = calibration.over(GBIT[link] * 1e9 / 8)
        group = HostGroup(
            count=1, cores=2, memory_gb=24, gbit=GBIT[link], burst_kb=98.304, link_per_process=True
        )
        hosts = Hosts((group,))
    kind = "local" if strategy == "local" else "synchronous"
    known = facts(RECORDED["facts"][f"{model}/{size}/{kind}"], calibration)
    found = price(STRATEGIES[strategy], known, hosts, steps=10, runs=2).to_dict()
    speeds = {
        name: float(f"{found[name]:.6g}")
        for name in ("samples_per_s", "samples_per_s_p10", "samples_per_s_p90")
    }
    return speeds | {name: found[name] for name in ("staleness_p50", "staleness_p99", "bottleneck")}


@pytest.mark.parametrize("case", list(RECORDED["cases"]))
def test_cases_give_recorded_results(case):
    assert result(case) == RECORDED["cases"][case]


def test_there_are_about_a_hundred_cases():
    assert len(RECORDED["cases"]) > 100


if __name__ == "__main__":
    cases = {case: result(case) for case in RECORDED["cases"]}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cases[name])}" for name in cases)
    known = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(RECORDED['facts'][name])}" for name in RECORDED["facts"]
    )
    FILE.write_text(f'{{\n "facts": {{\n{known}\n }},\n "cases": {{\n{lines}\n }}\n}}\n')
