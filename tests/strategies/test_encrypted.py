"""A run whose connections are encrypted: every role listens with TLS, and rows are what they are without."""

import pytest
from scenes import write

from runs import difference, train

pytestmark = pytest.mark.slow

STEPS = 100


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("encrypted"), num_examples=STEPS * 32, held_out=64)


heavy = pytest.mark.heavy


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("hybrid", ["strategy.staleness=2"]),
        pytest.param("hybrid", ["strategy.staleness=0"], marks=heavy),  # compares rows with another run
        pytest.param("asynchronous", ["strategy.trainers=2"], marks=heavy),
        pytest.param("hybrid", ["strategy.trainers=2", "strategy.staleness=2"], marks=heavy),
        pytest.param("hierarchical", ["strategy.groups=2"], marks=heavy),
    ],
)
def test_every_role_of_a_run_listens_with_tls(directory, begin, tmp_path, strategy, more):
    more = ["cluster.encrypt=true", 'strategy.transport="tcp"', "train.log_every_steps=1", *more]
    running = begin(strategy, *more)
    processes = running.until_it_trains()
    running.ends(0)
    endpoints = {each["role"]: each["endpoint"] for each in processes if each["role"] != "trainer"}
    assert len(endpoints) >= 2
    assert all(each.startswith("tls://127.0.0.1:") for each in endpoints.values()), endpoints
    if "strategy.staleness=0" in more:
        train(directory, "local", tmp_path / "local")
        assert difference(tmp_path / "local", tmp_path / "run") == (0, 0)
