"""Features, labels and tables of a model's input: frozen, pure, loadable from TOML."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from girih import config
from girih.config.bounds import Count, Positive
from girih.config.options import Options
from girih.errors import ConfigError, nearest
from girih.files.sealed import digest
from girih.tables import Dim, Table

Pooling = Literal["sum", "mean", "sqrtn"]
PartOfTime = Literal["hour", "weekday"]
Transform = Literal["log1p", "standardize", "hour", "weekday"]
TimeUnit = Literal["s", "ms", "us", "ns"]
LabelLoss = Literal["bce", "mse", "huber"]
DEFAULT_DIM = 16


class _Feature(Options):
    """The options of all features.

    Attributes:
        name: the name of the feature in the model, in the order of the schema.
        column: the column of the data; None takes ``name``.
    """

    owner = "feature {self.name!r}: "
    kind: ClassVar[str]
    name: str
    column: str | None = None

    def _check(self) -> None:
        if not self.name:
            raise ConfigError("feature: name = '': expected a non-empty string")

    @property
    def source(self) -> str:
        """The column of the feature."""
        return self.column or self.name


class _Sparse(_Feature):
    """The options of features with a table.

    Attributes:
        dim: width of the embedding, from 1 to 4096; None takes the dim of the table, or else the default, 16.
        table: the table of the rows; None takes a table with the feature's name. Features may share a table.
        pooling: the vector of several ids: their "mean", their "sum", or "sqrtn", the sum over √n.
        max_length: limit of the ids per example. A longer list keeps its last ids. None sets no limit.
        separator: the text between the ids of a cell; None for a single id, or for columns of lists.
        list_format: "brackets" reads cells such as ``[1, 2]`` as lists.
        padding_id: an id that does not count. Lists drop it; as a single id it is a missing id.
        float_ids: True reads the number 7.0 as the id 7.
    """

    misplaced_options: ClassVar[Mapping[str, str]] = {"embedding_dim": "did you mean 'dim'?"}
    dim: Dim | None = None
    table: str | None = None
    pooling: Pooling = "mean"
    max_length: Count | None = None
    separator: str | None = None
    list_format: Literal["brackets"] | None = None
    padding_id: int | str | None = None
    float_ids: bool | None = None

    def _check(self) -> None:
        _Feature._check(self)
        if self.separator == "":
            raise ConfigError(
                f"{self._owner()}separator is empty; leave it out for columns that are lists already"
            )
        if self.separator and self.list_format:
            raise ConfigError(
                f"{self._owner()}separator and list_format both say how a cell is split; drop one"
            )
        if isinstance(self.padding_id, int) and not -(1 << 63) <= self.padding_id < 1 << 64:
            raise ConfigError(
                f"{self._owner()}padding_id = {self.padding_id}: expected an id, from -2**63 to 2**64 - 1, or a text"
            )

    @property
    def is_split(self) -> bool:
        """True if cells of text hold lists of ids."""
        return self.separator is not None or self.list_format is not None

    @property
    def table_name(self) -> str:
        """The table of the feature's rows: its own table, unless it shares one."""
        return self.table or self.name


