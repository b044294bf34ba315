"""Checks of models: lists of features, and schemas for which a formula has no answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from girih.errors import ConfigError, nearest
from girih.schema import DEFAULT_DIM, Schema


def some_of(
    name: str, values: Sequence[str], features: Sequence[str], kind: str = "feature"
) -> tuple[str, ...]:
    """Refuses anything but a list of some features, each of them once; returns them in the order of ``features``.

    Args:
        kind: what ``features`` are, for errors.
    """
    if not isinstance(values, list | tuple) or not values:
        shown = list(values) if isinstance(values, tuple) else values
        raise ConfigError(f"{name} = {shown!r}: expected a list of features, and at least one of them")
    for value in values:
        if value not in features:
            raise ConfigError(f"{name}: {value!r} is not a {kind}{nearest(str(value), features)}")
        if values.count(value) > 1:
            raise ConfigError(f"{name}: {value!r} is listed {values.count(value)} times; name it once")
    return tuple(feature for feature in features if feature in values)


def one_label(model: str, schema: Schema) -> None:
    """Refuses schemas with several labels."""
    names = schema.labels.names
    if len(names) > 1:
        raise ConfigError(
            f"{model}: {len(names)} labels {list(names)}, the model has one output; "
            "keep one label, or take a model of several, as mmoe or dnn"
        )


def two_probabilities(model: str, schema: Schema) -> None:
    """Refuses schemas but those of two labels with binary cross-entropy: a click, and what follows it."""
    names, losses = schema.labels.names, schema.labels.losses
    if len(names) != 2 or set(losses) != {"bce"}:
        raise ConfigError(
            f"{model}: labels {list(names)} with losses {list(losses)}; expected two with bce: a click, and what follows it"
        )


def one_dim(model: str, schema: Schema, features: Iterable[str] | None = None) -> int:
    """The width that features share (all, if not named); the default width where there are none.

    Raises:
        ConfigError: widths differ.
    """
    wanted = None if features is None else set(features)
    dims = {f.name: schema.dim_of(f) for f in schema.sparse if wanted is None or f.name in wanted}
    by_dim = {dim: name for name, dim in reversed(dims.items())}
    if len(by_dim) > 1:
        shown = ", ".join(f"{dim} (as {name!r})" for dim, name in sorted(by_dim.items()))
        raise ConfigError(f"{model}: features must have one dim, received {shown}; set dim alike")
    return next(iter(by_dim), DEFAULT_DIM)
