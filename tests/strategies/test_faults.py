"""Connections that break in the middle of anything: nothing is lost, nothing happens twice, staleness is bounded."""

import os
from dataclasses import replace
from functools import partial

import pytest
from scenes import play, write

from girih.errors import GirihError
from runs import difference
from support.faults import Faults, connect

pytestmark = pytest.mark.slow

STEPS = 30
SEEDS = int(os.environ.get("GIRIH_SEEDS", "10"))
CONNECTING = ("girih.comm.peers", "girih.dense.halves.parameter_server", "girih.training.feeds")
FAULTS = {
    "broken": Faults(broken=0.05),
    "corrupt": Faults(corrupt=0.05),
    "late": Faults(delay_s=0.01),
    "disorder": Faults(doubled=0.1, swapped=0.1, dropped=0.02),
    "all": Faults(
        broken=0.02,
        refused=0.1,
        delay_s=0.005,
        delay=0.2,
        corrupt=0.02,
        doubled=0.05,
        swapped=0.05,
        dropped=0.01,
    ),
}
ROLES = ["embedding_servers=2", "embedding_workers=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("faults"), num_examples=STEPS * 32)


@pytest.fixture(scope="module")
def local(directory):
    return play(directory, {"name": "local", "config": "din"})


@pytest.fixture
def faulty(monkeypatch):
    """Has every connection between processes meet faults; returns all clients made."""
    clients = []

    def begin(faults):
        def faulty_connect(address, **options):
            clients.append(connect(address, **options, faults=faults))
            return clients[-1]

        for module in CONNECTING:
            monkeypatch.setattr(f"{module}.connect", faulty_connect)
        return clients

    return begin


def quick(choices, *of_them):
    return [c if c in of_them else pytest.param(*c, marks=pytest.mark.heavy) for c in choices]


@pytest.mark.parametrize(
    ("kind", "transport"),
    quick([(k, t) for k in FAULTS for t in ("shared", "tcp")], ("broken", "shared"), ("all", "tcp")),
)
def test_persia_defect_3_lookups_and_updates_whose_connection_breaks_are_made_again_once(
    directory, local, faulty, kind, transport
):
    clients = faulty(FAULTS[kind])
    scene = {
        "name": f"{kind}-{transport}",
        "config": "din",
        "strategy": "hybrid",
        "options": ["staleness=0", f"transport={transport}", *ROLES],
    }
    summary = play(directory, scene)
    assert difference(directory / "local", directory / scene["name"]) == (0, 0)
    assert summary["store"]["lookups"] == local["store"]["lookups"]
    assert summary["store"]["updates"] == local["store"]["updates"]
    assert summary["kept"] == 0
    assert sum(client.num_lost for client in clients) == 0
    if FAULTS[kind].broken or FAULTS[kind].corrupt:
        assert sum(client.num_reconnects for client in clients) > 10


@pytest.mark.parametrize(
    ("strategy", "staleness", "kind"),
    quick(
        [(s, t, k) for s in ("hybrid", "asynchronous") for t in (1, 3) for k in (None, "all")],
        ("hybrid", 3, "all"),
        ("asynchronous", 3, None),
    ),
)
def test_persia_defect_5_staleness_is_bounded_and_measured(
    directory, local, faulty, strategy, staleness, kind
):
    if kind is not None:
        faulty(FAULTS[kind])
    name = f"{strategy}-{staleness}-{kind}"
    scene = {
        "name": name,
        "config": "din",
        "strategy": strategy,
        "options": [f"staleness={staleness}", *ROLES],
    }
    seen = []
    summary = play(directory, scene, act=partial(watch_staleness, seen))
    assert 0 < summary["staleness_max"] <= staleness
    assert len(seen) == STEPS
    assert max(seen) == summary["staleness_max"]
    assert sum(seen) / STEPS == summary["staleness_mean"]
    assert summary["store"]["lookups"] == local["store"]["lookups"]
    assert summary["store"]["updates"] == local["store"]["updates"]
    assert summary["kept"] == 0


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_minutes_of_faults_move_no_row_otherwise_than_one_process_does(
    directory, local, faulty, strategy, transport
):
    """Each run is the same training over other dice; the model of what rows are to be is the local run."""
    num_reconnects = 0
    for seed in range(SEEDS):
        clients = faulty(replace(FAULTS["all"], seed=seed))
        name = f"minutes-{strategy}-{transport}-{seed}"
        options = ["staleness=0", f"transport={transport}", *ROLES]
        scene = {"name": name, "config": "din", "strategy": strategy, "options": options}
        summary = play(directory, scene)
        assert difference(directory / "local", directory / name) == (0, 0)
        assert summary["store"]["updates"] == local["store"]["updates"]
        assert summary["kept"] == 0
        assert sum(client.num_lost for client in clients) == summary["lost_updates"] == 0
        num_reconnects += sum(client.num_reconnects for client in clients)
    assert num_reconnects > 10 * SEEDS


@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_a_connection_that_is_cut_for_good_ends_the_run_with_an_error(directory, faulty, strategy):
    faulty(Faults(cut_after=40))
    scene = {
        "name": f"cut-{strategy}",
        "config": "din",
        "strategy": strategy,
        "options": ["staleness=2", "transport=tcp", *ROLES],
    }
    with pytest.raises(GirihError, match=r"nobody listens|another process|no lasting"):
        play(directory, scene)


def watch_staleness(seen, trainer):
    """Notes what servers say of each batch."""
    pull = trainer.sparse.pull

    def watched(batch):
        pulled = pull(batch)
        wait = pulled.wait

        def waited(*examples):
            found = wait(*examples)
            seen.append(pulled.staleness)
            return found

        pulled.wait = waited
        return pulled

    trainer.sparse.pull = watched