class Categorical(_Sparse):
    """An id, or a bag of ids, pooled to one vector of ``dim``.

    Attributes:
        bucketize: rising boundaries that turn a number into an id: the number of boundaries that are ≤ the number.
        weights: a list column with one weight per id.
        weight_separator: the text between an id and its weight, such as ``:`` in ``7:0.5``.
        transform: makes an id from a time: its "hour", 0 to 23, or its "weekday", 0 (Monday) to 6.
        time_unit: the unit of times that are numbers since 1970: "s", "ms", "us" or "ns"; None means seconds.

    Examples:
        A feature with a table of its own, a bag whose ids are separated by ``|``, and ids from prices:

        >>> import girih
        >>> user = girih.Categorical(name="user", dim=16)
        >>> tags = girih.Categorical(name="tags", separator="|", pooling="sum", table="tag")
        >>> price = girih.Categorical(
        ...     name="price_range", column="price", bucketize=[5, 20, 100]
        ... )
        >>> user.table_name, tags.table_name, price.source
        ('user', 'tag', 'price')
    """

    kind = "categorical"
    bucketize: tuple[float, ...] | None = None
    weights: str | None = None
    weight_separator: str | None = None
    transform: PartOfTime | None = None
    time_unit: TimeUnit | None = None

    def __post_init__(self) -> None:
        if self.bucketize is not None:
            object.__setattr__(self, "bucketize", _boundaries(self._owner(), self.bucketize))
        Options.__post_init__(self)

    def _check(self) -> None:
        _Sparse._check(self)
        if self.bucketize and (self.separator or self.weights):
            raise ConfigError(
                f"{self._owner()}bucketize makes one id from one number; drop separator and weights"
            )
        if self.transform and (self.separator or self.weights or self.bucketize or self.max_length):
            raise ConfigError(
                f"{self._owner()}{self.transform} makes one id from one time; drop separator, weights, max_length and bucketize"
            )
        if self.weight_separator == "" or (self.weight_separator and self.weight_separator == self.separator):
            raise ConfigError(
                f"{self._owner()}weight_separator = {self.weight_separator!r}: expected text between an id and its weight, as ':' in 7:0.5"
            )
        if self.weight_separator and self.weights:
            raise ConfigError(
                f"{self._owner()}weights and weight_separator both say where weights are; drop one"
            )
        if self.transform or self.bucketize:
            for option in ("list_format", "weight_separator", "padding_id", "float_ids"):
                if getattr(self, option) is not None:
                    raise ConfigError(
                        f"{self._owner()}{option} is for ids, and {'bucketize' if self.bucketize else self.transform} makes ids of"
                        " numbers or times; drop one"
                    )
        _check_time_unit(self)

    @property
    def part_of_time(self) -> PartOfTime | None:
        """The part of a time that becomes the id; None if the values are not times."""
        return self.transform


class Sequence(_Sparse):
    """Ids in order, oldest first. A model that reads sequences gets them whole; other models get them pooled.

    Examples:
        The last 50 clicks of a user, with the rows of the feature ``item``:

        >>> import girih
        >>> history = girih.Sequence(
        ...     name="history", table="item", separator=" ", max_length=50
        ... )
        >>> history.table_name, history.is_split
        ('item', True)
    """

    kind = "sequence"


class Numeric(_Feature):
    """A single number, float32. The transforms are applied in order, and null then becomes 0.

    Attributes:
        transform: one transform, or several. "log1p" is ln(1 + max(x, 0)). "standardize" takes mean and deviation from
            the training data, and comes last. "hour" and "weekday" read a time, as in :class:`Categorical`, and come
            first.
        time_unit: the unit of times that are numbers since 1970: "s", "ms", "us" or "ns"; None means seconds.

    Examples:
        >>> import girih
        >>> price = girih.Numeric(name="price", transform=["log1p", "standardize"])
        >>> hour = girih.Numeric(name="hour", column="time", transform="hour", time_unit="ms")
        >>> price.transform, hour.part_of_time
        (('log1p', 'standardize'), 'hour')
    """

    kind = "numeric"
    transform: Transform | tuple[Transform, ...] = ()
    time_unit: TimeUnit | None = None

    def __post_init__(self) -> None:
        if isinstance(self.transform, str):
            object.__setattr__(self, "transform", (self.transform,))
        Options.__post_init__(self)

    def _check(self) -> None:
        _Feature._check(self)
        if "standardize" in self.transform[:-1]:
            raise ConfigError(f"{self._owner()}standardize must be the last transform")
        if any(part in self.transform[1:] for part in ("hour", "weekday")):
            raise ConfigError(
                f"{self._owner()}hour or weekday must be the first transform, and the only one of a time"
            )
        _check_time_unit(self)

    @property
    def part_of_time(self) -> PartOfTime | None:
        """The part of a time that becomes the number; None if the values are not times."""
        return "hour" if "hour" in self.transform else "weekday" if "weekday" in self.transform else None


