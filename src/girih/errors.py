"""Errors that girih raises on purpose. The tree shows who made the mistake.

    GirihError
    ├── UserError                  the command line ends with status 2
    │   ├── ConfigError            (ValueError)   a configuration, schema or argument
    │   ├── DataError              (ValueError)   a file or a row of the data
    │   ├── MissingFileError       (FileNotFoundError)
    │   ├── RunDirectoryError      (FileExistsError)
    │   ├── CheckpointError        (ValueError)   damaged, or of another schema
    │   └── StorageFullError       (OSError)      disk, shared memory or address space ran out
    ├── RoleError                  (RuntimeError)     a process of the run failed
    ├── NonFiniteError             (ArithmeticError)  a loss or a gradient is NaN or infinite
    ├── WireError                  (ConnectionError)  a message that cannot be sent or read, or a closed connection
    │   └── Lost                                      a call to a process that has restarted
    ├── WireTimeout                (TimeoutError)     another process does not answer
    └── RemoteError                (RuntimeError)     another process answered that it failed

Every message is one line. It says what was received, what was expected, and how to fix the problem.

Examples:
    >>> import girih
    >>> try:
    ...     girih.Table(name="user", dim=0)
    ... except girih.errors.GirihError as error:
    ...     print(error)
    table 'user': dim = 0: expected an integer from 1 to 4096
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 40  # limit of names that an error lists


class GirihError(Exception):
    """Root of all errors that girih raises on purpose."""


class UserError(GirihError):
    """A mistake in the configuration, the data or the usage, which the user can fix."""


class ConfigError(UserError, ValueError):
    """An invalid configuration, schema or argument."""


class DataError(UserError, ValueError):
    """A file or a row that cannot be used as data."""


class MissingFileError(UserError, FileNotFoundError):
    """A path or pattern that matches nothing."""


class RunDirectoryError(UserError, FileExistsError):
    """A run directory that is in use, or that is not a run directory."""


class CheckpointError(UserError, ValueError):
    """A checkpoint that is damaged, incomplete or of another schema."""


class StorageFullError(UserError, OSError):
    """Disk, shared memory or address space ran out."""


class RoleError(GirihError, RuntimeError):
    """A process of the run failed, or could not start."""


class NonFiniteError(GirihError, ArithmeticError):
    """A loss or a gradient became NaN or infinite."""


class WireError(GirihError, ConnectionError):
    """A message that cannot be sent or read, or a connection that is closed."""


class Lost(WireError):
    """The process restarted before it replied. The call may or may not have run, and only the caller can find out."""


class WireTimeout(GirihError, TimeoutError):
    """Another process does not answer."""


class RemoteError(GirihError, RuntimeError):
    """Another process answered that it failed. The message is from this process."""


def named(text: str) -> GirihError | None:
    """Returns the error that another process reported as ``Name: message``, or None if it is not one of these."""
    name, _, message = text.partition(": ")
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, GirihError) else None


def kind_of(value: object) -> str:
    """Returns the class of a value with its article, such as ``an Adam``, or for a class ``the class Adam``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOU"  # SGD is spelled out
    return f"{'an' if name[0].upper() in vowels else 'a'} {name}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?``, or at most :data:`MOST_NAMES` valid names if no name is close."""
    names, word = sorted(valid), str(name).casefold()
    alike = [each for each in names if each.casefold() == word]
    begun = [each for each in names if word and each.casefold().startswith(word)]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if found := alike or close or begun[: len(begun) == 1]:
        return f"; did you mean {found[0]!r}?"
    if len(names) > MOST_NAMES:
        names[MOST_NAMES:] = [f"and {len(names) - MOST_NAMES:,} more"]
    return f"; valid: {', '.join(names)}" if names else "; there are none"
