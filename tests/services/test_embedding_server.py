"""An embedding server whose shards work in parallel, compared with one store that does one request after the other."""

import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import count

import numpy as np
import pytest

import girih
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.service import answer, as_float, as_integer, as_text, connect, from_text
from girih.services import embedding_server
from girih.services.embedding_server import EmbeddingServer
from girih.sparse.protocol import SparseVerb
from girih.sparse.routing.key_router import KeyRouter
from girih.store import Keys, RowUpdate, Store
from girih.tables import TTL
from remote_site import SECRET, batch_of, running, spec_of
from support.twins import shard_of_key

SHARDS, DIM = 3, 4


class Recording(EmbeddingServer):
    """Notes the frames in the order in which it takes them."""

    def open(self, closing):
        self.frames = []
        super().open(closing)

    def on_lookup(self, request):
        self.frames.append(request.frame)
        super().on_lookup(request)

    def on_update(self, request):
        self.frames.append(request.frame)
        super().on_update(request)

    on_drop = on_update


@contextmanager
def serving(spec, *, together=1, num_senders=None):
    role = Recording(
        spec=spec, index=0, num_servers=1, num_contributors=together, address="shm://", secret=SECRET, num_senders=num_senders,
    )  # fmt: skip
    with running(role) as address, ExitStack() as stack:
        yield role, lambda: stack.enter_context(connect(address, secret=SECRET))


def asked_of(spec, users, items):
    (group,) = spec.groups()
    return KeyRouter(group, 1, SHARDS, by_shard=True).ask(batch_of(users, items)).of_place(0)


def lookup(client, number, asked, trainer=0, *, train=True, step=1):
    return client.call(SparseVerb.LOOKUP, (number, trainer, number, step, 0, int(train)), asked)


def update(client, turn, gradients, trainer=0, *, keys=(), step=1):
    fields = (turn, trainer, turn, turn, step, as_integer(1.0))
    return client.call(SparseVerb.UPDATE, fields, (gradients, *keys))


