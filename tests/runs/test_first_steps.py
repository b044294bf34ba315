"""The speed of a run's first steps, by hand."""

import pytest

from girih.runs.first_steps import FirstSteps
from girih.runs.state import RunState


def heard(*seconds, examples=100, state=None):
    """First steps that took so long each."""
    first, state = FirstSteps(), state or RunState()
    first.begin(state)
    for each in seconds:
        state.examples += examples
        state.train_s += each
        first.step(state)
    return first


def test_the_first_two_steps_do_not_count_where_there_are_more():
    found = heard(5.0, 1.0, 0.1, 0.1, 0.2)
    assert found.samples_per_s == pytest.approx(300 / 0.4)
    assert found.steps == 3
    assert heard(5.0, 1.0).samples_per_s == pytest.approx(200 / 6.0)
    assert heard().samples_per_s is None


def test_two_seconds_are_taken_and_no_more():
    found = heard(0.1, 0.1, *[0.5] * 4, *[9.0] * 10)
    assert found.samples_per_s == pytest.approx(200)
    assert found.steps == 4


def test_a_run_that_goes_on_begins_anew():
    state = RunState(step=50, examples=5000, train_s=1000.0)
    found = heard(0.1, 0.1, 0.2, state=state)
    assert found.samples_per_s == pytest.approx(500)
