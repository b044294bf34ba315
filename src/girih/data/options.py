"""The config section ``[data]``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Unpack

from girih.config.bounds import Bounds, Count
from girih.config.options import Options
from girih.data import readers
from girih.data.dataset import BATCH_SIZE, MOST_EXAMPLES, SHUFFLE_ROWS, Dataset, ReadOptions
from girih.data.decode.conditions import parse_where
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


class DataOptions(Options):
    """Files, and options for reading them.

    Attributes:
        format: the format of all files. With ``kafka``, it is that of the training data and of any other ``kafka://``
            address; other data is Parquet.
        train, valid, test: a path, glob or fsspec address, or a list of them.
        batch_size: examples per batch.
        encoding: the codec of text files, by Python's name.
        separator: the text between values of a CSV; ``\\s+`` stands for any number of blanks and tabs.
        quote: the character around values that hold the separator; "" for none.
        columns: names of the columns of a CSV without a header line.
        quoted_line_breaks: true allows line breaks within quotes of a CSV.
        decimal: the mark before the fraction of a number of a CSV.
        thousands: the mark between groups of digits of a number of a CSV.
        units: texts before or after numbers of a CSV that are ignored, such as "$" and "%".
        null_values: texts that mean a missing value, in addition to an empty cell of a text file.
        where: a condition that rows must meet; see :func:`girih.read_parquet`. Predictions use all rows.
        split: how to cut the files of ``train`` into training, validation and test data.
        messages: the content of a Kafka message: a JSON object, or an Arrow IPC stream.
        start: the first record of a topic that is read: ``earliest``, ``latest`` or a moment.
        stop_at: ``end`` ends an epoch at the last record that exists when the topic is opened; None never ends.
        kafka: options of librdkafka by their own names.
        shuffle: permute the training data differently in each epoch, in windows of at least ``shuffle_rows`` rows; None
            shuffles files, but not a stream.
        shuffle_rows: the minimum number of rows that are permuted together.
        on_bad_row: ``error`` stops; ``skip`` drops and counts.
        read_ahead: number of batches that are read before they are needed.
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

    def _check(self) -> None:
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
                raise ConfigError("split: a stream has no last rows; give separate valid and test data")
            if self.shuffle:
                raise ConfigError("shuffle = true: a stream is read in its order; drop it")
            if not is_topic(self.train):
                raise ConfigError(
                    f"train = {self.train!r}: format kafka reads kafka://host:port,host:port/topic"
                )
            Topic.at(str(self.train), self.kafka)

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits of this data."""
        made = self.split.names if self.split else ()
        return ("train", *(name for name in _OF_SPLIT if name in made or getattr(self, name) is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPaths:
    """Paths of data, and the name of their option for errors.

    Attributes:
        format: None means the format of the options.
        key: the option that names the paths; "" for an argument.
    """

    paths: Paths
    format: str | None = None
    key: str = ""


def open_dataset(
    options: DataOptions,
    schema: Schema,
    *,
    split: SplitName = "train",
    files: DataPaths | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    cuts: dict[str, Cuts] | None = None,
    **reading: Unpack[ReadOptions],
) -> Dataset:
    """Opens one split of the data.

    By default only the split ``train`` is shuffled; the options or ``reading`` can change this. Without labels, for
    predictions, all rows are read, also rows that do not meet ``where``.

    Args:
        split: ``train``, ``valid`` or ``test``.
        files: files to read instead of the files of the split.
        base_dir: the start of relative paths: the directory of the config file; None is the current directory.
        cuts: the values at which ``split`` cuts the files. An empty mapping is filled.

    Raises:
        ConfigError: the split is not configured.
        MissingFileError, DataError: as in the readers.
    """
    is_split = files is None
    is_cut = is_split and options.split is not None and split in ("train", *options.split.names)
    files = files or _paths_of(options, "train" if is_cut else split)
    if isinstance(files.paths, str) and is_topic(files.paths):
        if options.format != "kafka":
            raise ConfigError(
                f'{split} = {files.paths!r}: format is {options.format!r}; set format = "kafka"'
            )
        ends = split != "train" or not is_split
        return _open_topic(options, schema, files.paths, ends=ends, reading=reading)
    if "shuffle" not in reading:
        reading["shuffle"] = options.shuffle is not False and split == "train" and is_split
    dataset = _open_files(options, schema, files, base_dir, reading)
    if not is_cut or options.split is None:
        return dataset
    cuts = {} if cuts is None else cuts
    if "train" not in cuts:
        cuts["train"] = find_cuts(dataset, options.split)
    return cuts["train"].of(dataset, split)


def _paths_of(options: DataOptions, split: SplitName) -> DataPaths:
    paths: Paths | None = getattr(options, split)
    if paths is None:
        raise ConfigError(f'[data] has no {split}; add {split} = "path", or a split, or name the files')
    return DataPaths(paths=paths, key=f"data.{split}")


def _open_files(
    options: DataOptions,
    schema: Schema,
    files: DataPaths,
    base_dir: str | os.PathLike[str] | None,
    reading: ReadOptions,
) -> Dataset:
    form = files.format or options.format
    read = getattr(readers, f"read_{'parquet' if form == 'kafka' else form}")
    of_format = (*_OF_TEXT, *(_OF_CSV if form == "csv" else ())) if form in _TEXTS else ()
    paths: Sequence[Any] = [files.paths] if isinstance(files.paths, str | os.PathLike) else list(files.paths)
    try:
        dataset: Dataset = read(
            [relative_to(base_dir, os.fspath(path)) for path in paths],
            schema,
            batch_size=options.batch_size,
            shuffle_rows=options.shuffle_rows,
            on_bad_row=options.on_bad_row,
            where=options.where if reading.get("with_labels", True) else None,
            null_values=options.null_values or None,
            **reading,
            **{name: getattr(options, name) for name in of_format},
        )
    except MissingFileError as error:
        reason = str(error)
        if isinstance(error, NothingThereError) and error.path not in map(os.fspath, paths):
            reason = f"{error.path}: {error.problem}; relative paths start at {base_dir}, the directory of the config file"
        raise MissingFileError(f"{files.key} = {_shown(paths)}: {reason}" if files.key else reason) from None
    return replace(dataset, read_ahead=options.read_ahead)


def _shown(paths: Sequence[object]) -> str:
    """Returns paths in the form in which a config has them."""
    return f'"{paths[0]}"' if len(paths) == 1 else str(list(paths))


def is_topic(paths: object) -> bool:
    """Returns whether this is the address of a Kafka topic."""
    return isinstance(paths, str) and paths.startswith(SCHEME)


def _open_topic(
    options: DataOptions, schema: Schema, address: str, *, ends: bool, reading: ReadOptions
) -> Dataset:
    """Opens a topic. If ``ends`` is True, as for evaluation, reads from the first to the last existing record."""
    with_labels = reading.get("with_labels", True)
    dataset = readers.read_kafka(
        address,
        schema,
        messages=options.messages,
        start="earliest" if ends else options.start,
        stop_at="end" if ends else options.stop_at,
        kafka=options.kafka,
        batch_size=options.batch_size,
        on_bad_row=options.on_bad_row,
        keep=reading.get("keep", ()),
        with_labels=with_labels,
        where=options.where if with_labels else None,
        null_values=options.null_values or None,
    )
    return replace(dataset, read_ahead=options.read_ahead)
