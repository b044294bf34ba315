"""The training loop between its steps."""

from types import SimpleNamespace

import pytest

from girih.training.loop import Loop


@pytest.mark.parametrize("meeting", [Loop._measure, Loop._save])
def test_a_trainer_says_that_it_stands_still_before_it_waits_for_others(meeting):
    said = []

    def rendezvous():
        said.append("waits")
        return False

    loop = SimpleNamespace(
        session=SimpleNamespace(detach_from_round=lambda: said.append("leaves")),
        ranks=SimpleNamespace(rendezvous=rendezvous),
        score=lambda: None,
        _metrics=SimpleNamespace(settle=lambda wait: None),
    )
    meeting(loop)
    assert said == ["leaves", "waits"]
