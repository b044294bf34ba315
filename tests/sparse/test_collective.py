"""Shards spread over two real trainers: what float16 between them rounds, and who waits for whom."""

import time
from dataclasses import replace

import numpy as np
import pytest

import girih
from companions import together
from girih.comm.codecs.rows import grow, shrink
from girih.data.batch import Batch, Share
from girih.kernels.cpu import ahead
from girih.sparse.halves.collective import CollectiveSparse
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import ASKED_KEYS, EXCHANGE_NS, PACED_KEYS, SERVED_ROWS, Stats
from support import cases
from support.twins import shard_of_key
from support.votes import push

RANKS, SHARDS_EACH, USERS_TABLE = 2, 2, 0
USERS = (range(12), range(6, 20))
SGD = girih.optim.SGD(lr=1.0)
LATE_S = 0.5


def owner(user):
    return shard_of_key(user, USERS_TABLE, RANKS * SHARDS_EACH) // SHARDS_EACH


def batch_of(users):
    return cases.batch_of(list(users), list(users), [[] for _ in users])


def rows_of(embeddings):
    """float32[B, 5], the embedding and the first-order weight of each example's user."""
    numbers = cases.numbers_of(embeddings)
    return np.concatenate([numbers["user"], numbers["first_order"].reshape(-1, 1)], axis=1)


def step(ranks):
    """One step in which each user's row is seen as it came, and moves by the sum of its gradients."""
    spec = replace(cases.spec(shards=SHARDS_EACH), optimizer=SGD)
    stats = Stats()
    half = CollectiveSparse(spec, ranks, stats, float16_embeddings=True, float16_gradients=True)
    exact = CollectiveSparse(spec, ranks)  # whose rows begin with the same numbers
    users = USERS[ranks.rank]
    own = sorted(user for user in set().union(*USERS) if owner(user) == ranks.rank)
    before = rows_of(exact.peek(batch_of(users)).wait())
    pulled = half.pull(batch_of(users))
    embeddings = pulled.wait()
    seen = rows_of(embeddings)
    wanted = cases.coefficients(batch_of(users), ranks.rank)
    cases.give(embeddings, wanted, batch_of(users))
    push(pulled, 1, 1.0).wait()
    given = np.concatenate([wanted["user"], wanted["first_order"].reshape(-1, 1)], axis=1)
    counted = [stats.counters[name] for name in (ASKED_KEYS, SERVED_ROWS, PACED_KEYS)]
    return {
        "before": before.tolist(),
        "seen": seen.tolist(),
        "given": given.tolist(),
        "own": own,
        "after": rows_of(half.peek(batch_of(own)).wait()).tolist(),
        "counted": counted,
    }


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    layouts = [[each] * segments for each in (SGD, cases.spec().optimizer) for segments in (1, 2)]
    ahead.make_ready([*ahead.training(layouts), *ahead.packing()])


@pytest.fixture(scope="module")
def told():
    return together(step, RANKS)


def rounded(row):
    return grow(*shrink(np.array([row], np.float32)))[0]


def by_user(told, name):
    return [
        dict(zip(users, np.float32(each[name]), strict=True)) for users, each in zip(USERS, told, strict=True)
    ]


def test_a_row_is_rounded_on_all_trainers_or_on_none(told):
    before, seen, kinds = by_user(told, "before"), by_user(told, "seen"), set()
    for rank, users in enumerate(USERS):
        for user in users:
            kept = [user in each for each in USERS] == [owner(user) == r for r in range(RANKS)]
            exact = before[rank][user]
            np.testing.assert_array_equal(seen[rank][user], exact if kept else rounded(exact))
            assert np.any(rounded(exact) != exact)
            kinds.add((kept, owner(user) == rank, all(user in each for each in USERS)))
    # of its owner alone; of another alone; of both, as the owner and as the other see it
    assert kinds == {(True, True, False), (False, False, False), (False, True, True), (False, False, True)}


def test_rows_move_by_gradients_of_which_those_that_travelled_are_rounded(told):
    before, given = by_user(told, "before"), by_user(told, "given")
    for rank, each in enumerate(told):
        for user, after in zip(each["own"], np.float32(each["after"]), strict=True):
            expected = next(rows[user] for rows in before if user in rows)
            for other, gradients in enumerate(given):
                if user in gradients:
                    told_gradient = gradients[user] if other == rank else rounded(gradients[user])
                    expected = expected - told_gradient
            np.testing.assert_allclose(after, expected, rtol=0, atol=2e-6)
    largest = max(np.abs(rounded(each) - each).max() for rows in given for each in rows.values())
    assert largest > 1e-4  # far beyond what is allowed


