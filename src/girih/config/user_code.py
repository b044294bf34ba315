"""Loads the user's own classes and functions from ``path/to/file.py:Class`` or ``package.module:Class``."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import itertools
import json
import os
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from girih.errors import ConfigError, nearest
from girih.files.sealed import parse
from girih.files.whole import make_private, write_whole

_BESIDE = set[str]()
"""Directories that only this process searches for modules."""
_NOT_SEARCHED = set[Path]()
"""Run directories, which hold data: nothing is imported from them unless its path is given."""


def never_search(*directories: Path) -> None:
    """Keeps run directories off the import path."""
    _NOT_SEARCHED.update(directory.resolve() for directory in directories)


def naming(model: str | None) -> list[str]:
    """Returns the overrides for an option ``--model``, which names the class of a config's model."""
    return [] if model is None else [f"model.name={json.dumps(reference(model), ensure_ascii=False)}"]


def reference(name: str) -> str:
    """Returns the name of a class as given by the user, with an absolute path.

    Raises:
        ConfigError: the name is not that of a class.
    """
    source, _, class_name = name.rpartition(":")
    if not source or not class_name:
        raise ConfigError(f"--model {name}: expected path/to/file.py:Class or package.module:Class")
    return f"{Path(source).expanduser().absolute()}:{class_name}" if source.endswith(".py") else name


def files_of(name: str, directory: Path) -> list[Path]:
    """Returns the files that are imported for a class, with links resolved: a file, or a module and its packages. Imports nothing.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    source = name.rpartition(":")[0]
    if source.endswith(".py"):
        return [(directory / Path(source).expanduser()).resolve()]
    files, path = list[Path](), [*sys.path, *map(str, _searched(directory))]
    for module in itertools.accumulate(source.split("."), "{}.{}".format):
        specs = _specs(module, path, within=bool(files))
        spec = next((each for each in specs if each is not None), None)
        if spec is None:
            raise ModuleNotFoundError(f"no module {module!r} on the import path")
        path = list(spec.submodule_search_locations or ())
        origin = spec.origin if spec.has_location else None
        files.append(Path(origin or [*path, module][0]).resolve())
    return files


def _specs(module: str, path: list[str], *, within: bool = False) -> Iterator[ModuleSpec | None]:
    """Returns the answer of each finder for a module. Imports nothing.

    Args:
        within: whether the path is that of a package.
    """
    for finder in sys.meta_path:
        yield finder.find_spec(module, path if within or finder is PathFinder else None)


def load_object(
    name: str, where: str, directory: Path | None = None, *, accepts: Callable[[object], bool], expected: str
) -> Any:
    """Loads the class or function that ``file.py:Class`` or ``package.module:Class`` names.

    The file runs the same as in ``python file.py``, but its directory is at the end of the import path.

    Args:
        where: names the option in errors, for example ``config.toml: [model].name``.
        directory: the base of relative paths. Packages are searched there too, before the working directory.
        accepts: returns whether a value is acceptable; expected: describes acceptable values, for errors.

    Raises:
        ConfigError: the file, module or name does not exist, fails to load, or is not the expected kind.
    """
    source, _, class_name = name.rpartition(":")
    where = f"{where} = {name!r}"
    kind = "function" if expected == "a function" else "Class"
    if not source or not class_name:
        raise ConfigError(f"{where}: expected path/to/file.py:{kind} or package.module:{kind}")
    if source.endswith(".py"):
        module = _from_file((directory or Path()) / Path(source).expanduser(), where)
    else:
        module = _from_package(source, where, directory)
    loaded = getattr(module, class_name, None)
    if loaded is None:
        classes = {key: value for key, value in vars(module).items() if accepts(value)}
        own = [k for k, value in classes.items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{where}: {source} has no {kind.lower()} {class_name!r}{nearest(class_name, own)}")
    if not accepts(loaded):
        raise ConfigError(f"{where}: {class_name} is not {expected}")
    return loaded


def blame(error: Exception, file: str | None = None) -> str:
    """Returns one line about an error in the user's code: type, text, and the last line of ``file`` in the traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    local_frames = [frame for frame in frames if frame.filename == file]
    frame = next(reversed(local_frames or frames), None)
    place = f" at {frame.filename}:{frame.lineno}" if frame else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _from_file(path: Path, where: str) -> ModuleType:
    file = path.resolve()
    if not file.is_file():
        raise ConfigError(f"{where}: no such file: {path}")
    # unique names, so that two files model.py of two directories do not collide in sys.modules
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    _search(file.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where}: {path} failed to load: {blame(error, str(file))}") from error
    return module


