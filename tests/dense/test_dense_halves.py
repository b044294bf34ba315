"""Every dense half by the same suite."""

from companions import together
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.parameter_server import ParameterServerReplica
from girih.dense.halves.replica import Replica
from girih.dense.halves.substituted import SubstitutedReplica
from girih.planner.placement import Placement
from girih.testing.dense_suite import DenseHalfSuite, dense_schema, dense_spec
from girih.testing.fakes import FakeDense


class Alone:
    """The only trainer."""

    first, rank, size = True, 0, 1

    def broadcast(self, value):
        return value

    def broadcast_tensor(self, tensor):
        pass

    def all_reduce(self, tensor, *, async_op=False):
        pass

    def sum(self, values):
        return [float(value) for value in values]

    def barrier(self):
        pass


class TestFake(DenseHalfSuite):
    def make(self):
        return FakeDense()

    def spoil(self, half):
        half.spoiled = "weight"
        return "weight"


class TestReplica(DenseHalfSuite):
    def make(self):
        return Replica(dense_spec())


class TestAllReduced(DenseHalfSuite):
    def make(self):
        return AllReducedReplica(dense_spec(), Alone())


class TestParameterServer(DenseHalfSuite):
    def make(self):
        return ParameterServerReplica(
            dense_spec(), Alone(), staleness=0, address="shm://", secret=b"of this run"
        )


class TestSubstituted(DenseHalfSuite):
    def make(self):
        schema = dense_schema()
        names = [feature.name for feature in schema.features]
        placement = Placement(dict.fromkeys(names, 0))
        return SubstitutedReplica(dense_spec(), Alone(), schema=schema, placement=placement)


class OfTwo(DenseHalfSuite):
    """Two real trainers, who do the same."""

    def __init__(self, ranks):
        self.ranks = ranks

    def make(self):
        return AllReducedReplica(dense_spec(), self.ranks)


def two_trainers(ranks):
    """Two batches in flight, and micro-batches, with DistributedDataParallel below."""
    suite = OfTwo(ranks)
    suite.test_two_batches_in_flight_have_gradients_of_their_own()
    suite.test_a_discarded_batch_moves_nothing_and_puts_buffers_back()
    suite.test_a_loss_that_is_nan_is_refused_and_names_the_feature()
    suite.test_one_refused_micro_batch_refuses_all()
    suite.test_micro_batches_have_the_loss_and_the_gradients_of_the_whole()
    suite.test_what_was_saved_is_restored()
    return True


def test_two_trainers_pass_the_suite_together():
    assert together(two_trainers) == [True, True]
