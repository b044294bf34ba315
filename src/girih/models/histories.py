"""Histories and their targets, as models of sequences are told of them: the option ``attention``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from girih.errors import ConfigError, nearest
from girih.models import checks
from girih.schema import Categorical, Schema, Sequence

Pairs = tuple[tuple[str, str], ...]
"""(history, target): a sequence feature, and the categorical one that it is read for."""

NOT_SUBSTITUTABLE = "it reads histories by layers that are not computed in parts; use the model 'din', or strategy 'synchronous'"
"""Why strategy ``substitution`` refuses the models of sequences but DIN."""


def pairs_of(
    model: str, schema: Schema, attention: Mapping[str, str] | None, others: Collection[str] = ()
) -> Pairs:
    """The histories that a model reads whole, each with its target, in the schema's order.

    Args:
        model: named in errors.
        attention: history → target. None pairs each sequence with the one categorical feature of its table.
        others: sequences that are no histories.

    Raises:
        ConfigError: a feature is unknown or of another kind, or has no target, or more than one.
    """
    return _by_table(model, schema, others) if attention is None else _checked(schema, attention)


def dims_of(model: str, schema: Schema, pairs: Pairs) -> dict[str, int]:
    """History → the dim that it shares with its target.

    Raises:
        ConfigError: the two have different dims.
    """
    return {pair[0]: checks.one_dim(f"{model}: {' and '.join(pair)}", schema, pair) for pair in pairs}


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
                f"{model}: sequence {sequence.name!r} shares its table {sequence.table_name!r} with {targets}; "
                "expected one categorical feature, its target: share a table with it, or name it in attention"
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
