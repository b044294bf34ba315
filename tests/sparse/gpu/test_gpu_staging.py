"""Pinned memory and streams between the wire and a real GPU."""

import numpy as np
import pytest
import torch

from girih.comm.pinned import FromDevice, Parcels, ToDevice

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]
BUSY = 20_000_000  # cycles, about 10 ms


def arrays(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((20_000 + seed, 16), (7, 1), (0, 3))]


def test_batches_that_are_sent_ahead_come_as_they_were():
    lane = ToDevice(torch.device("cuda"))
    for _ in range(3):
        sent = [lane.send(arrays(seed)) for seed in range(5)]
        torch.cuda._sleep(BUSY)
        sums = [[part * 2 for part in each.taken_over()] for each in sent]
        del sent  # their memory is free for the next ones, which wait for the sums
        for seed, found in enumerate(sums):
            for part, array in zip(found, arrays(seed), strict=True):
                np.testing.assert_array_equal(part.cpu().numpy(), 2 * array)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # which setting it says once
def test_what_comes_back_is_what_was_computed_and_the_host_does_not_wait_to_begin():
    lane = FromDevice(torch.device("cuda"))
    for seed in range(10):
        given = [torch.from_numpy(array).cuda() for array in arrays(seed)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(BUSY)
            coming = lane.begin([None, *(part + 1 for part in given)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with coming.arrived() as (nothing, *found):
            assert nothing is None
            for part, array in zip(found, arrays(seed), strict=True):
                np.testing.assert_array_equal(part, array + np.float32(1))


def test_a_parcel_goes_there_and_back():
    parcels, (array, *_) = Parcels(torch.device("cuda")), arrays(0)
    flat = array.reshape(-1)
    np.testing.assert_array_equal(parcels.back(parcels.there(flat) * 2), 2 * flat)
