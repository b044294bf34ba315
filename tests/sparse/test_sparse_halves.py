"""Every sparse half by the same suite."""

import inspect
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from companions import together
from girih.checkpoint.parts import PartReader
from girih.planner.placement import Placement
from girih.sparse.halves.collective import CollectiveSparse
from girih.sparse.halves.local import FeatureParallelSparse, LocalSparse
from girih.sparse.halves.row_updates import numbers_on
from girih.sparse.halves.staging import Staging
from remote_site import site
from support import cases
from support.fakes import FakeSparse
from support.sparse_suite import SparseHalfSuite


class Alone:
    """The only trainer."""

    first, rank, size = True, 0, 1

    def __init__(self):
        self.numbers = iter(range(1000))

    def next_number(self):
        return next(self.numbers)

    def broadcast(self, value):
        return value

    def barrier(self):
        pass

    def largest(self, values):
        return list(values)

    def sum_by_name(self, counts):
        return dict(counts)

    def begin_exchange(self, sent, sent_sizes, received_sizes):
        return lambda: sent


class TestFake(SparseHalfSuite):
    def make(self):
        return FakeSparse(cases.spec())


class TestLocal(SparseHalfSuite):
    def make(self):
        return LocalSparse(cases.spec())


class TestLocalOnThreads(SparseHalfSuite):
    def make(self):
        return LocalSparse(cases.spec(shards=3))


class TestLocalAhead(SparseHalfSuite):
    def make(self):
        return LocalSparse(cases.spec(shards=2), micro_batches=3, ahead=True)


class TestCollectiveOfOne(SparseHalfSuite):
    def make(self):
        return CollectiveSparse(cases.spec(), Alone())


class TestCollectiveOfOneAhead(SparseHalfSuite):
    def make(self):
        return CollectiveSparse(cases.spec(), Alone(), micro_batches=2, ahead=True)


class TestFeatureParallel(SparseHalfSuite):
    def make(self):
        return FeatureParallelSparse(cases.spec(), Alone(), Placement(dict.fromkeys(cases.FEATURES, 0)))


class TestRemote(SparseHalfSuite):
    num_servers = 1
    staging = None

    @pytest.fixture(autouse=True)
    def _sites(self):
        self.sites = {}
        with ExitStack() as self.stack:
            yield

    def make(self):
        here = self.stack.enter_context(
            site(cases.spec(), num_servers=self.num_servers, staging=self.staging)
        )
        (trainer,) = here.trainers
        self.sites[id(trainer)] = here
        return trainer

    def dispatched(self, half, batch):
        return self.sites[id(half)].keep(batch)


class TestRemoteOfTwoServers(TestRemote):
    num_servers = 2
    # each server refuses its own part; a step that both would not refuse is refused by the dense half, before
    test_a_gradient_that_is_not_finite_is_refused_and_moves_nothing = None


class TestRemoteStaged(TestRemote):
    """By the way to a device and back, as where the dense half is on a GPU."""

    def staging(self):
        return Staging(torch.device("cpu"))


class OfTwo(SparseHalfSuite):
    """Two real trainers, who do the same."""

    contributors = 2

    def __init__(self, ranks):
        self.ranks = ranks

    def make(self):
        return CollectiveSparse(cases.spec(shards=2), self.ranks)

    def saved(self, half, storage):
        own = self.ranks.gather(dict(super().saved(half, storage).parts))
        told = self.ranks.broadcast(own and own[0] | own[1])
        return PartReader(storage, told)


class OfTwoInterleaved(OfTwo):
    """The same with all that is done ahead, and groups in turn."""

    def make(self):
        names = [group.spec.name for group in cases.spec().groups()]
        return CollectiveSparse(
            cases.spec(shards=2),
            self.ranks,
            micro_batches=2,
            ahead=True,
            interleaving=[[name] for name in names[1:]],
            excluded=names[:1],
        )


def two_trainers_interleaved(ranks):
    return two_trainers(ranks, OfTwoInterleaved)


def two_trainers(ranks, kind=OfTwo):
    suite, passed = kind(ranks), []
    for name in sorted(name for name in dir(suite) if name.startswith("test_")):
        test = getattr(suite, name)
        if "tmp_path" in inspect.signature(test).parameters:
            with tempfile.TemporaryDirectory() as directory:
                test(Path(ranks.broadcast(directory)))
                ranks.barrier()
        else:
            test()
        passed.append(name)
    return passed


@pytest.mark.parametrize("play", [two_trainers, two_trainers_interleaved])
def test_two_trainers_pass_the_suite_together(play):
    one, other = together(play)
    assert one == other
    assert len(one) >= 10


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_of_groups_are_one_tensor_on_the_device_of_the_vote(device):
    made = torch.zeros(1, dtype=torch.int32, device=device)
    for numbers, size in (([], 0), ([3, -1], 2), ([made, -1], 2)):
        found = numbers_on(torch.device(device), numbers)
        assert (found.shape, found.dtype, found.device.type) == ((size,), torch.float64, device)
    assert numbers_on(torch.device("cpu"), [torch.tensor([5], dtype=torch.int32), -1]).tolist() == [5, -1]
