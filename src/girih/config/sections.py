"""Converts TOML to frozen dataclasses and back. An unknown key is an error that names the nearest key.

:func:`build` turns a plain mapping into a dataclass by its type hints, :func:`check_call` checks
options against a callable's signature (models, ``torch.optim``), and :func:`plain` goes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from girih.config.bounds import Bounds
from girih.config.toml_hints import mend, no_config
from girih.config.user_code import KINDS, check_class, never_search, run_of
from girih.errors import ConfigError, MissingFileError, kind_of, nearest
from girih.files.whole import write_whole

_MOST_NESTED = 50
_LONG_KEY = re.compile(rf"(?:^|[,{{\[])(?:[^.,=\n{{\[#]*\.){{{_MOST_NESTED}}}", re.MULTILINE)
"""A dotted key. TOML's parser takes quadratic time and memory for it; matching takes linear time."""

_MOST_BYTES = 64 << 20
_MOST_SHOWN = 200  # maximum characters of a value in errors
_TOO_LARGE = 1 << 1023  # larger integers do not fit into a float
_BARE_LIST = re.compile(r"\[([^][{}\"']*)\]")
"""A list whose strings lost their quotes to a shell."""


@contextlib.contextmanager
def located(where: object) -> Iterator[None]:
    """Prefixes errors of the body with their place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_toml(path: str | os.PathLike[str], *, expanded: bool = True) -> dict[str, Any]:
    """Reads a TOML file, with or without expanding ``${NAME}`` from the environment.

    Raises:
        MissingFileError: the file does not exist.
        ConfigError: the file is not TOML, or a variable is not set.
    """
    file = Path(path)
    if not file.is_file():
        hint = " (it is a directory)" if file.is_dir() else ""
        raise MissingFileError(f"{file}: no such config file{hint}; expected a TOML file")
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise ConfigError(f"{file}: {size:,} bytes; expected a config of at most {_MOST_BYTES:,}")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text ({error.reason} at byte {error.start})"
        raise ConfigError(f"{file}: {why}{no_config(file)}") from None
    except PermissionError:
        raise ConfigError(f"{file}: not readable; check its permissions") from None
    try:
        mapping = parse_toml(text)
    except RecursionError:
        raise _nested(str(file)) from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}{mend(file, text, str(error))}") from None
    _check_nesting(mapping, str(file))
    return typing.cast(dict[str, Any], expand(mapping, str(file))) if expanded else mapping


def parse_toml(text: str) -> dict[str, object]:
    """Parses a TOML text.

    Raises:
        ValueError: not TOML, or a number is too long. RecursionError: lists or keys are too deep.
    """
    if _LONG_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def write_toml(path: Path, mapping: Mapping[str, object]) -> None:
    """Writes a mapping as TOML for :func:`read_toml`. Leaves out ``None`` values."""
    import tomli_w  # only writing needs it

    write_whole(path, tomli_w.dumps(plain(mapping)))


def with_overrides(
    path: Path, overrides: Sequence[str] | Mapping[str, object], strategy: str | None, run: Path | None = None
) -> dict[str, Any]:
    """Reads a config file and applies a strategy's name, then overrides.

    Another ``model.name`` drops the options of ``[model]`` in the file, since they belong to the old model.

    Args:
        overrides: each ``section.key=value``, or values by ``section.key``, in any order.
        strategy: replaces all of ``[strategy]``.
        run: a run directory. A file in a run directory is data: see :mod:`girih.config.user_code`.

    Raises:
        ConfigError: not TOML, an invalid override, or a class that the config of a run may not name.
        MissingFileError: the file does not exist.
    """
    written = read_toml(path, expanded=False)
    old = _section(written, "model").get("name")
    if (held := run_of(path, run)) is not None:
        never_search(held, path.resolve().parent)
        classes = classes_in(written, str(path))
        for kind in classes:
            written[kind] = {**_section(written, kind), KINDS[kind]: None}
    if strategy is not None:
        written["strategy"] = {"name": strategy}
    pairs = (
        [(str(key), plain(value), f"overrides: {key!r}") for key, value in overrides.items()]
        if isinstance(overrides, Mapping)
        else [_parsed(override) for override in overrides]
    )
    if any(key == "model.name" and not _same_model(old, value) for key, value, _ in pairs):
        written["model"] = {}
    for pair in pairs:
        _assign(written, *pair)
    if held is not None:
        for kind, name in classes.items():
            key, section = KINDS[kind], written.get(kind)
            if isinstance(section, dict) and section.get(key, name) is None:
                check_class(kind, name, path, held)
                section[key] = name
    _check_nesting(written, f"{path}, with --set")
    return written


def classes_in(mapping: Mapping[str, object], where: str) -> dict[str, str | list[str]]:
    """Returns the user's own classes or functions that each section of a config names."""
    names = {kind: expand(_section(mapping, kind).get(key), where) for kind, key in KINDS.items()}
    return {kind: name for kind, name in names.items() if isinstance(name, str | list) and ":" in str(name)}


