"""Extensions of griffe for the pages of Python names.

- Roles of docstrings, as in :class:`girih.Trainer`, become plain code.
- A subclass of ``Options`` gets its constructor: it becomes a dataclass without a decorator, which griffe cannot see.
- The docstring of such a subclass also describes the options of its bases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]*)`")
OPTIONS = "girih.config.options.Options"
SECTION = re.compile(r"^Attributes:\n(?: +.*\n)+", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): .*\n(?:     .*\n)*", re.MULTILINE)


class PlainRoles(griffe.Extension):
    """Rewrites each docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)


class OptionClasses(griffe.Extension):
    """Completes subclasses of ``Options``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe after it has read all modules."""
        kinds = [kind for kind in classes_in(pkg) if OPTIONS in (base.path for base in kind.mro())]
        entries = {kind.path: dict(entries_of(kind)) for kind in kinds}
        keyword = griffe.ExprKeyword("kw_only", "True")
        call = griffe.ExprCall(griffe.ExprName("dataclasses.dataclass"), [keyword])
        for kind in kinds:
            kind.decorators.append(griffe.Decorator(call, lineno=kind.lineno, endlineno=kind.lineno))
            complete(kind, [entries.get(each.path, {}) for each in (kind, *kind.mro())])


def classes_in(module: griffe.Module) -> Iterator[griffe.Class]:
    """Yields the classes of a module and its submodules."""
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from classes_in(member)


def entries_of(kind: griffe.Class) -> Iterator[tuple[str, str]]:
    """Yields the names and the text of each entry below ``Attributes:``."""
    section = SECTION.search(f"{kind.docstring.value}\n" if kind.docstring else "")
    for entry in ENTRY.finditer(section[0] if section else ""):
        yield entry[1], entry[0]


def complete(kind: griffe.Class, entries: list[dict[str, str]]) -> None:
    """Writes the options of a class and its bases below ``Attributes:``; the text of the nearest class counts."""
    known: set[str] = set()
    text = "Attributes:\n"
    for names, entry in ((names, entry) for each in entries for names, entry in each.items()):
        if known.isdisjoint(names.split(", ")):
            text += entry
        known |= set(names.split(", "))
    if not known or kind.docstring is None:
        return
    docstring = f"{kind.docstring.value}\n"
    if SECTION.search(docstring):
        kind.docstring.value = SECTION.sub(lambda _: text, docstring, count=1)
    else:
        before, mark, after = docstring.partition("Examples:\n")
        kind.docstring.value = f"{before.rstrip()}\n\n{text}\n{mark}{after}"
