"""One function per format. Each makes a :class:`~girih.data.dataset.Dataset` from files and a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

from girih.data.dataset import Dataset, ReadOptions, check_schema, make_dataset
from girih.data.decode.columns import Notation
from girih.data.formats.arrow import arrow_source
from girih.data.formats.delimited import DelimitedSource
from girih.data.formats.jsonl import JsonlSource
from girih.data.formats.pairs import PairsSource, as_columns
from girih.data.formats.parquet import ParquetSource
from girih.data.formats.text import BLOCK_BYTES, find_text_files
from girih.data.kafka.source import TURN, KafkaSource
from girih.data.kafka.topic import Topic
from girih.data.paths import DataFile, Paths, find_files
from girih.data.unit import Source
from girih.errors import ConfigError, nearest
from girih.schema import Schema, list_of_texts

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


def read_parquet(paths: Paths, schema: Schema, **options: Unpack[ReadOptions]) -> Dataset:
    """Reads Parquet files.

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read; no other column is read.
        batch_size: number of examples of a batch; the last batch of an epoch may have fewer. Default: 4096.
        shuffle: permutes row groups over all files, then rows in windows of at least ``shuffle_rows``. Default: False.
        shuffle_rows: the minimum number of rows that are permuted together. Default: a million.
        seed: determines the order, together with the epoch. Default: 0.
        on_bad_row: ``error`` (the default) stops at the first bad row; ``skip`` drops and counts bad rows.
        keep: columns to pass on, as ``Batch.kept``.
        with_labels: False for data without label columns.
        where: a condition that rows must meet, such as ``"country in ['NL', 'BE'] and price > 0"``; its grammar is in
            :mod:`girih.data.decode.conditions`. Default: all rows.
        null_values: texts that mean a missing value, in addition to an empty cell of a text file, such as ``["NA",
            "NULL"]``. Default: the texts in the schema, which a trained model also uses.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file or column that does not fit the schema.
        ConfigError: an unusable option.

    Examples:
        >>> import girih
        >>> import pyarrow as pa
        >>> from pyarrow import parquet
        >>> parquet.write_table(
        ...     pa.table({"user": [7, 8, 9], "clicked": [1, 0, 1]}), "day-01.parquet"
        ... )
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> data = girih.read_parquet("day-*.parquet", schema, batch_size=2, shuffle=True)
        >>> data.num_examples, data.batch_size
        (3, 2)
    """
    return make_dataset(ParquetSource(find_files(paths, suffix=".parquet")), schema, **options)


def read_arrow(data: object, schema: Schema, **options: Unpack[ReadOptions]) -> Dataset:
    """Reads Arrow data in place.

    The data may be a pyarrow table or record batch, or a list of them, a ``RecordBatchReader``, a pandas or Polars
    ``DataFrame``, a DuckDB relation, a Hugging Face dataset, or any other object with ``__arrow_c_stream__``. girih
    holds this data in memory, in the buffers of its owner. It first reads a reader or a query to its end. A pyarrow
    dataset of files is read by row groups (files other than Parquet one by one), and may be larger than memory.

    Rows form parts of a million. ``shuffle`` permutes these parts, and then rows in windows, as :func:`read_parquet`
    does with row groups. Every trainer must give the same rows in the same order. Positions are only valid for this
    order; for a table, girih compares some of its rows.

    Args:
        data: the table or frame, see above.
        schema: the features and labels to read; no other column is read.
        options: the options of :func:`read_parquet`.

    Returns:
        The dataset.

    Raises:
        ConfigError: an object without columns, a filtered pyarrow dataset, or an unusable option. Also, when training
            begins, a table of more than 256 MiB under a strategy with loaders, which are other processes.
        DataError: no rows, or columns that do not fit the schema.

    Examples:
        >>> import girih
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"user": [7, 8, 9], "clicked": [1, 0, 1]})
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> data = girih.read_arrow(frame, schema, where="user < 9")
        >>> data.first().ids.tolist()
        [7, 8]
    """
    return make_dataset(arrow_source(data), schema, **options)


class TextOptions(ReadOptions, total=False):
    """Options of readers of text, in addition to the options of every reader."""

    encoding: str
    block_bytes: int


class CsvOptions(TextOptions, total=False):
    """Options of :func:`read_csv`, in addition to the options of every reader of text."""

    separator: str
    quote: str
    columns: Sequence[str] | None
    quoted_line_breaks: bool
    decimal: str
    thousands: str | None
    units: Sequence[str]


def _headers(
    columns: Sequence[str] | None, schema: Schema, *, with_labels: bool
) -> list[tuple[str, ...]] | None:
    """Returns the columns that lines of a CSV may have, or None if a header line names them.

    Raises:
        ConfigError: columns that are not a list of different names.
    """
    if columns is None:
        return None
    if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
        raise ConfigError(f"columns = {columns!r}: expected a list of different names")
    if with_labels:
        return [tuple(columns)]
    unlabelled = set(schema.labels.names) - set(schema.labels.derive)
    return [tuple(columns), tuple(name for name in columns if name not in unlabelled)]


def _read_text(
    open_source: Callable[[tuple[DataFile, ...], int], Source],
    paths: Paths,
    schema: Schema,
    options: TextOptions,
    columns: Schema | None = None,
    notation: Notation | None = None,
) -> Dataset:
    """Makes a dataset of text files; see :func:`make_dataset`.

    ``open_source`` takes the files and the size of blocks.
    """
    files = find_text_files(paths, options.get("encoding", "utf-8"))
    source = open_source(files, options.get("block_bytes", BLOCK_BYTES))
    reading: dict[str, Any] = {
        n: value for n, value in options.items() if n not in ("encoding", "block_bytes")
    }
    return make_dataset(source, schema, columns, notation=notation, **reading)


def read_csv(paths: Paths, schema: Schema, **options: Unpack[CsvOptions]) -> Dataset:
    """Reads text files of separated values, uncompressed or compressed by gzip, bzip2, xz or zstd.

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read.
        separator: one or more characters, such as ``::``; ``\\s+`` for any number of blanks and tabs. Default: ``,``.
        quote: the character around values that hold the separator; "" for none. Default: ``"``.
        quoted_line_breaks: values within quotes may hold line breaks. A quote that is not closed then ends its row much
            later.
        columns: names, for files without a header line. A first line that repeats them is skipped. Without labels,
            files may lack the label columns.
        decimal: the mark before the fraction of a number, such as ``,`` in ``1.234,5``. Default: ``.``.
        thousands: the mark between groups of digits, such as ``.`` in ``1.234,5``. Default: none.
        units: texts before or after numbers that are ignored, such as ``["$", "%"]``.
        encoding: a Python codec, such as ``cp1252``, ``gbk`` or ``utf-16``; ids equal the ids of the same text in
            UTF-8. Default: ``utf-8``.
        block_bytes: the number of bytes of text that are decoded at once.
        options: the options of :func:`read_parquet`; ``shuffle`` permutes files, then rows in windows.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file or column that does not fit the schema.
        ConfigError: an unusable option.

    Examples:
        >>> from pathlib import Path
        >>> import girih
        >>> _ = Path("clicks.csv").write_text("user;clicked\\n7;1\\n8;0\\n")
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> data = girih.read_csv("clicks.csv", schema, separator=";")
        >>> data.first().ids.tolist()
        [7, 8]
    """
    check_schema(schema)
    for option in options:
        if option not in CsvOptions.__annotations__:
            meant = "separator" if option == "delimiter" else option
            raise ConfigError(f"unknown option {option!r}{nearest(meant, CsvOptions.__annotations__)}")
    headers = _headers(options.get("columns"), schema, with_labels=options.get("with_labels", True))
    written: dict[str, Any] = {n: options[n] for n in ("decimal", "thousands", "units") if n in options}
    notation = Notation(**{name: list_of_texts(value) for name, value in written.items()})

    def open_source(files: tuple[DataFile, ...], block_bytes: int) -> Source:
        breaks = options.get("quoted_line_breaks", False)
        marks = options.get("separator", ","), options.get("quote", '"')
        return DelimitedSource(files, *marks, headers, block_bytes, line_breaks=breaks)

    reading: Any = {n: value for n, value in options.items() if n in TextOptions.__annotations__}
    return _read_text(open_source, paths, schema, reading, notation=notation)


def read_criteo(paths: Paths, schema: Schema, **options: Unpack[TextOptions]) -> Dataset:
    """Reads Criteo's raw logs: tabs, no header, columns ``label``, ``I1``…``I13``, ``C1``…``C26``.

    Without labels, lines may lack the label.

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read.
        options: ``encoding`` and ``block_bytes``, as in :func:`read_csv`, and the options of :func:`read_parquet`.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file that does not fit the schema.
        ConfigError: an unusable option.

    Examples:
        >>> from pathlib import Path
        >>> import girih
        >>> columns = ["1", *map(str, range(13)), *(f"{word:08x}" for word in range(26))]
        >>> _ = Path("day_0").write_text("\\t".join(columns) + "\\n")
        >>> schema = girih.Schema(
        ...     [girih.Numeric(name="I1"), girih.Categorical(name="C1")], labels="label"
        ... )
        >>> girih.read_criteo("day_0", schema).first().labels.tolist()
        [[1.0]]
    """
    lists = [CRITEO_COLUMNS] if options.get("with_labels", True) else [CRITEO_COLUMNS, CRITEO_COLUMNS[1:]]
    return _read_text(
        lambda files, size: DelimitedSource(files, "\t", "", lists, size), paths, schema, options
    )


def read_libsvm(paths: Paths, schema: Schema, **options: Unpack[TextOptions]) -> Dataset:
    """Reads libsvm files, ``label index:value …``; the i-th pair of a line is the i-th feature.

    A categorical feature takes the index as its id and the value as its weight. A numeric feature takes the value. A
    single feature that is categorical or a sequence takes all pairs of a line as a bag, any number of them. The columns
    are named ``label``, ``1:index``, ``1:value``, …

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read.
        options: ``encoding`` and ``block_bytes``, as in :func:`read_csv`, and the options of :func:`read_parquet`.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file that does not fit the schema.
        ConfigError: an unusable option, or a schema that such files cannot have.

    Examples:
        >>> from pathlib import Path
        >>> import girih
        >>> _ = Path("clicks.libsvm").write_text("1 3:1 12:0.5\\n")
        >>> schema = girih.Schema([girih.Categorical(name="words")], labels="label")
        >>> data = girih.read_libsvm("clicks.libsvm", schema)
        >>> data.first().ids.tolist()
        [3, 12]
    """
    check_schema(schema)
    columns = as_columns(schema)
    return _read_text(lambda files, size: PairsSource(files, schema, size), paths, schema, options, columns)


def read_libffm(paths: Paths, schema: Schema, **options: Unpack[TextOptions]) -> Dataset:
    """Reads libffm files, ``label field:index:value …``; a feature takes the pairs of its field.

    The feature's column, or else its name, is the field. A categorical feature is a bag of indexes with values as
    weights. A sequence is a list of indexes. A numeric feature takes the value of its only pair. A field that a line
    lacks is an empty bag, or a missing number.

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read.
        options: ``encoding`` and ``block_bytes``, as in :func:`read_csv`, and the options of :func:`read_parquet`.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file that does not fit the schema.
        ConfigError: an unusable option, or a schema that such files cannot have.

    Examples:
        >>> from pathlib import Path
        >>> import girih
        >>> _ = Path("clicks.libffm").write_text("1 0:7:1 1:12:1\\n")
        >>> schema = girih.Schema(
        ...     [
        ...         girih.Categorical(name="user", column="0"),
        ...         girih.Categorical(name="item", column="1"),
        ...     ],
        ...     labels="label",
        ... )
        >>> data = girih.read_libffm("clicks.libffm", schema)
        >>> data.first().ids.tolist()
        [7, 12]
    """
    check_schema(schema)
    columns = as_columns(schema, "libffm")
    return _read_text(
        lambda files, size: PairsSource(files, schema, size, "libffm"), paths, schema, options, columns
    )


def read_jsonl(paths: Paths, schema: Schema, **options: Unpack[TextOptions]) -> Dataset:
    """Reads JSON lines: one object per line, whose keys are columns; numbers, strings, booleans, and lists of these.

    A key that a line lacks is a missing value. The first thousand lines of each file determine the columns and their
    types. Lines with other types are read too, but more slowly.

    Args:
        paths: a file, directory, glob or fsspec address, or a list of them.
        schema: the features and labels to read.
        options: ``encoding`` and ``block_bytes``, as in :func:`read_csv`, and the options of :func:`read_parquet`.

    Returns:
        The dataset. It reads rows when you iterate over it, or train on it.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        DataError: a file that does not fit the schema.
        ConfigError: an unusable option.

    Examples:
        >>> from pathlib import Path
        >>> import girih
        >>> _ = Path("clicks.jsonl").write_text('{"user": 7, "clicked": 1}\\n')
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> data = girih.read_jsonl("clicks.jsonl", schema)
        >>> data.first().ids.tolist()
        [7]
    """
    check_schema(schema)
    null_values = options.get("null_values")
    nulls = schema.null_values if null_values is None else tuple(null_values)
    return _read_text(lambda files, size: JsonlSource(files, size, nulls), paths, schema, options)


def read_kafka(
    address: str,
    schema: Schema,
    *,
    messages: Literal["json", "arrow"] = "json",
    start: str = "earliest",
    stop_at: Literal["end"] | None = None,
    kafka: Mapping[str, object] | None = None,
    **options: Unpack[ReadOptions],
) -> Dataset:
    """Reads the records of a Kafka topic, in the order of each partition's offsets.

    Partitions take turns. girih uses no consumer groups: positions hold the offsets, as with files. A column is a key
    of JSON objects, or a column of Arrow IPC streams.

    Args:
        address: ``kafka://host:port,host:port/topic``.
        schema: the features and labels to read.
        messages: ``json``, one object per message, or ``arrow``, an IPC stream of any number of rows per message.
        start: ``earliest``, ``latest`` or a moment such as ``2026-11-01T00:00:00Z``, for an epoch without a position.
        stop_at: ``end`` ends an epoch at the last record that exists when the topic is opened; None never ends.
        kafka: options of librdkafka by their own names, for example for security.
        options: the options of :func:`read_parquet`, except ``shuffle``; an invalid message is a bad row.

    Returns:
        The dataset. An epoch without ``stop_at`` does not end.

    Raises:
        ConfigError: an unusable option, or confluent-kafka is not installed.
        DataError: no broker answers, the topic does not exist, or its first records do not fit the schema.

    Examples:
        >>> import girih
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> data = girih.read_kafka(
        ...     "kafka://localhost:9092/clicks", schema, stop_at="end"
        ... )  # doctest: +SKIP
    """
    check_schema(schema)
    if messages not in TURN:
        raise ConfigError(f"messages = {messages!r}: expected 'json' or 'arrow'")
    if stop_at not in (None, "end"):
        raise ConfigError(f"stop_at = {stop_at!r}: expected 'end', or nothing")
    if options.get("shuffle"):
        raise ConfigError("shuffle = True: a stream is read in its order; drop it")
    topic = Topic.at(address, kafka)
    source = KafkaSource(topic=topic, messages=messages, spans=topic.spans(start), endless=stop_at is None)
    return make_dataset(source, schema, **options)