def step_without_tables(ranks):
    schema = girih.Schema([girih.Numeric(name="x")], labels="y")
    half = CollectiveSparse(SparseSpec(schema=schema, needs={}, optimizer=SGD), ranks)
    numbers = np.ones((3, 1), np.float32)
    batch = Batch(ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), numeric=numbers, labels=numbers)
    pulled = half.pull(batch, half.prepare(batch))
    blocks = len(pulled.wait().blocks)
    push(pulled, 1, 1.0).wait()
    return [blocks, half.last_step]


def test_a_model_of_numbers_alone_takes_its_steps():
    assert together(step_without_tables, RANKS) == [[0, 1]] * RANKS


def test_keys_and_rows_of_each_trainer_are_counted(told):
    asked = [0, 0]
    for users in USERS:
        for user in users:
            for _ in range(2):  # users, and items of the same ids, whose group is another one
                asked[shard_of_key(user, USERS_TABLE, RANKS * SHARDS_EACH) // SHARDS_EACH] += 1
    rows = [2 * len(each["own"]) for each in told]
    assert [each["counted"] for each in told] == [
        [asked[r], rows[r], RANKS * max(asked)] for r in range(RANKS)
    ]


def messages_of_a_step(ranks):
    """What a step sends, laid out in several ways: how often all exchange something, and bytes by kind."""
    found = {}
    groups = [group.spec.name for group in cases.spec().groups()]
    for name, options in (
        ("plain", {}),
        ("ahead", {"ahead": True}),
        ("in turn", {"interleaving": [[group] for group in groups]}),
        ("cut", {"micro_batches": 3}),
        ("all", {"ahead": True, "micro_batches": 3, "interleaving": [[group] for group in groups]}),
    ):
        stats, counted = Stats(), []
        half = CollectiveSparse(cases.spec(shards=2), ranks, stats, **options)
        between = half.exchange._ranks
        between.begin_exchange = counting(between.begin_exchange, counted)
        batch = replace(cases.batches()[ranks.rank], share=Share(num_examples=8, weight=0.5))
        pulled = half.pull(batch, half.prepare(batch))
        cases.give(pulled.wait(), cases.coefficients(batch, 1), batch)
        push(pulled, 1, 1.0)
        found[name] = [len(counted), stats.wire_bytes()]
        del between.begin_exchange
        half.close()
    return [len(groups), found]


def counting(exchange, counted):
    def counted_exchange(*arguments):
        counted.append(1)
        return exchange(*arguments)

    return counted_exchange


def test_messages_are_few_and_bytes_do_not_grow_with_micro_batches():
    for num_groups, found in together(messages_of_a_step):
        assert num_groups == 2
        # counts, keys, rows and gradients; one for each interleaving group, and rows for each micro-batch; and the vote, which
        # shares a connection with the others in the plain layout alone
        assert [found[name][0] for name in ("plain", "ahead", "in turn", "cut", "all")] == [5, 4, 6, 6, 10]
        plain, lengths = (
            found["plain"][1],
            8 * 2 * 2,
        )  # of two more micro-batches, how many keys each of two tables has
        for name in ("ahead", "in turn", "cut", "all"):
            own = found[name][1]
            assert {kind: own[kind] for kind in ("embeddings", "gradients")} == {
                kind: plain[kind] for kind in ("embeddings", "gradients")
            }
            assert own["ids"] == plain["ids"] + (lengths if name in ("cut", "all") else 0)


def wait_for_one(ranks):
    """Seconds in the exchanges of a step in which rank 0 reads its rows late."""
    stats = Stats()
    half = CollectiveSparse(cases.spec(), ranks, stats)
    half.pull(cases.batches()[1]).wait()  # loads kernels
    stats.counters.clear()
    for group in half.routed[: 1 - ranks.rank]:
        group.read = late(group.read)
    ranks.barrier()
    half.pull(cases.batches()[0]).wait()
    return stats.counters[EXCHANGE_NS] / 1e9


def late(read):
    def read_late(*arguments, **options):
        time.sleep(LATE_S)
        return read(*arguments, **options)

    return read_late


def test_who_waits_for_a_trainer_that_is_late_is_seen():
    of_the_late, of_the_other = together(wait_for_one)
    assert of_the_other > LATE_S / 2 > of_the_late
