"""Rules that keep operators on trainers, based on properties of recommenders (HT §3.2.1). To add a rule, add a line.

Operators with parameters go to group servers, with all operators of their module. So a group has one copy of the
parameters. Traffic decides about the other operators, because requests to a server and its answers use the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from girih.planner.operators import Operator
from girih.planner.tagging.index import Index


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The neighbours of an operator, and their devices so far.

    Attributes:
        from_trainers, from_servers: bytes that it reads from operators on trainers and on servers.
        feeds_servers: whether an operator on a server reads from it.
        gathers: whether it reads from several independent operators on servers.
        hands_out: whether several independent operators on servers read from it.
    """

    operator: Operator
    from_trainers: float
    from_servers: float
    feeds_servers: bool
    gathers: bool
    hands_out: bool


def surroundings_of(index: Index, number: int, on_servers: Sequence[bool]) -> Surroundings:
    """Finds the neighbours of an operator."""
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
        keeps: returns whether the rule applies to an operator with these neighbours. girih calls it again if neighbours
            move to trainers.
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
        "it joins outputs that servers can compute in parallel",
        lambda around: around.gathers,
    ),
    TaggingRule(
        "hands out",
        "servers can process its output in parallel",
        lambda around: around.hands_out,
    ),
    TaggingRule(
        "reads from trainers",
        "most of its input is on trainers, and its output is not larger than its input",
        _reads_from_trainers,
    ),
    TaggingRule(
        "feeds trainers",
        "only trainers read from it, and its output is not smaller than its input",
        _feeds_trainers,
    ),
)
HAS_PARAMETERS = "its module has parameters, and a group has one copy of them"
_BETWEEN = "no rule keeps it on trainers"
NOT_MOVABLE = "it cannot be moved"


def by_rules(index: Index) -> tuple[list[bool], list[str]]:
    """Returns whether each operator goes to a server, and the reason. Applies rules until no rule applies any more.

    A bundle stays on trainers if a rule keeps each of its operators.
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
        for number in [*open_bundles, *reversed(open_bundles)]:  # in the order of the data, and in reverse
            operators = index.bundles[number].operators
            kept = [_rule_for(index, operator, on_servers) for operator in operators]
            if on_servers[operators[0]] and all(kept):
                changed = True
                for operator, rule in zip(operators, kept, strict=True):
                    on_servers[operator], reasons[operator] = False, rule
    return on_servers, reasons


def _rule_for(index: Index, operator: int, on_servers: Sequence[bool]) -> str:
    """Returns the first rule that keeps an operator on trainers, as a reason, or "" if no rule does."""
    around = surroundings_of(index, operator, on_servers)
    return next((f"{rule.name}: {rule.reason}" for rule in RULES if rule.keeps(around)), "")
