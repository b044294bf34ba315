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
    from prediction import judged

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


def test_a_wrong_prediction_says_what_it_misses():
    import fleet
    from prediction import missing_term

    def wrong(work_ms, predicted, cpu_ms, step_ms):
        """Of a step of 100 examples, on all cores."""
        window = {"cpu_s": cpu_ms * fleet.CORES / 1e3, "step_s": step_ms / 1e3}
        found = {"speed": {"work_ms": {"a": work_ms * fleet.CORES}}, "windows": [window]}
        return missing_term({"examples": 100, "predicted": predicted, "found": found})

    assert wrong(10, 100 / 0.010, cpu_ms=19, step_ms=20) == {
        "misses": "work", "predicted, ms": pytest.approx(10), "measured, ms": pytest.approx(19),
    }  # fmt: skip
    found = wrong(10, 100 / 0.010, cpu_ms=11, step_ms=20)
    assert found == {"misses": "waiting", "predicted, ms": pytest.approx(0), "measured, ms": pytest.approx(9)}


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
    speeds, judgement, worst = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert {each["misses"] for each in worst["rows"]} <= {"work", "waiting"}
    assert [each["strategy"] for each in speeds["rows"]] == ["local", "hybrid, τ = 4"]
    assert all(each["predicted"] > 0 < each["measured"] for each in speeds["rows"])
    assert judgement["rows"][0]["runs"] == 2
