"""Embedding servers and workers, and what of PERSIA's defects lies between processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch

import girih
from girih.checkpoint import Storage
from girih.checkpoint.parts import PartReader
from girih.comm.group.trainers import NO_NUMBERS, Vote
from girih.comm.rpc import Request
from girih.comm.service import answer, as_text, from_text
from girih.errors import GirihError, NonFiniteError, StorageFullError, WireError
from girih.sparse.groups.bags import BagPooler
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import as_rows
from girih.sparse.halves.staging import Staging
from girih.sparse.protocol import BatchCodec, SparseVerb
from girih.tables import LRU, MinCount
from girih.telemetry.stats import wire_bytes
from remote_site import batch_of, give, site, spec_of
from support.votes import push, refuse, rows_error


def test_a_batch_is_read_and_moved_on_any_number_of_servers():
    batch = batch_of([1, 2, 1], [7, 7, 8])
    moved = []
    for num_servers in (1, 3):
        with site(num_servers=num_servers) as here:
            (trainer,) = here.trainers
            pulled = trainer.pull(here.keep(batch))
            give(pulled, [1, 2, 4])
            push(pulled, 1)
            trainer.sync()
            before = pulled.wait().stacked(("user", "item")).detach().numpy()
            moved.append(before - here.peek(batch))
            assert trainer.stats().rows == {"user": 2, "item": 2}
    np.testing.assert_array_equal(moved[0], moved[1])
    np.testing.assert_allclose(moved[0][:, :, 0], [[5, 3], [2, 3], [5, 4]], rtol=1e-6)


@pytest.mark.parametrize("moment", ["before it is read", "before it is pushed", "before it is dropped"])
@pytest.mark.parametrize("staging", [None, lambda: Staging(torch.device("cpu"))])
def test_a_batch_whose_worker_came_back_is_trained_on_once(moment, staging):
    batch, other = batch_of([1, 2, 1], [7, 7, 8]), batch_of([1], [7])
    with site(num_senders=1, staging=staging, num_servers=2) as here:
        (trainer,) = here.trainers
        kept = here.keep(batch)
        here.keep(other, number=1)
        before = here.peek(batch)
        if moment == "before it is read":
            here.begin_worker(1)
        pulled = trainer.pull(kept)
        give(pulled, [1, 2, 4])
        if moment != "before it is read":
            here.begin_worker(1)
        pending = refuse(pulled) if moment == "before it is dropped" else push(pulled, 1)
        pending.wait()
        trainer.sync()
        expected = [[5, 3], [2, 3], [5, 4]] if moment != "before it is dropped" else np.zeros((3, 2))
        np.testing.assert_allclose((before - here.peek(batch))[:, :, 0], expected, rtol=1e-6)
        last = trainer.pull(here.keep(batch, number=2))
        last.wait()
        assert last.staleness == 0
        told = trainer.stats()
        assert told.processes["embedding-worker 0"]["gauges"]["kept_samples"] == 1  # the last one
        assert told.store["updates"] == (0 if moment == "before it is dropped" else 4)


def test_what_is_let_go_of_before_it_came_is_read_and_dropped_by_the_worker_that_came_back():
    with site(num_senders=1) as here:
        (trainer,) = here.trainers
        kept = [here.keep(batch_of([n], [n]), number=n) for n in range(3)]
        here.begin_worker(1)
        for each in kept:
            trainer.pull(each).discard()
        trainer.sync()
        told = trainer.stats().processes["embedding-worker 0"]
        assert told["gauges"] == {"kept_samples": 0, "incarnation": 1}


def test_a_push_whose_worker_is_gone_before_the_others_have_pushed_is_applied_with_theirs():
    """A server has one trainer's part of the step already, from the life before."""
    with site(num_senders=1, together=2, num_trainers=2) as here:
        batch = batch_of([1], [5])
        pulled = [t.pull(here.keep(batch, trainer=n)) for n, t in enumerate(here.trainers)]
        for each in pulled:
            give(each, 1)
        before, pushed = here.peek(batch), push(pulled[0], 1)
        answer(here.loader.call(SparseVerb.STATS, (0,)))  # by then the worker has sent it on
        here.begin_worker(1)
        push(pulled[1], 1).wait()
        pushed.wait()
        np.testing.assert_allclose(before - here.peek(batch), 2)


