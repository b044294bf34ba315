"""Which strategy a config is advised to take."""

from dataclasses import replace

import pytest

from girih.app.rank_strategies import StrategyEstimate, choose, offers
from girih.errors import ConfigError
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.simulator.prediction import Prediction
from girih.planner.simulator.result import simulate
from girih.planner.steps.fold import fold
from girih.planner.steps.graph import Operation, StepGraph
from girih.strategies import BY_NAME

ONE_CORE = Hosts((HostGroup(count=1, cores=1, memory_gb=1, gbit=1),))


def prediction(seconds):
    step = Operation(name="pass", term="pass", role="trainer", core_s=seconds, begins=True)
    graph = StepGraph(examples=100, roles={"trainer": 1}, operations=(step,))
    simulated = simulate(graph, ONE_CORE, runs=1, step_spread=0.0, run_spread=0.0)
    return Prediction(simulated=simulated, fold=fold(graph, 1), cores=1, in_flight=1)


def offer(name, seconds, **options):
    return StrategyEstimate(
        strategy=BY_NAME[name](**options), is_configured=False, prediction=prediction(seconds)
    )


def test_the_fastest_is_chosen_and_near_it_the_one_with_the_fewest_processes():
    fast, near = offer("hybrid", 1.0, trainers=2), offer("synchronous", 1.04, trainers=2)
    best, why = choose([fast, near, offer("local", 1.2)])
    assert best is near
    assert (
        "within 5% of the fastest, hybrid (trainers = 2), with 2 processes instead of 5; bounded by cores"
        in why
    )
    far = replace(near, prediction=prediction(1.1))
    assert choose([far, fast]) == (fast, "it is predicted to be the fastest, bounded by cores")
    assert choose([replace(fast, prediction=None)])[0] is None


def test_every_strategy_is_asked_with_as_many_trainers_and_refusals_are_told():
    asked = []

    def facts_of(strategy):
        asked.append((strategy.name, strategy.trainers))
        raise ConfigError(f"no {strategy.name} here")

    own = BY_NAME["hybrid"](trainers=3, staleness=7)
    found = offers(own, facts_of)
    assert found[0].is_configured
    assert found[0].label == "hybrid (staleness = 7, trainers = 3)"
    assert sum(each.is_configured for each in found) == 1
    assert {name for name, _ in asked} == set(BY_NAME)
    assert {count for name, count in asked if name != "local"} == {3}
    assert [each.refused for each in found] == [f"no {each.strategy.name} here" for each in found]
    groups = [each.strategy for each in found if each.strategy.name == "hierarchical"]
    assert {(each.groups, each.trainers_per_group, each.servers_per_group) for each in groups} == {
        (3, 1, 0),
        (1, 3, 3),
    }


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_strategy_says_how_it_trains_with_two(name):
    for each in BY_NAME[name].with_trainers(2):
        assert each.trainers == (1 if name == "local" else 2)
