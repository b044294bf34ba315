"""Steps of ``substitution`` that end without a vote: loss, refusals and stops of two real trainers."""

import math
from dataclasses import replace

import pytest

from companions import together
from girih.dense.halves.replica import Replica
from girih.dense.halves.substituted import SubstitutedReplica
from girih.errors import NonFiniteError
from girih.planner.placement import modulo
from support.dense_suite import case, dense_schema, dense_spec
from support.votes import apply

STEPS = 4
MODES = {"replicated": (False, "stop"), "split": (True, "stop"), "split, skipping": (True, "skip")}


def train(ranks):
    """What each mode does on one of the trainers."""
    ranks.vote = None  # nobody calls it
    placement = modulo(dense_schema(), ranks.size)
    own, told = placement.features_of(ranks.rank), {}
    for name, (split, on_nonfinite) in MODES.items():
        spec = replace(dense_spec(), on_nonfinite=on_nonfinite)
        half = SubstitutedReplica(spec, ranks, schema=dense_schema(), placement=placement, split=split)
        losses, stopping = [], []
        for number in range(STEPS):
            one = case(number).of_features(own)
            if number == 2 and ranks.rank:
                ranks.request_stop()
            computed = half.compute(one.batch, one.embeddings())
            outcome = apply(computed)
            losses.append(outcome.facts().loss)
            stopping.append(ranks.stopping)
        ranks.forget_stop()
        one, spoiled = case(9).of_features(own), ranks.rank == 1
        told[name] = [losses, stopping, *(refused(half, one, spoiled=spoiled, parts=n) for n in (1, 2))]
    return told


def refused(half, one, *, spoiled, parts):
    """How a step ends in which one trainer's gradient of its own rows is infinite in the first micro-batch, and no other number is."""
    embeddings = one.embeddings()
    if spoiled:
        embeddings.blocks[0].values.register_hook(lambda gradient: gradient * math.inf)
    try:
        computed = half.compute(one.batch, embeddings, last=parts == 1)
        if parts == 2:
            computed = computed.add(one.batch, one.embeddings(), last=True)
    except NonFiniteError as error:
        return f"raised: {error}"
    return str(apply(computed).facts().refused or "applied")


@pytest.fixture(scope="module")
def told():
    return together(train)


@pytest.mark.parametrize("mode", MODES)
def test_all_know_the_loss_of_one_process(told, mode):
    alone, losses = Replica(dense_spec()), []
    for number in range(STEPS):
        one = case(number)
        computed = alone.compute(one.batch, one.embeddings())
        outcome = apply(computed)
        losses.append(outcome.facts().loss)
    for each in told:
        assert each[mode][0] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_all_learn_of_a_stop_in_the_step_before_which_it_was_requested(told, mode):
    assert [each[mode][1] for each in told] == [[False, False, True, True]] * 2


@pytest.mark.parametrize("parts", [1, 2])
def test_where_trainers_agree_none_moves(told, parts):
    for mode in ("split", "split, skipping"):
        assert told[0][mode][1 + parts] == "another trainer's loss or gradient is NaN or infinite"
        assert told[1][mode][1 + parts].startswith("the gradient of feature")


def test_where_they_do_not_the_one_that_cannot_go_on_says_that_others_may_have_moved(told):
    assert told[0]["replicated"][2] == "applied"
    assert told[1]["replicated"][2].startswith("raised: trainer 1: the gradient of feature")
    assert (
        "other trainers may have applied theirs; resume from the last checkpoint" in told[1]["replicated"][2]
    )