def _section(mapping: Mapping[str, object], name: str) -> dict[str, object]:
    """Returns a section; a string stands for a section with this name."""
    section = mapping.get(name)
    return section if isinstance(section, dict) else {"name": section}


def dropped_options(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Returns the options of ``[model]`` that :func:`with_overrides` dropped, because the model changed."""
    old, new = (mapping.get("model") for mapping in (before, after))
    if (
        not isinstance(old, Mapping)
        or not isinstance(new, Mapping)
        or _same_model(old.get("name"), new.get("name"))
    ):
        return []
    return [key for key in old if key not in new]


def _same_model(old: object, new: object) -> bool:
    """Returns whether two names mean one model; paths to the file of the user's own class may differ."""

    def class_name(name: object) -> object:
        return name.rpartition(":")[2] if isinstance(name, str) and ":" in name else name

    return class_name(old) == class_name(new)


def _check_nesting(mapping: Mapping[str, object], where: str) -> None:
    level: list[Any] = [mapping]
    for _ in range(_MOST_NESTED):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, dict | list)]
    if level:
        raise _nested(where)


def _nested(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: lists or keys more than {_MOST_NESTED} deep; expected sections of keys and values"
    )


def expand(value: object, where: str) -> Any:
    """Returns a copy with ``${NAME}`` in strings, at any depth, replaced from the environment.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(value, dict):
        return {key: expand(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, where) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{([^}]*)\}", lambda match: _environment(match[1], where), value)
    return value


def variables_in(value: object) -> dict[str, str]:
    """Returns the environment variables that :func:`expand` would use, by name, without those that are not set."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return {name: text for item in items for name, text in variables_in(item).items()}
    names = re.findall(r"\$\{([^}]*)\}", value) if isinstance(value, str) else []
    return {name: os.environ[name] for name in names if name in os.environ}


def _environment(name: str, where: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"{where}: ${{{name}}} is not set in the environment; export {name}=...")
    return os.environ[name]


def apply_override(mapping: dict[str, object], assignment: str) -> None:
    """Applies ``section.key=value`` in place. The value is parsed as TOML, else taken as a string.

    ``section={...}`` replaces a section. ``features.user.dim=8`` finds a table of ``[[features]]`` or ``[[tables]]`` by name.
    """
    _assign(mapping, *_parsed(assignment))


def _parsed(assignment: str) -> tuple[str, object, str]:
    """Returns key, value and error prefix of ``section.key=value``."""
    path, equals, text = assignment.partition("=")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
        if bare := _BARE_LIST.fullmatch(value):
            quoted = json.dumps([item.strip() for item in bare[1].split(",")], ensure_ascii=False)
            raise ConfigError(
                f"--set {assignment!r}: strings in a list need quotes, for example --set '{path.strip()}={quoted}'"
            ) from None
    except RecursionError:
        raise _nested(f"--set {path.strip()}") from None
    return path.strip() if equals else "", value, f"--set {assignment!r}"


def _assign(mapping: dict[str, object], path: str, value: object, where: str) -> None:
    keys = [key.strip() for key in path.split(".")]
    if not all(keys) or (len(keys) == 1 and not isinstance(value, dict | list)):
        raise ConfigError(f"{where}: expected section.key=value, for example train.epochs=2")
    target: Any = mapping
    for position, key in enumerate(keys[:-1]):
        if isinstance(target, list):
            target = _named(target, key, f"{where}: {keys[position - 1]} has no {keys[position - 1][:-1]}")
        else:
            target = target.setdefault(key, {})
        if not isinstance(target, dict | list):
            raise ConfigError(f"{where}: {'.'.join(keys[: position + 1])} is not a table of options")
    if isinstance(target, list):
        raise ConfigError(
            f"{where}: {'.'.join(keys[:-1])} is a list; expected the name of a feature or table, and a key, for example"
            " features.user.dim=8"
        )
    target[keys[-1]] = value


