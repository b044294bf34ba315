"""Rules that keep operators on trainers, from what is known of recommenders (HT §3.2.1); another one is another line here.

Operators with parameters go to group servers, so that a group has one copy of them, and all operators of their module with them. For
the others it is a matter of traffic: a server is asked, and answers, over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from girih.planner.operators import Operator
from girih.planner.tagging.index import Index


@dataclass(frozen=True, slots=True)
class Surroundings:
    """An operator, and where its neighbours are so far.

    Attributes:
        from_trainers, from_servers: bytes that it reads from operators there.
        feeds_servers: whether an operator on a server reads from it.
        gathers: whether it reads from several operators on servers, none of which needs another's output.
        hands_out: whether several operators on servers read from it, none of which needs another's output.
    """

    operator: Operator
    from_trainers: float
    from_servers: float
    feeds_servers: bool
    gathers: bool
    hands_out: bool


def surroundings_of(index: Index, number: int, on_servers: Sequence[bool]) -> Surroundings:
    """Looks at the neighbours of an operator."""
    from_trainers = from_servers = 0.0
    for producer in index.producers[number]:
        size = index.consumers[producer][number].bytes_per_example
        from_servers += size if on_servers[producer] else 0.0
        from_trainers += 0.0 if on_servers[producer] else size
    readers = [consumer for consumer in index.consumers[number] if on_servers[consumer]]
    return Surroundings(
        operator=index.operators[number],
        from_trainers=from_trainers,
        from_servers=from_servers,
        feeds_servers=bool(readers),
        gathers=index.are_independent([p for p in index.producers[number] if on_servers[p]]),
        hands_out=index.are_independent(readers),
    )


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
    read = around.from_trainers + around.from_servers
    return (
        around.from_trainers > 0
        and around.from_trainers >= around.from_servers
        and around.operator.output_bytes_per_example <= read
    )


def _feeds_trainers(around: Surroundings) -> bool:
    read = around.from_servers + around.from_trainers
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


def by_rules(index: Index) -> tuple[list[bool], list[str]]:
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
            kept = [_rule_for(index, operator, on_servers) for operator in operators]
            if on_servers[operators[0]] and all(kept):
                changed = True
                for operator, rule in zip(operators, kept, strict=True):
                    on_servers[operator], reasons[operator] = False, rule
    return on_servers, reasons


def _rule_for(index: Index, operator: int, on_servers: Sequence[bool]) -> str:
    """The first rule that keeps an operator on trainers, as a reason; empty where none does."""
    around = surroundings_of(index, operator, on_servers)
    return next((f"{rule.name}: {rule.reason}" for rule in RULES if rule.keeps(around)), "")
