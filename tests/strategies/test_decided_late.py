"""Strategies with rows in servers whose hosts learn a step late what came of it, as on GPUs: they learn what others do."""

import pytest
from scenes import play, write

from girih.strategies import asynchronous, hybrid
from runs import difference

STEPS, SIZE = 6, 16


def scene(name, strategy, **more):
    short = [f"train.max_steps={STEPS}", f"data.batch_size={SIZE}"]
    return {"name": name, "strategy": strategy, "overrides": short, "options": ["staleness=0"], **more}


@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_what_devices_decide_is_what_hosts_do(tmp_path, monkeypatch, strategy):
    directory = write(tmp_path, num_examples=STEPS * SIZE, size=SIZE, held_out=SIZE)
    waiting = play(directory, scene("waiting", strategy))
    for module in (hybrid, asynchronous):
        monkeypatch.setattr(module, "is_deferred", lambda context: True)
    halves = []
    late = play(directory, scene("late", strategy), act=lambda trainer: halves.append(trainer.dense))
    assert "Deferred" in type(halves[0]).__name__
    assert difference(directory / "waiting", directory / "late") == (0, 0)
    assert late["logloss"] == waiting["logloss"]
    refused = play(directory, scene("refused", strategy, spoil=("nan", 0, 3), raises=True))
    assert refused["step"] == 3
    assert "step 3: the loss is nan" in refused["error"]
    infinite = play(directory, scene("infinite", strategy, spoil=("infinite", 0, 2), raises=True))
    assert infinite["step"] == 2
    assert "the gradient of feature" in infinite["error"]
