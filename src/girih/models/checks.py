"""Checks of models: lists of features, histories with their targets, and schemas that a formula does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from girih.errors import ConfigError, nearest
from girih.schema import DEFAULT_DIM, Categorical, Schema, Sequence


def some_of(name: str, values: Seq[str], features: Seq[str], kind: str = "feature") -> tuple[str, ...]:
    """Refuses anything except a list of some features, each listed once. Returns them in the order of ``features``.

    Args:
        kind: the kind of ``features``, for errors.
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
            "keep one label, or use a model for several labels, such as mmoe or dnn"
        )


def two_probabilities(model: str, schema: Schema) -> None:
    """Refuses all schemas except two labels with binary cross-entropy: a click, and an event after it."""
    names, losses = schema.labels.names, schema.labels.losses
    if len(names) != 2 or set(losses) != {"bce"}:
        raise ConfigError(
            f"{model}: labels {list(names)} with losses {list(losses)}; expected two with bce: a click, and what follows it"
        )


def one_dim(model: str, schema: Schema, features: Iterable[str] | None = None) -> int:
    """Returns the width that features share (by default all features), or the default width if there are none.

    Raises:
        ConfigError: widths differ.
    """
    wanted = None if features is None else set(features)
    dims = {f.name: schema.dim_of(f) for f in schema.sparse if wanted is None or f.name in wanted}
    by_dim = {dim: name for name, dim in reversed(dims.items())}
    if len(by_dim) > 1:
        shown = ", ".join(f"{dim} (as {name!r})" for dim, name in sorted(by_dim.items()))
        raise ConfigError(f"{model}: features must have one dim, received {shown}; set the same dim")
    return next(iter(by_dim), DEFAULT_DIM)


Pairs = tuple[tuple[str, str], ...]
"""(history, target): a sequence feature, and the categorical feature that attends to it."""

NOT_SUBSTITUTABLE = "it reads histories by layers that are not computed in parts; use the model 'din', or strategy 'synchronous'"
"""Why strategy ``substitution`` refuses models of sequences, except DIN."""


def pairs_of(
    model: str, schema: Schema, attention: Mapping[str, str] | None, others: Collection[str] = ()
) -> Pairs:
    """Returns the histories that a model reads whole, each with its target, in the schema's order.

    Args:
        model: named in errors.
        attention: history → target. None pairs each sequence with the only categorical feature of its table.
        others: sequences that are not histories.

    Raises:
        ConfigError: a feature is unknown or of another kind, or has no target, or more than one.
    """
    return _by_table(model, schema, others) if attention is None else _checked(schema, attention)


def dims_of(model: str, schema: Schema, pairs: Pairs) -> dict[str, int]:
    """Returns history → the dim that it shares with its target.

    Raises:
        ConfigError: the two have different dims.
    """
    return {pair[0]: one_dim(f"{model}: {' and '.join(pair)}", schema, pair) for pair in pairs}


def _by_table(model: str, schema: Schema, others: Collection[str]) -> Pairs:
    sequences = [f for f in schema.sparse if isinstance(f, Sequence) and f.name not in others]
    categorical = [feature for feature in schema.sparse if isinstance(feature, Categorical)]
    if not sequences:
        raise ConfigError(
            f"{model}: the schema has no sequence feature; set kind = 'sequence' for the history"
        )
    pairs = []
    for sequence in sequences:
        targets = [feature.name for feature in categorical if feature.table_name == sequence.table_name]
        if len(targets) != 1:
            raise ConfigError(
                f"{model}: sequence {sequence.name!r} shares its table {sequence.table_name!r} with {targets or 'no other feature'}; "
                f"expected one categorical feature, its target: if this is 'item', use --set features.{sequence.name}.table=item, or name it in attention"
            )
        pairs.append((sequence.name, targets[0]))
    return tuple(pairs)


def _checked(schema: Schema, attention: Mapping[str, str]) -> Pairs:
    if not isinstance(attention, Mapping) or not attention:
        raise ConfigError(f"attention = {attention!r}: expected a table of sequence = target")
    sequences = [feature.name for feature in schema.sparse if isinstance(feature, Sequence)]
    targets = [feature.name for feature in schema.sparse if isinstance(feature, Categorical)]
    for name, target in attention.items():
        if name not in sequences:
            raise ConfigError(f"attention: {name!r} is not a sequence feature{nearest(name, sequences)}")
        if target not in targets:
            hint = nearest(target, targets)
            raise ConfigError(f"attention.{name} = {target!r}: not a categorical feature{hint}")
    return tuple((name, attention[name]) for name in sequences if name in attention)
