"""Memory of a run's roles, by hand, and what is refused before it starts."""

import tracemalloc
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_step_graphs import GRAPH, facts

from girih import cli
from girih.errors import ConfigError
from girih.hierarchical.averaging import BY_NAME as BY_ALGORITHM
from girih.planner import memory
from girih.planner.facts import TableFacts
from girih.planner.memory import Copies
from girih.services.dense_server import DenseServer
from girih.strategies import BY_NAME

TABLES = (TableFacts(name="a", row_bytes=50, max_rows=1000), TableFacts(name="b", row_bytes=70))
SIZE = 40_000
"""Bytes of 10,000 parameters; Adam's state takes two more copies of them."""


def account(known=None, **copies):
    return memory.account(known or facts(tables=TABLES), Copies(**copies))


def test_a_replica_has_a_gradient_for_each_of_its_nets():
    assert account() == {
        "embedding-server": {"a": 50_000.0},
        "trainer": {"dense parameters": SIZE * (1 + 2 + 1)},
    }
    assert account(nets=5)["trainer"] == {"dense parameters": SIZE * (1 + 2 + 5)}
    unmeasured = account(replace(facts(), dense_cost=None), nets=5)
    assert unmeasured["trainer"] == {"dense parameters": SIZE * (1 + 5)}


@pytest.mark.parametrize(
    ("averaging", "averages"), [("easgd", 1 + 2 * 3), ("ma", 4 * 3), ("bmuf", 2 + 4 * 3)]
)
def test_replicas_that_are_averaged_have_a_model_that_is_evaluated_and_what_a_round_takes(
    averaging, averages
):
    found = account(groups=3, nets=2, averaging=averaging)
    assert found["trainer"] == {"dense parameters": 3 * SIZE * (1 + 2 + 2 + 1 + 3)}
    assert found["dense-server"] == {"dense parameters": SIZE * averages}


def test_group_servers_have_a_gradient_for_each_net_of_each_trainer():
    found = account(groups=2, trainers_per_group=3, servers_per_group=2, nets=4)
    assert found["group-server"] == {"dense parameters": 2 * SIZE * (1 + 2 + 3 * 4 + 1 + 3)}
    assert found["trainer"] == {"dense parameters": SIZE * (6 + 2 * 2)}  # two gather Adam's state
    alone = account(trainers_per_group=3, servers_per_group=2, nets=4)
    assert alone["group-server"] == {"dense parameters": SIZE * (1 + 2 + 3 * 4)}
    assert "dense-server" not in alone


@pytest.mark.parametrize("averaging", sorted(BY_ALGORITHM))
def test_dense_servers_take_no_more_than_is_accounted(averaging):
    """A round of three replicas and a meeting, by the memory that numpy takes."""
    replicas, numbers = 3, 100_000
    answered = []
    work = DenseServer(
        index=0, num_replicas=replicas, averaging=averaging, rate=None, address="shm://", secret=b""
    )
    stack = ExitStack()
    work.open(stack)
    tracemalloc.start()
    try:
        work.on_begin(asked((0,), np.zeros(numbers, np.float32)))
        kept = tracemalloc.get_traced_memory()[0] / (4 * numbers)
        for verb, more in ((work.on_average, ()), (work.on_meet, (np.zeros(0, np.float32),))):
            for each in range(replicas):
                request = asked((each, 0), np.ones(numbers, np.float32), *more)
                request.reply = lambda *given: answered.append(len(given))
                verb(request)
                del request
        most = tracemalloc.get_traced_memory()[1] / (4 * numbers)
    finally:
        tracemalloc.stop()
        stack.close()
    assert len(answered) == 2 * replicas
    assert kept == pytest.approx(memory.KEPT[averaging], abs=0.1)
    counted = memory.KEPT[averaging] + memory.ROUND[averaging] * replicas
    assert 0.7 * counted < most < 1.1 * counted + 1  # one more is the mean, as it is made


def asked(fields, *arrays):
    """A request, as far as a server looks into it."""
    frame = SimpleNamespace(fields=fields, arrays=arrays)
    return SimpleNamespace(frame=frame, reply=lambda *given: None, fail=pytest.fail)


