"""Requests to scale as the first trainer takes them between two steps: refused in a sentence, or paused for."""

import json
from types import SimpleNamespace

import pytest

import girih
from girih.checkpoint.state import RunState
from girih.cluster.options import ClusterOptions
from girih.comm.group import TrainerGroup
from girih.lifecycle.rescaling import Rescaling, Scaling, rescaled
from girih.planner.facts import Facts, GroupFacts, ModelFacts
from girih.runs import scale_requests

SCHEMA = girih.Schema([girih.Categorical(name="user", dim=8)], labels="click")
GROUP = GroupFacts(name="embedding-8", tables=("user",), dim=8, output_vectors=0, output_numbers=0)
MODEL = ModelFacts(name="Model", num_parameters=10)
STEP = 7


class Processes:
    """Those of a run, as far as scaling asks about them."""

    options = ClusterOptions()

    def __init__(self, *, may_grow=True, has_launcher=True):
        self.may_grow, self.has_launcher = may_grow, has_launcher
        self.told = []

    def scale(self, stage, counts, overrides):
        self.told.append((stage, counts, list(overrides)))


def facts_of(strategy):
    return Facts(
        schema=SCHEMA, model=MODEL, groups=(GROUP,), num_trainers=strategy.trainers, seed=0, batch_size=8
    )


def context_of(directory, processes, ranks=None):
    """What rescaling needs of a run."""
    return SimpleNamespace(directory=directory, processes=processes, ranks=ranks or TrainerGroup())


def asked(tmp_path, strategy, *, held=False, processes=None, **counts):
    """Rescaling that has looked once at a request."""
    ranks, facts = TrainerGroup(), facts_of(strategy)
    ranks.size = strategy.trainers
    rescaling = Rescaling(context_of(tmp_path, processes or Processes(), ranks), strategy, facts, held=held)
    rescaling.follow(strategy, strategy.plan(facts))
    request = scale_requests.ask(tmp_path, {name.replace("_", "-"): count for name, count in counts.items()})
    assert rescaling.due(RunState(step=STEP))
    rescaling.run(RunState(step=STEP))
    return rescaling, ranks, request


@pytest.mark.parametrize(
    ("strategy", "changes", "why"),
    [
        (girih.Local(), {"loader": 2}, "strategy 'local' cannot change its number of loader processes; it cannot"),
        (girih.Synchronous(trainers=2), {"loader": 2}, "cannot change its number of loader processes; expected one of trainer"),
        (girih.Hybrid(), {"group_server": 2}, "expected one of embedding-server, embedding-worker, loader, trainer"),
        (girih.Hybrid(trainers=2), {"loader": 3}, "loaders = 3: expected at most one per trainer, 2 in all"),
        (girih.Hybrid(), {"loader": 4096}, "loaders = 4096: expected an integer from 1 to 1024"),
        (girih.Hybrid(), {"embedding_server": 2, "held": True}, "the run has a plan that fixes the numbers of processes"),
        (
            girih.Synchronous(trainers=2),
            {"trainer": 3, "processes": Processes(has_launcher=False)},
            "end it, and continue with --resume and other numbers",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, strategy, changes, why):
    _, ranks, request = asked(tmp_path, strategy, **changes)
    assert why in scale_requests.outcome(tmp_path, request)["refused"]
    assert scale_requests.pending(tmp_path) is None
    assert not ranks.stop_requested


def test_as_many_as_there_are_is_nothing_to_do(tmp_path):
    _, ranks, request = asked(tmp_path, girih.Hybrid(embedding_servers=2), embedding_server=2)
    assert scale_requests.outcome(tmp_path, request)["roles"] == {"embedding-server": [2, 2]}
    assert not ranks.stop_requested


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        (girih.Hybrid(), {"embedding_server": 2}, (False, True, "moving")),
        (girih.Asynchronous(), {"embedding_worker": 2}, (False, False, "done")),
        (girih.Hybrid(), {"trainer": 2}, (True, False, "anew")),
        (girih.Hybrid(), {"loader": 1, "embedding_server": 3, "processes": Processes(may_grow=False)}, (True, True, "anew")),
    ],
)  # fmt: skip
def test_trainers_pause_for_it(tmp_path, strategy, changes, expected):
    rescaling, ranks, request = asked(tmp_path, strategy, **changes)
    anew, moves, stage = expected
    counts = dict(request.counts)
    assert ranks.stop_requested
    ranks.size = 1  # one alone agrees with itself
    scaling = rescaling.agreed(is_finished=False)
    assert scaling == Scaling(counts=counts, restarts_all=anew, rows_move=moves)
    rescaling.begin(scaling, STEP)
    begun = json.loads((tmp_path / "scale.json").read_text())["begun"]
    assert begun["step"] == STEP
    assert begun["before"] == dict.fromkeys(counts, 1)
    ((told, _, overrides),) = rescaling._processes.told
    assert told == stage
    assert len(overrides) == len(counts)
    assert all(each.startswith("strategy.") for each in overrides)


def test_after_the_last_step_nothing_is_scaled(tmp_path):
    rescaling, ranks, request = asked(tmp_path, girih.Hybrid(), embedding_server=2)
    assert rescaling.agreed(is_finished=True) is None
    assert not ranks.stopping
    rescaling.refuse_late()
    assert "the run has done its last step" in scale_requests.outcome(tmp_path, request)["refused"]


def test_a_stop_that_is_asked_for_meanwhile_comes_first(tmp_path):
    rescaling, ranks, _ = asked(tmp_path, girih.Hybrid(), embedding_server=2)
    ranks.request_stop()
    assert rescaling.agreed(is_finished=False) is None
    assert ranks.stopping


@pytest.mark.parametrize(("servers", "word"), [(2, "step"), (1, "refused")])
def test_a_life_that_comes_back_tells_what_became_of_it(tmp_path, servers, word):
    """As many as were asked for, where trainers came back behind the change; else as it was."""
    request = scale_requests.ask(tmp_path, {"embedding-server": 2})
    scale_requests.begin(tmp_path, request, STEP, {"embedding-server": 1})
    strategy = girih.Hybrid(embedding_servers=servers)
    rescaling = Rescaling(context_of(tmp_path, Processes()), strategy, facts_of(strategy), held=False)
    rescaling.follow(strategy, strategy.plan(facts_of(strategy)))
    rescaling.run(RunState(step=STEP + 1))
    assert word in scale_requests.outcome(tmp_path, request)
    assert scale_requests.pending(tmp_path) is None


def test_the_plan_stays_but_for_the_numbers():
    strategy = girih.Hybrid(trainers=2, staleness=3)
    plan = strategy.plan(facts_of(strategy))
    scaling = Scaling(counts={"embedding-server": 4, "loader": 2}, restarts_all=False, rows_move=True)
    rescale = type("Own", (girih.Hybrid,), {"rescale": lambda self, *given: given})
    own = rescale(trainers=2, staleness=3)
    changed, new, given = rescaled(scaling, own, plan, "session", SimpleNamespace(), None, 0)
    assert (changed.embedding_servers, changed.loaders, changed.staleness) == (4, 2, 3)
    expected = girih.Hybrid(trainers=2, staleness=3, embedding_servers=4, loaders=2)
    assert new == expected.plan(facts_of(expected))
    assert given == (new, given[1], "session", plan)
