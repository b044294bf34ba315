"""The speed of a run's first steps, by hand."""

import pytest

from girih.checkpoint.state import RunState
from girih.training.log import FirstSteps


def heard(*seconds, examples=100, state=None, since=0):
    """What is predicted after steps that took so long each: examples per second, and from what."""
    first, state = FirstSteps(since), state or RunState()
    first.begin(state)
    for each in seconds:
        state.examples += examples
        state.train_s += each
        first.step(state)
    return first.predicted(state)


def test_two_seconds_behind_two_steps_are_taken_and_no_more():
    found, told = heard(0.1, 0.1, *[0.5] * 4, *[9.0] * 10)
    assert found == pytest.approx(200)
    assert told == "its first 4 steps"
    assert heard(0.1, 0.1, 2.5, 1.0) == (pytest.approx(40), "its first step")


@pytest.mark.parametrize("seconds", [(5.0,), (5.0, 1.0), (0.1, 0.1, 0.1), (0.1, 0.1, *[0.1] * 19)])
def test_few_steps_predict_nothing(seconds):
    assert heard(*seconds) == (None, "nothing: 2 s of training are needed after the first 2 steps")
    assert heard() == (None, None)


def test_a_run_that_is_mostly_its_start_is_predicted_nothing():
    told = "nothing: its first 2 steps took 6.0 of 16.0 s of training"
    assert heard(5.0, 1.0, *[0.1] * 100) == (None, told)
    assert heard(5.0, 1.0, *[0.1] * 1000)[0] == pytest.approx(1000)


def test_a_run_that_goes_on_begins_anew():
    state = RunState(step=50, examples=5000, train_s=1000.0)
    found, told = heard(0.1, 0.1, *[0.2] * 10, state=state, since=50)
    assert found == pytest.approx(500)
    assert told == "its first 10 steps since it was scaled at step 50"
