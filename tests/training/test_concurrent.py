"""Concurrent nets with halves that are fakes: order, staleness, meetings, refusal, errors, and what is waited for."""

import threading

import pytest
import torch

from girih.comm.group.trainers import Vote
from girih.dense.half import Outcome, StepFacts
from girih.errors import NonFiniteError
from girih.telemetry.stats import Spans
from girih.training.concurrent import Concurrent
from girih.training.schedules import JoinedHalves, always, in_step
from support import cases
from support.fakes import FakeDense, FakeSparse

MOST_S = 20


def batches(count):
    return [(cases.batch_of([n % 5, 7], [n % 3, 1]), n) for n in range(count)]


def steps_of(schedule, source, sparse, dense, may_begin=always):
    return schedule(source, JoinedHalves(sparse, dense, 0, lambda: 1.0, Spans()), may_begin)


def of(events, kind):
    return [number for what, number in events if what == kind]


class Gated:
    """A dense half whose batches compute until the test lets them go.

    Attributes:
        begun: numbers of the batches, as they begin. failing: those that raise. refusing: those that are refused.
    """

    def __init__(self, source, *, failing=(), refusing=()):
        self._numbers = {id(batch): number for batch, number in source}
        self.begun, self.failing, self.refusing = [], failing, refusing
        self._changed, self._open = threading.Condition(), set()

    def compute(self, batch, embeddings, *, last=True):
        with self._changed:
            number = self._numbers[id(batch)]
            self.begun.append(number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number in self._open, MOST_S)
        if number in self.failing:
            raise RuntimeError("of the model")
        return Done(NonFiniteError("of the test") if number in self.refusing else None)

    def let_go(self, *numbers):
        with self._changed:
            self._open.update(numbers)
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, MOST_S)


class Done:
    def __init__(self, refusal):
        self.refusal, self.vote = refusal, Vote(torch.tensor(refusal is not None))

    def apply(self, vote):
        return Outcome(StepFacts(0.5, self.refusal))


def test_one_net_does_what_the_schedule_in_step_does():
    (one, dense), (other, plain) = ((FakeSparse(cases.spec()), FakeDense()) for _ in range(2))
    steps = list(steps_of(Concurrent(1), batches(6), one, dense))
    expected = list(steps_of(in_step(), batches(6), other, plain))
    assert [(s.token, s.loss, s.staleness, s.under_way) for s in steps] == [
        (s.token, s.loss, 0, 0) for s in expected
    ]
    assert one.events == other.events
    assert dense.parameters == plain.parameters


def test_as_many_batches_train_at_once_as_there_are_nets_and_are_told_in_turn():
    sparse, source = FakeSparse(cases.spec()), batches(7)
    dense = Gated(source)
    steps = steps_of(Concurrent(3), source, sparse, dense)
    told = []
    reader = threading.Thread(target=lambda: told.extend(steps))
    reader.start()
    dense.wait_for(3)
    assert of(sparse.events, "pull") == [0, 1, 2]
    dense.let_go(1, 2)  # the first one is the slowest: the others take the next batches
    dense.wait_for(5)
    assert sorted(of(sparse.events, "apply")) == [1, 2]
    assert told == []
    dense.let_go(*range(7))
    reader.join(MOST_S)
    assert [step.token for step in told] == list(range(7))
    assert max(step.staleness for step in told) == 2
    assert sorted(of(sparse.events, "push")) == list(range(7))
    assert sparse.last_step == 7
    assert told[-1].under_way == 0


@pytest.mark.parametrize("nets", [2, 4])
def test_no_batch_is_read_while_as_many_as_nets_are_not_applied(nets):
    sparse, source = FakeSparse(cases.spec()), batches(20)
    dense = Gated(source)
    dense.let_go(*range(20))
    steps = list(steps_of(Concurrent(nets), source, sparse, dense))
    assert max(step.staleness for step in steps) <= nets - 1
    open_batches = 0
    for what, _ in sparse.events:
        open_batches += (what == "pull") - (what == "apply")
        assert open_batches <= nets


