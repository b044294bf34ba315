"""Benchmarks of HT's claims: their arms differ in one thing, what they count is right, and they run."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from girih.app.run_config import RunConfig
from girih.cli import bench
from girih.config import write_toml
from girih.planner.calibration import Calibration
from girih.planner.plan import Plan

pytestmark = pytest.mark.usefixtures("folder")


def test_all_arms_of_quality_train_on_as_many_examples_in_as_many_updates(tmp_path, monkeypatch):
    import hierarchical_quality as quality
    from strategy_quality import EVALUATIONS, NUM_TRAIN

    monkeypatch.setenv("KUAIRAND", "nowhere")
    monkeypatch.setenv("CLICKLOG", "nowhere")
    arms = quality.arms(quality.PARTS, [2, 4, 8], [1, 2, 4])
    assert len(arms) == 1 + 3 + 3 + 3 + 2, "the tuned arm is made later"
    for data, case in quality.DATA.items():
        for name, arm in arms.items():
            made = quality.config(data, arm, 1.0, 2, quick=False)
            write_toml(tmp_path / "config.toml", {**made, "strategy": dict(arm.strategy)})
            settings = RunConfig.load(tmp_path / "config.toml")
            trainers = settings.strategy.trainers
            assert settings.data.batch_size == case.update * trainers, name
            examples = settings.train.evaluate_every_steps * settings.data.batch_size
            due = NUM_TRAIN[case.data] / EVALUATIONS
            assert due - 8 * case.update < examples <= due, name
            assert settings.train.early_stopping.metric == quality.METRIC
    bits = {name: arm for name, arm in arms.items() if name.endswith(quality.BITS)}
    assert {name.removesuffix(quality.BITS) for name in bits} == {quality.ONE, "1 group of 8 trainers"}
    for name, arm in bits.items():
        assert arm.strategy == arms[name.removesuffix(quality.BITS)].strategy
        made = quality.config("kuairand", arm, 1.0, 2, quick=False)
        plain = quality.config("kuairand", arms[name.removesuffix(quality.BITS)], 1.0, 2, quick=False)
        assert made["train"] == {**plain["train"], "dense_forward": "int8"}
    eights = [arm.strategy for name, arm in arms.items() if arm.per_step == 8 and name not in bits]
    assert sorted(strategy["groups"] for strategy in eights) == [1, 2, 4, 8]
    assert {strategy.get("servers_per_group", 0) for strategy in eights} == {0, quality.SERVERS_PER_GROUP}


@pytest.mark.slow
def test_quality_chooses_rates_on_validation_data_and_is_held_against_one_trainer(
    tmp_path, monkeypatch, capsys
):
    """Training is a formula here: what is shown of it is what the benchmark makes."""
    import hierarchical_quality as quality

    trained = []

    def formula(run, metric):
        trained.append(run.name)
        factor, seed = run.name.rsplit("/", 2)[1:]
        copies = run.strategy["groups"]
        valid = 0.8 + 0.01 * abs(float(factor[1:]) * copies - 2)  # the best rates are 2 / copies
        test = (0.9 + 0.001 * int(seed)) * (1 + 0.001 * (copies - 1))
        return {
            "auc": 0.7, "steps": 100 // run.config["data"]["batch_size"], "staleness_mean": 0.0, "staleness_max": 0,
            "updates_since_read_mean": 1.5, quality.METRIC: test, "curve": [[1, valid + 0.1], [2, valid]],
            "dense_staleness": {"median": 0, "p99": 1, "max": int(seed)},
        }  # fmt: skip

    def words():
        monkeypatch.setattr(sys, "argv", [
            "hierarchical_quality", "--data", "generated", "--parts", "trainers", "groups",
            "--counts", "2", "4", "--groups", "1", "2",
            "--results", str(tmp_path / "results"), "--docs", str(tmp_path), "--json", str(tmp_path / "found.json"),
        ])  # fmt: skip
        quality.main()
        quality_, rates = json.loads((tmp_path / "found.json").read_text())["tables"]
        return {row["arm"]: row for row in quality_["rows"]}, {row["arm"]: row for row in rates["rows"]}

    monkeypatch.setattr(quality, "trained", formula)
    monkeypatch.setattr(quality, "generate", lambda: None)
    rows, rates = words()
    assert {arm: row["rates ×"] for arm, row in rows.items()} == {
        "one trainer, one net": "2", "2 trainers, EASGD": "1", "4 trainers, EASGD": "0.5",
        "1 group of 4 trainers": "2", "2 groups of 2 trainers": "1",
    }  # fmt: skip
    assert rates["4 trainers, EASGD"] == {
        "data": "generated", "arm": "4 trainers, EASGD",
        "rates ×: best validation NE": "0.25: 0.81000, 0.5: 0.80000, 1: 0.82000, 2: 0.86000",
    }  # fmt: skip
    over, peers = "over one trainer's, %", "over EASGD's of as many trainers, %"
    assert rows["4 trainers, EASGD"][over] == "+0.300 ± 0.000"
    assert rows["2 groups of 2 trainers"][peers] == "-0.199 ± 0.000"
    assert rows["4 trainers, EASGD"][peers] == rows["one trainer, one net"][over] == ""
    assert rows["2 groups of 2 trainers"]["dense staleness: median, p99, most"] == "0, 1, 4"
    assert {row["last validation NE"] for row in rows.values()} == {"0.8000 ± 0.0000"}
    assert "svg" in (tmp_path / "hierarchical-quality.svg").read_text()[:100]
    once, shown = len(trained), rows
    assert words()[0] == shown
    assert len(trained) == once, "what is kept is not trained again"
    capsys.readouterr()
    for wrong, told in (
        (["--counts", "1", "2"], "--counts 1: expected"),
        (["--groups", "3"], "--groups 3: cannot"),
    ):
        monkeypatch.setattr(sys, "argv", ["hierarchical_quality", *wrong])
        with pytest.raises(SystemExit):
            quality.main()
        assert told in capsys.readouterr().err


def test_arms_of_speed_differ_in_one_thing_and_refused_ones_say_why():
    import hierarchical_speed as speed

    parts = {part: speed.arms(part, 4, 512) for part in speed.PARTS}
    assert [arm.trainers for arm in parts["trainers"].values()] == [1, 2, 4]
    assert [arm.strategy.get("nets", 1) for arm in parts["nets"].values()] == [1, 2, 4, 8]
    first, *others = parts["ablation"].values()
    for arm in others:
        assert arm.batch == first.batch
        differs = {key for key, _ in arm.strategy.items() ^ first.strategy.items()} - {"tagging"}
        assert differs in ({"split_fc"}, {"wire_activations", "wire_dense_gradients"}, set())
    for arms in parts.values():
        for name, arm in arms.items():
            reason = speed.refused(arm)
            later = {"split_fc", "wire_activations", "wire_dense_gradients"} & set(arm.strategy)
            assert reason is None or later, name
            assert reason is None or any(option in reason for option in later)
    assert "tagging" in speed.refused(speed.Arm({**first.strategy, "tagging": "best"}, 8))


@pytest.mark.slow
def test_groups_are_planned_for_the_links_of_the_benchmark(tmp_path):
    import hierarchical_speed as speed

    file = bench.FOLDER.parent / "docs" / "results" / "prediction" / "calibration.json"
    wires = {}
    for rate in ("1gbit", "10mbit"):
        options = Namespace(cardinality=50, dim=16, batch=512, rate=rate, cores=None, quick=False)
        measured = speed.Bench(options, None, tmp_path, Calibration.read(file))
        plan = Plan.read(measured._held(speed.arms("ablation", 2, 512)[speed.AUTO]))
        assert {"trainer", "server 0"} <= set(plan.tagging.devices.values())
        wires[rate] = plan.wire["activations"], plan.wire["dense_gradients"]
        assert measured._held(speed.arms("trainers", 2, 512)["2 × 1 net"]) is None
    assert wires["10mbit"] == ("int8", "topk")
    assert wires["1gbit"] != wires["10mbit"]


def test_slow_hosts_are_planned_as_hosts_with_one_core_on_a_slow_clock(tmp_path):
    import hierarchical_speed as speed

    file = bench.FOLDER.parent / "docs" / "results" / "prediction" / "calibration.json"
    calibration = Calibration.read(file)
    arm = speed.arms("ablation", 2, 512, size=4)[speed.AUTO]
    assert (arm.trainers, arm.servers) == (4, 4)
    options = Namespace(cardinality=50, dim=16, batch=512, rate="100mbit", cores=0.1, quick=False)
    slow = speed.Bench(options, None, tmp_path, calibration)._calibrated(arm, calibration)
    assert (slow.cores, slow.machines) == (8, 8)
    assert slow.links["tcp"].bytes_per_s == min(calibration.links["tcp"].bytes_per_s, 125e6)


def test_alpha_and_period_of_easgd_are_chosen_in_turn(tmp_path, monkeypatch):
    """The best values of a formula are found, outside of the first grid too."""
    import hierarchical_quality as quality
    from experiments import Results

    def formula(run, metric):
        alpha = run.strategy.get("elastic_rate", quality.ALPHA / 4)
        every = run.strategy.get("average_every_steps", quality.EVERY)
        factor = float(run.name.rsplit("/", 2)[1][1:])
        valid = 0.8 + abs(np.log(alpha / 0.025)) + abs(np.log(every / 90)) + abs(np.log(factor / 2))
        return {"auc": 0.7, "staleness_mean": 0.0, "staleness_max": 0, "curve": [[1, valid]]}

    monkeypatch.setattr(quality, "trained", formula)
    kept = Results(tmp_path)
    name, arm = quality._tuned_easgd("generated", 4, kept, quick=False)
    assert arm.strategy["elastic_rate"] == pytest.approx(0.025)
    assert arm.strategy["average_every_steps"] == 90
    assert (arm.strategy["groups"], arm.per_step) == (4, 4)
    assert name == "4 trainers, EASGD, α = 0.025, every 90 steps"
    tried = quality._tried_easgd("generated", kept)
    assert ["generated", name, "2", "0.80000"] in tried
    assert len(tried) == len({tuple(row) for row in tried})


def test_use_is_processor_time_and_bytes_over_time():
    import fleet
    import hierarchical_speed as speed

    window = {
        "samples_per_s": 2000.0, "step_s": 0.5, "machine_cpu_s": 0.25 * fleet.CORES,
        "cpu_s_each": {"trainer 0": 0.1, "group-server 1": 0.4, "embedding-server 0": 0.2},
        "link_bytes": {"t0": [12_500_000, 6_250_000], "g1": [6_250_000, 25_000_000], "s0": [99, 99]},
    }  # fmt: skip
    summary = {
        "wire_bytes": {"activations": 5000, "dense": 4000}, "num_examples": 100,
        "dense_staleness": {"median": 1, "p99": 2, "max": 3},
    }  # fmt: skip
    runs = [{"windows": [window], "summary": summary}]
    trainer, server = speed.use(runs, "1gbit")  # 62.5 MB a step
    assert trainer == {"process": "trainer 0", "cores": 0.2, "link out": 0.2, "link in": 0.1}
    assert server == {"process": "group-server 1", "cores": 0.8, "link out": 0.1, "link in": 0.4}
    told = speed.speed(runs, "1gbit")
    assert told["busiest link ms"] == pytest.approx(200)
    assert told["CPU / cores ms"] == pytest.approx(250)
    assert told["activations B an example"] == 50
    assert told["most"] == 3


@pytest.mark.heavy
def test_the_scale_of_groups_is_predicted_for_a_machine_each(tmp_path):
    calibration = bench.FOLDER.parent / "docs" / "results" / "prediction" / "calibration.json"
    words = ["--quick", "--calibration", calibration, "--gbit", "10", "--json", tmp_path / "found.json"]
    done = subprocess.run(
        [sys.executable, bench.FOLDER / "hierarchical_scale.py", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    once, whole, by_groups, by_size, beside = json.loads(Path(tmp_path, "found.json").read_text())["tables"]
    assert once["rows"][0]["pass, ms"] > 0
    assert [row["machines"] for row in by_groups["rows"]] == [16, 32]
    assert [row["machines"] for row in by_size["rows"]] == [16, 32]
    assert [row["machines"] for row in beside["rows"]] == [2, 16, 32]
    speeds = {row["arm"]: row["samples/s"] for row in (*by_groups["rows"], *by_size["rows"])}
    assert (
        speeds["2 groups"] < speeds["4 groups"] < 2.02 * speeds["2 groups"]
    )  # one pass was measured for both
    assert speeds["(4, 4)"] == speeds["4 groups"] == whole["rows"][1]["4 groups"]


def network_missing():
    sys.path.insert(0, str(bench.FOLDER))
    import network

    return network.missing()


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # five runs of up to nine processes, each of them once
def test_groups_run_over_links_and_are_kept(tmp_path):
    if (reason := network_missing()) is not None:
        pytest.skip(reason)
    words = [sys.executable, str(bench.FOLDER / "hierarchical_speed.py"), "--quick", "--parts", "groups"]
    calibration = bench.FOLDER.parent / "docs" / "results" / "prediction" / "calibration.json"
    words += ["--calibration", str(calibration)]
    for round_ in range(2):
        done = subprocess.run(
            [*words, "--json", "found.json"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert bool(re.findall(r"/.* \d+\.\d ms a step  \d+", done.stdout)) == (round_ == 0)
    found = json.loads(Path(tmp_path, "found.json").read_text())
    assert not found["skipped"]
    speed, use = found["tables"]
    assert [row["arm"] for row in speed["rows"]] == [
        "1 × (1, 1)",
        "1 × (2, 2)",
        "1 × (2, 2), no FC splits",
        "EASGD, 1 trainer",
        "EASGD, 2 trainers",
    ]
    processes = {(row["arm"], row["process"]) for row in use["rows"]}
    assert {("1 × (2, 2)", "group-server 1"), ("EASGD, 2 trainers", "dense-server 0")} <= processes
    # six steps have no round of averaging, and another trainer may have ended before the first one's window
    asked = [
        row for row in use["rows"] if row["process"] in ("trainer 0", "group-server 0", "group-server 1")
    ]
    assert all(0 < row["link out"] < 1 for row in asked)


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # six runs of up to six processes
def test_quality_runs_on_a_log(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    from girih.data.click_log import click_log

    for split, start in (("train", 0), ("valid", 1), ("test", 2)):
        pq.write_table(click_log(8192, start=8192 * start)[0], tmp_path / f"{split}.parquet")
    monkeypatch.setenv("CLICKLOG", str(tmp_path))
    words = [
        sys.executable,
        str(bench.FOLDER / "hierarchical_quality.py"),
        "--quick",
        "--data",
        "generated",
        "--counts",
        "2",
        "--groups",
        "1",
    ]
    done = subprocess.run(
        [*words, "--json", "found.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["arm"]: row for row in json.loads((tmp_path / "found.json").read_text())["tables"][0]["rows"]}
    assert list(rows) == [
        "one trainer, one net",
        "2 nets of one trainer",
        "2 trainers, EASGD",
        "1 group of 2 trainers",
        "one trainer, one net, 8 bits forward",
        "1 group of 2 trainers, 8 bits forward",
    ]
    assert all(0.5 < float(row["test NE"]) < 2 for row in rows.values())
    assert {row["updates"] for row in rows.values()} == {"16"}
    assert (tmp_path / "runs" / "experiments" / "hierarchical-quality.svg").is_file()
