"""The config section ``[data]``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from girih.config.bounds import Bounds, Count
from girih.config.options import Options
from girih.data import readers
from girih.data.dataset import BATCH_SIZE, MOST_EXAMPLES, SHUFFLE_ROWS, Dataset
from girih.data.decode.where import parse_where
from girih.data.kafka.topic import SCHEME, Topic
from girih.data.paths import NothingThereError, Paths, relative_to
from girih.data.split import Cuts, Split, find_cuts
from girih.errors import ConfigError, MissingFileError
from girih.schema import Schema

SplitName = Literal["train", "valid", "test"]
_OF_TEXT = ("encoding",)
_OF_CSV = ("separator", "quote", "columns", "quoted_line_breaks", "decimal", "thousands", "units")
_OF_SPLIT: tuple[SplitName, ...] = ("valid", "test")
_OF_KAFKA = ("messages", "start", "stop_at", "kafka")
_TEXTS = ("csv", "criteo", "jsonl", "libsvm", "libffm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Options):
    """Files, and options of reading them.

    Attributes:
        format: of all files; with ``kafka``, of the training data, and of what else has a ``kafka://`` address: the rest is Parquet.
        train, valid, test: a path, glob or fsspec address, or a list of them.
        batch_size: examples per batch.
        encoding: of text files, a codec of Python.
        separator, quote, columns, quoted_line_breaks, decimal, thousands, units: of CSV; see :func:`girih.read_csv`.
        null_values: texts that mean a missing value, besides an empty cell of a text file.
        where: a condition that rows have to meet; see :func:`girih.read_parquet`. Predictions are made for all rows.
        split: how the files of ``train`` are cut into training, validation and test data.
        messages, start, stop_at, kafka: of Kafka topics; see :func:`girih.read_kafka`.
        shuffle: the training data, each epoch anew, in windows of at least ``shuffle_rows`` rows; None: files, but no stream.
        on_bad_row: ``error`` stops; ``skip`` drops and counts.
        read_ahead: batches that are read before they are needed.
    """

    format: Literal["parquet", "csv", "criteo", "libsvm", "libffm", "jsonl", "kafka"] = "parquet"
    train: str | tuple[str, ...]
    valid: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None
    null_values: tuple[str, ...] = ()
    where: str | None = None
    split: Split | None = None
    batch_size: Annotated[int, Bounds(1, MOST_EXAMPLES)] = BATCH_SIZE
    encoding: str = "utf-8"
    separator: str = ","
    quote: str = '"'
    columns: tuple[str, ...] | None = None
    quoted_line_breaks: bool = False
    decimal: str = "."
    thousands: str | None = None
    units: tuple[str, ...] = ()
    messages: Literal["json", "arrow"] = "json"
    start: str = "earliest"
    stop_at: Literal["end"] | None = None
    kafka: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool | None = None
    shuffle_rows: Count = SHUFFLE_ROWS
    on_bad_row: Literal["error", "skip"] = "error"
    read_ahead: Count = 4

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for split in ("train", "valid", "test"):
            paths = getattr(self, split)
            if paths is not None and (not paths or not all(paths)):
                raise ConfigError(f"{split} = {paths!r}: expected a path, or a list of paths")
        for formats, names in ((_TEXTS, _OF_TEXT), (("csv",), _OF_CSV), (("kafka",), _OF_KAFKA)):
            for option in fields(self) if self.format not in formats else ():
                default = {} if option.name == "kafka" else option.default
                if option.name in names and getattr(self, option.name) != default:
                    has = (
                        f"format {formats[0]} has"
                        if len(formats) == 1
                        else f"formats {', '.join(formats)} have"
                    )
                    raise ConfigError(
                        f"{option.name}: only {has} it, and format is {self.format!r}; drop one"
                    )
        if self.where is not None:
            parse_where(self.where)
        for name in self.split.names if self.split else ():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"split: cuts {name} off train, and {name} = {getattr(self, name)!r} names files; drop one of them"
                )
        if self.format == "kafka":
            if self.split:
                raise ConfigError("split: a stream has no last rows; give valid and test of their own")
            if self.shuffle:
                raise ConfigError("shuffle = true: a stream is read in its order; drop it")
            if not is_topic(self.train):
                raise ConfigError(
                    f"train = {self.train!r}: format kafka reads kafka://host:port,host:port/topic"
                )
            Topic.at(str(self.train), self.kafka)

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits that there are."""
        made = self.split.names if self.split else ()
        return ("train", *(name for name in _OF_SPLIT if name in made or getattr(self, name) is not None))


