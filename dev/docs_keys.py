"""The page of the site that lists each key of a config file, by section."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docs_options import PAGE, REQUIRED, Option, link, options_of, path_of, readable
from torch import Tensor

from girih import models, optim, strategies
from girih.app.run_config import KINDS, SECTIONS
from girih.config.options import Options
from girih.dense.options import GRAPH_ONLY, OPTIMIZERS
from girih.schema import Defaults, Feature, Labels
from girih.tables import Table

KIND_OF = KINDS | {"defaults": Defaults, "tables": Table, "labels": Labels}
"""Section → its options, if it has the same keys in each config."""
CHOICES: dict[str, tuple[str, str | None, str, Mapping[str, Any]]] = {
    "features": ("kind", None, "the kind of the feature", {each.kind: each for each in get_args(Feature)}),
    "model": ("name", None, "the model; ``file.py:Class`` names your own, and its parameters are the other keys", models.BY_NAME),
    "sparse_optimizer": ("name", "adagrad", "the optimizer of rows", optim.BY_NAME),
    "first_order_optimizer": ("name", None, "the optimizer of first-order weights; without this section, the optimizer of rows", optim.BY_NAME),
    "dense_optimizer": ("name", "adam", "the optimizer of dense parameters", OPTIMIZERS),
    "strategy": ("name", "local", "the strategy; ``file.py:Class`` names your own, and its parameters are the other keys", strategies.BY_NAME),
}  # fmt: skip
"""Section → the key that selects its other keys, with default and meaning, and the options by its value."""
NO_KEYS = ("schema", "params", *GRAPH_ONLY)
"""Parameters of models and optimizers that a config does not set."""
INTRO = """\
# Config keys

This page lists each key with its type, default and meaning. "unset" means that the key is left out; in Python this is `None`.
[The config file](../config.md) explains the keys with examples.
"""
HEAD = "\n| key | type | default | meaning |\n|---|---|---|---|\n"
WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", Any: "any value", NoneType: "unset"}  # fmt: skip


def key_lines() -> Iterator[str]:
    """A part for each section, and below it one for each value of the key that selects the others.

    Raises:
        LookupError: a section that is neither in ``KIND_OF`` nor in ``CHOICES``, or a key without a meaning.
    """
    yield INTRO
    if lost := set(SECTIONS) ^ (KIND_OF.keys() | CHOICES.keys()):
        raise LookupError(
            f"KIND_OF and CHOICES of {__file__} differ from the sections of a config: {', '.join(lost)}"
        )
    chosen = {kind for *_, kinds in CHOICES.values() for kind in kinds.values()}
    shown: set[Any] = set()
    for section in SECTIONS:
        name = f"[[{section}]]" if section in ("features", "tables") else f"[{section}]"
        yield f"\n## `{name}` {{ #{section} }}\n"
        if section in KIND_OF:
            yield from tables_of(KIND_OF[section], chosen)
            continue
        key, default, meaning, kinds = CHOICES[section]
        links = " or ".join(f"[`{value}`](#{anchor(kind)})" for value, kind in kinds.items())
        yield HEAD + row(key, links, REQUIRED if default is None else default, meaning)
        for value, kind in kinds.items():
            if kind not in shown:
                shown.add(kind)
                yield f'\n### `{key} = "{value}"` of `{name}` {{ #{anchor(kind)} }}\n'
                yield from tables_of(kind, chosen)


def tables_of(kind: Any, chosen: set[Any]) -> Iterator[str]:
    """The table of a class's options, then those of classes that these options take and that no section shows."""
    options = [option for option in options_of(kind) if option.name not in NO_KEYS]
    yield HEAD if options else "\nIt has no other keys.\n"
    for option in options:
        yield row(option.name, type_text(option.hint), option.default, meaning_of(option, kind))
    for option in options:
        for inner in dict.fromkeys(kinds_in(option.hint)):
            if inner not in chosen:
                name = getattr(inner, "name", None)
                title = f"`{option.name}`" + (f' with `name = "{name}"`' if isinstance(name, str) else "")
                yield f"\n### {title} {{ #{anchor(inner)} }}\n"
                yield from tables_of(inner, chosen)


def row(key: str, values: str, default: Any, meaning: str) -> str:
    cells = f"`{key}`", values, "required" if default is REQUIRED else toml(default), readable(meaning)
    line = "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |\n"
    return PAGE.sub(lambda page: link(page[1], "../"), line)


def meaning_of(option: Option, kind: Any) -> str:
    if kind.__module__.startswith("torch."):
        return re.split(r"\. |\s*\(default", option.meaning)[0] or f"see ``torch.optim.{kind.__name__}``"
    if not option.meaning:
        raise LookupError(
            f"{path_of(kind)}: no meaning of {option.name}; add it to Attributes: of the docstring"
        )
    return option.meaning


def anchor(kind: Any) -> str:
    return path_of(kind).replace(".", "-").lower()


def toml(value: Any) -> str:
    return "unset" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def kinds_in(hint: Any) -> Iterator[type[Options]]:
    """Yields the classes of options in a hint."""
    if isinstance(hint, type) and issubclass(hint, Options):
        yield hint
    for part in get_args(hint):
        yield from kinds_in(part)


def type_text(hint: Any) -> str:
    """The values that a key takes, in words."""
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part not in (..., Tensor)]
    if origin is Annotated:
        return str(parts[1].text(parts[0]))
    if origin is Literal:
        return " or ".join(map(toml, parts))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_text, parts)))
    if parts and isinstance(origin, type):
        return f"a {'table' if issubclass(origin, Mapping) else 'list'}, each {type_text(parts[-1])}"
    if isinstance(hint, type) and issubclass(hint, Options):
        return f"[{getattr(hint, 'name', 'table')}](#{anchor(hint)})"
    return WORDS.get(hint) or f"`{hint.__name__}`"
