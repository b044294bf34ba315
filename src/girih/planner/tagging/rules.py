"""Rules that keep operators on trainers, from what is known of recommenders (HT §3.2.1); another one is another line here.

Operators with parameters go to group servers, so that a group has one copy of them, and all operators of their module with them. For
the others it is a matter of traffic: a server is asked, and answers, over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from girih.planner.operators import Operator
from girih.planner.tagging.index import Index


class Surroundings:
    """An operator's neighbours, and where they are so far."""

    def __init__(self, index: Index, number: int, on_servers: Sequence[bool]) -> None:
        self._index, self._number, self._on_servers = index, number, on_servers
        self._read = [producer for producer in index.producers[number] if on_servers[producer]]
        self._readers = [consumer for consumer in index.consumers[number] if on_servers[consumer]]

    @property
    def operator(self) -> Operator:
        """The operator itself."""
        return self._index.operators[self._number]

    def read_bytes(self, *, on_servers: bool) -> float:
        """Returns the bytes that it reads from operators on servers, or from those on trainers."""
        producers = self._index.producers[self._number]
        read = [
            self._index.consumers[p][self._number] for p in producers if self._on_servers[p] == on_servers
        ]
        return sum(edge.bytes_per_example for edge in read)

    @property
    def feeds_servers(self) -> bool:
        """Whether an operator on a server reads from it."""
        return bool(self._readers)

    @property
    def gathers(self) -> bool:
        """Whether it reads from several operators on servers, none of which needs another's output."""
        return self._index.independent(self._read)

    @property
    def hands_out(self) -> bool:
        """Whether several operators on servers read from it, none of which needs another's output."""
        return self._index.independent(self._readers)


@dataclass(frozen=True, slots=True)
class TaggingRule:
    """A reason to keep operators without parameters on trainers.

    Attributes:
        keeps: whether it applies to an operator with such neighbours. It is asked again where neighbours have become trainers'.
    """

    name: str
    reason: str
    keeps: Callable[[Surroundings], bool]


def _reads_from_trainers(around: Surroundings) -> bool:
    from_trainers, from_servers = around.read_bytes(on_servers=False), around.read_bytes(on_servers=True)
    return (
        from_trainers > 0
        and from_trainers >= from_servers
        and around.operator.output_bytes_per_example <= from_trainers + from_servers
    )


def _feeds_trainers(around: Surroundings) -> bool:
    read = around.read_bytes(on_servers=True) + around.read_bytes(on_servers=False)
    return not around.feeds_servers and around.operator.output_bytes_per_example >= read


RULES = (
    TaggingRule(
        "gathers",
        "it puts together what servers can compute side by side",
        lambda around: around.gathers,
    ),
    TaggingRule(
        "hands out",
        "servers can compute side by side what is made of it",
        lambda around: around.hands_out,
    ),
    TaggingRule(
        "reads from trainers",
        "most of what it reads is on trainers, and it gives out no more than it reads",
        _reads_from_trainers,
    ),
    TaggingRule(
        "feeds trainers",
        "only trainers read from it, and it gives out no less than it reads",
        _feeds_trainers,
    ),
)
HAS_PARAMETERS = "its module has parameters, of which a group has one copy"
_BETWEEN = "no rule keeps it on trainers"
NOT_MOVABLE = "it cannot be moved"


def by_rules(index: Index, rules: Sequence[TaggingRule] = RULES) -> tuple[list[bool], list[str]]:
    """Whether each operator goes to a server, and why: rules are applied until none applies any more.

    A bundle stays on trainers where a rule keeps each of its operators.
    """
    on_servers = [True] * len(index.operators)
    reasons = [_BETWEEN] * len(index.operators)
    open_bundles = []
    for number, bundle in enumerate(index.bundles):
        if not bundle.movable:
            for operator in bundle.operators:
                on_servers[operator], reasons[operator] = False, NOT_MOVABLE
        elif bundle.parameter_bytes:
            for operator in bundle.operators:
                reasons[operator] = HAS_PARAMETERS
        else:
            open_bundles.append(number)
    changed = True
    while changed:
        changed = False
        for number in [*open_bundles, *reversed(open_bundles)]:  # along the data, and against it
            operators = index.bundles[number].operators
            kept = [_rule_for(index, operator, on_servers, rules) for operator in operators]
            if on_servers[operators[0]] and all(kept):
                changed = True
                for operator, rule in zip(operators, kept, strict=True):
                    on_servers[operator], reasons[operator] = False, rule
    return on_servers, reasons


def _rule_for(index: Index, operator: int, on_servers: Sequence[bool], rules: Sequence[TaggingRule]) -> str:
    """The first rule that keeps an operator on trainers, as a reason; empty where none does."""
    around = Surroundings(index, operator, on_servers)
    return next((f"{rule.name}: {rule.reason}" for rule in rules if rule.keeps(around)), "")
