"""A loader over real sockets: shares in turn, whatever the order they are asked for in; ids go to embedding workers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import models
from girih.comm.service import answer, as_text, connect, listen
from girih.data import NormalizationStats, epoch
from girih.errors import DataError, Lost, RemoteError, WireError
from girih.models import needs_of
from girih.services.loader import Loader
from girih.sparse.options import StoreOptions
from girih.sparse.protocol import BatchCodec, SparseVerb
from girih.sparse.spec import SparseSpec
from girih.training.feeds import LoaderDataset

SECRET = b"of this run"
SIZE, NUM_EXAMPLES, AHEAD = 4, 22, 2  # the last batch has two examples
SCHEMA = girih.Schema([girih.Categorical(name="user", dim=4), girih.Numeric(name="x")], labels="click")
SPEC = SparseSpec(
    schema=SCHEMA,
    needs=needs_of(models.DNN(SCHEMA, hidden=(2,)), SCHEMA),
    optimizer=girih.optim.SGD(),
    first_order_optimizer=None,
    store=StoreOptions(),
    seed=0,
)
PACKETS = BatchCodec.of(SCHEMA, SPEC.needs)


class Keeping:
    """An embedding worker's part in it: it keeps ids under numbers, and forgets them."""

    def __init__(self, stack, number):
        self.kept, self.forgotten, self.still_kept, self._number = [], [], [], number
        self.server = stack.enter_context(listen(self._handle, address="shm://", secret=SECRET))

    def _handle(self, request):
        source = request.frame.fields[:2]
        if request.frame.kind == SparseVerb.DROP_IDS:
            self.forgotten.append(tuple(request.frame.fields))
            self.still_kept = [each for each in self.still_kept if each != source]
            request.reply()
            return
        batch = PACKETS.unpack_ids(request.frame.arrays, request.frame.fields[-1])
        self.kept.append((*source, batch.ids.tolist()))
        self.still_kept.append(source)
        request.reply((1000 * self._number + len(self.kept),))


class Site:
    """One loader for some trainers, two workers."""

    def __init__(
        self, stack, path, num_trainers=2, trainers=None, num_workers=2, in_step=True, codec=PACKETS, life=0
    ):
        self.data = replace(girih.read_parquet(path, SCHEMA, batch_size=SIZE), read_ahead=AHEAD)
        self.workers = [Keeping(stack, number) for number in range(num_workers)]
        hosts = tuple(worker.server.address for worker in self.workers)
        served = tuple(range(num_trainers)) if trainers is None else trainers
        loader = Loader(
            data=self.data,
            codec=codec,
            index=0,
            trainers=served,
            num_trainers=num_trainers,
            workers=hosts,
            address="shm://",
            secret=SECRET,
            in_step=in_step,
            incarnation=life,
        )
        stop, told, address = threading.Event(), threading.Event(), []
        thread = threading.Thread(target=loader.run, args=(lambda a: (address.append(a), told.set()), stop))
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(stop.set)
        assert told.wait(20)
        self.address = address[0]
        self.client = connect(self.address, secret=SECRET)
        stack.callback(self.client.close)

    def feed(self, stack, rank):
        loader = connect(self.address, secret=SECRET)
        feed = LoaderDataset(self.data, NormalizationStats.empty(SCHEMA).apply, rank, loader)
        stack.callback(feed.close)
        return feed

    def ask(self, number, trainer, share):
        return self.client.call(SparseVerb.NEXT, (number, trainer, share))

    def begin(self, number, trainer=0):
        told = as_text({"epoch": 0, "position": None})
        answer(self.client.call(SparseVerb.BEGIN, (number, trainer), (told,)))


@contextmanager
def site(path, **options):
    with ExitStack() as stack:
        here = Site(stack, path, **options)
        here.stack = stack
        yield here


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "log.parquet")


def write(path, **changed):
    columns = {
        "user": np.arange(NUM_EXAMPLES),
        "x": np.arange(NUM_EXAMPLES, dtype=np.float64) / 2,
        "click": np.arange(NUM_EXAMPLES) % 2,
    }
    pq.write_table(pa.table(columns | changed), path)
    return path


