"""PICASSO's Eq. 2, by hand."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import girih
from girih.errors import ConfigError
from girih.planner.facts import AccessProfile, DenseCost, Facts, GroupFacts, ModelFacts, OperatorFacts
from girih.planner.interleaving import MEMORY_SHARE, MOST, micro_batch_size, micro_batches
from girih.planner.traffic import Speeds
from girih.strategies import BY_NAME

SCHEMA = girih.Schema([girih.Categorical(name="user", dim=4)], labels="click")
PROFILE = AccessProfile(
    rows={"user": 800.0},
    rows_of_share={"user": 500.0},
    widths={"user": 4},
    ids=1000.0,
    ids_of_tables={"user": 1000.0},
)
SPEEDS = Speeds(1e9, 1e10, 1e10, latency_s=1e-6)


def facts(*, trainers=2, kept=1000.0, free=1e9, measured=True, pass_s=1e-6, example_s=1e-6, **schedule):
    return Facts(
        schema=SCHEMA,
        model=ModelFacts(name="M", num_parameters=10),
        groups=(GroupFacts(name="g", tables=("user",), dim=4, output_vectors=1, output_numbers=4),),
        num_trainers=trainers,
        seed=0,
        batch_size=1000,
        schedule=girih.ScheduleOptions(**{"micro_batches": "auto", **schedule}),
        profile=PROFILE if measured else None,
        speeds=SPEEDS,
        dense_cost=DenseCost(bytes_per_example=kept, memory_bytes=free, pass_s=pass_s, example_s=example_s)
        if measured
        else None,
    )


def test_the_size_is_what_the_scarcest_resource_is_for():
    assert micro_batch_size({"memory": (1000, 10), "network": (300, 2)}) == (100, "memory")
    assert micro_batch_size({"memory": (1000, 0), "network": (300, 2)}) == (150, "network")


def test_activations_that_do_not_fit_the_memory_are_cut():
    free = 1000.0 * 100 / MEMORY_SHARE  # for 100 of the 500 examples of a trainer's share
    count, why = micro_batches(facts(free=free, micro_batches_from="mlp"))
    assert count == 5
    assert "memory allows 100 examples" in why
    assert micro_batches(facts(micro_batches_from="mlp"))[0] == 1
    assert micro_batches(facts(free=1.0, micro_batches_from="mlp"))[0] == MOST


@settings(max_examples=300, deadline=None)
@given(
    trainers=st.integers(2, 9),
    example_s=st.floats(1e-9, 1e-5),
    latency_s=st.floats(0.0, 1e-5),
    pass_s=st.floats(1e-10, 1e-4),
)
def test_rows_are_cut_as_often_as_it_hides_more_than_a_part_costs(trainers, example_s, latency_s, pass_s):
    asked = facts(trainers=trainers, example_s=example_s, pass_s=pass_s)
    asked = replace(asked, speeds=replace(SPEEDS, latency_s=latency_s))
    others, share = trainers - 1, 1000 / trainers
    rows_s = 4 * 4 * 500 * others / trainers / SPEEDS.bytes_per_s
    hidden_s = min(rows_s, share * example_s)  # no more than there is to compute meanwhile
    costs = {n: n * (others * latency_s + pass_s) + hidden_s / n for n in range(1, MOST + 1)}
    assert costs[micro_batches(asked)[0]] == pytest.approx(min(costs.values()), rel=1e-9)


def test_one_where_nothing_is_known_and_the_plan_says_why():
    assert micro_batches(facts(measured=False)) == (
        1,
        "the cost of an example in the model is not known yet",
    )
    assert micro_batches(facts(trainers=1))[0] == 1


def test_a_number_is_taken_as_it_is():
    assert micro_batches(facts(micro_batches=7)) == (7, "")


def test_a_plan_has_the_number_and_why_it_was_chosen():
    asked = replace(
        facts(pass_s=1e-7), speeds=replace(SPEEDS, latency_s=3e-7)
    )  # 3 · 4 ≥ 10 of 4e-6 s of rows
    plan = BY_NAME["synchronous"]().plan(asked)
    assert plan.schedule["micro_batches"] == 3
    assert plan.schedule["micro_batches_from"] == "embedding"
    assert "network" in plan.predicted["micro_batches"]["why"]
    assert plan.measured["dense_cost"] == asdict(asked.dense_cost)


def test_layers_that_a_strategy_does_not_cut_from_are_refused():
    asked = facts(micro_batches=3)
    with pytest.raises(ConfigError, match=r"micro_batches_from = 'embedding'.*'mlp'"):
        BY_NAME["hybrid"]().plan(asked)
    assert (
        BY_NAME["hybrid"]().plan(facts(micro_batches=3, micro_batches_from="mlp")).schedule["micro_batches"]
        == 3
    )
    own_loss = replace(asked, model=replace(asked.model, loss_strategies=("synchronous",)))
    with pytest.raises(ConfigError, match="needs a whole batch"):
        BY_NAME["synchronous"]().plan(own_loss)


def test_one_trainer_with_nobody_to_send_to_has_a_plan_too():
    operator = OperatorFacts(name="first", aggregation="sum", columns=1, colocated_features=())
    alone = replace(
        facts(trainers=1),
        model=ModelFacts(name="M", num_parameters=10, operators=(operator,)),
        speeds=Speeds(0.0, 1e10, 1e10),
    )
    plan = BY_NAME["substitution"]().plan(alone)
    assert plan.schedule["upper_network"] == "replicated"
    assert "memory" in plan.predicted["micro_batches"]["why"]
