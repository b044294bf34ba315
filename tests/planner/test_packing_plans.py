"""Groups and interleaving groups of a plan: what PICASSO's equations give, worked out by hand."""

from dataclasses import replace

import pytest

import girih
from girih.config.train import ScheduleOptions
from girih.errors import ConfigError
from girih.planner.facts import AccessProfile, DenseCost, Facts, GroupFacts, ModelFacts, OperatorFacts
from girih.planner.interleaving import arrange, capacity
from girih.planner.packing import packed, parameter_volume, spread
from girih.planner.traffic import Speeds

TABLES = {"a": 8, "b": 8, "c": 32, "d": 32, "e": 32, "f": 32}
"""Table → numbers per row; one id of each in each of a hundred examples."""


def facts_of(schedule=None, *, measured=True, trainers=2, ids=None, **more):
    schema = girih.Schema(
        [girih.Categorical(name=name, dim=dim) for name, dim in TABLES.items()], labels="click"
    )
    by_dim = {dim: tuple(name for name in TABLES if TABLES[name] == dim) for dim in (8, 32)}
    groups = [
        GroupFacts(name=f"embedding-{dim}", tables=tables, dim=dim, output_vectors=0, output_numbers=0)
        for dim, tables in by_dim.items()
    ]
    of_tables = dict.fromkeys(TABLES, 100.0) | (ids or {})
    profile = AccessProfile(
        rows=dict.fromkeys(TABLES, 50.0),
        rows_of_share=dict.fromkeys(TABLES, 30.0),
        widths=TABLES,
        ids=sum(of_tables.values()),
        ids_of_tables=of_tables,
    )
    return Facts(
        schema=schema,
        model=ModelFacts(name="Model", num_parameters=more.pop("weights", 1000)),
        groups=tuple(groups),
        num_trainers=trainers,
        seed=0,
        batch_size=100,
        schedule=schedule or ScheduleOptions(),
        profile=profile if measured else None,
        dense_cost=more.pop("cost", COST),
        **more,
    )


def tables_of(groups):
    return [set(group.tables) for group in groups]


def test_the_volume_is_that_of_equation_1():
    # of ten ids, six are a's and four c's: 6 · 8 + 4 · 32 numbers
    assert parameter_volume(10, {"a": 8, "c": 32}, {"a": 0.6, "c": 0.4}) == pytest.approx(6 * 8 + 4 * 32)


def test_tables_of_one_layout_are_one_group_and_nothing_splits_it_where_nothing_is_interleaved():
    groups = packed(facts_of())
    assert tables_of(groups) == [{"a", "b"}, {"c", "d", "e", "f"}]
    assert [group.volume for group in groups] == [pytest.approx(1600), pytest.approx(12800)]
    assert [group.name for group in groups] == ["embedding-8", "embedding-32"]


def test_a_group_above_the_average_is_split_evenly_by_its_ratio_to_it():
    groups = packed(facts_of(), split=True)  # 12,800 over an average of 7,200 is 1.8
    assert [len(group.tables) for group in groups] == [2, 2, 2]
    assert [group.volume for group in groups] == [pytest.approx(v) for v in (1600, 6400, 6400)]
    skewed = packed(facts_of(ids={"c": 700.0}), split=True)  # by volume: c is as much as d, e, f and more
    assert tables_of(skewed) == [{"a", "b"}, {"c"}, {"d", "e", "f"}]
    assert len({group.name for group in skewed}) == 3


def test_equal_groups_are_not_above_their_average():
    groups = packed(facts_of(ids={"a": 0.1, "b": 0.3, **dict.fromkeys("cdef", 0.025)}), split=True)
    assert len(groups) == 2


def test_a_table_is_never_cut():
    groups = packed(facts_of(), at_least=99)
    assert sorted(tables_of(groups), key=str) == sorted(({name} for name in TABLES), key=str)


def test_without_packing_each_table_is_a_group():
    groups = packed(facts_of(ScheduleOptions(packing=False)))
    assert tables_of(groups) == [{name} for name in TABLES]
    assert len({group.name for group in groups}) == len(TABLES)


def test_tables_of_excluded_features_are_packed_apart():
    arranged = arrange(facts_of(ScheduleOptions(excluded=("d", "a"))))
    found = {group.name: set(group.tables) for group in arranged.groups}
    assert [found[name] for name in arranged.excluded] == [{"a"}, {"d"}]
    assert [[found[name] for name in names] for names in arranged.interleaving] == [[{"b"}, {"c", "e", "f"}]]


