"""The training loop between its steps."""

from types import SimpleNamespace

import pytest

from girih.checkpoint.state import RunState
from girih.training.loop import Loop
from girih.training.session import StepHook


class Hook(StepHook):
    """Is due after every other step, and notes what the loop does with it."""

    def __init__(self, said, *, pauses=True):
        self.said, self.pauses = said, pauses

    def due(self, state):
        return state.step % 2 == 0

    def run(self, state):
        self.said.append(f"runs at {state.step}")

    def skip(self):
        self.said.append("skips")


def loop_of(said, *, all_are_there=True, **options):
    """A loop whose session and trainers note what it asks of them."""

    def rendezvous():
        said.append("waits")
        return all_are_there

    ranks = SimpleNamespace(rendezvous=rendezvous, stopping=False)
    none = dict.fromkeys(("feed", "learning_rate", "options", "log", "notes", "evaluation"))
    return Loop(
        session=SimpleNamespace(detach_from_round=lambda: said.append("leaves")),
        context=SimpleNamespace(ranks=ranks),
        state=RunState(step=4),
        hooks=[Hook(said, **options)],
        **none,
    )


@pytest.mark.parametrize(("all_are_there", "end"), [(True, "runs at 4"), (False, "skips")])
def test_a_trainer_says_that_it_stands_still_before_it_waits_for_others(all_are_there, end):
    said = []
    loop_of(said, all_are_there=all_are_there)._run_hooks()
    assert said == ["leaves", "waits", end]


def test_a_hook_that_does_not_pause_waits_for_nobody():
    said = []
    loop_of(said, pauses=False)._run_hooks()
    assert said == ["runs at 4"]


def test_no_batch_begins_behind_a_step_after_which_a_hook_pauses():
    assert [loop_of([])._may_begin(number) for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert loop_of([], pauses=False)._may_begin(9)