def test_every_trainer_gets_its_share_of_every_batch_in_turn(path):
    with site(path) as here:
        streams = [here.feed(here.stack, rank).stream(0, None) for rank in (0, 1)]
        with ThreadPoolExecutor() as pool:  # what is kept for one that takes nothing is bounded
            found = list(pool.map(list, streams))
        expected = [batch for batch, _ in here.data.batches(0)]
        assert [len(each) for each in found] == [6, 6]
        for number, whole in enumerate(expected):
            parts = [each[number][0] for each in found]
            assert (
                sum(part.num_examples for part in parts) == whole.num_examples == parts[0].share.num_examples
            )
            np.testing.assert_array_equal(np.concatenate([part.numeric for part in parts]), whole.numeric)
            np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
            assert sum(part.share.weight for part in parts) == 1
            assert not any(part.ids.size for part in parts)  # they never pass a trainer
            for rank, part in enumerate(parts):
                worker, sample = part.share.sample
                assert worker == (number + rank) % 2  # in turn
                source, trainer, ids = here.workers[worker].kept[sample % 1000 - 1]
                assert (source, trainer, sample // 1000) == (1, rank, worker)
                first = rank * whole.num_examples // 2
                assert ids == whole.ids[first : first + part.num_examples].tolist()
        assert found[0][-1][1].to_dict() == list(here.data.batches(0))[-1][1].to_dict()


def test_a_pass_begins_where_it_is_told(path):
    with site(path, num_trainers=1) as here:
        (_, first), (_, second), *_ = here.data.batches(0)
        feed = here.feed(here.stack, 0)
        rest = list(feed.stream(0, second))
        assert sum(batch.num_examples for batch, _ in rest) == NUM_EXAMPLES - 2 * SIZE
        assert rest[0][0].numeric[0, 0] == 2 * SIZE / 2
        assert len(list(feed.stream(0, first))) == len(rest) + 1


def test_requests_may_come_in_any_order_and_no_more_is_read_than_is_asked_for(path):
    with site(path, num_trainers=1, num_workers=1) as here:
        here.begin(1)
        time.sleep(0.3)
        assert len(here.workers[0].kept) <= AHEAD + 1
        late = here.ask(1, 0, 1)
        time.sleep(0.1)
        assert not late.done()
        assert answer(here.ask(1, 0, 0)).arrays[0][0, 0] == 0
        assert answer(late).arrays[0][0, 0] == SIZE / 2
        rest = [answer(here.ask(1, 0, number)) for number in range(2, 8)]
        assert [frame.fields[0] for frame in rest] == [
            1,
            1,
            1,
            1,
            0,
            0,
        ]  # the end comes as often as it is asked for


def test_what_nobody_takes_is_forgotten_and_a_slow_trainer_holds_up_the_others_no_longer(path):
    with site(path) as here:
        here.begin(1)
        taken = [here.ask(1, 0, number) for number in range(5)]
        time.sleep(0.3)
        assert not taken[-1].done()  # what is kept for the other trainer is bounded
        answer(here.client.call(SparseVerb.END, (1, 1, 0)))
        assert [answer(reply).fields[0] for reply in taken] == [1] * 5
        waiting = here.ask(1, 0, 9)
        answer(here.client.call(SparseVerb.END, (1, 0, 5)))
        with pytest.raises(RemoteError, match="this pass is over"):  # it is not asked for again and again
            answer(waiting)
        for worker in here.workers:
            assert worker.forgotten == [(1, 1, 0), (1, 0, 5)]
        here.begin(2)
        answer(here.ask(2, 0, 0))
        with pytest.raises(RemoteError, match="pass 1 is over"):
            answer(here.ask(1, 0, 6))


class Slow(BatchCodec):
    """Packs ids once it may."""

    begun, may = threading.Event(), threading.Event()

    def pack_ids(self, batch):
        self.begun.set()
        assert self.may.wait(20)
        return super().pack_ids(batch)


def test_a_share_that_is_on_its_way_when_its_trainer_ends_is_forgotten_too(path):
    with site(path, codec=Slow(PACKETS.pooled)) as here:
        here.begin(1)
        assert Slow.begun.wait(20)
        ended = here.client.call(SparseVerb.END, (1, 0, 0))
        time.sleep(0.3)
        Slow.may.set()
        answer(ended)
        answer(here.ask(1, 1, 0))
        assert not [source for worker in here.workers for source in worker.still_kept if source == (1, 0)]


def test_trainers_at_their_own_pace_have_readings_of_their_own(path):
    with site(path, in_step=False) as here:
        here.begin(1, 1)
        slow = [answer(here.ask(1, 1, 0))]
        feed = here.feed(here.stack, 0)
        fast = [list(feed.stream(epoch, None)) for epoch in range(3)]  # passes 1 to 3, to their ends
        assert [len(each) for each in fast] == [6, 6, 6]
        kept = [source for worker in here.workers for source in worker.kept if source[1] == 1]
        assert len(kept) <= 1 + AHEAD  # memory is bounded, however far one is behind
        slow += [answer(here.ask(1, 1, share)) for share in range(1, 6)]
        assert answer(here.ask(1, 1, 6)).fields[0] == 0
        for number, whole in enumerate(batch for batch, _ in here.data.batches(0)):
            (mine, _), theirs = fast[0][number], slow[number]
            np.testing.assert_array_equal(np.concatenate([mine.numeric, theirs.arrays[0]]), whole.numeric)
            assert mine.share.weight == theirs.arrays[2][0] == 1  # each step is of one trainer alone
            assert mine.share.num_examples == whole.num_examples


def test_trainers_at_their_own_pace_share_what_is_decoded_while_they_are_close(path, monkeypatch):
    decode, units = epoch.decode, []
    monkeypatch.setattr(epoch, "decode", lambda unit, *rest: units.append(unit) or decode(unit, *rest))
    with site(path, in_step=False) as here:
        one, other = (here.feed(here.stack, rank).stream(0, None) for rank in (0, 1))
        assert len(list(zip(one, other, strict=True))) == 6
        assert len(units) == 1


def test_the_next_pass_of_trainers_in_step_leaves_a_late_one_the_end_of_this_one(path):
    with site(path) as here:
        here.begin(1)
        late = [here.ask(1, 1, share) for share in range(6)]
        assert [answer(here.ask(1, 0, share)).fields[0] for share in range(7)] == [1] * 6 + [0]
        answer(here.client.call(SparseVerb.END, (1, 0, 5)))
        here.begin(2)
        assert [answer(reply).fields[0] for reply in [*late, here.ask(1, 1, 6)]] == [1] * 6 + [0]
        assert answer(here.ask(2, 0, 0)).fields[0] == 1


def test_what_is_wrong_with_the_data_reaches_every_trainer_however_often_it_asks(tmp_path):
    clicks = np.arange(NUM_EXAMPLES) % 2.0
    clicks[9] = np.nan
    with site(write(tmp_path / "bad.parquet", click=clicks)) as here:
        here.begin(1)
        asked = [[here.ask(1, trainer, share) for share in range(5)] for trainer in (0, 1)]
        for trainer in (0, 1):
            for share in (4, 3, 2):  # the third batch has it
                with pytest.raises(DataError, match=r"bad\.parquet, row 10 .*: column 'click' = nan"):
                    answer(asked[trainer][share])


def test_an_unknown_request_is_refused_and_the_loader_goes_on(path):
    with site(path, num_trainers=1) as here:
        with pytest.raises(RemoteError):
            answer(here.client.call(77))
        here.begin(1)
        assert answer(here.ask(1, 0, 0)).fields[0] == 1


def test_each_loader_serves_its_part_of_the_trainers(path):
    class Processes:
        secret = SECRET
        registry = None

        def host(self, name, index):
            return "127.0.0.1"

        def start(self, name, roles, bearing):
            self.roles = roles()
            return tuple("" for _ in self.roles)

    data = girih.read_parquet(path, SCHEMA, batch_size=SIZE)
    for num_loaders, size, expected in ((1, 3, [(0, 1, 2)]), (2, 3, [(0, 2), (1,)]), (2, 2, [(0,), (1,)])):
        processes = Processes()
        plan = SimpleNamespace(feed={"loaders": num_loaders}, wire={"transport": "shared"})
        sparse = SimpleNamespace(store=StoreOptions())
        context = SimpleNamespace(processes=processes, ranks=SimpleNamespace(size=size), sparse=sparse)
        girih.Hybrid(loaders=num_loaders)._start_loaders(plan, context, PACKETS, ("a", "b"), data)
        assert [role.trainers for role in processes.roles] == expected
        assert {role.num_trainers for role in processes.roles} == {size}
        assert {role.workers for role in processes.roles} == {("a", "b")}


def begins_of(data):
    """Where each batch of the first epoch begins, as trainers tell loaders."""
    ends = [position.to_dict() for _, position in data.batches(0)]
    return [as_text({"epoch": 0, "position": position}) for position in (None, *ends[:-1])]


@pytest.mark.parametrize("in_step", [True, False])
def test_a_loader_that_came_back_goes_on_behind_the_last_share_of_each_trainer(path, in_step):
    with site(path, in_step=in_step, life=1) as here:
        begins, whole = begins_of(here.data), [batch for batch, _ in here.data.batches(0)]
        with pytest.raises(Lost, match="pass 1 is over"):
            answer(here.ask(1, 0, 4))
        for trainer, taken in ((0, 4), (1, 1)):
            answer(here.client.call(SparseVerb.RESUME, (1, trainer, taken), (begins[taken],)))
            parts = [answer(here.ask(1, trainer, share)) for share in range(taken, 6)]
            assert answer(here.ask(1, trainer, 6)).fields[0] == 0
            for number, part in enumerate(parts, taken):
                middle = whole[number].num_examples // 2
                own = whole[number].numeric[middle:] if trainer else whole[number].numeric[:middle]
                np.testing.assert_array_equal(part.arrays[0], own)
                assert part.fields[1] == (number + trainer) % 2  # the worker that it was with before
        for worker in here.workers:  # what the life before sent, and nobody was told of
            assert worker.forgotten == [(1, 0, 4), (1, 1, 1)]


def test_ids_are_read_again_for_a_worker_that_came_back(path, monkeypatch):
    decode, units = epoch.decode, []
    monkeypatch.setattr(epoch, "decode", lambda unit, *rest: units.append(unit) or decode(unit, *rest))
    with site(path, num_trainers=1) as here:
        begins, feed = begins_of(here.data), here.feed(here.stack, 0)
        stream = feed.stream(0, None)
        taken = [next(stream)[0] for _ in range(5)]
        sent = [here.workers[part.share.sample[0]].kept[part.share.sample[1] % 1000 - 1] for part in taken]
        before = len(units)
        for number in (1, 3, 0, 4):  # one worker's in turn, then the other one's
            worker, sample = taken[number].share.again()
            assert worker == taken[number].share.sample[0]
            assert here.workers[worker].kept[sample % 1000 - 1] == sent[number]
        assert len(units) - before == 3  # there is one unit: two were skipped to reach the fourth
        with pytest.raises(WireError, match="trainer 2; expected 0 or more, and one of 0"):
            answer(here.client.call(SparseVerb.STORE_AGAIN, (1, 2, 0), (begins[0],)))


def test_the_end_of_a_pass_says_how_many_shares_were_taken(path):
    """What was handed over may not be asked for yet at the worker, and must be kept for that."""
    with site(path, num_trainers=1) as here:
        feed = here.feed(here.stack, 0)
        whole = list(feed.stream(0, None))
        broken_off = feed.stream(1, None)
        next(broken_off), next(broken_off)
        broken_off.close()
        for worker in here.workers:
            assert worker.forgotten == [(1, 0, len(whole)), (2, 0, 2)]