def test_staleness_counts_the_batches_of_the_same_trainer_that_are_not_applied():
    with site() as here:
        (trainer,) = here.trainers
        pulled = [trainer.pull(here.keep(batch_of([n], [n]))) for n in range(4)]
        for each in pulled:
            give(each, 1)
        assert [each.staleness for each in pulled] == [0, 1, 2, 3]
        push(pulled[0], 1)
        refuse(pulled[2])
        trainer.sync()
        last = trainer.pull(here.keep(batch_of([9], [9])))
        last.wait()
        assert last.staleness == 2


def test_gradients_of_one_step_are_applied_together_and_once():
    with site(spec_of(optimizer=girih.optim.Adagrad(lr=1.0)), together=2, num_trainers=2) as here:
        assert len(here.trainers) == 2
        batches = [batch_of([1, 2], [5, 5]), batch_of([2, 3], [5, 6])]
        pulled = [t.pull(here.keep(b)) for t, b in zip(here.trainers, batches, strict=True)]
        before = here.peek(batch_of([1, 2, 3], [5, 6, 6]))
        give(pulled[0], [1, 2])
        give(pulled[1], [4, 8])
        first = push(pulled[0], 1)
        assert not first.done()
        np.testing.assert_array_equal(here.peek(batch_of([1, 2, 3], [5, 6, 6])), before)
        push(pulled[1], 1).wait()
        first.wait()
        moved = before - here.peek(batch_of([1, 2, 3], [5, 6, 6]))
        total = np.array([[1, 7], [6, 8], [8, 8]])  # Adagrad's first step of a sum is its sign
        np.testing.assert_allclose(moved[:, :, 0], total / np.abs(total), rtol=1e-5)


def test_servers_drop_what_trainers_that_are_gone_began_and_count_it():
    """One has pushed its part of a step, the other one has read for it."""
    with site(together=2, num_trainers=2) as here:
        for life in range(2):
            pulled = [t.pull(here.keep(batch_of([1], [5]))) for t in here.trainers]
            for each in pulled:
                give(each, 1)
            before, pushed = here.peek(batch_of([1], [5])), push(pulled[0], 1)
            if life == 0:
                here.trainers[0].reset()
                assert here.stats[0].counters["lost_updates"] == 2
                assert here.trainers[0].last_step == 1
                np.testing.assert_array_equal(here.peek(batch_of([1], [5])), before)
                for trainer in here.trainers:  # as new ones have them
                    trainer.turns, trainer._numbers = count(), count()
                    trainer._pending.clear()
        push(pulled[1], 1).wait()
        pushed.wait()
        assert [each.staleness for each in pulled] == [0, 0]
        np.testing.assert_allclose(before - here.peek(batch_of([1], [5])), 2)


def test_a_refused_step_moves_nothing_and_counts_on():
    with site(together=2, num_trainers=2) as here:
        batch = batch_of([1], [1])
        for number in range(2):
            pulled = [t.pull(here.keep(batch)) for t in here.trainers]
            assert [p.wait() is not None and p.staleness for p in pulled] == [0, 0]
            before = here.peek(batch)
            for each in pulled:
                give(each, 1)
                refuse(each) if number == 0 else push(each, 1)
            for trainer in here.trainers:
                trainer.sync()
            np.testing.assert_allclose(before - here.peek(batch), 2 * number, atol=1e-6)


def test_a_group_that_takes_no_part_moves_nothing_even_where_a_trainer_asked_this_server_for_no_key():
    """Adam moves rows by a gradient of 0, and weight decay too."""
    with site(spec_of(optimizer=girih.optim.Adagrad(lr=1.0, l2=0.5)), together=2, num_trainers=2) as here:
        pulled = [
            t.pull(here.keep(b))
            for t, b in zip(here.trainers, (batch_of([1], [1]), batch_of([], [])), strict=True)
        ]
        before = here.peek(batch_of([1], [1]))
        for each in pulled:
            each.wait()
            push(each, 1)  # without gradients
        for trainer in here.trainers:
            trainer.sync()
        np.testing.assert_array_equal(here.peek(batch_of([1], [1])), before)


