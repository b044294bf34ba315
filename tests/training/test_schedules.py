"""Schedules with halves that are fakes: order, staleness, refusal, and what is let go of."""

import itertools

import numpy as np
import pytest
import torch

from girih.data.batch import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.models.loss import loss_of
from girih.telemetry.stats import Spans
from girih.training.schedules import JoinedHalves, Pipelined, StalenessGate, in_step
from support import cases
from support.fakes import FakeDense, FakeSparse


def batches(count):
    return [(cases.batch_of([n % 5, 7], [n % 3, 1]), n) for n in range(count)]


def steps_of(schedule, source, sparse, dense, *, lr_scale=lambda: 1.0):
    return schedule(source, JoinedHalves(sparse, dense, 0, lr_scale, Spans()))


def of(events, what):
    return [number for kind, number in events if kind == what]


def test_in_step_each_batch_sees_all_updates_before_it():
    sparse, dense = FakeSparse(cases.spec()), FakeDense()
    steps = list(steps_of(in_step(), batches(5), sparse, dense))
    assert sparse.events == [(what, n) for n in range(5) for what in ("pull", "push", "apply")]
    assert [(step.token, step.staleness, step.num_examples) for step in steps] == [
        (n, 0, 2) for n in range(5)
    ]
    assert sparse.last_step == 5


def test_in_step_waits_for_what_is_not_applied_at_once():
    late, prompt = FakeSparse(cases.spec(), at_once=False), FakeSparse(cases.spec())
    losses = [[s.loss for s in steps_of(in_step(), batches(6), half, FakeDense())] for half in (late, prompt)]
    assert losses[0] == losses[1]
    assert late.events == prompt.events


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("refusing", [(), (0,), (2, 3), tuple(range(8))])
@pytest.mark.parametrize("deliveries", [0, 1, 9])
def test_no_batch_is_read_before_all_but_the_last_ones_are_applied(staleness, refusing, deliveries):
    """On every path: updates that arrive late, at once, or now and then; steps that are refused."""
    sparse, dense = FakeSparse(cases.spec(), at_once=False), FakeDense()
    dense.losses = [float("nan") if n in refusing else 0.5 for n in range(8)]
    steps = []
    for step in steps_of(Pipelined(staleness), batches(8), sparse, dense):
        steps.append(step)
        for _ in range(min(deliveries, len(sparse._under_way))):
            sparse.deliver()
    assert max(step.staleness for step in steps) <= staleness
    pulled, done = 0, 0
    for what, _ in sparse.events:
        pulled, done = pulled + (what == "pull"), done + (what == "apply")
        assert pulled - done <= staleness + 1
    assert of(sparse.events, "pull") == of(sparse.events, "apply") == list(range(8))
    assert of(sparse.events, "refuse") == list(refusing)
    assert of(sparse.events, "push") == [n for n in range(8) if n not in refusing]
    assert [step.token for step in steps] == list(range(8))
    assert sparse.last_step == 8 - len(refusing)  # refused steps are not counted


def test_staleness_is_used_where_updates_are_slow():
    sparse = FakeSparse(cases.spec(), at_once=False)
    steps = list(steps_of(Pipelined(2), batches(8), sparse, FakeDense()))
    assert [step.staleness for step in steps] == [0, 1, *[2] * 6]
    assert sparse.events[:5] == [
        ("pull", 0),
        ("pull", 1),
        ("pull", 2),
        ("push", 0),
        ("push", 1),
    ]


def test_staleness_of_nothing_is_the_schedule_in_step():
    assert in_step() == Pipelined(0)


def test_a_refused_step_moves_nothing_and_is_told():
    sparse, dense = FakeSparse(cases.spec()), FakeDense()
    (good,) = steps_of(in_step(), batches(1), sparse, dense)
    before = {key: values[0].copy() for key, values in sparse.rows.items()}
    parameters, count = dict(dense.parameters), dense.num_batches
    dense.losses = [float("nan")]
    (step,) = steps_of(in_step(), batches(1), sparse, dense)
    assert good.refused is None
    assert "the loss is nan" in str(step.refused)
    assert np.isnan(step.loss)
    assert (dense.parameters, dense.num_batches) == (parameters, count)
    for key, values in before.items():
        np.testing.assert_array_equal(sparse.rows[key][0], values)


def test_a_push_that_is_refused_refuses_the_step():
    """Where no loss is wrong, and no parameter's gradient, but a row's."""
    sparse, dense = FakeSparse(cases.spec()), FakeDense()
    original = dense.compute

    def compute(batch, embeddings, *, last=True):
        computed = original(batch, embeddings)
        embeddings.blocks[0].values.grad[0] = float("inf")
        return computed

    dense.compute = compute
    parameters = dict(dense.parameters)
    (step,) = steps_of(in_step(), batches(1), sparse, dense)
    assert "is NaN or infinite" in str(step.refused)
    assert sparse.events == [("pull", 0), ("refuse", 0), ("apply", 0)]
    assert dense.parameters == parameters


@pytest.mark.parametrize("staleness", [0, 2])
def test_closed_early_it_lets_go_of_what_was_pulled_ahead(staleness):
    sparse = FakeSparse(cases.spec(), at_once=False)
    source = iter(batches(9))
    steps = steps_of(Pipelined(staleness), source, sparse, FakeDense())
    assert [step.token for step in itertools.islice(steps, 2)] == [0, 1]
    steps.close()
    pulled = of(sparse.events, "pull")
    assert of(sparse.events, "push") == [0, 1]
    assert of(sparse.events, "give up") == [n for n in pulled if n > 1]
    assert len(pulled) <= staleness + 2
    sparse.sync()
    assert sparse.open == []


