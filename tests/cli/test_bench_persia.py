"""Benchmarks of Persia's claims: what they count and keep, and that they run."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
def test_what_is_kept_is_not_measured_again_unless_something_else_is_asked(tmp_path, capsys):
    from experiments import RUNNING_PARTS, Results, Run

    done = []

    def do(run):
        done.append(run)
        return {"windows": [{"step_s": 0.002}], "number": len(done)}

    run = Run("zipf/τ = 4/0", {"batch": 64}, {"name": "hybrid"}, {"rate": "1gbit"})
    slower = Run(run.name, run.config, run.strategy, {"rate": "200mbit"})
    kept = Results(tmp_path, parts=RUNNING_PARTS)
    assert [kept.measure(run, do)["number"] for _ in range(2)] == [1, 1]
    assert "2.0 ms a step" in capsys.readouterr().out
    assert kept.measure(slower, do)["number"] == 2
    (file,) = tmp_path.rglob("*.json")
    found = json.loads(file.read_text())
    assert found["asked"]["conditions"] == {"rate": "200mbit"}
    assert found["wall_s"] >= 0
    assert found["machine"]["cores"] >= 1
    file.write_text(json.dumps({**found, "code": "of yesterday"}))
    assert Results(tmp_path, parts=RUNNING_PARTS, other_code=True).measure(slower, do)["number"] == 2
    assert kept.measure(slower, do)["number"] == 3
    assert "4 runs, 0.00 machine hours" in kept.told()


def test_the_limit_of_a_step_is_the_larger_part_and_the_sum_has_what_crosses_a_link_in_turn():
    import fleet
    import persia_wire

    window = {
        "samples_per_s": 1000.0, "step_s": 0.5, "machine_cpu_s": 0.1 * fleet.CORES,
        "link_bytes": {"t0": [1_000_000, 2_000_000], "w0": [5_000_000, 4_000_000]},
    }  # fmt: skip
    summary = {"wire_bytes": {"embeddings": 80e6, "gradients": 40e6}, "steps": 10, "staleness_mean": 3.0}
    strategy = {"name": "hybrid", "trainers": 2}
    run = {"windows": [window], "summary": summary, "asked": {"strategy": strategy}}
    parts = persia_wire.parts([run], "200mbit")
    assert parts["wire ms"] == pytest.approx(200)
    assert parts["limit ms"] == pytest.approx(200)
    assert parts["step / limit"] == pytest.approx(2.5)
    assert parts["sum ms"] == pytest.approx(100 + 240)  # 6 MB of a trainer's step at 25 MB/s
    assert persia_wire.parts([run], "1gbit")["limit ms"] == pytest.approx(100)
    run = {**run, "asked": {"strategy": {"name": "synchronous", "trainers": 2}}}
    assert persia_wire.parts([run], "200mbit")["sum ms"] == pytest.approx(100 + 200)


def test_the_time_to_an_auc_lies_between_two_evaluations():
    from persia_fig6 import mean_time, seconds_to

    curve = [[100, 2.0, 0.6], [200, 4.0, 0.7], [300, 6.0, 0.69]]
    assert seconds_to(curve, 0.65) == pytest.approx(3.0)
    assert seconds_to(curve, 0.5) == 2.0
    assert seconds_to(curve, 0.71) is None
    later = [[100, 4.0, 0.6], [200, 8.0, 0.7]]
    assert mean_time([{"curve": curve}, {"curve": later}], 0.65) == pytest.approx(4.5)
    assert mean_time([{"curve": curve}, {"curve": [[100, 4.0, 0.6]]}], 0.65) is None


@pytest.mark.slow
def test_keys_are_counted_as_the_servers_of_a_run_count_them(tmp_path):
    import persia_balance

    options = Namespace(batch=256, steps=6, trainers=1, servers=3, known=2)
    settings = persia_balance._settings("generated", options, tmp_path)
    shuffled, of_tables = persia_balance.counted(settings, options.steps)
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train").in_order(), epochs=1)
        processes = trainer.sparse.stats().processes
    served = [processes[f"embedding-server {s}"]["counters"]["served_keys"] for s in range(3)]
    assert shuffled.sum(0).tolist() == served
    assert shuffled.shape == (6, 3)
    by_placement = persia_balance.placed(settings, shuffled, of_tables, options.known)
    totals = {name: keys.sum(1) for name, keys in by_placement.items()}
    assert (totals["tables, t mod N"] == totals["shuffled"]).all()
    assert (totals["tables, by load"] == totals["shuffled"][2:]).all()
    most = {name: (keys.sum(0).max() / keys.sum(0).mean()) for name, keys in by_placement.items()}
    assert most["shuffled"] < 1.1 < most["tables, t mod N"]


@pytest.mark.heavy
def test_a_measured_run_tells_when_it_reached_each_auc(tmp_path):
    """With evaluations between its windows: their time is left out, and trainers come to them together."""
    import fleet

    config = fleet.write_task(tmp_path, rows=4096, cardinality=50, dim=4, hidden=(8,), batch=128)
    text = config.read_text().replace("[data]\n", f'[data]\nvalid = "{tmp_path}/train-0.parquet"\n')
    config.write_text(text)
    strategy = 'strategy = {name = "hybrid", trainers = 2}'
    plan = fleet.Plan(str(config), (strategy, "train.evaluate_every_steps=5"), warmup=0, steps=5, windows=4)
    found = fleet.measure(plan, tries=1)
    steps, seconds, aucs = zip(*found["curve"], strict=True)
    assert steps == (5, 10, 15, 20)
    assert (np.diff((0.0, *seconds)) > 0).all()
    assert seconds[-1] < found["notes"][-1]["time_s"] - found["notes"][0]["time_s"] + seconds[0]
    assert all(0 < auc < 1 for auc in aucs)
    assert [window["step_s"] > 0 for window in found["windows"]] == [True] * 3
    assert found["summary"]["auc"] == pytest.approx(aucs[-1], abs=1e-6)


def network_missing():
    sys.path.insert(0, str(bench.FOLDER))
    import network

    return network.missing()


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # eight runs of several processes, each of them once
@pytest.mark.parametrize(
    ("name", "words", "tables"),
    [
        ("persia_wire", ("--rates", "1gbit", "--staleness", "0", "4", "--compressions", "none", "all"), (3, 1, 2)),
        ("persia_fig9", ("--arenas", "heap"), (4, 3, 4)),
    ],
)  # fmt: skip
def test_runs_over_links_and_keeps_what_it_found(name, words, tables, tmp_path):
    if (reason := network_missing()) is not None:
        pytest.skip(reason)
    words = [sys.executable, str(bench.FOLDER / f"{name}.py"), "--quick", *words, "--json", "found.json"]
    for round_ in range(2):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made = re.findall(r"/.* \d+\.\d ms a step  \d+", done.stdout)
        assert bool(made) == (round_ == 0)
    found = json.loads(Path(tmp_path, "found.json").read_text())
    assert not found["skipped"]
    assert tuple(len(table["rows"]) for table in found["tables"]) == tables
