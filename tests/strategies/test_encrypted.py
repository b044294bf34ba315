"""A run whose connections are encrypted: every role listens with TLS, and rows are what they are without."""

import sys

import pytest
from running import Running
from scenes import write

from runs import difference

STEPS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("encrypted"), num_examples=STEPS * 32, held_out=64)


def command(directory, run, strategy, *more):
    words = [sys.executable, "-m", "girih", "train", str(directory / "din.toml"), "--run", str(run)]
    words += ["--strategy", strategy]
    return [*words, *(word for each in more for word in ("--set", each))]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("hybrid", ["strategy.staleness=0"]),
        pytest.param("asynchronous", ["strategy.trainers=2"], marks=pytest.mark.heavy),
        pytest.param("hybrid", ["strategy.trainers=2", "strategy.staleness=2"], marks=pytest.mark.heavy),
        pytest.param("hierarchical", ["strategy.groups=2"], marks=pytest.mark.heavy),
    ],
)
def test_every_role_of_a_run_listens_with_tls(directory, tmp_path, strategy, more):
    more = ["cluster.encrypt=true", 'strategy.transport="tcp"', *more]
    running = Running(command(directory, tmp_path / "run", strategy, *more))
    try:
        processes = running.until_it_trains()
        running.ends(0)
    finally:
        running.abort()
    endpoints = {each["role"]: each["endpoint"] for each in processes if each["role"] != "trainer"}
    assert len(endpoints) >= 2
    assert all(each.startswith("tls://127.0.0.1:") for each in endpoints.values()), endpoints
    if "strategy.staleness=0" in more:
        local = Running(command(directory, tmp_path / "local", "local"))
        local.ends(0)
        assert difference(tmp_path / "local", tmp_path / "run") == (0, 0)