Feature = Categorical | Sequence | Numeric


class Labels(Options):
    """Labels to predict: columns in [0, 1], conditions on columns, or any numbers if the loss is ``mse`` or ``huber``.

    Attributes:
        names: the labels, in the order of the model's outputs. A text is one name.
        derive: label → a condition that makes it, such as ``{"liked": "rating >= 4"}``. Operators are ``== != < <= > >=
            in``. Other labels are columns of their name.
        weight: a column of weights of the examples, at least 0; None weights all equally.
        loss: label → ``bce`` (binary cross-entropy of a logit, the default), ``mse`` or ``huber`` (of the plain
            output).
        huber_delta: the error from which Huber's loss grows linearly.
        missing: a label that is null or NaN makes a bad row (``error``), or does not count (``skip``).
        mask: label → a column of 0 and 1, or a condition as in ``derive``. If the condition is not met, the label does
            not count for the example, and its value is not read.
        label_weight: label → a column of weights of the examples for this label, in addition to ``weight``.

    Examples:
        >>> import girih
        >>> labels = girih.Labels(
        ...     names=["liked", "watch_s"],
        ...     derive={"liked": "rating >= 4"},
        ...     loss={"watch_s": "huber"},
        ... )
        >>> labels.losses
        ('bce', 'huber')
    """

    owner = "labels: "

    names: tuple[str, ...]
    derive: Mapping[str, str] = field(default_factory=dict)
    weight: str | None = None
    loss: Mapping[str, LabelLoss] = field(default_factory=dict)
    huber_delta: Positive = 1.0
    missing: Literal["error", "skip"] = "error"
    mask: Mapping[str, str] = field(default_factory=dict)
    label_weight: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: Any = self.names
        object.__setattr__(self, "names", (names,) if isinstance(names, str) else names)
        Options.__post_init__(self)

    def _check(self) -> None:
        if not self.names:
            raise ConfigError("labels: names is empty; expected at least one label")
        _refuse_duplicates("label", self.names)
        for option in ("derive", "loss", "mask", "label_weight"):
            for name in getattr(self, option):
                if name not in self.names:
                    raise ConfigError(
                        f"labels: {option} has {name!r}, which is not among names = {list(self.names)}"
                    )

    @property
    def losses(self) -> tuple[LabelLoss, ...]:
        """The loss of each label, in the order of ``names``."""
        return tuple(self.loss.get(name, "bce") for name in self.names)

    @property
    def are_weighted(self) -> bool:
        """True if an example may have different weights for different labels."""
        return self.missing == "skip" or bool(self.mask or self.label_weight)


class Defaults(Options):
    """The section ``[defaults]``: values for features and tables that do not set them.

    Attributes:
        dim: width of embeddings.
    """

    dim: Dim = DEFAULT_DIM


