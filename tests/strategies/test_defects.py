"""PERSIA's defects that concern several processes, in runs over a loader, embedding workers and embedding servers.

Those of one worker or server are in tests/sparse/test_remote.py (1, 2, 6, 8, 10), those that need faults or several
trainers in test_faults.py (3, 5) and test_edges.py (2).
"""

import pytest
from scenes import play, write

from girih.comm.service import connect
from girih.errors import CheckpointError, GirihError, WireTimeout
from girih.services.loader import _Pass
from girih.sparse.protocol import SparseVerb
from girih.sparse.routing.shard_reader import ShardReader
from runs import apart, columns_of, difference, latest

STEPS = 30
ONE_EACH = ["trainers=1", "embedding_workers=1", "embedding_servers=1", "loaders=1", "staleness=0"]
TWO_EACH = ["embedding_workers=2", "embedding_servers=2", "staleness=0"]
ROLES = ("embedding-server", "embedding-worker", "loader")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("defects"), num_examples=STEPS * 32, held_out=101)
    (directory / "wide.toml").write_text(
        (directory / "deepfm.toml").read_text().replace("dim = 4", "dim = 8")
    )
    play(directory, {"name": "local"})
    return directory


def hybrid(name, *overrides, options=TWO_EACH, **more):
    return {"name": name, "strategy": "hybrid", "options": options, "overrides": overrides, **more}


def test_hybrid_with_1_trainer_1_worker_1_server_equals_local(directory):
    summary = play(directory, hybrid("one-each", options=ONE_EACH))
    assert (summary["trainers"], summary["steps"], summary["staleness_max"]) == (1, STEPS, 0)
    assert difference(directory / "local", directory / "one-each") == (0, 0)


@pytest.mark.parametrize("verb", ["read", "apply"])
def test_persia_defect_3_a_lookup_or_an_update_that_fails_ends_the_run_and_is_told(
    directory, monkeypatch, verb
):
    original, calls = getattr(ShardReader, verb), []

    def fail_once(self, *arguments, **options):
        calls.append(verb)
        if len(calls) == 20:
            raise RuntimeError("the memory of this row is damaged")
        return original(self, *arguments, **options)

    monkeypatch.setattr(ShardReader, verb, fail_once)
    with pytest.raises(GirihError, match="the memory of this row is damaged"):
        play(directory, hybrid(f"failing-{verb}", options=[*TWO_EACH[:2], "staleness=3"]))
    assert not (directory / f"failing-{verb}" / "checkpoints").exists()  # nothing that lacks a batch


def test_persia_defect_4_what_nobody_will_pull_is_forgotten(directory):
    seen = []

    def watch(trainer):
        original = trainer.sparse.stats
        trainer.sparse.stats = lambda **options: seen.append(original(**options)) or seen[-1]

    summary = play(directory, hybrid("cut-short", "train.max_steps=5", options=["staleness=3"]), act=watch)
    assert summary["steps"] == 5
    kept = [stats.processes["embedding-worker 0"]["gauges"].get("kept_samples") for stats in seen]
    assert kept == [0] * len(seen)
    assert seen


def test_persia_defect_6_what_one_server_wrote_goes_on_on_eight_and_on_three(directory):
    first = play(directory, hybrid("of-one", "train.max_steps=10", options=ONE_EACH))
    assert first["steps"] == 10
    for number in (8, 3):
        options = [*ONE_EACH[:2], f"embedding_servers={number}", "staleness=0"]
        play(directory, hybrid(f"on-{number}", "store.shards=1", options=options, load="of-one"))
        assert difference(directory / "local", directory / f"on-{number}") == (0, 0)


@pytest.mark.slow
def test_persia_defect_7_momentum_and_weight_decay_are_not_ignored(directory):
    found = {}
    for momentum, l2 in ((0.9, 0.01), (0.9, 0.0), (0.0, 0.01), (0.0, 0.0)):
        sgd = f"sparse_optimizer={{name='sgd', lr=0.2, momentum={momentum}, l2={l2}}}"
        first_order = sgd.replace("sparse", "first_order", 1)
        local, remote = f"local-sgd-{momentum}-{l2}", f"hybrid-sgd-{momentum}-{l2}"
        play(directory, {"name": local, "overrides": [sgd, first_order]})
        play(directory, hybrid(remote, sgd, first_order))
        assert difference(directory / local, directory / remote) == (0, 0)
        found[momentum, l2] = columns_of(latest(directory / remote))
    for one in found:
        for other in found:
            if one != other:  # each option moves rows in a way of its own
                embeddings = [name for name in found[one] if name[-1] == "embedding"]
                assert max(apart(found[one][n][1], found[other][n][1]) for n in embeddings) > 1e-5, (
                    one,
                    other,
                )


def test_persia_defect_8_a_checkpoint_of_another_dim_is_refused_and_leaves_all_rows(directory):
    def act(trainer):
        with pytest.raises(CheckpointError, match="dim"):
            trainer.load(directory / "local")

    summary = play(directory, {**hybrid("wide"), "config": "wide"}, act=act)
    assert summary["steps"] == STEPS
    play(directory, {"name": "local-wide", "config": "wide"})
    assert difference(directory / "local-wide", directory / "wide") == (0, 0)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_persia_defect_9_no_process_answers_who_lacks_the_secret_of_the_run(
    directory, monkeypatch, transport
):
    seen = []

    def strangers(trainer):
        addresses = trainer._cluster.addresses
        for role in ROLES:
            for address in addresses.get(role, ()):
                with connect(address, secret=b"guessed", timeout_s=0.2) as client:
                    reply = client.call(
                        SparseVerb.LOAD if role == ROLES[0] else SparseVerb.DROP_IDS, (1, 0, 0)
                    )
                    with pytest.raises(WireTimeout):
                        reply.wait()
                seen.append(role)

    original = _Pass.__init__

    def begin(self, *arguments):
        original(self, *arguments)
        strangers(here[0])  # now that the loader runs

    here = []
    monkeypatch.setattr(_Pass, "__init__", begin)
    options = [*TWO_EACH, f"transport={transport}"]
    play(directory, hybrid(f"strangers-{transport}", options=options), act=here.append)
    assert sorted(seen) == sorted(["embedding-server", "embedding-worker"] * 2 + ["loader"])
    assert difference(directory / "local", directory / f"strangers-{transport}") == (0, 0)