def _from_package(source: str, where: str, directory: Path | None) -> ModuleType:
    for each in _searched(directory):
        _search(each)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            hint = "; name a file with its ending, for example models.py:Class" if "/" in source else ""
            raise ConfigError(f"{where}: no module {source!r} on the import path{hint}") from None
        raise ConfigError(f"{where}: {source} failed to load: {blame(error)}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {source} failed to load: {blame(error)}") from error


def is_found_by_others(module: str) -> bool:
    """Returns whether the processes that girih starts find a top-level module. They do not if it is only next to a config."""
    path = [each for each in sys.path if each not in _BESIDE or each == os.getcwd()]
    return any(each is not None for each in _specs(module, path))


def _searched(directory: Path | None) -> list[Path]:
    """Returns directories to search for packages after the import path, since started processes do not have them in front."""
    return [each for each in ((directory or Path()).resolve(), Path.cwd()) if _may_search(each)]


def _may_search(directory: Path) -> bool:
    return not _NOT_SEARCHED.intersection((directory.resolve(), *directory.resolve().parents))


def _search(directory: Path) -> None:
    if str(directory) not in sys.path and _may_search(directory):
        sys.path.append(str(directory))
        _BESIDE.add(str(directory))


RECORD = "classes.json"
KINDS = {"model": "name", "strategy": "name", "train": "metrics"}
"""Sections that may name a class, or functions in a list, and the key for it."""
_SOURCES = {
    "model": ("class", "--model file.py:Class"),
    "strategy": ("class", "--set strategy.name=file.py:Class"),
    "train": ("function", "--set 'train.metrics=[\"file.py:function\"]' to girih train, or delete the key"),
}
"""The noun for a name of each kind, and the command's option that gives the name."""
_KEY_BYTES = 32
_SIGNS = (
    ".lock", "checkpoints", RECORD, "metrics.jsonl", "plan.json", "processes.json", "summary.json",
)  # fmt: skip
"""Files of which a run directory has at least two."""


def run_of(config: Path, run: Path | None) -> Path | None:
    """Returns the run directory that holds a config file.

    Args:
        run: a directory that counts as a run directory regardless of its content.
    """
    for directory in (config.parent.resolve(), config.resolve().parent):  # differ if the file is a link
        is_run = run is not None and directory == run.resolve()
        if is_run or sum((directory / name).exists() for name in _SIGNS) > 1:
            return directory
    return None


def record_classes(run: Path, classes: Mapping[str, str | list[str]], directory: Path) -> None:
    """Records in a run directory the classes that its config may name; without a key, records nothing.

    Args:
        classes: names by kind, a key of :data:`KINDS`. directory: the base of relative paths.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        key = _key()
        hashes = {kind: _hash(key, kind, name, directory) for kind, name in classes.items()}
        write_whole(run / RECORD, json.dumps(hashes))


def check_class(kind: str, name: str | list[str], config: Path, run: Path) -> None:
    """Refuses a class or functions that the config of a run names, unless the user's own config named them.

    Args:
        config: the file, whose directory is the base of relative paths.

    Raises:
        ConfigError: the class's file is in the run directory, or this user has no record of it.
    """
    directory = config.resolve().parent
    try:
        names = [name] if isinstance(name, str) else name
        files = [file for name in names for file in files_of(name, directory)]
        if any(parent.samefile(run) for file in files for parent in file.parents):
            raise ValueError("the file is in the run directory")
        if not (run / RECORD).is_file():
            raise ValueError(f"it has no {RECORD}")
        recorded = parse((run / RECORD).read_bytes()).get(kind)
        if not hmac.compare_digest(str(recorded).encode(), _hash(_key(), kind, name, directory).encode()):
            raise ValueError(f"{RECORD} records another class, or is another user's")
    except (OSError, RuntimeError, ValueError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        noun, option = _SOURCES[kind]
        raise ConfigError(
            f"{config}: [{kind}].{KINDS[kind]} = {name!r}: a run directory may only name a {noun} that your own config named ({reason}); give {option}"
        ) from None


def _hash(key: bytes, kind: str, name: str | list[str], directory: Path) -> str:
    if not isinstance(name, str):
        return " ".join(_hash(key, kind, one, directory) for one in name)
    files = [str(file) for file in files_of(name, directory)]
    module, _, class_name = name.rpartition(":")
    contents: list[Any] = [kind, "" if module.endswith(".py") else module, files, class_name]
    return hmac.digest(key, json.dumps(contents).encode(), "sha256").hex()


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
            f"{path}: mode {stat.S_IMODE(status.st_mode):o} of user {status.st_uid}; expected mode 600, owned by you"
        )
    if len(key) != _KEY_BYTES:
        raise PermissionError(f"{path}: {len(key)} bytes, expected {_KEY_BYTES}; delete it")
    return key