def test_what_a_half_raises_ends_the_steps_and_lets_go_of_the_rest():
    sparse, dense = FakeSparse(cases.spec(), at_once=False), FakeDense()

    def fail(batch, embeddings, *, last=True):
        raise RuntimeError("of the model")

    dense.compute = fail
    with pytest.raises(RuntimeError, match="of the model"):
        list(steps_of(Pipelined(2), batches(9), sparse, dense))
    assert of(sparse.events, "give up") == [0, 1, 2]
    sparse.sync()
    assert sparse.open == []


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_micro_batches_learn_what_whole_batches_do(count):
    whole, cut = ((FakeSparse(cases.spec()), FakeDense()) for _ in range(2))
    one = list(steps_of(in_step(), batches(5), *whole))
    other = list(steps_of(in_step(count), batches(5), *cut))
    assert cut[0].events == whole[0].events
    assert cut[1].num_batches == 5 * min(count, 2)  # of which none is empty
    assert [step.num_examples for step in other] == [2] * 5
    np.testing.assert_allclose([s.loss for s in other], [s.loss for s in one], rtol=1e-6)
    assert cut[1].parameters == pytest.approx(whole[1].parameters, rel=1e-6)
    assert cut[0].rows.keys() == whole[0].rows.keys()
    for key, values in whole[0].rows.items():
        np.testing.assert_allclose(cut[0].rows[key], values, rtol=1e-5, atol=1e-7)


def test_one_refused_micro_batch_refuses_the_step():
    sparse, dense = FakeSparse(cases.spec()), FakeDense()
    dense.losses = [0.5, float("nan"), 0.5, 0.5]
    steps = list(steps_of(in_step(2), batches(2), sparse, dense))
    assert [step.refused is not None for step in steps] == [True, False]
    assert of(sparse.events, "refuse") == [0]


def test_the_next_batch_is_prepared_before_this_one_is_pushed():
    sparse = FakeSparse(cases.spec())
    read = []
    source = (read.append(item[1]) or item for item in batches(3))
    steps = steps_of(in_step(prefetch=True), source, sparse, FakeDense())
    assert next(steps).token == 0
    assert read == [0, 1]
    assert sparse.events[:4] == [("pull", 0), ("prepare", 1), ("push", 0), ("apply", 0)]
    assert [step.token for step in steps] == [1, 2]
    assert of(sparse.events, "prepare") == [1, 2]
    assert of(sparse.events, "push") == [0, 1, 2]


def test_two_batches_may_be_prepared_ahead():
    sparse, read = FakeSparse(cases.spec()), []
    source = (read.append(item[1]) or item for item in batches(4))
    steps = steps_of(in_step(prefetch=2), source, sparse, FakeDense())
    for number, read_by_then in enumerate(([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])):
        assert next(steps).token == number
        assert read == read_by_then
    assert list(steps) == []
    assert len(of(sparse.events, "prepare")) == 3


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_fails_in_reading_ahead_is_raised_after_the_step_before_it(ahead):
    def failing():
        yield from batches(2)
        raise OSError("of the disk")

    done = []
    steps = steps_of(in_step(prefetch=ahead), failing(), FakeSparse(cases.spec()), FakeDense())
    with pytest.raises(OSError, match="of the disk"):
        done.extend(step.token for step in steps)
    assert done == [0, 1]


def test_closed_early_a_prepared_batch_was_not_pulled():
    sparse = FakeSparse(cases.spec())
    steps = steps_of(in_step(prefetch=True), batches(9), sparse, FakeDense())
    assert [step.token for step in itertools.islice(steps, 2)] == [0, 1]
    steps.close()
    assert of(sparse.events, "pull") == [0, 1]
    assert sparse.open == []


def test_learning_rates_are_asked_for_once_a_step():
    scales = itertools.count(1)
    sparse = FakeSparse(cases.spec())
    list(steps_of(in_step(), batches(4), sparse, FakeDense(), lr_scale=lambda: 1 / next(scales)))
    assert next(scales) == 5


def test_labels_and_example_weights_follow_the_logits_to_their_device():
    seen = []

    class Model(torch.nn.Module):
        def loss(self, outputs, batch):
            seen.append([None if each is None else each.device.type for each in batch[:2]])
            return outputs.sum()

    def batch(example_weights):
        return Batch(
            ids=np.empty(0, np.int64),
            offsets=np.zeros(1, np.int32),
            numeric=np.empty((2, 0), np.float32),
            labels=np.ones((2, 1), np.float32),
            example_weights=example_weights,
        )

    class Half:
        device, whole_batch = torch.device("meta"), False
        _spec = DenseSpec(module=Model(), optimizer=torch.optim.SGD, losses=("bce",))

    for weights in (None, np.ones(2, np.float32)):
        targets, share = Replica._targets(Half(), batch(weights))
        loss_of(Model())(torch.empty(2, 1, device="meta"), targets)
        assert share == 1.0
    assert seen == [["meta", None], ["meta", "meta"]]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_gate_admits_no_batch_beyond_its_bound(staleness):
    """Whatever order updates come in, and never less than the bound allows."""
    rng, gate = np.random.default_rng(staleness), StalenessGate(staleness)
    found = set()
    for _ in range(300):
        behind = gate.num_read - gate.num_applied
        assert gate.admits() == (behind <= staleness)
        if gate.admits() and rng.random() < 0.6:
            found.add(behind)
            gate.num_read += 1
        elif behind:
            gate.num_applied += 1
    assert found == set(range(staleness + 1))
