"""The config section ``[data]``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from girih.config.bounds import Bounds, Count
from girih.config.options import Options
from girih.data import readers
from girih.data.dataset import BATCH_SIZE, MOST_EXAMPLES, SHUFFLE_ROWS, Dataset
from girih.data.paths import Paths, relative_to
from girih.errors import ConfigError
from girih.schema import Schema

SplitName = Literal["train", "valid", "test"]
_OF_CSV = ("separator", "quote", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Options):
    """Files, and options of reading them.

    Attributes:
        format: of all files.
        train, valid, test: a path, glob or fsspec address, or a list of them.
        batch_size: examples per batch.
        separator, quote, columns: of CSV; see :func:`girih.read_csv`.
        shuffle: the training data, each epoch anew, in windows of at least ``shuffle_rows`` rows.
        on_bad_row: ``error`` stops; ``skip`` drops and counts.
        read_ahead: batches that are read before they are needed.
    """

    format: Literal["parquet", "csv", "criteo", "libsvm"] = "parquet"
    train: str | tuple[str, ...]
    valid: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None
    batch_size: Annotated[int, Bounds(1, MOST_EXAMPLES)] = BATCH_SIZE
    separator: str = ","
    quote: str = '"'
    columns: tuple[str, ...] | None = None
    shuffle: bool = True
    shuffle_rows: Count = SHUFFLE_ROWS
    on_bad_row: Literal["error", "skip"] = "error"
    read_ahead: Count = 4

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for split in ("train", "valid", "test"):
            paths = getattr(self, split)
            if paths is not None and (not paths or not all(paths)):
                raise ConfigError(f"{split} = {paths!r}: expected a path, or a list of paths")
        if self.format != "csv":
            for option in fields(self):
                if option.name in _OF_CSV and getattr(self, option.name) != option.default:
                    raise ConfigError(
                        f"{option.name}: only format csv has it, and format is {self.format!r}; drop one"
                    )


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
        shuffle = options.shuffle and split == "train" and paths is None
    read = getattr(readers, f"read_{options.format}")
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
