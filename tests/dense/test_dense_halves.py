"""Every dense half by the same suite."""

from companions import together
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.parameter_server import ParameterServerReplica
from girih.dense.halves.replica import Replica
from girih.dense.halves.substituted import SubstitutedReplica
from girih.hierarchical.hogwild import HogwildReplica
from girih.planner.placement import Placement, modulo
from support.dense_suite import DenseHalfSuite, dense_schema, dense_spec
from support.fakes import FakeDense
from support.votes import drop


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


class TestHogwild(DenseHalfSuite):
    def make(self):
        return HogwildReplica(dense_spec(), Alone(), nets=2)


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


class TwoAllReduced(OfTwo):
    def make(self):
        return AllReducedReplica(dense_spec(), self.ranks)

    def spoil(self, half):
        one = self.case(0)
        drop(half.compute(one.batch, one.embeddings()))  # the first call tries gradients out
        return super().spoil(half)


class Leaving(ParameterServerReplica):
    """Waits for the others before it ends: rank 0 has the server, which they may still ask."""

    def close(self):
        self._ranks.barrier()
        super().close()


class TwoServed(OfTwo):
    def make(self):
        half = Leaving(dense_spec(), self.ranks, staleness=0, address="shm://", secret=b"of this run")
        self.ranks.barrier()  # both begin with the same parameters
        return half


class TwoSubstituted(OfTwo):
    """Each has features of its own, and names no other's."""

    split = False

    def __init__(self, ranks):
        super().__init__(ranks)
        self.placement = modulo(dense_schema(), ranks.size)
        self.own = self.placement.features_of(ranks.rank)

    def make(self):
        schema = dense_schema()
        return SubstitutedReplica(
            dense_spec(), self.ranks, schema=schema, placement=self.placement, split=self.split
        )

    def case(self, seed, size=6):
        return super().case(seed, size).of_features(self.own)

    def nan_case(self, feature):
        return super().nan_case(feature) if feature in self.own else (self.case(0), "nan")


class TwoSplit(TwoSubstituted):
    """The example with the NaN is in the share of one, its feature is the other's."""

    split = True

    def nan_case(self, feature):
        return super().nan_case(feature)[0], "nan"


SUITES = (TwoAllReduced, TwoServed, TwoSubstituted, TwoSplit)


def two_trainers(ranks):
    """All tests of all suites, one by one."""
    passed = []
    for kind in SUITES:
        suite = kind(ranks)
        for name in sorted(name for name in dir(suite) if name.startswith("test_")):
            getattr(suite, name)()
            passed.append(f"{kind.__name__}.{name}")
    return passed


def test_two_trainers_pass_the_suite_together():
    one, other = together(two_trainers)
    assert one == other
    assert len(one) == len(SUITES) * len([name for name in dir(DenseHalfSuite) if name.startswith("test_")])
