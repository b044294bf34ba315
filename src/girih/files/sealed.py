"""Reads files of JSON strictly, seals them with a checksum, and refuses them in one line.

A sealed file is one JSON object. Its first key, ``crc32``, is the CRC-32 of the same object without that key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from girih.errors import CheckpointError, ConfigError, GirihError, MissingFileError, UserError

CHECKSUM = "crc32"
_MOST_NESTED = 100
_LONGEST_REASON = 300
_BEGINNING = re.compile(rb'\{\s*"crc32": (\d{1,10}), ?')


def parse(text: bytes | str, *, infinite: bool = False) -> Any:
    """Returns the tree of a JSON text in UTF-8.

    Args:
        infinite: True allows infinities, as ``json`` of Python writes them.

    Raises:
        ValueError: the text is not JSON, or has a key twice, a number that is not finite, a lone surrogate, or too many
            levels.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        number = partial(_number, infinite=infinite)
        tree = json.loads(text, object_pairs_hook=_object, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("too many levels of JSON") from None
    if "\\u" in text:
        json.dumps(tree, ensure_ascii=False).encode()
    level = [tree]
    for _ in range(_MOST_NESTED):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return tree
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(f"more than {_MOST_NESTED} levels of JSON")


def seal(tree: Mapping[str, object], indent: int | None = None, *, infinite: bool = False) -> bytes:
    """Returns the content of a sealed file.

    Args:
        infinite: see :func:`parse`.

    Raises:
        CheckpointError: a number is NaN, or infinite.
    """
    text = json.dumps(tree, indent=indent)
    try:
        parse(text, infinite=infinite)
    except ValueError as error:
        raise CheckpointError(f"a value cannot be saved: {error}") from None
    return seal_text(text)


def seal_text(text: str) -> bytes:
    """Returns the content of a sealed file for a text of JSON, without checking the text."""
    begin, space = ("{\n ", "") if text[1:2] == "\n" else ("{", " ")
    return f'{begin}"{CHECKSUM}": {zlib.crc32(text.encode())},{space}{text[1:]}'.encode()


def sealed_text(data: bytes) -> str:
    """Returns the text that was sealed, without comparing the checksum. Reverses :func:`seal_text`."""
    beginning = _BEGINNING.match(data)
    return (data if beginning is None else b"{" + data[beginning.end() :]).decode()


def unseal(
    data: bytes,
    where: object,
    format: int,
    fix: str,
    *,
    infinite: bool = False,
    older: Collection[int] = (),
) -> dict[str, object]:
    """Returns the tree in a sealed file.

    Args:
        where: the file. format: the number that ``format`` must have. fix: the advice in errors. infinite: see
            :func:`parse`.
        older: other allowed numbers of the format.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    with refusing(where, fix):
        tree = parse(data, infinite=infinite)
        if not isinstance(tree, dict):
            raise ValueError("not a JSON object")
        if type(tree["format"]) is not int or tree["format"] not in (format, *older):
            shown, by = repr(tree["format"])[:40], str(tree.get("girih", "of another version"))[:40]
            raise CheckpointError(
                f"{where}: format {shown}, which girih {by} wrote; this girih reads format {format}; use that one, or {fix}"
            )
        beginning = _BEGINNING.match(data)
        if beginning is None:
            raise ValueError("it does not begin with its checksum")
        if zlib.crc32(sealed_text(data).encode()) != int(beginning[1]):
            raise ValueError("its checksum differs")
        del tree[CHECKSUM]
        return tree


@contextlib.contextmanager
def refusing(
    where: object, fix: str, kind: type[UserError] = CheckpointError, fault: str = "damaged"
) -> Iterator[None]:
    """Turns each exception that the content of a file causes into one error that names the file.

    Args:
        where: the file. fix: the advice in errors. kind: the class of the error. fault: the fault in words.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, kind) or (isinstance(error, GirihError) and not isinstance(error, ConfigError)):
            raise
        raise kind(f"{where}: {fault}: {reason_of(error)}{'; ' if fix else ''}{fix}") from error


def reason_of(error: Exception) -> str:
    """Returns an error in one short line, with its class if it is not girih's own."""
    text = " ".join(str(error).split()).lstrip(": ")
    if isinstance(error, KeyError):
        text = f"it lacks {text}"
    elif not isinstance(error, GirihError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def digest(text: str) -> str:
    """Returns 16 hex digits that distinguish texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_inside(name: str) -> None:
    """Refuses a name that can lead out of its directory.

    Raises:
        ValueError: the name is not a relative path of plain names.
    """
    leads_out = {"", ".", ".."} & set(name.split("/"))
    if leads_out or name.startswith("~") or "\\" in name or not name.isprintable():
        raise ValueError(f"the name {name!r} leads out of its directory")


def open_file(
    path: Path, inside: Path | None = None, fix: str = "", kind: type[UserError] = CheckpointError
) -> IO[bytes]:
    """Opens a regular file for reading.

    Args:
        inside: a directory that must hold the file, after links are followed. fix: the advice if the file is missing.
        kind: the class of other errors.

    Raises:
        MissingFileError: no such file.
        UserError: as ``kind``: a directory, a pipe, a device, a link that leads outside, or not readable.
    """
    try:
        if inside is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside)):
            raise kind(f"{path}: a link that leads out of {inside}; copy the file itself there")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: no such file{'; ' if fix else ''}{fix}") from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise kind(f"{path}: cannot be read ({reason}); check the path and its permissions") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise kind(f"{path}: not a regular file; expected one, not a directory, pipe or device")
    return os.fdopen(descriptor, "rb")


def read_sealed(path: Path, format: int, fix: str) -> dict[str, object]:
    """Returns the tree in a sealed local file; see :func:`open_file` and :func:`unseal`."""
    with open_file(path, path.parent, fix) as file:
        return unseal(file.read(), path, format, fix)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return mapping


def _number(text: str, *, infinite: bool) -> float:
    number = float(text)
    if not (math.isfinite(number) or (infinite and text.endswith("Infinity"))):
        raise ValueError(f"the number {text} is not finite")
    return number