def test_persia_defect_1_a_row_evicted_between_pull_and_push_shifts_no_gradient():
    with site(spec_of(eviction=LRU(max_rows=3)), num_trainers=2) as here:
        slow, fast = here.trainers
        fast.last_step = 5  # rows of the step under way are never evicted
        late = slow.pull(here.keep(batch_of([1, 2, 3], [1, 2, 3])))
        give(late, [100, 2, 3])
        thief = fast.pull(here.keep(batch_of([2, 3, 4], [2, 3, 4]), 1))  # the row of 1 is now that of 4
        give(thief, 0)
        before = here.peek(batch_of([2, 3, 4], [2, 3, 4]))
        push(late, 1)
        slow.sync()
        moved = before - here.peek(batch_of([2, 3, 4], [2, 3, 4]))
        np.testing.assert_allclose(moved[:, 0, 0], [2, 3, 0], rtol=1e-5)
        assert slow.stats().store["dropped"] == 2  # user 1 and item 1


def test_persia_defect_1_a_row_that_was_not_admitted_shifts_no_gradient():
    with site(spec_of(admission=MinCount(count=2)), num_servers=2) as here:
        (trainer,) = here.trainers
        batch = batch_of([1, 2, 3], [1, 2, 3])
        seen = batch_of([1, 3], [1, 3])
        for _ in range(2):  # those seen twice have rows
            refuse(trainer.pull(here.keep(seen)))
        trainer.sync()
        pulled = trainer.pull(here.keep(batch))
        before = here.peek(batch)
        give(pulled, [2, 100, 4])
        push(pulled, 1)
        trainer.sync()
        moved = before - here.peek(batch)
        np.testing.assert_allclose(moved[:, 0, 0], [2, 0, 4], rtol=1e-5)
        assert trainer.stats().store["dropped"] == 2  # user 2 and item 2


class Unheeding(Vote):
    """A vote that lets every step pass."""

    def cast(self, refuses, words=NO_NUMBERS):
        return super().cast(torch.zeros_like(refuses), words)


def test_persia_defect_2_every_gradient_is_checked_and_inf_too():
    """By the trainer before it is sent, and by the worker."""
    for bad in (np.nan, np.inf, -np.inf):
        with site() as here:
            (trainer,) = here.trainers
            batch = batch_of([1, 2], [1, 2])
            for gradient in ([1, 1], [1, bad]):
                pulled = trainer.pull(here.keep(batch))
                give(pulled, gradient)
                before = here.peek(batch)
                if np.isfinite(gradient).all():
                    push(pulled, 1).wait()
                    continue
                for vote in (Vote(), Unheeding()):
                    pending = pulled.push(2, 1.0, vote)
                    if vote.known_refused:
                        pending.wait()
                        assert "the gradient of feature" in str(rows_error(vote))
                        pulled = trainer.pull(here.keep(batch))
                        give(pulled, gradient)
                        continue
                    with pytest.raises(NonFiniteError, match="NaN or infinite"):
                        pending.wait()
                    np.testing.assert_array_equal(here.peek(batch), before)


