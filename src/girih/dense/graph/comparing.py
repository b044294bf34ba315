"""Recordings of several batches, compared call by call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from girih.dense.graph.calls import Attribute, Call, ConstantTensor, NetInput, Opaque, Recording, Ref, Result
from girih.dense.graph.structures import leaves, mapped


def live(recording: Recording, more: Collection[Ref]) -> tuple[Recording, list[int]]:
    """The calls of which something comes of what is returned, or of ``more``; and their numbers before."""
    kept = (recording.logits, *more)
    needed = {ref.call for ref in kept if isinstance(ref, Result)}
    for number in reversed(range(len(recording.calls))):
        if number in needed:
            call = recording.calls[number]
            needed |= {ref.call for ref in leaves((call.args, call.kwargs)) if isinstance(ref, Result)}
    numbers = sorted(needed)
    places = {number: place for place, number in enumerate(numbers)}

    def moved(value: Any) -> Any:
        return replace(value, call=places[value.call]) if isinstance(value, Result) else value

    calls = []
    for call in (recording.calls[number] for number in numbers):
        args, kwargs = mapped((call.args, call.kwargs), moved)
        calls.append(replace(call, args=args, kwargs=kwargs))
    left = {where: moved(ref) for where, ref in recording.left.items() if more}
    return replace(recording, calls=calls, logits=moved(recording.logits), left=left), numbers


def check_alike(one: Recording, other: Recording) -> None:
    """Raises Opaque with the deeper scope where two recordings are not of the same calls."""
    for a, b in zip(one.calls, other.calls, strict=False):
        if not _alike(a, b):
            raise Opaque(
                max(a.scope, b.scope, key=len),
                f"its calls differ from batch to batch, or as it trains: {word_of(a)}, {word_of(b)}",
            )
    if (
        len(one.calls) != len(other.calls)
        or one.left.keys() != other.left.keys()
        or one.logits != other.logits
    ):
        scope = max(each.calls[-1].scope if each.calls else "" for each in (one, other))
        raise Opaque(scope, "it makes another number of calls in other batches, or as it trains")


def _alike(a: Call, b: Call) -> bool:
    if (a.kind, a.target, a.scope, a.ways) != (b.kind, b.target, b.scope, b.ways):
        return False
    pairs = list(zip(leaves((a.args, a.kwargs)), leaves((b.args, b.kwargs)), strict=False))
    if mapped((a.args, a.kwargs), lambda _: None) != mapped((b.args, b.kwargs), lambda _: None):
        return False
    return all(
        type(x) is type(y)
        and (x == y or not isinstance(x, (NetInput, Attribute, ConstantTensor, Result, str)))
        for x, y in pairs
    )


def flags_of(trained: Recording, evaluated: Recording) -> frozenset[tuple[int, int]]:
    """Arguments that follow the mode: the call's number, and the argument's place."""
    found = set()
    for number, (a, b) in enumerate(zip(trained.calls, evaluated.calls, strict=True)):
        pairs = zip(leaves((a.args, a.kwargs)), leaves((b.args, b.kwargs)), strict=True)
        for place, (x, y) in enumerate(pairs):
            if x != y:
                if type(x) is not bool:
                    raise Opaque(a.scope, f"{word_of(a)} is given {x!r} as it trains, and else {y!r}")
                found.add((number, place))
    return frozenset(found)


def word_of(call: Call) -> str:
    """The name of what is called."""
    if call.kind == "function" and call.target is getattr:
        return str(call.args[1])
    return str(getattr(call.target, "__name__", call.target)).strip("_")
