"""Predictions held to measurements: how they are judged, and that the benchmark runs."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from girih.cli import bench
from girih.planner.calibration import LINKS, Calibration, Link, Rate, StepWork

pytestmark = pytest.mark.usefixtures("folder")


def row(case, strategy, predicted, measured):
    return {"case": case, "strategy": strategy, "predicted": predicted, "measured": measured}


def test_errors_and_orders_are_judged_by_hand():
    from prediction_tables import judged

    found = judged(
        [
            row("a", "local", 50, 100),  # 50 % off; in no pair
            row("a", "hybrid", 110, 100),  # 10 %
            row("a", "synchronous", 120, 150),  # 20 %; faster than hybrid, and predicted so
            row(
                "a", "asynchronous", 90, 105
            ),  # 14 %; no pair with hybrid, which is within 10 %; behind synchronous
            row("b", "hybrid", 100, 100),
            row("b", "synchronous", 90, 120),  # 25 %; predicted to be slower than hybrid
        ]
    )
    assert found["median error"] == pytest.approx((15 / 105 + 0.2) / 2)
    assert found["worst error"] == 0.5
    assert found["pairs"] == 3
    assert found["rightly ordered"] == pytest.approx(2 / 3)
    assert found["cases"] == 2
    assert (
        found["fastest picked"] == 0.5
    )  # synchronous is the fastest in both, and predicted to be so in the first
    assert judged([])["rightly ordered"] is None
    assert judged([])["fastest picked"] is None


def test_only_strategies_of_a_contest_are_held_against_each_other():
    from prediction_tables import judged

    rows = [row("a", "hybrid", 100, 50), {**row("a", "synchronous", 90, 100), "contest": False}]
    assert judged(rows)["cases"] == 0
    assert judged([{**each, "contest": True} for each in rows])["worst regret"] == 0.5


def test_parts_of_a_step_are_compared_by_hand():
    """A step of 20 ms on all cores, of which the processes compute 12 ms on each core; predicted are 25 ms with 15 ms."""
    import fleet
    from prediction_tables import phases

    cores = fleet.CORES
    window = {
        "step_s": 0.020,
        "cpu_s": 0.012 * cores,
        "cpu_s_each": {"trainer 0": 0.004, "trainer 1": 0.006, "loader 0": 1e-5},
    }
    speed = {
        "core_s": {"trainer": 0.010 * cores, "parameter-server": 0.005 * cores, "loader": 0.0},
        "examples": 100,
        "wire_bytes": {"ids": 400.0, "dense": 0.0},
    }
    summary = {"wire_bytes": {"ids": 5000}, "num_shares": 10}
    found = {"found": {"windows": [window], "speed": speed, "summary": summary}, "predicted": 100 / 0.025}
    parts = {name: (predicted, measured) for name, predicted, measured in phases(found)}
    assert parts == {
        "processor time: trainer": (pytest.approx(15 * cores), pytest.approx(10)),
        "waits of the cores": (pytest.approx(10), pytest.approx(8)),
        "bytes: ids": (400.0, 500.0),
    }


def test_kept_runs_that_cannot_be_predicted_are_counted():
    from prediction_kept import left_out

    assert {source: number for source, (number, _) in left_out().items()} == {
        "des-table5, mesh": 13, "des-table5, asynchronous": 3, "prediction, one group": 18,
    }  # fmt: skip


@pytest.mark.heavy
def test_the_benchmark_runs_and_keeps_what_it_found(tmp_path):
    work = StepWork(
        lookup=Rate(1e-4, 1e-6, 1e-8),
        updates={"adagrad": Rate(1e-4, 1e-6, 1e-8)},
        example_s=1e-6,
        value_s=1e-7,
        step_s=1e-3,
        products=((64, 1e9),),
    )
    links = dict.fromkeys(LINKS, Link(1e-4, 1e9))
    calibration = Calibration(trainers=2, machine={"cores": 2}, links=links, work=work)
    (tmp_path / "calibration.json").write_text(json.dumps(asdict(calibration)))
    words = [sys.executable, str(bench.FOLDER / "prediction.py"), "--quick", "--json", "found.json"]
    words += ["--results", "kept", "--calibration", "calibration.json"]
    for _ in range(2):  # the second time from what was kept
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "ms a step" not in done.stdout
    speeds, judgement, _, parts, _ = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert "processor time: trainer" in {each["phase"] for each in parts["rows"]}
    assert [each["strategy"] for each in speeds["rows"]] == ["local", "hybrid, τ = 4"]
    assert all(each["predicted"] > 0 < each["measured"] for each in speeds["rows"])
    assert judgement["rows"][0]["runs"] == 2