MISFITS = {
    "another dtype": lambda rows: rows.astype(np.float64),
    "another width": lambda rows: np.ascontiguousarray(rows[:, :-1]),
    "a row too few": lambda rows: rows[:-1],
    "another shape": lambda rows: rows.reshape(-1),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_rows_and_gradients_that_do_not_fit_are_refused_before_a_kernel_follows_them(monkeypatch, misfit):
    distort, batch = MISFITS[misfit], batch_of([1, 2], [1, 2])
    told = "group '.*: float.* expected float32.*in one piece"

    def take_step(trainer, here):
        pulled = trainer.pull(here.keep(batch))
        give(pulled, 1)
        push(pulled, 1).wait()

    def spoil(method, spoiled):
        def wrapped(self, *given, **options):
            return spoiled(method(self, *given, **options))

        return wrapped

    def spoil_rows(reply):
        def wrapped(self, fields=(), arrays=()):
            is_rows = self.frame.kind == SparseVerb.LOOKUP
            reply(self, fields, [distort(array) for array in arrays] if is_rows else arrays)

        return wrapped

    with site(num_servers=2) as here:
        (trainer,) = here.trainers
        before = here.peek(batch)
        spoils = (
            (Request, "reply", None),  # server to worker
            (
                BatchCodec,
                "pack_gradients",
                lambda packed: [distort(each) for each in packed],
            ),  # trainer to worker
            (BagPooler, "scatter", lambda found: (distort(found[0]), found[1])),  # worker to server
        )
        for cls, name, spoiled in spoils:
            with monkeypatch.context() as patched:
                method = getattr(cls, name)
                patched.setattr(cls, name, spoil(method, spoiled) if spoiled else spoil_rows(method))
                with pytest.raises(WireError, match=told) as caught:
                    take_step(trainer, here)
            assert "\n" not in str(caught.value)
            np.testing.assert_array_equal(here.peek(batch), before)
    with pytest.raises(WireError, match="in pieces; expected"):
        as_rows(np.zeros((4, 3), np.float32)[:, :2], 4, 2, "rows")


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_persia_defect_6_a_checkpoint_of_one_server_loads_on_eight_and_back(tmp_path, place, request):
    batch = batch_of(range(100), range(100))
    root = Storage.at(tmp_path if place == "directory" else request.getfixturevalue("s3_address"))
    directory, files, values = root, None, None
    for number, num_servers in enumerate((1, 8, 3, 1)):
        with site(spec_of(shards=2 if number == 2 else 1), num_servers=num_servers) as here:
            (trainer,) = here.trainers
            if files is None:
                pulled = trainer.pull(here.keep(batch))
                give(pulled, np.arange(100))
                push(pulled, 1)
                trainer.sync()
            else:
                trainer.load(PartReader(directory, files), step=1)
            found = here.peek(batch)
            values = found if values is None else values
            np.testing.assert_array_equal(found, values)
            assert trainer.stats().rows == {"user": 100, "item": 100}
            directory = root / str(number)
            files = trainer.begin_save(directory).write()
            assert len(files) == num_servers * (2 if number == 2 else 1)


def test_persia_defect_8_rows_of_another_dim_are_refused_and_none_is_lost(tmp_path):
    batch = batch_of([1, 2], [1, 2])
    with site(spec_of(dim=8)) as here:
        pulled = here.trainers[0].pull(here.keep(batch))
        pulled.wait()
        files = here.trainers[0].begin_save(Storage.at(tmp_path)).write()
    with site(spec_of(dim=4)) as here:
        (trainer,) = here.trainers
        pulled = trainer.pull(here.keep(batch))
        give(pulled, 1)
        push(pulled, 1)
        trainer.sync()
        before = here.peek(batch)
        with pytest.raises(girih.errors.CheckpointError):
            trainer.load(PartReader(Storage.at(tmp_path), files), step=1)
        np.testing.assert_array_equal(here.peek(batch), before)


def test_persia_defect_10_a_request_is_one_call_of_a_store_however_many_keys_it_has(monkeypatch):
    from girih.store import Store

    calls, original = [], Store.lookup

    def lookup(self, keys, *arguments):
        calls.append(len(keys.ids))
        return original(self, keys, *arguments)

    monkeypatch.setattr(Store, "lookup", lookup)
    with site() as here:
        here.trainers[0].pull(here.keep(batch_of(range(1000), range(1000)))).wait()
    assert calls == [2000]


def test_errors_of_another_process_are_told():
    with site() as here:
        (trainer,) = here.trainers
        kept = here.keep(batch_of([1], [1]))
        trainer.pull(kept).wait()
        taken, left = (here.keep(batch_of([n], [n]), number=n) for n in (1, 2))
        answer(
            here.loader.call(SparseVerb.DROP_IDS, (1, 0, 2))
        )  # overtakes what the trainer asks for the one that it took
        trainer.pull(taken).wait()
        with pytest.raises(GirihError, match="is not kept here"):
            trainer.pull(left).wait()
        with pytest.raises(girih.errors.ConfigError, match="has its ids with it"):
            trainer.pull(batch_of([1], [1]))
        told = trainer.stats().processes["embedding-worker 0"]
        assert told["gauges"]["kept_samples"] == 2  # what was pulled, and not yet pushed


def test_a_segment_that_one_server_cannot_begin_is_in_the_way_of_no_checkpoint(tmp_path, monkeypatch):
    begin = LocalShards.begin_segment

    def fail(self, *given):
        if self._first_file == 1:
            raise StorageFullError("no space left for what changes meanwhile")
        time.sleep(0.2)  # the other one has answered by then
        return begin(self, *given)

    with site(num_servers=3) as here:
        (trainer,) = here.trainers
        refuse(trainer.pull(here.keep(batch_of(range(20), range(20)))))
        monkeypatch.setattr(LocalShards, "begin_segment", fail)
        with pytest.raises(StorageFullError, match="no space left for what changes meanwhile"):
            trainer.begin_segment(Storage.at(tmp_path / "segment"), 1, None)
        saved = ThreadPoolExecutor(1).submit(
            lambda: trainer.begin_save(Storage.at(tmp_path / "save")).write()
        )
        assert len(saved.result(30)) == 3
        monkeypatch.undo()
        parts = trainer.begin_segment(Storage.at(tmp_path / "again"), 2, None).write()
        assert len(parts) == 3


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_worker_that_prefetches_finds_keys_once_and_before_it_is_asked(prefetch):
    batch = batch_of([1, 2, 1], [7, 7, 8])

    def dedups(here):  # asked after what the worker does when nobody waits
        frame = answer(here.loader.call(SparseVerb.STATS, (1,)))
        return [span[0] for span in from_text(frame.arrays[0])["spans"]].count("dedup")

    with site(prefetch=prefetch) as here:
        (trainer,) = here.trainers
        kept = here.keep(batch)
        assert [dedups(here) for _ in range(2)][-1] == prefetch
        give(trainer.pull(kept), 1.0)
        assert dedups(here) == 1


def test_bytes_are_counted_once_each():
    batch = batch_of([1, 2, 1], [7, 7, 8])
    with site(num_servers=2) as here:
        (trainer,) = here.trainers
        pulled = trainer.pull(here.keep(batch))
        give(pulled, 1)
        push(pulled, 1)
        trainer.sync()
        told = trainer.stats().processes
        assert here.stats[0].wire_bytes() == {"gradients": 3 * 2 * 4 * 4}
        worker, servers = (
            wire_bytes(told["embedding-worker 0"]["counters"]),
            [wire_bytes(told[f"embedding-server {s}"]["counters"]) for s in (0, 1)],
        )
        # 4 unique keys of 8 bytes, their counts of 4; lengths of two tables to each of two servers
        assert worker == {"ids": 4 * 12 + 2 * 2 * 8, "embeddings": 3 * 2 * 4 * 4, "gradients": 4 * 4 * 4}
        assert sum(wire["embeddings"] for wire in servers) == 4 * 4 * 4
        trainer.peek(batch).wait()
        assert here.stats[0].wire_bytes()["ids"] == 6 * 8 + 7 * 4


def test_text_and_numbers_survive():
    from girih.comm.service import as_float, as_integer

    for value in (None, {"a": [1, "ü"]}, ""):
        assert from_text(as_text(value)) == value
    for number in (0.0, -1.5, 1e-300, float("inf")):
        assert as_float(as_integer(number)) == number


def test_halves_on_the_wire_lose_little():
    batch = batch_of(range(50), range(50))
    with site(float16_embeddings=True, float16_gradients=True) as here, site() as exact:
        found = []
        for each in (here, exact):
            (trainer,) = each.trainers
            pulled = trainer.pull(each.keep(batch))
            embeddings = give(pulled, np.linspace(-1, 1, 50))
            push(pulled, 1)
            trainer.sync()
            found.append((embeddings.stacked(("user", "item")).detach(), torch.from_numpy(each.peek(batch))))
        for close, true in zip(*found, strict=True):
            assert 0 < (close - true).abs().max() <= true.abs().max() * 2**-11
