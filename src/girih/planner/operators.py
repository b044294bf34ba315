"""The dense half as a graph of operators, and where each is run: frozen, JSON both ways.

A tagging is operator → device: "trainer", or "server 0" to "server k-1" (HT §3.2's node_name).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Generic, TypeVar

from girih import config
from girih.config.bounds import Bounds, NonNegative
from girih.errors import ConfigError

TRAINER = "trainer"
Member = TypeVar("Member", bound=Hashable)
Tagging = Mapping[str, str]
"""Operator → device, of a whole graph."""


def server_name(index: int) -> str:
    """The name of a group server in a tagging."""
    return f"server {index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, forward and backward together.

    Attributes:
        name: unique in the graph, as in "top.0" or "cat_1".
        kind: class of a module, or name of a function: "Linear", "PairwiseDots", "cat".
        module: path of the module whose parameters it uses; "" for none. Operators of one module are placed together.
        flops_per_example: a multiplication and an addition count 2; forward and backward.
        parameter_bytes: of the parameters that it is the first operator to use.
        output_bytes_per_example: of its output, in float32.
        seconds_per_example: measured on one core, forward and backward; None where it was not measured.
        movable: whether it can be run elsewhere than on trainers: not where it reads embeddings or the containers of inputs, or
            its class cannot be imported elsewhere.
    """

    name: str
    kind: str
    module: str = ""
    flops_per_example: NonNegative = 0.0
    parameter_bytes: Annotated[int, Bounds(0)] = 0
    output_bytes_per_example: NonNegative = 0.0
    seconds_per_example: NonNegative | None = None
    movable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor that goes from one operator to another, forward; its gradient comes back in the backward pass.

    Attributes:
        rows_per_example: vectors along its last dimension; 0 where that is the batch, which is one row.
        number_bytes: of each of its numbers: 4 of float32, 2 of bfloat16; 0 of others, which codecs leave as they are.
    """

    producer: str
    consumer: str
    bytes_per_example: NonNegative
    rows_per_example: NonNegative = 1.0
    number_bytes: Annotated[int, Bounds(0, 4)] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGraph:
    """Operators, each behind those that it reads from, and the tensors between them.

    Attributes:
        cut: layers of the model of which the operators have the parts.

    Raises:
        ConfigError: a name twice, an edge of an unknown operator, or one that goes backward.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    cut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        order = {operator.name: number for number, operator in enumerate(self.operators)}
        if len(order) != len(self.operators):
            names = [operator.name for operator in self.operators]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"operator graph: {twice!r} is there twice; expected one operator of each name")
        for edge in self.edges:
            for name in (edge.producer, edge.consumer):
                if name not in order:
                    raise ConfigError(
                        f"operator graph: an edge from {edge.producer!r} to {edge.consumer!r}; no operator is {name!r}"
                    )
            if order[edge.producer] >= order[edge.consumer]:
                raise ConfigError(
                    f"operator graph: {edge.consumer!r} reads from {edge.producer!r}, which is not before it; expected"
                    " operators in the order in which they run"
                )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: object, where: str = "operator graph") -> OperatorGraph:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a key is missing, unknown or of another type, or the graph is refused.
        """
        graph: OperatorGraph = config.build(cls, mapping, where)
        return graph


class DisjointSets(Generic[Member]):
    """Members that are joined into sets, each of which goes by one of its members."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._parents = {member: member for member in members}

    def root(self, member: Member) -> Member:
        """The member that a set goes by."""
        while (parent := self._parents[member]) != member:
            self._parents[member] = self._parents[parent]
            member = parent
        return member

    def join(self, one: Member, other: Member) -> None:
        """Makes two sets one, which goes by the first one's member."""
        self._parents[self.root(other)] = self.root(one)

    def sets(self) -> list[list[Member]]:
        """All sets, by their first members; members keep their order."""
        sets: dict[Member, list[Member]] = {}
        for member in self._parents:
            sets.setdefault(self.root(member), []).append(member)
        return list(sets.values())


ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
"""Optimizers of ``torch.optim`` that move a part of a parameter as they would move it within the whole."""
