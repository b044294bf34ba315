"""Classes and functions of the user's own that the ``config.toml`` of a run may name.

A run directory is data: others may have written it. Its config may name one only if the user's config named the same
one before. ``girih train`` records that in ``classes.json``, by a hash with a key that the user alone can read. The hash
covers the files that are imported and the name, not the run: a copy of a run keeps its record.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from girih.config.user_code import files_of
from girih.errors import ConfigError
from girih.runs.files import make_private, write_whole
from girih.runs.sealed import parse

RECORD = "classes.json"
KINDS = {"model": "name", "strategy": "name", "train": "metrics"}
"""Sections that may name a class, or functions in a list, and the key that does."""
_WAYS_ON = {
    "model": ("class", "--model file.py:Class"),
    "strategy": ("class", "--set strategy.name=file.py:Class"),
    "train": ("function", "--set 'train.metrics=[\"file.py:function\"]' to girih train, or delete the key"),
}
_KEY_BYTES = 32
_SIGNS = (
    ".lock", "checkpoints", RECORD, "metrics.jsonl", "plan.json", "processes.json", "summary.json",
)  # fmt: skip
"""Files of which a run directory has at least two."""


def run_of(config: Path, run: Path | None) -> Path | None:
    """The run directory that holds a config file.

    Args:
        run: a directory that is one, whatever it holds.
    """
    for directory in (config.parent.resolve(), config.resolve().parent):  # which differ if the file is a link
        is_run = run is not None and directory == run.resolve()
        if is_run or sum((directory / name).exists() for name in _SIGNS) > 1:
            return directory
    return None


def record_classes(run: Path, classes: Mapping[str, str | list[str]], directory: Path) -> None:
    """Notes in a run directory which classes its config may name; notes nothing if there is no key.

    Args:
        classes: names by kind, a key of :data:`KINDS`. directory: where relative paths start.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        key = _key()
        hashes = {kind: _hash(key, kind, name, directory) for kind, name in classes.items()}
        write_whole(run / RECORD, json.dumps(hashes))


def check_class(kind: str, name: str | list[str], config: Path, run: Path) -> None:
    """Refuses a class, or functions, that the config of a run names, unless the user's config named it.

    Args:
        config: the file, whose directory relative paths start from.

    Raises:
        ConfigError: it is in the run directory, or there is no record by this user.
    """
    directory = config.resolve().parent
    try:
        names = [name] if isinstance(name, str) else name
        files = [file for each in names for file in files_of(each, directory)]
        if any(parent.samefile(run) for file in files for parent in file.parents):
            raise ValueError("the file is in the run directory")
        if not (run / RECORD).is_file():
            raise ValueError(f"it has no {RECORD}")
        recorded = parse((run / RECORD).read_bytes()).get(kind)
        if not hmac.compare_digest(str(recorded).encode(), _hash(_key(), kind, name, directory).encode()):
            raise ValueError(f"{RECORD} records another class, or is another user's")
    except (OSError, RuntimeError, ValueError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        noun, option = _WAYS_ON[kind]
        raise ConfigError(
            f"{config}: [{kind}].{KINDS[kind]} = {name!r}: a run directory may only name a {noun} that your own config named ({reason}); give {option}"
        ) from None


def _hash(key: bytes, kind: str, name: str | list[str], directory: Path) -> str:
    if not isinstance(name, str):
        return " ".join(_hash(key, kind, each, directory) for each in name)
    files = [str(file) for file in files_of(name, directory)]
    module, _, class_name = name.rpartition(":")
    what: list[Any] = [kind, "" if module.endswith(".py") else module, files, class_name]
    return hmac.digest(key, json.dumps(what).encode(), "sha256").hex()


def _key() -> bytes:
    """The user's key, made on first use.

    Raises:
        OSError: another user could read or replace it.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = make_private(Path(state, "girih")) / "key"
    if not path.exists():
        descriptor, new = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(new, path)
        os.unlink(new)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status, key = os.fstat(file.fileno()), file.read()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{path}: mode {stat.S_IMODE(status.st_mode):o} of user {status.st_uid}; expected 600, and you alone"
        )
    if len(key) != _KEY_BYTES:
        raise PermissionError(f"{path}: {len(key)} bytes, expected {_KEY_BYTES}; delete it")
    return key