def test_no_batch_behind_a_meeting_begins_before_it():
    sparse, source, period = FakeSparse(cases.spec()), batches(10), 4
    dense = Gated(source)
    dense.let_go(*range(10))
    done = [0]
    steps = steps_of(
        Concurrent(3),
        source,
        sparse,
        dense,
        lambda n: done[0] + n <= -(-(done[0] + 1) // period) * period,
    )
    for step in steps:
        done[0] += 1
        if done[0] % period == 0:
            assert step.under_way == 0
            assert sparse.open == []
            assert len(of(sparse.events, "pull")) == done[0]
    assert done == [10]


def test_a_stop_lets_what_has_begun_be_told_and_begins_no_more():
    sparse, source, stopping = FakeSparse(cases.spec()), batches(10), [False]
    dense = Gated(source)
    steps = steps_of(Concurrent(3), source, sparse, dense, lambda number: not stopping[0])
    dense.let_go(0)
    told = [next(steps)]
    dense.wait_for(3)
    stopping[0] = True
    dense.let_go(*range(10))
    told += steps
    assert [step.token for step in told] == of(sparse.events, "pull")
    assert 3 <= len(told) <= 4
    assert sparse.open == []


def test_closed_early_it_waits_for_the_nets_and_leaves_no_thread():
    sparse, source = FakeSparse(cases.spec()), batches(9)
    dense = Gated(source)
    steps = steps_of(Concurrent(3), source, sparse, dense)
    dense.let_go(0)
    assert next(steps).token == 0
    dense.wait_for(3)
    threading.Timer(0.05, dense.let_go, range(9)).start()
    steps.close()
    assert sparse.open == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("girih-net")]


def test_what_a_net_raises_ends_the_steps_behind_those_before_it():
    sparse, source = FakeSparse(cases.spec()), batches(9)
    dense = Gated(source, failing={2})
    dense.let_go(*range(9))
    told = []
    with pytest.raises(RuntimeError, match="of the model"):
        told.extend(step.token for step in steps_of(Concurrent(3), source, sparse, dense))
    assert told == list(range(len(told)))
    assert len(of(sparse.events, "give up")) == 1
    assert sparse.open == []  # whatever had begun is applied, or ended


def test_what_fails_in_reading_is_raised_after_the_steps_before_it():
    source = batches(3)

    def failing():
        yield from source
        raise OSError("of the disk")

    dense, told = Gated(source), []
    dense.let_go(*range(3))
    with pytest.raises(OSError, match="of the disk"):
        told.extend(
            step.token for step in steps_of(Concurrent(2), failing(), FakeSparse(cases.spec()), dense)
        )
    assert told == [0, 1, 2]


def test_a_refused_step_moves_nothing_and_the_other_nets_go_on():
    sparse, source = FakeSparse(cases.spec()), batches(6)
    dense = Gated(source, refusing={1, 4})
    dense.let_go(*range(6))
    steps = list(steps_of(Concurrent(2), source, sparse, dense))
    assert sum(step.refused is not None for step in steps) == 2
    assert len(of(sparse.events, "refuse")) == 2
    assert sparse.last_step == 4
    assert sparse.open == []


def test_nets_share_the_threads_that_torch_computes_with():
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        source = batches(4)
        dense = Gated(source)
        dense.let_go(*range(4))
        compute = dense.compute
        dense.compute = lambda *given, **rest: seen.append(torch.get_num_threads()) or compute(*given, **rest)
        list(steps_of(Concurrent(2), source, FakeSparse(cases.spec()), dense))
        assert seen == [2] * 4
        assert torch.get_num_threads() == 4
        seen.clear()
        list(steps_of(Concurrent(1), source[:2], FakeSparse(cases.spec()), dense))
        assert seen == [4] * 2
    finally:
        torch.set_num_threads(before)
