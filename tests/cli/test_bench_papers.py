"""``girih bench paper_sizes``: what it assumes against brute force and sums by hand, and a run with few points."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from companions import ran
from girih.cli import bench
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.simulator.result import simulate

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def papers(folder):
    """The modules of the benchmark."""
    names = ("facts", "graphs", "picasso", "sizes", "pages")
    return SimpleNamespace(**{name: importlib.import_module(f"paper_{name}") for name in names})


@pytest.mark.parametrize(("exponent", "new"), [(0.0, 0.0), (1.2, 0.0), (1.32, 0.05)])
def test_unique_ids_are_those_of_draws(papers, exponent, new):
    ids, draws, rng = 1000, 3000, np.random.default_rng(0)
    law = papers.facts.Law(ids, exponent, new)
    weights = np.arange(1, ids + 1.0) ** -exponent
    found = [
        len(np.unique(rng.choice(ids, rng.binomial(draws, 1 - new), p=weights / weights.sum())))
        for _ in range(200)
    ]
    assert law.unique(draws) == pytest.approx(np.mean(found) + new * draws, rel=0.01)


def test_ids_of_the_wide_data_are_those_of_the_paper(papers):
    """DES, Table 2: unique ids of a batch of 600 features."""
    wide = importlib.import_module("wide")
    law, each = papers.facts.Law(wide.NUM_IDS, wide.EXPONENT, wide.NEW), 950 / 600
    for batch, unique in ((512, 147_664), (4096, 789_511), (8192, 1_389_353)):
        single, double = 600 * (2 - each), 600 * (each - 1)
        assert single * law.unique(batch) + double * law.unique(2 * batch) == pytest.approx(unique, rel=0.04)


@pytest.mark.parametrize("nodes", [1, 16])
def test_without_interleaving_the_resources_of_an_executor_follow_one_another(papers, nodes):
    workload = papers.picasso.WORKLOADS["W&D"]
    graph = papers.picasso.executor(workload, nodes, 1, 1, parameter_bytes=0.0)
    hosts = Hosts((HostGroup(count=nodes, cores=1, memory_gb=1, gbit=100),))
    found = simulate(graph, hosts, runs=1, step_spread=0, run_spread=0)
    by_hand = workload.host_s + workload.gpu_s
    if nodes > 1:
        by_hand += workload.link_bytes * (nodes - 1) / nodes / 12.5e9
        latencies_s = (2 + 2) * (nodes - 1) * papers.facts.NCCL_LATENCY_S
        by_hand += latencies_s / workload.share
        assert found.samples_per_s / nodes == pytest.approx(workload.off, rel=0.01)
    assert nodes / found.samples_per_s == pytest.approx(by_hand, rel=1e-3)


def test_with_interleaving_the_slowest_resource_of_an_executor_bounds_it(papers):
    workload = papers.picasso.WORKLOADS["MMoE"]
    graph = papers.picasso.executor(workload, 1, 50, 20, parameter_bytes=0.0)
    hosts = Hosts((HostGroup(count=1, cores=1, memory_gb=1, gbit=100),))
    found = simulate(graph, hosts, runs=1, step_spread=0, run_spread=0)
    slowest_s = max(workload.host_s, workload.gpu_s)
    assert slowest_s <= 1 / found.samples_per_s < 1.1 * slowest_s


@pytest.mark.slow
def test_few_points_are_predicted_again_from_where_a_run_ended(papers, tmp_path):
    words = ["--quick", "--seeds", "0", "--resume", "tag", "--json", "found.json"]
    done = ran(bench.FOLDER / "paper_sizes.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "found.json"
    whole = json.loads(file.read_text())
    assert {table["title"] for table in whole["tables"]} == set(papers.pages.PARTS)
    for table in whole["tables"]:
        for row in table["rows"]:
            assert 0 < row["5 %"] <= row["samples/s"] <= row["95 %"]
            assert row["extrapolated"] == bool(row["because"])
            assert row["extrapolated"] or row["x"] == 1
    cut = json.loads(file.read_text())
    cut["tables"][1]["rows"] = cut["tables"][1]["rows"][:1]
    file.write_text(json.dumps(cut))
    assert ran(bench.FOLDER / "paper_sizes.py", *words, cwd=tmp_path).returncode == 0
    assert json.loads(file.read_text())["tables"] == whole["tables"]
    assert all(papers.pages.page_parts(whole)[part] for part in papers.pages.PARTS.values())