def open_dataset(
    options: DataOptions,
    schema: Schema,
    *,
    split: SplitName = "train",
    paths: Paths | None = None,
    format: str | None = None,
    key: str = "",
    base_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    keep: Iterable[str] = (),
    with_labels: bool = True,
    cuts: dict[str, Cuts] | None = None,
) -> Dataset:
    """Opens one split of the data.

    Args:
        split: ``train``, ``valid`` or ``test``.
        paths: files to read in place of the split's.
        format: of the files; None is that of the options.
        key: of the option that says them, for errors; "" for an argument.
        base_dir: what relative paths start at: the directory of the config file; None is the current one.
        with_labels: without labels, for predictions, all rows are read, whether they meet ``where`` or not.
        cuts: where ``split`` cut the files, once that is known; found otherwise, and noted here.
        shuffle: None shuffles the split ``train`` where the options say so, and nothing else.

    Raises:
        ConfigError: the split is not configured.
        MissingFileError, DataError: as the readers raise them.
    """
    chosen: Any = paths if paths is not None else getattr(options, split)
    is_cut = paths is None and options.split is not None and split in ("train", *options.split.names)
    chosen = options.train if is_cut else chosen
    if chosen is None:
        raise ConfigError(f'[data] has no {split}; add {split} = "path", or a split, or name the files')
    listed: Sequence[Any] = [chosen] if isinstance(chosen, str | os.PathLike) else list(chosen)
    if shuffle is None:
        shuffle = options.shuffle is not False and split == "train" and paths is None
    if is_topic(chosen):
        if options.format != "kafka":
            raise ConfigError(f'{split} = {chosen!r}: format is {options.format!r}; set format = "kafka"')
        return _open_topic(
            options,
            schema,
            chosen,
            ends=split != "train" or paths is not None,
            keep=keep,
            with_labels=with_labels,
        )
    form = format or options.format
    read = getattr(readers, f"read_{'parquet' if form == 'kafka' else form}")
    own = (*_OF_TEXT, *(_OF_CSV if form == "csv" else ())) if form in _TEXTS else ()
    below = [relative_to(base_dir, os.fspath(path)) for path in listed]
    try:
        dataset: Dataset = read(
            below,
            schema,
            batch_size=options.batch_size,
            shuffle=shuffle,
            shuffle_rows=options.shuffle_rows,
            seed=seed,
            on_bad_row=options.on_bad_row,
            keep=keep,
            with_labels=with_labels,
            where=options.where if with_labels else None,
            null_values=options.null_values or None,
            **{name: getattr(options, name) for name in own},
        )
    except MissingFileError as error:
        key = key if paths is not None else f"data.{'train' if is_cut else split}"
        told = str(error)
        if isinstance(error, NothingThereError) and error.path not in map(os.fspath, listed):
            told = (
                f"{error.path}: {error.problem}; relative paths start at {base_dir}, where the config file is"
            )
        raise MissingFileError(f"{key} = {_shown(listed)}: {told}" if key else told) from None
    dataset = replace(dataset, read_ahead=options.read_ahead)
    if not is_cut or options.split is None:
        return dataset
    cuts = {} if cuts is None else cuts
    if "train" not in cuts:
        cuts["train"] = find_cuts(dataset, options.split)
    return cuts["train"].of(dataset, split)


def _shown(paths: Sequence[Any]) -> str:
    """Paths as a config has them."""
    return f'"{paths[0]}"' if len(paths) == 1 else str(list(paths))


def is_topic(paths: object) -> bool:
    """Whether this is the address of a Kafka topic."""
    return isinstance(paths, str) and paths.startswith(SCHEME)


def _open_topic(
    options: DataOptions, schema: Schema, address: str, *, ends: bool, keep: Iterable[str], with_labels: bool
) -> Dataset:
    """A topic to train on; or to judge by, which is read from its first record to the last that is there."""
    dataset = readers.read_kafka(
        address,
        schema,
        messages=options.messages,
        start="earliest" if ends else options.start,
        stop_at="end" if ends else options.stop_at,
        kafka=options.kafka,
        batch_size=options.batch_size,
        on_bad_row=options.on_bad_row,
        keep=keep,
        with_labels=with_labels,
        where=options.where if with_labels else None,
        null_values=options.null_values or None,
    )
    return replace(dataset, read_ahead=options.read_ahead)
