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
from girih.data.kafka.topic import SCHEME, Topic
from girih.data.paths import Paths, relative_to
from girih.errors import ConfigError
from girih.schema import Schema

SplitName = Literal["train", "valid", "test"]
_OF_CSV = ("separator", "quote", "columns")
_OF_KAFKA = ("messages", "start", "stop_at", "kafka")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Options):
    """Files, and options of reading them.

    Attributes:
        format: of all files; with ``kafka``, of the training data, and of what else has a ``kafka://`` address: the rest is Parquet.
        train, valid, test: a path, glob or fsspec address, or a list of them.
        batch_size: examples per batch.
        separator, quote, columns: of CSV; see :func:`girih.read_csv`.
        messages, start, stop_at, kafka: of Kafka topics; see :func:`girih.read_kafka`.
        shuffle: the training data, each epoch anew, in windows of at least ``shuffle_rows`` rows; None: files, but no stream.
        on_bad_row: ``error`` stops; ``skip`` drops and counts.
        read_ahead: batches that are read before they are needed.
    """

    format: Literal["parquet", "csv", "criteo", "libsvm", "kafka"] = "parquet"
    train: str | tuple[str, ...]
    valid: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None
    batch_size: Annotated[int, Bounds(1, MOST_EXAMPLES)] = BATCH_SIZE
    separator: str = ","
    quote: str = '"'
    columns: tuple[str, ...] | None = None
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
        for format, names in (("csv", _OF_CSV), ("kafka", _OF_KAFKA)):
            for option in fields(self) if self.format != format else ():
                default = {} if option.name == "kafka" else option.default
                if option.name in names and getattr(self, option.name) != default:
                    raise ConfigError(
                        f"{option.name}: only format {format} has it, and format is {self.format!r}; drop one"
                    )
        if self.format == "kafka":
            if self.shuffle:
                raise ConfigError("shuffle = true: a stream is read in its order; drop it")
            if not is_topic(self.train):
                raise ConfigError(
                    f"train = {self.train!r}: format kafka reads kafka://host:port,host:port/topic"
                )
            Topic.at(str(self.train), self.kafka)


def open_dataset(
    options: DataOptions,
    schema: Schema,
    *,
    split: SplitName = "train",
    paths: Paths | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    keep: Iterable[str] = (),
    with_labels: bool = True,
) -> Dataset:
    """Opens one split of the data.

    Args:
        split: ``train``, ``valid`` or ``test``.
        paths: files to read in place of the split's, in the same format.
        base_dir: what relative paths start at: the directory of the config file; None is the current one.
        shuffle: None shuffles the split ``train`` where the options say so, and nothing else.

    Raises:
        ConfigError: the split is not configured.
        MissingFileError, DataError: as the readers raise them.
    """
    chosen: Any = paths if paths is not None else getattr(options, split)
    if chosen is None:
        raise ConfigError(f'[data] has no {split}; add {split} = "path", or name the files')
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
    read = getattr(readers, f"read_{'parquet' if options.format == 'kafka' else options.format}")
    dataset: Dataset = read(
        [relative_to(base_dir, os.fspath(path)) for path in listed],
        schema,
        batch_size=options.batch_size,
        shuffle=shuffle,
        shuffle_rows=options.shuffle_rows,
        seed=seed,
        on_bad_row=options.on_bad_row,
        keep=keep,
        with_labels=with_labels,
        **{name: getattr(options, name) for name in _OF_CSV if options.format == "csv"},
    )
    return replace(dataset, read_ahead=options.read_ahead)


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
    )
    return replace(dataset, read_ahead=options.read_ahead)