class Plain:
    """One store for each shard, and one request after the other."""

    def __init__(self, spec, together):
        (group,) = spec.groups()
        self.stores = [Store(group.spec, shard=shard, num_shards=SHARDS) for shard in range(SHARDS)]
        self._together = together
        self._asked, self._turns, self._done = {}, {}, {}

    def answer(self, frame):
        """Gives the staleness and the rows of a request, or None."""
        _, trainer, *_ = frame.fields
        if frame.kind == SparseVerb.LOOKUP:
            return self._read(frame)
        turn = (frame.fields[3], trainer if self._together == 1 else 0)
        self._turns.setdefault(turn, {})[trainer] = frame
        if len(self._turns[turn]) == self._together:
            self._apply(self._turns.pop(turn))
        return None

    def _read(self, frame):
        _, trainer, number, step, _, train = frame.fields
        lengths, keys, counts = (np.array(each) for each in frame.arrays)
        tables = np.repeat(np.tile(np.arange(2, dtype=np.int32), SHARDS), lengths)
        rows, out = np.empty(len(keys), np.int32), np.empty((len(keys), DIM), np.float32)
        for store, mine in self._of_shards(keys, tables):
            read = np.empty((mine.sum(), DIM), np.float32)
            asked = Keys(keys[mine], tables[mine], counts[mine])
            rows[mine] = store.lookup(asked, step, read) if train else store.peek(asked, read)
            out[mine] = read
        if not train:
            return 0, out, (rows < 0).astype(np.uint8)
        self._asked[trainer, number] = keys, tables
        return number - len(self._done.setdefault(trainer, set())), out

    def _of_shards(self, keys, tables):
        for store in self.stores:
            owners = [shard_of_key(int(k), int(t), SHARDS) for k, t in zip(keys, tables, strict=True)]
            yield store, np.array(owners, int) == store.shard

    def _apply(self, frames):
        total, where = {}, []
        for trainer in sorted(frames):
            frame = frames[trainer]
            self._done[trainer].add(frame.fields[2])
            keys, tables = self._asked[trainer, frame.fields[2]]
            pairs = zip(keys.tolist(), tables.tolist(), strict=True)
            for pair, gradient in zip(pairs, frame.arrays[0], strict=True):
                total[pair] = total.get(pair, np.float32(0)) + gradient
            where.append(frame)
        *_, step, scale = where[0].fields
        keys, tables = np.array([k for k, _ in total]), np.array([t for _, t in total], np.int32)
        sums = np.array(list(total.values()))
        for store, mine in self._of_shards(keys, tables):
            store.apply_gradients(
                Keys(keys[mine], tables[mine]), RowUpdate(sums[mine], step, as_float(scale))
            )


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("few", [0, 48, 1 << 20])
def test_requests_of_several_clients_leave_what_one_after_the_other_leaves(together, few, monkeypatch):
    """Rows, staleness and counters, bit for bit; with all work in queues, with some, and with none."""
    monkeypatch.setattr(embedding_server, "FEW_IDS", few)
    spec = spec_of(optimizer=girih.optim.Adagrad(lr=0.1), eviction=TTL(steps=3), shards=SHARDS)
    num_clients, answers = 2, {}

    def client(trainer, calls):
        rng, open_reads = np.random.default_rng(trainer), []
        for number in range(25):
            users, items = (np.unique(rng.integers(0, 60, rng.integers(1, 40))) for _ in range(2))
            size = min(len(users), len(items))
            asked = asked_of(spec, users[:size], items[:size])
            step = number // 2 + 1
            open_reads.append((number, len(asked[1]), lookup(calls, number, asked, trainer, step=step)))
            if rng.random() < 0.5:
                peeked = lookup(calls, number, asked, trainer, train=False)
                answers[trainer, number, 0] = answer(peeked)
            while open_reads and (len(open_reads) > 3 or number == 24):
                turn, size, reply = open_reads.pop(0)
                gradients = rng.normal(size=(size, DIM)).astype(np.float32)
                update(calls, turn, gradients, trainer, step=turn // 2 + 1)
                answers[trainer, turn, 1] = answer(reply)

    with serving(spec, together=together) as (role, new_client):
        threads = [threading.Thread(target=client, args=(n, new_client())) for n in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        told = from_text(answer(new_client().call(SparseVerb.STATS, (0,))).arrays[0])
        everything = asked_of(spec, range(60), range(60))
        rows = answer(lookup(new_client(), 0, everything, train=False)).arrays
        frames = role.frames[:-1]
        plain = Plain(spec, together)
        assert len(answers) > 60
        for frame in frames:
            expected = plain.answer(frame)
            if expected is not None:
                got = answers[frame.fields[1], frame.fields[2], frame.fields[5]]
                assert got.fields == (expected[0],)
                for array, other in zip(got.arrays, expected[1:], strict=True):
                    np.testing.assert_array_equal(array, other)
        expected = plain.answer(role.frames[-1])
        for array, other in zip(rows, expected[1:], strict=True):
            np.testing.assert_array_equal(array, other)
        counters = Counter()
        for store in plain.stores:
            counters.update(store.counters())
            store.close()
        assert {name: told["store"][name] for name in counters} == counters
        assert counters["expired"] > 10


class Blocked:
    """Updates of the last shard wait until ``gate`` is set. ``begun`` is set when one waits."""

    def __init__(self, monkeypatch):
        self.gate, self.begun = threading.Event(), threading.Event()
        original = Store.apply_gradients

        def apply(store, keys, change):
            if store.shard == SHARDS - 1:
                self.begun.set()
                assert self.gate.wait(30)
            return original(store, keys, change)

        monkeypatch.setattr(Store, "apply_gradients", apply)


@pytest.fixture
def queued(monkeypatch):
    """All work goes through the queues."""
    monkeypatch.setattr(embedding_server, "FEW_IDS", 0)


def user_keys(spec, shards):
    """A request for keys of ``user`` in some shards."""
    lengths, keys, counts = asked_of(spec, np.arange(400), np.arange(400))
    tables = np.repeat(np.tile([0, 1], SHARDS), lengths)
    owners = np.repeat(np.arange(SHARDS), lengths.reshape(SHARDS, 2).sum(axis=1))
    wanted = np.isin(owners, shards) & (tables == 0)
    kept = np.array([[(wanted & (owners == s) & (tables == t)).sum() for t in (0, 1)] for s in range(SHARDS)])
    return kept.reshape(-1), keys[wanted], counts[wanted]


def test_a_read_is_answered_while_another_shard_is_being_updated(monkeypatch, queued):
    spec, block = spec_of(shards=SHARDS), Blocked(monkeypatch)
    with serving(spec) as (_, new_client):
        client, other = new_client(), new_client()
        everything = user_keys(spec, range(SHARDS))
        before = answer(lookup(client, 0, everything)).arrays[0].copy()
        ones = np.ones((len(everything[1]), DIM), np.float32)
        update_reply = update(client, 0, ones)
        assert block.begun.wait(20)
        waits = lookup(other, 0, user_keys(spec, [SHARDS - 1]), 1)
        waits_too = lookup(client, 1, everything)
        quick = user_keys(spec, [0, 1])
        for number in (1, 2):  # read after the update
            found = answer(lookup(other, number, quick, 1)).arrays[0]
            np.testing.assert_array_equal(found, before[np.isin(everything[1], quick[1])] - 1)
        assert not any(reply.done() for reply in (update_reply, waits, waits_too))
        block.gate.set()
        answer(update_reply)
        np.testing.assert_array_equal(answer(waits_too).arrays[0], before - 1)
        slow = np.isin(everything[1], user_keys(spec, [SHARDS - 1])[1])
        np.testing.assert_array_equal(answer(waits).arrays[0], before[slow] - 1)


def test_a_checkpoint_has_all_updates_that_came_before_it_and_none_after(monkeypatch, queued, tmp_path):
    spec, block = spec_of(shards=SHARDS), Blocked(monkeypatch)
    place = as_text(str(tmp_path))
    with serving(spec) as (_, new_client):
        client, everything = new_client(), user_keys(spec, range(SHARDS))
        before = answer(lookup(client, 0, everything)).arrays[0].copy()
        answer(lookup(client, 1, everything))
        ones = np.ones((len(everything[1]), DIM), np.float32)
        first = update(client, 0, ones)
        assert block.begun.wait(20)
        saved, second = client.call(SparseVerb.SAVE, (), (place,)), update(client, 1, ones)
        assert not saved.done()
        block.gate.set()
        for reply in (first, saved, second):
            answer(reply)
        parts = from_text(answer(client.call(SparseVerb.WRITE, (1,))).arrays[0])
        np.testing.assert_array_equal(answer(lookup(client, 2, everything)).arrays[0], before - 1 - 1)
    with serving(spec) as (_, new_client):
        reader = PartReader(Storage.at(tmp_path), parts)
        answer(new_client().call(SparseVerb.LOAD, (), (as_text(reader.to_dict()),)))
        found = answer(lookup(new_client(), 0, everything, train=False)).arrays
        np.testing.assert_array_equal(found[0], before - 1)
        assert not found[1].any()


def test_a_push_that_comes_again_while_it_is_being_applied_is_applied_once(monkeypatch, queued):
    spec, block = spec_of(shards=SHARDS), Blocked(monkeypatch)
    with serving(spec, together=2, num_senders=2) as (role, new_client):
        clients, everything = [new_client(), new_client(), new_client()], user_keys(spec, range(SHARDS))
        for trainer in (0, 1):
            before = answer(lookup(clients[trainer], 0, everything, trainer)).arrays[0].copy()
        ones = np.ones((len(everything[1]), DIM), np.float32)
        pushed = [update(clients[trainer], 0, ones, trainer) for trainer in (0, 1)]
        assert block.begun.wait(20)
        again = update(clients[2], 0, ones, 0, keys=everything[:2])
        assert not again.done()
        block.gate.set()
        for reply in (*pushed, again):
            assert answer(reply).fields == ()
        np.testing.assert_array_equal(answer(lookup(clients[2], 1, everything)).arrays[0], before - 2)
        assert not role._turns
        assert not role._running


def test_servers_that_are_reset_end_their_work_first(monkeypatch, queued):
    spec, block = spec_of(shards=SHARDS), Blocked(monkeypatch)
    with serving(spec) as (_, new_client):
        client, everything = new_client(), user_keys(spec, range(SHARDS))
        numbers = count()
        before = answer(lookup(client, next(numbers), everything)).arrays[0].copy()
        pushed = update(client, 0, np.ones((len(everything[1]), DIM), np.float32))
        assert block.begun.wait(20)
        reset = client.call(SparseVerb.RESET)
        assert not reset.done()
        block.gate.set()
        assert answer(pushed).fields == ()
        assert answer(reset).fields == (0, 1)
        found = answer(lookup(client, 0, everything))
        assert found.fields == (0,)
        np.testing.assert_array_equal(found.arrays[0], before - 1)
