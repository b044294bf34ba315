"""The dense half as a graph of operators, and the device of each operator.

The classes are frozen, and have a JSON form.

A tagging maps each operator to a device: "trainer", or "server 0" to "server k-1" (node_name in HT §3.2).
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
"""Operator → device, for all operators of a graph."""


def server_name(index: int) -> str:
    """Returns the name of a group server in a tagging."""
    return f"server {index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, with its forward and backward pass.

    Attributes:
        name: unique in the graph, for example "top.0" or "cat_1".
        kind: class of a module, or name of a function: "Linear", "PairwiseDots", "cat".
        module: path of the module whose parameters it uses; "" for none. All operators of a module have the same
            device.
        flops_per_example: operations of the forward and backward pass. A multiplication with an addition counts 2.
        parameter_bytes: bytes of parameters that no earlier operator uses.
        output_bytes_per_example: bytes of its output, in float32.
        seconds_per_example: measured seconds of the forward and backward pass on one core, or None.
        movable: True if it can run outside trainers. False if it reads embeddings or the containers of inputs. False if
            another process cannot import its class.
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
    """A tensor that one operator sends to another in the forward pass. Its gradient returns in the backward pass.

    Attributes:
        rows_per_example: vectors per example, along the last dimension. If the batch is the last dimension, this is 0:
            the tensor is one row.
        number_bytes: bytes per number: 4 for float32, 2 for bfloat16. 0 for other dtypes, which codecs do not change.
    """

    producer: str
    consumer: str
    bytes_per_example: NonNegative
    rows_per_example: NonNegative = 1.0
    number_bytes: Annotated[int, Bounds(0, 4)] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGraph:
    """Operators, each one after the operators that it reads from, and the tensors between them.

    Attributes:
        cut: layers of the model that are split into several operators.

    Raises:
        ConfigError: a name occurs twice, or an edge has an unknown operator or goes backward.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    cut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        order = {operator.name: number for number, operator in enumerate(self.operators)}
        if len(order) != len(self.operators):
            names = [operator.name for operator in self.operators]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"operator graph: {twice!r} occurs twice; expected different names")
        for edge in self.edges:
            for name in (edge.producer, edge.consumer):
                if name not in order:
                    raise ConfigError(
                        f"operator graph: an edge from {edge.producer!r} to {edge.consumer!r}; there is no operator {name!r}"
                    )
            if order[edge.producer] >= order[edge.consumer]:
                raise ConfigError(
                    f"operator graph: {edge.consumer!r} reads from {edge.producer!r}, which comes later; expected"
                    " operators in the order in which they run"
                )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: object, where: str = "operator graph") -> OperatorGraph:
        """Inverts :meth:`to_dict`.

        Raises:
            ConfigError: a key is missing, unknown or of the wrong type, or the graph is refused.
        """
        graph: OperatorGraph = config.build(cls, mapping, where)
        return graph


class DisjointSets(Generic[Member]):
    """Disjoint sets of members that can be joined. One member represents each set."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._parents = {member: member for member in members}

    def root(self, member: Member) -> Member:
        """Returns the representative of a member's set."""
        while (parent := self._parents[member]) != member:
            self._parents[member] = self._parents[parent]
            member = parent
        return member

    def join(self, one: Member, other: Member) -> None:
        """Joins two sets. The representative of the first one stays."""
        self._parents[self.root(other)] = self.root(one)

    def sets(self) -> list[list[Member]]:
        """Returns all sets in the order of their first members; members keep their order."""
        sets: dict[Member, list[Member]] = {}
        for member in self._parents:
            sets.setdefault(self.root(member), []).append(member)
        return list(sets.values())


ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
"""Optimizers of ``torch.optim`` that may update a parameter in pieces. The result is the same as for the whole
parameter.
"""
