"""Runs of real processes that a test begins, and that end with it."""

import pytest
from running import Running
from slowing import Slowing

from runs import command


@pytest.fixture
def begin(directory, tmp_path):
    """Begins a run in the module's ``directory``, by a strategy with overrides."""
    started = []

    def begin(strategy, *overrides):
        started.append(Running(command(directory, strategy, tmp_path / "run", *overrides)))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def slowing(tmp_path, monkeypatch):
    """Slows roles down in processes that are started from here on."""
    return Slowing(tmp_path, monkeypatch)
