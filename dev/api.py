"""Compares the public names of girih with dev/api.txt, which has one line for each name. ``make api``

    python dev/api.py            prints each change, and ends with status 1 if there is one
    python dev/api.py --write    writes the file

griffe reads the source without importing it. So the script needs neither torch nor the history of git.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("api.txt")
MODULES = ("errors", "models", "nn", "optim", "tables")
"""Public modules. Public are the names in ``__all__``, or the classes of a module without ``__all__``."""
MORE = ("strategies.Strategy",)
"""Public names below other modules."""
OPERATORS = ("__getitem__", "__init__", "__iter__")
"""Methods with underscores that users call."""
UNPACKED = re.compile(r"Unpack\[(\w+)\]")
ADVICE = """\
The public names changed. If you mean it:
1. python dev/api.py --write
2. If a name was removed or changed, add a line to CHANGELOG.md. docs/stability.md says how long an old name stays.
Otherwise, restore the names."""


def main() -> int:
    lines = api_lines(load())
    if "--write" in sys.argv[1:]:
        FILE.write_text("".join(f"{line}\n" for line in lines.values()))
        return 0
    before = {name_of(line): line for line in FILE.read_text().splitlines()}
    changes = list(changes_between(before, lines))
    if changes:
        print("\n".join([*changes, ADVICE]), file=sys.stderr)
    return 1 if changes else 0


def load() -> griffe.Module:
    """Reads all modules of girih."""
    package = griffe.load("girih", search_paths=[ROOT / "src"], try_relative_path=False)
    if not isinstance(package, griffe.Module):
        raise TypeError(f"girih: expected a module, received {type(package).__name__}")
    return package


def public_names(package: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """Yields each public name below girih, such as ``optim.Adam``, with its definition."""
    for name in [*exports_of(package), *MORE]:
        yield name, definition(package[name])
    for module in MODULES:
        for name in exports_of(package[module]):
            yield f"{module}.{name}", definition(package[module][name])


def page_names(package: griffe.Module) -> list[str]:
    """Returns the public names that have a page in the documentation. The names below a module are on its page."""
    return [name for name in [*exports_of(package), *MORE] if not name.startswith("__")]


def exports_of(module: griffe.Module) -> list[str]:
    """Returns the public names of a public module."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [name for name, member in module.members.items() if member.is_public and member.is_class]


def definition(member: griffe.Object | griffe.Alias) -> griffe.Object:
    """Returns the definition that a name leads to."""
    return member.final_target if isinstance(member, griffe.Alias) else member


def api_lines(package: griffe.Module) -> dict[str, str]:
    """Returns name → line of all public names, of the public members of classes, and of options of functions."""
    lines: dict[str, str] = {}
    for name, target in public_names(package):
        path = f"girih.{name}"
        lines |= lines_of(path, target)
        if isinstance(target, griffe.Class):
            lines[path] += f"({', '.join(map(str, target.bases))})" if target.bases else ""
            for each, member in members_of(target):
                lines |= lines_of(f"{path}.{each}", member)
    return dict(sorted(lines.items()))


def lines_of(path: str, target: griffe.Object) -> dict[str, str]:
    """Returns the lines of one name: a signature, an annotation with a default, or the name alone."""
    if isinstance(target, griffe.Attribute):
        has_default = target.value is not None and "property" not in target.labels
        return {path: f"{path}: {target.annotation}" + (f" = {target.value}" if has_default else "")}
    if not isinstance(target, griffe.Function):
        return {path: path}
    options = {f"{path}.{name}": f"{path}.{name}: {option.annotation}" for name, option in options_of(target)}
    return {path: f"{path}{target.signature().removeprefix(target.name)}"} | options


def options_of(function: griffe.Function) -> Iterator[tuple[str, griffe.Attribute]]:
    """Yields the keywords of a function that its annotation takes from a TypedDict: ``Unpack[ReadOptions]``."""
    for parameter in function.parameters:
        if match := UNPACKED.fullmatch(str(parameter.annotation)):
            kind = definition(function.modules_collection[function.resolve(match[1])])
            if isinstance(kind, griffe.Class):
                for each in (*reversed(kind.mro()), kind):
                    yield from each.attributes.items()


def members_of(kind: griffe.Class) -> Iterator[tuple[str, griffe.Object]]:
    """Yields public members, inherited ones too: methods, properties, options, and attributes that a docstring names."""
    documented = set(attributes_in(kind))
    for name, member in kind.all_members.items():
        target = definition(member)
        is_hidden = name.startswith("_") and name not in OPERATORS
        if not is_hidden and (name in documented or is_shown(target)):
            yield name, target


def is_shown(member: griffe.Object) -> bool:
    """True for methods and properties, and for options: attributes with an annotation in the body of a class."""
    if not isinstance(member, griffe.Attribute):
        return member.is_function
    is_in_body = "class-attribute" in member.labels or member.value is None
    is_option = "instance-attribute" in member.labels and member.annotation is not None and is_in_body
    return "property" in member.labels or is_option


def attributes_in(kind: griffe.Class) -> Iterator[str]:
    """Yields the names below ``Attributes:`` in the docstrings of a class and its bases."""
    for each in (kind, *kind.mro()):
        for section in each.docstring.parse("google", warnings=False) if each.docstring else ():
            if section.kind is griffe.DocstringSectionKind.attributes:
                yield from (attribute.name for attribute in section.value)


def name_of(line: str) -> str:
    """Returns the name of a line."""
    return line.split("(")[0].split(":")[0]


def changes_between(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Yields a text for each difference."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"removed: {before[name]}"
        elif name not in before:
            yield f"added: {after[name]}"
        elif before[name] != after[name]:
            yield f"changed: {before[name]}\n     to: {after[name]}"


if __name__ == "__main__":
    sys.exit(main())