@dataclass(frozen=True)
class Schema:
    """The features, labels and tables that data, model and store share.

    Args:
        features: in the order in which models see them.
        labels: one name, a list of names, or :class:`Labels`.
        tables: only tables that differ from the defaults, or that are shared and have their own options.
        defaults: the dim of tables if neither the table nor its features set one.
        null_values: texts that mean a missing value, in files, dictionaries and requests.

    Raises:
        ConfigError: duplicates, unknown tables, or features that disagree on a shared table's dim.

    Examples:
        >>> import girih
        >>> schema = girih.Schema(
        ...     features=[
        ...         girih.Categorical(name="user", dim=16),
        ...         girih.Sequence(name="history", table="item", dim=8),
        ...         girih.Numeric(name="age", transform="standardize"),
        ...     ],
        ...     labels="clicked",
        ... )
        >>> schema.names, [table.name for table in schema.tables]
        (['user', 'history', 'age'], ['user', 'item'])
    """

    features: tuple[Feature, ...]
    labels: Labels
    tables: tuple[Table, ...] = ()
    null_values: tuple[str, ...] = ()

    def __init__(
        self,
        features: Seq[Feature],
        labels: Labels | str | Seq[str],
        tables: Seq[Table] = (),
        defaults: Defaults | None = None,
        null_values: Seq[str] = (),
    ) -> None:
        _refuse_others("features", features, Categorical, Sequence, Numeric)
        _refuse_others("tables", tables, Table)
        if not isinstance(labels, Labels):
            labels = Labels(names=labels)  # type: ignore[arg-type]
        nulls = config.build(tuple[str, ...], list_of_texts(null_values), "null_values")
        self._set(features=tuple(features), labels=labels, null_values=nulls)
        if not self.features:
            raise ConfigError("features: the list is empty; expected at least one feature")
        _refuse_duplicates("feature", self.names)
        _refuse_duplicates("table", [t.name for t in tables])
        for feature in self.features:
            if feature.source in self.labels.names and feature.source not in self.labels.derive:
                raise ConfigError(
                    f"feature {feature.name!r} reads the label {feature.source!r}: the model would see the answer"
                )
        self._set(tables=self._resolve(tuple(tables), defaults or Defaults()))

    def _set(self, **attributes: object) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _resolve(self, declared: tuple[Table, ...], defaults: Defaults) -> tuple[Table, ...]:
        by_name = {table.name: table for table in declared}
        used: dict[str, Table] = {}
        for feature in self.sparse:
            name = feature.table_name
            table = used.get(name) or by_name.get(name) or Table(name=name, dim=feature.dim)
            if table.dim is not None and feature.dim not in (None, table.dim):
                raise ConfigError(
                    f"table {name!r} has dim {table.dim}, feature {feature.name!r} has dim {feature.dim}"
                )
            known = feature.dim in (None, table.dim)
            used[name] = table if known else replace(table, dim=feature.dim)
        for name in by_name:
            if name not in used:
                raise ConfigError(f"table {name!r} is used by no feature{nearest(name, used)}")
        return tuple(table if table.dim else replace(table, dim=defaults.dim) for table in used.values())

    @property
    def names(self) -> list[str]:
        """The names of all features, in order."""
        return [feature.name for feature in self.features]

    @cached_property
    def sparse(self) -> tuple[Categorical | Sequence, ...]:
        """Categorical and sequence features, in order: the F features of a batch."""
        return tuple(f for f in self.features if not isinstance(f, Numeric))

    @cached_property
    def numeric(self) -> tuple[Numeric, ...]:
        """Numeric features, in order: the X columns of a batch."""
        return tuple(f for f in self.features if isinstance(f, Numeric))

    @cached_property
    def _table_by_name(self) -> Mapping[str, Table]:
        return {table.name: table for table in self.tables}

    def table_of(self, feature: Categorical | Sequence) -> Table:
        """Returns the table of a feature's rows, with its dim filled in.

        Raises:
            KeyError: a feature of another schema.
        """
        return self._table_by_name[feature.table_name]

    def dim_of(self, feature: Categorical | Sequence) -> int:
        """Returns the width of a feature's embedding.

        Raises:
            KeyError: a feature of another schema.
        """
        return self.table_of(feature).dim or DEFAULT_DIM

    def narrowed(self, names: Collection[str]) -> Schema:
        """Returns a schema with only the named features, in their order, with their tables and all labels.

        Args:
            names: of features; unknown names are ignored.

        Raises:
            ConfigError: no feature is left.
        """
        features = [feature for feature in self.features if feature.name in names]
        used = {feature.table_name for feature in features if not isinstance(feature, Numeric)}
        tables = [table for table in self.tables if table.name in used]
        return Schema(features, self.labels, tables, null_values=self.null_values)

    def to_dict(self) -> dict[str, object]:
        """Returns plain mappings and lists, in the form of a config file's sections."""
        sections = {
            "features": config.plain(self.features),
            "labels": config.plain(self.labels),
            "tables": config.plain(self.tables),
        }
        return sections | ({"data": {"null_values": list(self.null_values)}} if self.null_values else {})

    def fingerprint(self) -> str:
        """Returns 16 hex digits that change if anything changes that trained rows or inputs depend on.

        Names of columns do not count: the same feature may have another name in other files.
        """
        shape = [
            [
                config.plain(f) | {"column": None, "dim": not isinstance(f, Numeric) and self.dim_of(f)}
                for f in self.features
            ],
            {"names": list(self.labels.names), "derive": dict(self.labels.derive), "weight": None},
        ]
        if self.labels.loss:
            shape.append({"loss": self.labels.losses})
        return digest(json.dumps(shape, sort_keys=True))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object], where: str = "schema") -> Schema:
        """Builds a schema from the sections ``features``, ``labels``, ``tables``, ``defaults`` and ``data`` (only
        ``null_values``).

        Args:
            mapping: the sections, in the form of :meth:`to_dict`.
            where: names the mapping in errors.

        Raises:
            ConfigError: a section or an option is missing, unknown or invalid.
        """
        for key in ("features", "labels"):
            if key not in mapping:
                raise ConfigError(
                    f"{where}: section [{'[features]' if key == 'features' else key}] is missing"
                )
        features = _listed(mapping, "features", Feature, where)
        tables = _listed(mapping, "tables", Table, where)
        labels = config.build(Labels, mapping["labels"], f"{where}: [labels]")
        defaults = config.build(Defaults, mapping.get("defaults", {}), f"{where}: [defaults]")
        data = mapping.get("data", {})
        null_values = data.get("null_values", ()) if isinstance(data, Mapping) else ()
        with config.located(where):
            return cls(features, labels, tables, defaults, null_values)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Reads ``[[features]]``, ``[labels]``, ``[[tables]]``, ``[defaults]`` and ``data.null_values`` of a config file.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: a section or an option is missing, unknown or invalid.
        """
        return cls.from_dict(config.read_toml(path), str(path))


def list_of_texts(value: object) -> Any:
    """Returns a list of texts as a list. A single text stays unchanged, so that a later check refuses it."""
    return list(value) if isinstance(value, Seq) and not isinstance(value, str) else value


def _check_time_unit(feature: Categorical | Numeric) -> None:
    if feature.time_unit and feature.part_of_time is None:
        raise ConfigError(
            f"{feature._owner()}time_unit = {feature.time_unit!r}: is only for times, with transform = 'hour' or 'weekday'; drop it"
        )


def _listed(mapping: Mapping[str, object], key: str, kind: object, where: str) -> list[Any]:
    """Builds the tables of a list such as ``[[features]]``."""
    items, built = mapping.get(key, ()), []
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{where}: {key}: expected [[{key}]], a list of tables")
    for number, item in enumerate(items, start=1):
        is_named = isinstance(item, Mapping) and "name" in item
        name = repr(item["name"]) if is_named else f"number {number}"
        built.append(config.build(kind, item, f"{where}: [[{key}]] {name}"))
    return built


def _boundaries(owner: str, values: Iterable[float]) -> tuple[float, ...]:
    try:
        edges = tuple(float(edge) for edge in values)
    except (TypeError, ValueError):
        edges = ()
    if not edges or list(edges) != sorted(set(edges)) or not all(map(math.isfinite, edges)):
        shown = list(values) if isinstance(values, tuple) else values
        raise ConfigError(f"{owner}bucketize = {shown!r}: expected rising, finite boundaries")
    return edges


def _refuse_others(label: str, values: object, *kinds: type) -> None:
    others = [item for item in values if not isinstance(item, kinds)] if isinstance(values, Seq) else [values]
    if others:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{label}: {others[0]!r} is not a {names}; expected a list of those")


def _refuse_duplicates(label: str, names: Seq[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{label} {name!r} is listed {count} times; names must differ")