def _named(tables: list[object], name: str, where: str) -> dict[str, object]:
    """Returns the table with a name in a list such as ``[[features]]``."""
    names = [str(each["name"]) for each in tables if isinstance(each, dict) and "name" in each]
    if name not in names:
        raise ConfigError(f"{where} named {name!r}{nearest(name, names)}")
    return next(each for each in tables if isinstance(each, dict) and each.get("name") == name)


def build(cls: Any, value: object, where: str) -> Any:
    """Turns a plain value into ``cls`` by its type hints.

    A subclass of :class:`Redirecting` has hints about the options of other classes.

    Args:
        cls: a dataclass, or a type hint of dataclasses and plain types. ``name`` (or ``kind``) selects a member of a union
            of dataclasses; a string stands for ``{name = string}``.
        value: the value from TOML.
        where: names the value in errors, for example ``config.toml: [train]``.

    Raises:
        ConfigError: an unknown key, a wrong type or a value that the class refuses.
    """
    if dataclasses.is_dataclass(cls):
        kind = typing.cast(type, cls)
        return value if isinstance(value, kind) else _build_dataclass(kind, value, where)
    if typing.is_typeddict(cls):  # keys are checked when they are read
        cls = Mapping[str, Any]
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if origin in (Union, types.UnionType):
        return _build_union(arguments, value, where)
    if origin is Annotated:
        return _build_bounded(arguments[0], cls.__metadata__[0], value, where)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise ConfigError(f"{where} = {_shown(value)}: expected one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _build_tuple(arguments, value, where)
    if origin in (list, Sequence):
        return list(_build_tuple((arguments[0], ...), value, where))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {_shown(value)}: expected a table of keys and values")
        return {key: build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _build_scalar(cls, value, where)


def check_call(
    function: Callable[..., object], options: Mapping[str, object], where: str, *, skip: int = 1
) -> dict[str, Any]:
    """Checks keyword options against a callable's signature; the first ``skip`` parameters are not options.

    Raises:
        ConfigError: an option that the callable does not have, or one of the wrong type.
    """
    target: Any = function
    if (
        inspect.isclass(function) and function.__init__ is not object.__init__
    ):  # early Python 3.11 shows the parameters of __new__
        target, skip = function.__init__, skip + 1
    parameters, hints = inspect.signature(target).parameters, parameter_hints(target, extras=False)
    known = dict.fromkeys(hints.keys() - {*parameters, "return"}, False)  # options that several classes share
    for parameter in list(parameters.values())[skip:]:
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            known[parameter.name] = parameter.default is parameter.empty
    checked = {}
    for key, value in options.items():
        if key not in known:
            meant = "lr" if key == "learning_rate" and "lr" in known else key
            raise ConfigError(f"{where}: unknown option {key!r}{nearest(meant, known)}")
        checked[key] = build(hints[key], value, f"{where}.{key}") if key in hints else value
    for key, is_required in known.items():
        if is_required and key not in options:
            raise ConfigError(f"{where}: option {key!r} is missing")
    return checked


@functools.cache
def parameter_hints(function: Callable[..., object], *, extras: bool = True) -> dict[str, Any]:
    """Returns the type hints of a callable's parameters, with those of ``**options: Unpack[...]``, without type-checker-only hints."""
    try:
        hints = typing.get_type_hints(function, include_extras=extras)
    except (NameError, TypeError):
        return {}
    for hint in list(hints.values()):
        if typing.get_origin(hint) is typing.Unpack:
            hints |= typing.get_type_hints(typing.get_args(hint)[0], include_extras=extras)
    return hints


def plain(value: object) -> Any:
    """Inverts :func:`build`: dataclasses to mappings, tuples to lists, without ``None``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = _tag_key(type(value))
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain(({tag: getattr(value, tag)} if tag else {}) | fields)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@functools.cache
def hints_of(cls: type[object]) -> dict[str, object]:
    """Returns the type hints of a class, with annotations. Cached, because evaluating them is as slow as building a class."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def fields_of(cls: type) -> dict[str, bool]:
    """Returns the fields that a class takes, and whether each one is required."""
    missing = dataclasses.MISSING
    init_fields = (f for f in dataclasses.fields(cls) if f.init)
    return {f.name: f.default is missing and f.default_factory is missing for f in init_fields}


class Redirecting:
    """Base of classes with hints about options that belong to other classes."""

    __slots__ = ()
    misplaced_options: ClassVar[Mapping[str, str]] = {}
    """Options of other classes, with a hint about the right place."""


def hint_for(cls: type, key: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown key: the class's own hint, else the nearest key."""
    hint = cls.misplaced_options.get(key) if issubclass(cls, Redirecting) else None
    return f"; {hint}" if hint else nearest(key, known)


def _build_dataclass(cls: type, value: object, where: str) -> object:
    tag = _tag_key(cls)
    if isinstance(value, str) and tag == "name":
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {_shown(value)}: expected a table of options")
    hints, known = hints_of(cls), fields_of(cls)
    arguments = {}
    for key, item in value.items():
        if key == tag:
            continue
        if key not in known:
            hint = hint_for(cls, key, [*known, *([tag] if tag else [])])
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        arguments[key] = build(hints[key], item, f"{where} {key}")
    for key, required in known.items():
        if required and key not in arguments:
            raise ConfigError(f"{where}: key {key!r} is missing")
    with located(where):
        return cls(**arguments)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _not_a_table(value: object, where: str, tag: str, by_name: Mapping[str, type]) -> str:
    if isinstance(value, int | float | list):
        return f"{where} = {_shown(value)}: expected a table with the key {tag!r}"
    ours = ", ".join(f"{cls.__name__}(...)" for _, cls in sorted(by_name.items()))
    return f"{where} = {kind_of(value)}: expected one of girih's own: {ours}"


def _build_union(members: tuple[object, ...], value: object, where: str) -> object:
    if value is None and type(None) in members:
        return None
    classes: list[Any] = [member for member in members if dataclasses.is_dataclass(member)]
    if isinstance(value, tuple(c for c in classes if isinstance(c, type))):
        return value
    tagged = [c for c in classes if _tag_key(c)]
    if tagged and (isinstance(value, Mapping | str) or not {str, int, float, bool}.intersection(members)):
        tag = str(_tag_key(tagged[0]))
        by_name = {getattr(c, tag): c for c in tagged}
        if isinstance(value, str):
            value = {tag: value}
        if not isinstance(value, Mapping):
            raise ConfigError(_not_a_table(value, where, tag, by_name))
        if tag not in value:
            raise ConfigError(f"{where}: key {tag!r} is missing; one of {', '.join(sorted(by_name))}")
        name = value[tag]
        if not isinstance(name, str) or name not in by_name:
            raise ConfigError(f"{where}: unknown {tag} {name!r}{nearest(str(name), by_name)}")
        return _build_dataclass(by_name[name], value, where)
    failures = []
    for member in members:
        try:
            if member is not type(None):
                return build(member, value, where)
        except ConfigError as error:
            failures.append(error)
    raise failures[0]


def _build_tuple(arguments: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {_shown(value)}: expected a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(value) != len(arguments):
        raise ConfigError(f"{where} = {_shown(value)}: expected a list of {len(arguments)}")
    return tuple(
        build(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _build_bounded(kind: type, bounds: Bounds, value: object, where: str) -> object:
    try:
        built = build(kind, value, where)
    except ConfigError:
        built = None
    if built is None or not bounds.holds(built):
        value = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"{where} = {_shown(value)}: expected {bounds.text(kind)}")
    return built


def _build_scalar(cls: object, value: object, where: str) -> object:
    if cls is Any:
        return value
    if cls is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _TOO_LARGE:
        return float(value)
    if isinstance(cls, type) and isinstance(value, cls) and not (isinstance(value, bool) and cls is not bool):
        return value
    words: dict[object, str] = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    raise ConfigError(f"{where} = {_shown(value)}: expected {words.get(cls, str(cls))}")


@functools.cache
def _tag_key(cls: type) -> str | None:
    """Returns ``kind`` or ``name``, if the class or a base has it as a class variable; else None."""
    annotations = [vars(base).get("__annotations__", {}) for base in cls.__mro__]
    keys = ("kind", "name")
    return next((k for k in keys if any("ClassVar" in str(each.get(k)) for each in annotations)), None)