def test_volumes_are_spread_so_that_the_largest_sum_is_small():
    assert spread([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]  # 8 and 10, where 9 and 9 could be
    assert spread([1, 9, 1, 1], 2) == [[0, 2, 3], [1]]
    assert spread([0, 0, 0], 3) == [[0], [1], [2]]
    assert spread([1], 3) == [[0]]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_a_number_is_kept_whatever_was_measured(number, measured):
    arranged = arrange(facts_of(ScheduleOptions(interleaving_groups=number), measured=measured))
    assert len(arranged.interleaving) == number
    names = [name for names in arranged.interleaving for name in names]
    assert sorted(names) == sorted(group.name for group in arranged.groups)
    volumes = {group.name: group.volume for group in arranged.groups}
    sums = [sum(volumes[name] for name in names) for names in arranged.interleaving]
    assert max(sums) <= 4 / 3 * max(sum(sums) / number, max(volumes.values())) + 1e-6
    assert "interleaving_groups" in arranged.why


SPEEDS = Speeds(bytes_per_s=1e6, flops_per_s=3e8, memory_bytes_per_s=1e12, latency_s=0.0)
COST = DenseCost(bytes_per_example=0.0, memory_bytes=0.0, pass_s=5e-4, example_s=1e-5)
# The model takes a millisecond for 50 examples, in which 1,000 bytes are sent. A trainer sends for a step half of
# its 180 keys with 12 bytes each, and half of the 30 · 144 numbers of their rows, 4 bytes each, there and back: 1,080 + 17,280.
# The step looks up 14,400 numbers.
CAPACITY = 1000 / ((1080 + 17280) / 14400)


def test_the_capacity_is_that_of_equation_3():
    facts = facts_of(speeds=SPEEDS)
    found, why = capacity(facts)
    assert found == pytest.approx(CAPACITY)
    assert "network" in why
    # memory: 1e6 bytes in that millisecond, 16 bytes for a number, of which each trainer pools half
    found, why = capacity(replace(facts, speeds=Speeds(1e9, 3e8, 1e9, 0.0)))
    assert found == pytest.approx(1e6 / 8)
    assert "memory" in why
    # no smaller than what the network carries in the 2 messages of 5 ms
    found, why = capacity(replace(facts, speeds=replace(SPEEDS, latency_s=0.005)))
    assert found == pytest.approx(10 * CAPACITY)
    assert "messages" in why


def test_auto_makes_as_many_as_the_capacity_says():
    auto = ScheduleOptions(interleaving_groups="auto")
    slow = replace(SPEEDS, bytes_per_s=5e6)  # a capacity of 3,922 of 14,400
    arranged = arrange(facts_of(auto, speeds=slow))
    assert len(arranged.interleaving) == 4
    assert arranged.capacity == pytest.approx(5 * CAPACITY)
    arranged = arrange(facts_of(auto, speeds=SPEEDS))  # 19 are wanted
    assert len(arranged.interleaving) == len(TABLES)
    assert "19 are needed, but there are 6 tables" in arranged.why


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trainers": 1, "speeds": SPEEDS}, "a single trainer exchanges nothing"),
        ({"measured": False, "speeds": SPEEDS}, "not known yet"),
        ({"speeds": SPEEDS, "weights": 0}, "no parameters"),
        ({"speeds": SPEEDS, "cost": None}, "the cost of an example in the model is not known yet"),
        ({"speeds": Speeds(0.0, 1e9, 0.0)}, "neither network nor memory"),
    ],
)
def test_auto_says_why_it_makes_one(given, told):
    arranged = arrange(facts_of(ScheduleOptions(interleaving_groups="auto"), **given))
    assert len(arranged.interleaving) == 1
    assert arranged.capacity is None
    assert told in arranged.why
    assert len(arranged.groups) == 2  # nothing is split for a single one


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"interleaving_groups": 7}, "but there are 6 tables that are not excluded"),
        ({"interleaving_groups": 6, "excluded": ("a",)}, "set at most 5"),
        ({"excluded": ("aa",)}, "there is no feature 'aa' with ids; did you mean 'a'"),
    ],
)
def test_what_cannot_be_is_refused(schedule, told):
    with pytest.raises(ConfigError, match=told):
        arrange(facts_of(ScheduleOptions(**schedule)))


@pytest.mark.parametrize(
    "strategy", [girih.Local(), girih.Substitution(), girih.Hybrid(), girih.Asynchronous()]
)
@pytest.mark.parametrize("schedule", [{"interleaving_groups": 2}, {"excluded": ("a",)}])
def test_strategies_that_exchange_nothing_by_groups_refuse_an_order(strategy, schedule):
    operator = OperatorFacts(name="fm", aggregation="sum", columns=1)
    model = ModelFacts(name="Model", num_parameters=1, operators=(operator,))
    facts = replace(facts_of(ScheduleOptions(**schedule), trainers=1), model=model)
    with pytest.raises(
        ConfigError, match=rf"schedule: {next(iter(schedule))}: strategy '{strategy.name}' does not"
    ):
        strategy.plan(facts)


def test_the_plan_shows_groups_their_order_and_why():
    schedule = ScheduleOptions(interleaving_groups=2, excluded=("a",))
    plan = girih.Synchronous(trainers=2).plan(facts_of(schedule))
    names = {group["name"] for group in plan.groups}
    assert {n for each in plan.schedule["interleaving"] for n in each} | set(
        plan.schedule["excluded"]
    ) == names
    assert plan.predicted["volumes"].keys() == names
    assert plan.predicted["interleaving"]["why"] == "as schedule.interleaving_groups says"
    assert plan.asked["interleaving_groups"] == 2