def test_a_table_that_fits_nowhere_is_named_with_what_would_fit():
    strategy = BY_NAME["hierarchical"](groups=2)
    of_others = 2 * SIZE * (1 + 2 + 1 + 4) + SIZE * (1 + 2 * 2)  # the trainers' copies, and the averages
    known = facts(2, tables=TABLES, free_bytes=of_others + 20_000.0)
    with pytest.raises(
        ConfigError, match=r"table 'a' does not fit into memory: its 1,000 rows .* at most 400,"
    ):
        strategy.plan(
            replace(
                known,
                tables=(replace(TABLES[0], max_rows=1000, row_bytes=50 * 1000),),
                free_bytes=of_others + 2e7,
            )
        )
    small = replace(known, tables=(replace(TABLES[0], max_rows=400),))
    assert strategy.plan(small).strategy == "hierarchical"
    assert strategy.plan(replace(known, free_bytes=None)).strategy == "hierarchical"  # several hosts


REPLICA = SIZE * (1 + 2)
"""Of one trainer, without gradients."""
TOLD = r"dense parameters do not fit into memory: they take 0\.\d+ GB in all {} processes, with optimizer state, a gradient for each of {} nets"


@pytest.mark.parametrize(
    ("options", "free", "told"),
    [
        (
            {"nets": 8},
            REPLICA + 3.5 * SIZE,
            TOLD.format("trainer", 8) + r", but only .* set nets to at most 3$",
        ),
        (
            {"nets": 8},
            REPLICA + 0.5 * SIZE,
            r"model smaller: one trainer with one net has memory for 8,750 of its 10,000",
        ),
        (
            {"groups": 4, "nets": 2},
            2 * (REPLICA + 5 * SIZE) + 5 * SIZE,
            TOLD.format("trainer", 2) + ", copies for averaging, .* set nets = 1 and groups to at most 2$",
        ),
        (
            {"trainers_per_group": 3, "servers_per_group": 1, "nets": 2},
            (3 + 2) * SIZE
            + REPLICA
            + 5 * SIZE,  # three models and the state for a checkpoint; a copy with five gradients
            TOLD.format("group-server", 6)
            + r" \(operator 'top', Linear, has most of them: 4e-05 GB\), .* nets to at most 1$",
        ),
    ],
)
def test_dense_copies_that_fit_nowhere_are_named_with_what_would_fit(options, free, told):
    strategy = BY_NAME["hierarchical"](**options)
    known = facts(
        strategy.trainers, free_bytes=float(free), graph=GRAPH if "servers_per_group" in options else None
    )
    with pytest.raises(ConfigError, match=told):
        strategy.plan(known)


def test_what_is_told_to_fit_does():
    known = facts(1, free_bytes=REPLICA + 3.5 * SIZE)
    assert BY_NAME["hierarchical"](nets=3).plan(known).strategy == "hierarchical"
    with pytest.raises(ConfigError, match="do not fit into memory"):
        BY_NAME["hierarchical"](nets=4).plan(known)


@pytest.mark.usefixtures("torch")
def test_a_config_that_fits_nowhere_is_refused_in_one_line(log_directory, capsys):
    config = log_directory / "config.toml"
    most = 1 << 40  # rows of some 60 bytes each: no machine has that
    text = config.read_text().replace(
        'name = "user"\nkind = "categorical"\ndim = 4', 'name = "user"\nkind = "categorical"\ntable = "users"'
    )
    table = f'[[tables]]\nname = "users"\ndim = 4\neviction = {{ name = "lru", max_rows = {most} }}\n'
    config.write_text(text.replace("[labels]", f"{table}[labels]"))
    assert cli.run(["plan", str(config), "--strategy", "hierarchical", "--set", "strategy.groups=2"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert f"table 'users' does not fit into memory: its {most:,} rows (max_rows)" in told
    assert "set its max_rows to at most" in told
    assert cli.run(["plan", str(config), "--strategy", "hybrid"]) == 0  # which takes it for a bound
