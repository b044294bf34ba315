"""Numbers between a device and the wire: memory is used again once nothing reads it, and holds what was put there."""

import threading

import numpy as np
import pytest
import torch

from girih.comm.pinned import FromDevice, Parcels, ToDevice

CPU = torch.device("cpu")


class Moment:
    """Stands for an event of a GPU."""

    def __init__(self):
        self.come = threading.Event()

    def synchronize(self):
        assert self.come.wait(30)


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def test_what_is_sent_is_there_whatever_is_sent_after_it(monkeypatch):
    lane, moments = ToDevice(CPU), []

    def recorded():
        moments.append(Moment())
        return moments[-1]

    monkeypatch.setattr(lane, "recorded", recorded)
    batches = [arrays(n, (3, 2, 5), (0, 4), (7, 1), (65,)) for n in range(6)]
    for array in batches[0]:
        array.flags.writeable = False  # as what comes from the wire
    sent = [lane.send(batch) for batch in batches]
    for found, batch in zip(sent, batches, strict=True):
        for tensor, array in zip(found.tensors, batch, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.storage_offset() % 64 == 0
    for moment in moments:
        moment.come.set()
    assert [tuple(tensor.shape) for tensor in lane.send([]).tensors] == []


def test_what_comes_back_is_whole_until_it_was_read(monkeypatch):
    lane = FromDevice(CPU)
    batches = [arrays(n, (3, 2), (5,)) for n in range(4)]
    coming = [lane.begin([torch.from_numpy(one), None, torch.from_numpy(other)]) for one, other in batches]
    for each, (one, other) in zip(coming, batches, strict=True):
        with each.arrived() as (first, nothing, second):
            np.testing.assert_array_equal(first, one)
            np.testing.assert_array_equal(second, other)
            assert nothing is None


def test_who_reads_what_comes_waits_for_its_event(monkeypatch):
    lane, moment, read = FromDevice(CPU), Moment(), []
    monkeypatch.setattr(lane, "recorded", lambda: moment)
    coming = lane.begin([torch.ones(3)])

    def reads():
        with coming.arrived() as (array,):
            read.append(array.copy())

    thread = threading.Thread(target=reads)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    moment.come.set()
    thread.join(30)
    np.testing.assert_array_equal(read, [[1, 1, 1]])


@pytest.mark.parametrize("lanes", [False, True])
def test_a_parcel_has_memory_of_its_own(lanes):
    parcels = Parcels(CPU)
    if lanes:  # as on a GPU
        parcels._to, parcels._back = ToDevice(CPU), FromDevice(CPU)
    given = np.arange(5, dtype=np.float32)
    there = parcels.there(given)
    given[:] = 0
    assert there.tolist() == [0, 1, 2, 3, 4]
    found = [parcels.back(there + n) for n in range(3)]
    np.testing.assert_array_equal(found, [there.numpy() + n for n in range(3)])
