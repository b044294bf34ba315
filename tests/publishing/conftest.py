"""Logs of short runs on the small generated click log."""

import pytest
from following import EVERY, OPEN, SMALL, publish_here


@pytest.fixture(autouse=True)
def _closed():
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def config(log_directory):
    return log_directory / "config.toml"


@pytest.fixture(scope="session")
def patient(log_source, tmp_path_factory):
    """A run that has a checkpoint and a segment of every step, and a snapshot of each fourth: (the run, its log)."""
    directory = tmp_path_factory.mktemp("patient")
    log = directory / "log"
    options = [*EVERY, SMALL, "publish.every_steps=1", "publish.snapshot_every=4", "publish.keep=50"]
    return publish_here(log_source / "config.toml", directory / "run", log, *options), log
