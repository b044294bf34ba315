"""Extensions of griffe for the pages of Python names.

- Roles of docstrings, as in :class:`girih.Trainer`, become plain code.
- A subclass of ``Options`` gets its constructor: it becomes a dataclass without a decorator, which griffe cannot see.
- The docstring of such a subclass also describes the options of its bases, and the errors of all options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]*)`")
OPTIONS = "girih.config.options.Options"
SECTION = re.compile(r"^Attributes:\n(?: +.*\n)+", re.MULTILINE)
RAISES = re.compile(r"^Raises:\n(?: +.*\n?)+", re.MULTILINE)
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
        options = pkg[OPTIONS.removeprefix("girih.")].docstring
        errors = RAISES.search(options.value) if options else None
        raises = errors[0].rstrip() if errors else ""
        keyword = griffe.ExprKeyword("kw_only", "True")
        call = griffe.ExprCall(griffe.ExprName("dataclasses.dataclass"), [keyword])
        for kind in kinds:
            kind.decorators.append(griffe.Decorator(call, lineno=kind.lineno, endlineno=kind.lineno))
            complete(kind, [entries.get(each.path, {}) for each in (kind, *kind.mro())], raises)


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


def complete(kind: griffe.Class, entries: list[dict[str, str]], raises: str) -> None:
    """Writes the options of a class and its bases below ``Attributes:``, and the errors below ``Raises:``.

    Args:
        entries: of the class, then of its bases; the first text of an option counts.
        raises: the section, for a docstring without errors.
    """
    if kind.docstring is None:
        return
    known: set[str] = set()
    text = ""
    for each in entries:
        fresh = {names: entry for names, entry in each.items() if known.isdisjoint(names.split(", "))}
        known |= {name for names in fresh for name in names.split(", ")}
        text = "".join(fresh.values()) + text  # options of bases come first, as in the signature
    rest, mark, examples = SECTION.sub("", f"{kind.docstring.value}\n").partition("Examples:\n")
    parts = [
        rest,
        f"Attributes:\n{text}" if text else "",
        "" if RAISES.search(rest) else raises,
        mark + examples,
    ]
    kind.docstring.value = "\n\n".join(part.rstrip() for part in parts if part)
