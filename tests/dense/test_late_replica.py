"""A dense half that decides on the device: what is refused moves nothing, nor do the steps after it until the host knows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from girih.dense.halves.replica import Replica
from girih.dense.options import FUSED, Lamb, optimizer_factory
from girih.sparse.halves.row_updates import nonfinite_gradient
from support.dense_suite import DenseHalfSuite, case, dense_spec
from support.votes import apply

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(list(p), lr=0.1),
    "momentum": lambda p: torch.optim.SGD(list(p), lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(list(p), lr=0.1),
    "adam, fused": lambda p: torch.optim.Adam(list(p), lr=0.1, fused=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(list(p), lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(list(p), lr=0.1),
    "lamb": lambda p: Lamb(list(p), lr=0.1),
}


def deferred(spec):
    return Replica(replace(spec, deferred=True))


class TestLateReplica(DenseHalfSuite):
    """The suite of dense halves."""

    def make(self):
        return deferred(dense_spec())


def explained(numbers):
    return nonfinite_gradient(f"number {numbers[0]:.0f}") if numbers[0] >= 0 else None


def step(half, one, nonfinite=-1, spoil=False):
    """Launches one step; the outcome is on its way."""
    if spoil:
        one.vectors[2] = np.nan
    computed = half.compute(one.batch, one.embeddings())
    vote, key = computed.vote, torch.tensor([nonfinite], dtype=torch.float64)
    assert vote.cast((key >= 0).any(), key).tolist() == [[nonfinite]]
    vote.reported, vote.error_from = key, explained
    return computed.apply(vote)


def numbers(half):
    """Copies of all that a refused step must leave as it is."""
    state = half.state()
    moving = [value.clone() for value in state["model"].values()]
    for own in state["optimizer"].get("state", {}).values():
        moving += [
            v.clone() if isinstance(v, torch.Tensor) else torch.tensor(v)
            for v in own.values()
            if v is not None
        ]
    return moving


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, expected in zip(one, other, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_moves_as_a_replica_that_waits_and_not_at_all_where_refused(name, clip_norm):
    spec = replace(dense_spec(), optimizer=OPTIMIZERS[name], clip_norm=clip_norm)
    late, waiting = deferred(spec), Replica(replace(spec, module=dense_spec().module))
    for number in range(3):
        outcome = step(late, case(number))
        computed = waiting.compute(case(number).batch, case(number).embeddings())
        apply(computed)
        assert outcome.facts().refused is None
        assert outcome.facts().loss == computed.vote.loss
    before = numbers(late)
    assert_same(before, numbers(waiting))
    refused = step(late, case(3), spoil=True)
    after = step(late, case(4))  # launched before the host knows
    assert "the loss is nan, and so is feature" in str(refused.facts().refused)
    assert "a step before it was refused" in str(after.facts().refused)
    assert_same(numbers(late), before)
    # known by now, so that steps move on
    step(late, case(5))
    computed = waiting.compute(case(5).batch, case(5).embeddings())
    apply(computed)
    assert_same(numbers(late), numbers(waiting))


@pytest.mark.parametrize("name", FUSED)
def test_an_optimizer_by_name_reads_the_flag_itself_so_that_nothing_is_copied(monkeypatch, name):
    half = deferred(replace(dense_spec(), optimizer=optimizer_factory(name)))
    step(half, case(0))  # makes the state

    def copied(optimizer, device):
        pytest.fail("parameters and state are copied")

    monkeypatch.setattr("girih.dense.halves.deferred.copies_of", copied)
    assert step(half, case(1)).facts().refused is None
    before = numbers(half)
    assert step(half, case(2), spoil=True).facts().refused is not None
    assert_same(numbers(half), before)


@pytest.mark.parametrize("name", ["adam", "adam, fused", "sgd"])
def test_a_first_step_may_be_refused(name):
    half = deferred(replace(dense_spec(), optimizer=OPTIMIZERS[name]))
    other = deferred(replace(dense_spec(), optimizer=OPTIMIZERS[name]))
    assert step(half, case(0), spoil=True).facts().refused is not None
    for each in (half, other):
        assert step(each, case(1)).facts().refused is None
    assert_same(numbers(half), numbers(other))


def test_what_a_group_refuses_is_refused_here_and_named():
    half = deferred(dense_spec())
    before = numbers(half)
    outcome = step(half, case(0), nonfinite=7)
    assert "the gradient of feature 'number 7'" in str(outcome.facts().refused)
    assert np.isfinite(outcome.facts().loss)
    assert_same(numbers(half), before)


def test_a_model_without_parameters_has_losses_all_the_same():
    spec = dense_spec()
    for parameter in spec.module.parameters():
        parameter.requires_grad_(False)
    half = deferred(spec)
    assert half.optimizer is None
    assert step(half, case(0)).facts().refused is None
    assert step(half, case(0), spoil=True).facts().refused is not None
