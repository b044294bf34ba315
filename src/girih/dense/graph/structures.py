"""Nested arguments and results: their leaves, and the way to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Key = int | str


def leaves(value: Any) -> Iterator[Any]:
    """All that lies in tuples, lists, dicts and slices, in order."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with another value for each leaf, called in the order of :func:`leaves`."""
    if isinstance(value, tuple):
        found = [mapped(each, function) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    if isinstance(value, list):
        return [mapped(each, function) for each in value]
    if isinstance(value, dict):
        return {key: mapped(each, function) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return function(value)


def ways(value: Any) -> Iterator[tuple[Key, ...]]:
    """The keys that lead to each leaf, in the order of :func:`leaves`."""
    if isinstance(value, (tuple, list)):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        yield ()
        return
    for key, each in items:
        for way in ways(each):
            yield (key, *way)
