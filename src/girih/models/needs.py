"""The needs of a model: the parts of each feature that it reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from girih.errors import ConfigError, nearest
from girih.schema import Schema, Sequence

Needs = Mapping[str, frozenset[str]]
"""Feature name → some of :data:`KINDS`. A model does not read a feature that is left out."""

EMBEDDING, FIRST_ORDER, SEQUENCE = "embedding", "first_order", "sequence"
KINDS = (EMBEDDING, FIRST_ORDER, SEQUENCE)
"""A pooled vector of the feature's dim, a pooled weight of width 1, the vectors of all ids unpooled."""


def of_all(schema: Schema, *kinds: str) -> dict[str, frozenset[str]]:
    """Returns the same needs for every categorical and sequence feature."""
    return {feature.name: frozenset(kinds) for feature in schema.sparse}


def needs_of(module: object, schema: Schema) -> dict[str, frozenset[str]]:
    """Returns the checked declaration in a module's attribute ``needs``, in the schema's order.

    A module without the attribute reads the embedding of every categorical and sequence feature. Features without needs
    are left out.

    Args:
        module: a model.
        schema: the features of the data.

    Returns:
        Feature → some of "embedding", "first_order" and "sequence": a pooled vector, a pooled weight, and the vectors of
        all ids.

    Raises:
        ConfigError: an unknown feature or need, or whole sequences of a feature that is not a sequence.

    Examples:
        >>> import girih
        >>> schema = girih.Schema(
        ...     [girih.Categorical(name="user"), girih.Numeric(name="age")], labels="clicked"
        ... )
        >>> girih.models.needs_of(girih.models.LR(schema), schema)
        {'user': frozenset({'first_order'})}
    """
    declared: Any = getattr(module, "needs", None)
    owner = type(module).__name__
    if declared is None:
        return of_all(schema, EMBEDDING)
    return check_needs(declared, schema, owner)


def check_needs(declared: object, schema: Schema, owner: str) -> dict[str, frozenset[str]]:
    """Checks needs, and returns them in the schema's order; see :func:`needs_of`.

    Args:
        owner: names the declaring object in errors.
    """
    if not isinstance(declared, Mapping):
        raise ConfigError(
            f"{owner}.needs = {declared!r}: expected a mapping, as in {{'user': {{'embedding'}}}}"
        )
    by_name = {feature.name: feature for feature in schema.sparse}
    numeric = {feature.name for feature in schema.numeric}
    for name, kinds in declared.items():
        if name in numeric:
            raise ConfigError(
                f"{owner}.needs: {name!r} is numeric and has no table; its value comes in `numeric`"
            )
        if name not in by_name:
            raise ConfigError(f"{owner}.needs: unknown feature {name!r}{nearest(name, by_name)}")
        _check_kinds(f"{owner}.needs[{name!r}]", kinds)
        if SEQUENCE in kinds and not isinstance(by_name[name], Sequence):
            raise ConfigError(
                f"{owner}.needs[{name!r}]: 'sequence' of a categorical feature; set kind = 'sequence'"
            )
    return {name: frozenset(declared[name]) for name in by_name if declared.get(name)}


def check_same_needs(module: object, declared: object, schema: Schema) -> None:
    """Refuses a file's needs if they differ from the needs of the model that the file describes.

    Raises:
        ConfigError: they differ, or are invalid.
    """
    expected = needs_of(module, schema)
    if check_needs(declared, schema, "its needs") != expected:
        raise ConfigError(f"its needs differ from the needs of {type(module).__name__}: {expected}")


def _check_kinds(where: str, kinds: object) -> None:
    if isinstance(kinds, str) or not isinstance(kinds, Collection):
        raise ConfigError(f"{where} = {kinds!r}: expected a set, as in {{'embedding', 'first_order'}}")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"{where}: unknown need {kind!r}{nearest(kind, KINDS)}")
    if len(set(kinds)) != len(kinds):
        raise ConfigError(f"{where} = {list(kinds)}: a need is listed twice")
