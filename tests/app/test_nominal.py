"""Decisions of plans from nominal speeds: what docs/strategies.md says of them, and that no clock and no free memory takes part."""

import time
from dataclasses import replace

import pytest

import girih
from girih.app.run_config import RunConfig
from girih.lifecycle import dense_cost
from girih.planner.facts import Facts, GroupFacts, ModelFacts, OperatorFacts
from girih.planner.traffic import NOMINAL, split_pays

SCHEMA = girih.Schema([girih.Categorical(name=name, dim=4) for name in ("user", "item")], labels="click")


def facts(batch_size, weights):
    operator = OperatorFacts(name="first", aggregation="sum", columns=4)
    return Facts(
        schema=SCHEMA,
        model=ModelFacts(
            name="M",
            num_parameters=weights,
            upper_parameters=weights,
            upper_weights=weights,
            operators=(operator,),
        ),
        groups=(GroupFacts(name="g", tables=("user",), dim=4, output_vectors=1, output_numbers=4),),
        num_trainers=2,
        seed=0,
        batch_size=batch_size,
    )


@pytest.mark.parametrize(
    ("batch_size", "weights", "network"),
    [
        (21, 10_000_000, "replicated"),
        (23, 10_000_000, "split"),
        (1024, 100_000, "split"),
        (1024, 2000, "split"),
        (1024, 1000, "replicated"),  # the latency of one more AllReduce takes longer
        (4096, 0, "replicated"),  # LR
    ],
)
def test_substitution_splits_by_batch_and_network(batch_size, weights, network):
    plan = girih.Substitution(trainers=2, placement="modulo").plan(facts(batch_size, weights))
    assert plan.schedule["upper_network"] == network
    assert "speeds" not in plan.measured


@pytest.mark.parametrize(("bytes_per_s", "least"), [(1.25e8, 214), (1.25e9, 22), (2649 * 2**20, 10)])
def test_links_that_were_calibrated_decide_the_same_for_batches_that_are_larger(bytes_per_s, least):
    speeds = replace(NOMINAL, bytes_per_s=bytes_per_s, latency_s=0.0)
    more = {"shared_parameters": 10**9, "weights": 10**9, "speeds": speeds}
    assert split_pays(least, 4, **more)
    assert not split_pays(least - 1, 4, **more)


def test_a_stopped_clock_and_other_free_memory_plan_the_same(monkeypatch, log_source):
    settings = RunConfig.load(
        log_source / "config.toml",
        overrides=["schedule.micro_batches='auto'", "schedule.micro_batches_from='mlp'"],
    )
    plans = []
    for free_bytes in (1e9, 1e12):
        monkeypatch.setattr(dense_cost, "host_bytes", lambda free_bytes=free_bytes: free_bytes)
        plans.append(settings.planned())
        for name in ("perf_counter", "thread_time", "process_time"):
            monkeypatch.setattr(time, name, lambda: 0.0)
    assert plans[0] == plans[1]
    assert plans[0].measured["dense_cost"]["bytes_per_example"] > 0
