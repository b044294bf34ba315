"""Resolves paths, globs and fsspec addresses to files that can be opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO
from urllib.parse import unquote

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from girih.errors import ConfigError, DataError, MissingFileError, UserError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class NothingThereError(MissingFileError):
    """A path or pattern that matches nothing.

    Attributes:
        path: the path that was searched. problem: why it matches nothing.
    """

    path = problem = ""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file on some file system.

    Messages show ``address``. ``encoding`` is a codec of text that is not UTF-8.
    """

    filesystem: fsspec.AbstractFileSystem  # None if no file can be opened
    path: str
    address: str
    size: int
    encoding: str | None = None

    def open(self, *, in_arrow: bool = False) -> IO[bytes] | pa.NativeFile:
        """Opens the file for reading bytes.

        Args:
            in_arrow: let Arrow itself read a local file, without Python's lock.

        Raises:
            MissingFileError: the file no longer exists.
            DataError: the file cannot be opened.
        """
        try:
            if in_arrow and isinstance(self.filesystem, LocalFileSystem):
                return pa.OSFile(self.path)
            return self.filesystem.open(self.path, "rb")
        except FileNotFoundError:
            raise MissingFileError(f"{self.address}: the file has gone since it was listed") from None
        except OSError as error:
            raise DataError(f"{self.address}: cannot be opened: {one_line(error)}") from None


def find_files(paths: Paths, *, suffix: str | None = None) -> tuple[DataFile, ...]:
    """Lists the files that paths, globs or fsspec addresses name: in the given order, globs sorted.

    Args:
        suffix: the ending of files to take from a directory, at any depth; None refuses directories.

    Raises:
        MissingFileError: a path or pattern that matches nothing.
        ConfigError: not a path, or a file system that fsspec does not know.
        DataError: a directory without such files, or a directory that cannot be listed.
    """
    given = list(paths) if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]
    if not given:
        raise ConfigError("paths: the list is empty; expected at least one file or pattern")
    files: list[DataFile] = []
    for path in given:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"paths: {path!r} is not a path; expected strings such as 'train/*.parquet'")
        files += _matches(os.fspath(path), suffix)
    return tuple(files)


def relative_to(base: str | os.PathLike[str] | None, path: str) -> str:
    """Returns the path below ``base``. Absolute paths and fsspec addresses stay unchanged."""
    expanded = os.path.expanduser(path)
    if base is None or "://" in path or os.path.isabs(expanded):
        return path
    return os.path.join(os.fspath(base), path)


def one_line(error: BaseException) -> str:
    """Returns the first line of another library's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _matches(path: str, suffix: str | None) -> list[DataFile]:
    try:
        return _list(path, suffix)
    except UserError:
        raise
    except ImportError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except ValueError as error:  # an unknown protocol
        raise ConfigError(f"{path}: not an address that can be read: {one_line(error)}") from None
    except FileNotFoundError:
        raise _nothing_there(path, "no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be listed: {one_line(error)}") from None


def _nothing_there(path: str, problem: str) -> NothingThereError:
    hint = (
        ""
        if os.path.isabs(os.path.expanduser(path)) or "://" in path
        else f"; relative paths start at {os.getcwd()}"
    )
    error = NothingThereError(f"{path}: {problem}{hint}")
    error.path, error.problem = path, problem
    return error


def _list(path: str, suffix: str | None) -> list[DataFile]:
    filesystem, root = fsspec.core.url_to_fs(os.path.expanduser(path))
    if any(mark in path for mark in "*?[") and not filesystem.exists(root):
        found = filesystem.glob(root, detail=True)
        files = [_file(filesystem, info, path) for _, info in sorted(found.items()) if info["type"] == "file"]
        if not files:
            raise _nothing_there(path, "no file matches this pattern")
        return files
    info = filesystem.info(root)
    if info["type"] != "directory":
        return [_file(filesystem, info, path, exact=True)]
    if suffix is None:
        raise DataError(f"{path}: is a directory; name files, or a pattern such as {path.rstrip('/')}/*.csv")
    inside = sorted(filesystem.find(root, detail=True).items())
    hidden = ("_", ".")  # names of files that Spark and other tools add to the data
    below = [
        _file(filesystem, info, path)
        for name, info in inside
        if name.endswith(suffix)
        and not any(part.startswith(hidden) for part in name[len(root) :].strip("/").split("/"))
    ]
    if not below:
        raise DataError(f"{path}: the directory has no {suffix} files")
    return below


def _file(
    filesystem: fsspec.AbstractFileSystem,
    info: Mapping[str, str | float | None],
    requested: str,
    *,
    exact: bool = False,
) -> DataFile:
    name = str(info["name"])
    address = requested if exact else (filesystem.unstrip_protocol(name) if "://" in requested else name)
    return DataFile(filesystem, name, address, int(info.get("size") or 0))


_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Partitions:
    """The partition columns of some files.

    Attributes:
        types: by column; int64 if each value spells an integer, else string.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._values = [partitions_in(file.path) for file in files]
        names = dict.fromkeys(name for values in self._values for name in values)
        self.types: dict[str, pa.DataType] = {name: self._type(name) for name in names}

    def names(self, file: int, file_columns: Sequence[str]) -> list[str]:
        """Returns the partition columns of a file, without names that the file's own columns have."""
        return [name for name in self._values[file] if name not in file_columns]

    def added(self, table: pa.Table, file: int, wanted: Sequence[str], *, as_text: bool = False) -> pa.Table:
        """Returns a file's rows, with the missing partition columns among ``wanted``, in the order of ``wanted``.

        Args:
            as_text: as cells of a text file.
        """
        values = self._values[file]
        missing = [name for name in wanted if name in values and name not in table.column_names]
        for name in missing:
            kind, value = (pa.binary() if as_text else self.types[name]), values[name]
            read = int(value) if value is not None and kind == pa.int64() else value
            table = table.append_column(name, pa.repeat(pa.scalar(read, kind), table.num_rows))
        return table.select(list(wanted)) if missing else table

    def _type(self, name: str) -> pa.DataType:
        texts = [values[name] for values in self._values if values.get(name) is not None]
        return pa.int64() if texts and all(_INTEGER.fullmatch(text or "") for text in texts) else pa.string()


def partitions_in(path: str) -> dict[str, str | None]:
    """Returns the columns in a path and their values, as text. None stands for Hive's name of null."""
    pairs = (part.split("=", 1) for part in path.split("/")[:-1] if "=" in part.strip("="))
    found = {unquote(name): unquote(value) for name, value in pairs if name}
    return {name: None if value == _NULL else value for name, value in found.items()}
