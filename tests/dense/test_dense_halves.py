"""Every dense half by the same suite."""

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
        placement = Placement(dict.fromkeys(names, 0), 1)
        return SubstitutedReplica(dense_spec(), Alone(), schema=schema, placement=placement)
