"""Benchmarks of PICASSO's claims: their workloads have its sizes, their arms differ in one thing, and what they count is right."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from girih.app.run_config import RunConfig
from girih.cli import bench
from girih.config import write_toml

pytestmark = pytest.mark.usefixtures("folder")


def loaded(tmp_path, made):
    write_toml(tmp_path / "config.toml", made)
    return RunConfig.load(tmp_path / "config.toml")


def test_workloads_are_as_wide_as_the_papers(monkeypatch):
    import picasso

    monkeypatch.setenv("PICASSO", "nowhere")
    sizes = {"W&D": (204, 16), "CAN": (364, 19), "MMoE": (94, 11)}
    for name, workload in picasso.WORKLOADS.items():
        features = [f for f in picasso.config(workload, "", 8)["features"] if f["kind"] != "numeric"]
        assert (len(features), len({feature["dim"] for feature in features})) == sizes[name]
        assert (min(workload.sizes()), max(workload.sizes())) == workload.dims[:2]


def test_all_models_of_the_tables_train_what_is_written(tmp_path, monkeypatch):
    import picasso
    import picasso_table7

    monkeypatch.setattr(picasso, "ROOT", tmp_path / "data")
    monkeypatch.setenv("PICASSO", "")
    small = [workload.scaled(0.02, 3) for workload in picasso.WORKLOADS.values()]
    small += [replace(small[1], copies=2)]
    seven = picasso.Workload("", {}, picasso_table7.CATEGORICAL, (16, 16, 1), sequences=4, length=3)
    small += [replace(seven, model={"name": name, **own}) for name, own in picasso_table7.MODELS.items()]
    for workload in small:
        made = picasso.config(workload, picasso.write_epoch(workload, 8, 3, distinct=2), 8)
        settings = loaded(tmp_path, made)
        settings.model()
        (first, *_), num_batches = list(settings.dataset("train")), 3
        assert len(list(settings.dataset("train"))) == num_batches
        assert first.num_examples == 8
        assert np.isfinite(first.numeric).all()


@pytest.mark.parametrize("gpu", [False, True])
def test_arms_differ_in_one_part(gpu):
    import picasso

    tiers = ["gpu", "dram"] if gpu else ["dram", "ssd"]
    options = Namespace(tiers=tiers, gpu=gpu, hot_rows=7, warmup=2, steps=1)
    arms = picasso.arms(options)
    assert all((own["store"].get("tiers", ["dram"])[0] == "gpu") == gpu for own in arms.values())

    def flat(arm):
        return {f"{section}.{key}": value for section, own in arms[arm].items() for key, value in own.items()}

    parts = {
        "packing": {"schedule.packing"},
        "interleaving": {f"schedule.{name}" for name in picasso.ALONE if not gpu or name == "micro_batches"},
        "caching": {"store.hot_rows"},
        "prefetch": {"schedule.prefetch"},
    }
    for part, keys in parts.items():
        arm = f"without {part}"
        both = flat(picasso.BASE.get(arm, "all")), flat(arm)
        assert {
            key for key in both[0].keys() | both[1].keys() if both[0].get(key) != both[1].get(key)
        } == keys
    differ = {key for key, value in flat("all").items() if flat("none").get(key) != value}
    assert differ == set().union(*parts.values()) - parts["caching"]


def test_arms_of_slow_hosts_differ_in_one_number():
    import picasso

    options = Namespace(tiers=["dram", "ssd"], gpu=False, hot_rows=7, warmup=2, steps=1)
    arms = {name: picasso.arms(options)[name] for name in picasso.VARIED}
    one = arms[picasso.ONE]["schedule"]
    numbers = [
        {name: value for name, value in arm["schedule"].items() if one[name] != value}
        for arm in arms.values()
    ]
    assert numbers == [{}, {"interleaving_groups": 5}, {"micro_batches": 2}, {"micro_batches": 4}]
    assert {picasso.BASE[name] for name in arms} == {picasso.ONE}


def test_the_page_compares_interleaving_with_the_paper():
    import picasso
    import picasso_table4

    row = {
        "workload": "MMoE", "arm": picasso.ONE, "samples/s": "100", picasso_table4.BESIDE: "1.00", "by round": "1.00", "cores busy": "1",
        "Mbit/s": "2", "interleaving groups": "1", "micro-batches": "1",
    }  # fmt: skip
    rows = [row, row | {"arm": "5 interleaving groups", picasso_table4.BESIDE: "1.25"}, row | {"arm": "all"}]
    results = {
        "benchmark": "picasso_table4",
        "when": "2026-01-02T",
        "machine": {"cores": 2, "processor": "X"},
        "options": {},
    }
    made = picasso_table4.page_parts(results | {"tables": [{"title": picasso_table4.TITLE, "rows": rows}]})
    assert "| MMoE | 5 interleaving groups | 100 | 1.25 | 1.00 | 1.93 |" in made["slow hosts"]
    assert made["slow hosts"].count("| MMoE |") == 2
    assert picasso_table4.page_parts(results | {"tables": []}) == {"slow hosts": None}


def test_the_share_that_the_most_frequent_ids_cover():
    import picasso_fig3

    assert picasso_fig3.covered(np.full(1000, 3), 0.2) == pytest.approx(0.2)
    counts = np.array([1, 6, 1, 1, 1])
    assert picasso_fig3.covered(counts, 0.2) == pytest.approx(0.6)
    assert picasso_fig3.covered(counts, 0.001) == pytest.approx(0.6), "at least one id"
    found = picasso_fig3.covered_by({0: counts, 1: np.full(10, 2)})
    assert (found["20 %"], found["least at 20 %"], found["most at 20 %"]) == pytest.approx((0.4, 0.2, 0.6))
    assert (found["ids"], found["different ids"]) == (30, 15)


def test_ids_are_counted_by_feature(tmp_path, monkeypatch):
    import picasso
    import picasso_fig3

    monkeypatch.setattr(picasso, "ROOT", tmp_path / "data")
    monkeypatch.setenv("PICASSO", "")
    monkeypatch.setattr(picasso_fig3, "ZIPF_BATCH", 32)
    monkeypatch.setattr(picasso, "WIDE_DEEP", picasso.WIDE_DEEP.scaled(0.02, 3))
    found = picasso_fig3._counts(None, picasso_fig3.ZIPF)
    assert len(found) == picasso.WIDE_DEEP.num_features
    assert {counts.sum() for counts in found.values()} == {32 * picasso_fig3.ZIPF_FILES}


def test_a_step_is_divided_by_kind_of_work():
    import picasso_fig5

    spans = {
        "read": 0.1,
        "pull": 0.1,
        "wait for rows": 0.1,
        "forward": 0.2,
        "backward": 0.2,
        "push": 0.2,
        "exchange ids": 0.05,
    }
    window = {"step_s": 1.0, "phases_s": {**spans, "allreduce": 0.1}, "cpu_s_each": {"trainer 0": 0.45}}
    found = picasso_fig5.divided([{"windows": [window]}])
    assert found["ms a step"] == 1000
    assert found["reading"] == pytest.approx(0.1)
    assert found["waiting for rows"] == found["sending gradients of rows"] == pytest.approx(0.2)
    assert found["rest"] == pytest.approx(0.1)
    assert found[picasso_fig5.EXCHANGES] == pytest.approx(0.05)
    assert found[picasso_fig5.PROCESSOR] == pytest.approx(0.45)


def test_the_best_ratio_is_that_of_the_keys_that_most_batches_read(tmp_path, monkeypatch):
    import picasso
    import picasso_table6

    monkeypatch.setattr(picasso, "ROOT", tmp_path / "data")
    monkeypatch.setenv("PICASSO", "")
    workload = picasso.WIDE_DEEP.scaled(0.02, 3)
    made = picasso.config(workload, picasso.write_epoch(workload, 16, 6, distinct=6), 16)
    trace = picasso_table6.trace_of(made, 2, 8)  # the last two are of the next epoch
    times: Counter = Counter()
    data, reads, known = loaded(tmp_path, made).dataset("train"), Counter(), set()
    for number, batch in enumerate([*data, *islice(data, 2)]):
        of_feature = batch.ids.reshape(workload.num_features, -1)
        every = [(place, int(each)) for place, ids in enumerate(of_feature) for each in ids]
        keys = set(every)
        reads.update(keys & known if number >= 2 else ())
        times.update(every if number >= 2 else ())
        known |= keys
    assert trace.reads.tolist() == sorted(reads.values(), reverse=True)
    assert Counter(zip(trace.reads, trace.ids, strict=True)) == Counter((reads[k], times[k]) for k in reads)
    best = sum(count for _, count in reads.most_common(5)) / reads.total()
    assert trace.best_ratio(5) == pytest.approx(best)
    assert trace.most_ids_ratio(5) <= trace.best_ratio(5) < trace.best_ratio(len(reads)) == 1


def test_samples_tell_what_a_process_used_and_when():
    import time

    import sampler

    sampling = sampler.Sampler([os.getpid()], ["lo"], 5.0)
    time.sleep(0.5)  # it begins
    start, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < 0.2:
        pass
    end = time.perf_counter()
    found = sampling.take(start, end)
    assert start <= found["time_s"][0] < found["time_s"][-1] <= end
    assert found["cpu_s"][-1] - found["cpu_s"][0] == pytest.approx(0.2, abs=0.05)
    assert len(found["bytes"]["lo"]) == len(found["time_s"]) == len(found["rss_bytes"])
    kept = sampler.reduced(found, 1, None)
    assert len(kept["cores"]) == len(sampler.QUANTILES)
    assert kept["cores"] == sorted(kept["cores"])
    assert kept["rss_bytes"]["most"] >= kept["rss_bytes"]["median"] > 1 << 20


def test_quantiles_are_of_time_and_not_of_samples():
    import sampler

    found = sampler.quantiles([1.0, 0.0, 0.5], [8.0, 1.0, 1.0])
    assert found[0] == 0.0
    assert found[sampler.QUANTILES.index(15)] == 0.5
    assert found[sampler.QUANTILES.index(50)] == found[-1] == 1.0


def test_operators_are_counted_once_and_views_apart():
    import torch
    from picasso_table5 import operators_of

    x = torch.randn(4, 4)
    found = operators_of(lambda: torch.nn.functional.linear(x, x).relu().view(16)[2:].t())
    assert found == {"operators": 2, "views": 3}


@pytest.mark.heavy
def test_packing_leaves_fewer_operations(tmp_path):
    words = "--quick --workloads W&D --steps unpacked packed --batch 8 --json found.json"
    done = subprocess.run(
        [sys.executable, str(bench.FOLDER / "picasso_table5.py"), *words.split()],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "found.json").read_text())["tables"]
    plain, unpacked, packed = table["rows"]
    assert (unpacked["groups"], packed["groups"]) == (unpacked["features"], "1")
    kernels = [int(row["kernels"].replace(",", "")) for row in (plain, unpacked, packed)]
    assert kernels[0] == 0 < 3 * kernels[2] < kernels[1]
    assert int(packed["both"]) < int(unpacked["both"].replace(",", ""))
