"""Compiles kernels, which Python calls, and the functions that kernels call.

Numba's on-disk cache checks only the file of the cached function, not the functions that it calls. So girih names its
cache directory by a digest of the sources of all CPU kernels, the package versions and the processor. If any of these
changes, kernels are compiled again. The digest does not include the path of the sources, so all installations of a user
share the kernels.

The directory is in the user's cache directory or in ``NUMBA_CACHE_DIR``, or else in the directory for temporary files.
Its files are executed, so no other user may own or write the directory. Without a directory, each process compiles its
kernels again. :mod:`girih.kernels.cpu.ahead` compiles kernels before they are needed.

``NUMBA_DISABLE_JIT=1`` runs the same kernels as plain Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding as _typed_llvm
import numba as _typed_numba
import numpy as np
from llvmlite import __version__ as llvm_version
from numba import extending as _typed_extending
from numba.core import caching as _typed_caching
from numba.core import cgutils as _typed_cgutils
from numba.core import codegen as _typed_codegen
from numba.core import compiler as _typed_compiler
from numba.core import compiler_machinery as _typed_machinery
from numba.core import typed_passes as _typed_passes
from numba.core import types as _typed_types

from girih.files.whole import make_private

numba: Any = _typed_numba  # numba's type hints cover only a part of the package
caching: Any = _typed_caching
cgutils: Any = _typed_cgutils
extending: Any = _typed_extending
intrinsic: Any = extending.intrinsic
codegen: Any = _typed_codegen
compiler: Any = _typed_compiler
machinery: Any = _typed_machinery
passes: Any = _typed_passes
llvm: Any = _typed_llvm
types: Any = _typed_types

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger(__name__)
JIT_DISABLED: bool = bool(numba.config.DISABLE_JIT)
"""True if kernels run as plain Python."""


_OPTIONS_OF_NUMBA = ("OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "LOOP_VECTORIZE", "SLP_VECTORIZE")
_REMEDY = "set NUMBA_CACHE_DIR to a directory that only you can write"


def _digest() -> str:
    root = Path(__file__).resolve().parent
    versions = numba.__version__, llvm_version, np.__version__, sys.implementation.cache_tag, sys.abiflags
    options = [str(getattr(numba.config, name)) for name in _OPTIONS_OF_NUMBA]
    processor, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES  # an image may name its processor
    machine = (
        processor or llvm.get_host_cpu_name(),
        codegen.get_host_cpu_features() if features is None else features,
    )
    digest = hashlib.sha256(repr((versions, options, machine)).encode())
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR, "girih")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "girih"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "girih")


def _temporary() -> Path:
    return Path(tempfile.gettempdir(), f"girih-{os.geteuid()}")


def _cache_directory() -> tuple[str | None, str]:
    """Returns the directory for compiled kernels, or None, and a message about directories that cannot be used."""
    problems = []
    for parent in (_user_cache, _temporary):
        try:
            directory = str(make_private(make_private(parent()) / _digest()))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            problems.append(str(error))
            continue
        return directory, "; ".join([*problems, f"using {directory} instead: {_REMEDY}"]) if problems else ""
    return None, "; ".join([*problems, f"kernels compile again in each process: {_REMEDY}"])


CACHE_DIRECTORY, CACHE_WARNING = (None, "") if JIT_DISABLED else _cache_directory()
"""The directory for compiled kernels, or None, and a message about directories that cannot be used."""

_OPTIONS = {"nogil": True, "fastmath": False, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


class Kernel(NamedTuple):
    """A kernel: numba's dispatcher, and the argument types of its calls.

    Attributes:
        kinds: for each compilation, the types of parameters that their annotations leave open.
    """

    dispatcher: Any
    kinds: tuple[Mapping[str, Any], ...]


KERNELS: dict[str, Kernel] = {}
"""All kernels of the imported modules, by module and name. The dict is empty if kernels run as plain Python."""


def kernel(*kinds: Mapping[str, Any]) -> Callable[[F], F]:
    """Makes a function a kernel: numba compiles it and caches it on disk, and it runs without the GIL.

    NaN and infinity behave as in NumPy. The annotations of the parameters are the types that numba compiles for. Calls
    must pass these types.

    Args:
        kinds: types of the parameters that accept several types, by name. Each ``kinds`` is one compiled version.
            Without ``kinds``, there is one version.
    """

    def compiled(function: F) -> F:
        if JIT_DISABLED:
            return function
        dispatcher = _cached(function)
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        KERNELS[name] = Kernel(dispatcher, kinds or ({},))
        return dispatcher  # type: ignore[no-any-return]

    return compiled


def _cached(function: Callable[..., Any]) -> Any:
    dispatcher = numba.njit(**_OPTIONS)(function)
    if CACHE_DIRECTORY is not None:
        dispatcher._cache = _Cache(function)
    return dispatcher


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Finds a kernel by its module, name and line, for any path of its source."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_file = inspect.getfile(function)
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str | None:
        """The directory of all kernels."""
        return CACHE_DIRECTORY

    def get_source_stamp(self) -> bytes:
        """Returns a digest of the source. The directory's name covers kernels, but not functions of tests."""
        return _content_digest(self._py_file)

    def get_disambiguator(self) -> str:
        """Returns the line number."""
        return str(self._line)


@functools.cache
def _content_digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


class _Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """The names and contents of a kernel's files."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._lineno, self._locator = function.__code__.co_firstlineno, _Locator(function)
        name = f"{function.__module__}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, sys.abiflags)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Loads a compiled kernel from the disk.

    Numba's class first registers all functions that numba can compile. This takes a third of a second in each process,
    and memory. This class skips it. If a kernel must be compiled, the compiler registers the functions itself.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the kernel for some argument types, or None if the disk does not have it."""
        return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Stores a kernel, unless its sources changed since this process started, or the disk is full.

        A lock is necessary, because two processes that save at the same time could swap the files of two type
        combinations.
        """
        if _digest() != Path(self.cache_path).name:
            return
        try:
            with lock_file(Path(self.cache_path, "saving")):
                self._save_overload(sig, data)
        except OSError as error:
            _warn_once(f"kernels cannot be kept in {self.cache_path}: {error.strerror}; {_REMEDY}")

    def num_kept(self) -> int:
        """Returns the number of type combinations for which the disk has the kernel."""
        return len(self._cache_file._load_index())


@functools.cache
def _warn_once(line: str) -> None:
    _LOG.warning(line)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int | None]:
    """Locks a file, and waits while another process of this machine has locked it. Yields the file's descriptor.

    Yields None if the disk is full. Without a lock, two processes may do the same work, as on a file system without
    locks.
    """
    with contextlib.ExitStack() as stack:
        descriptor = None
        with contextlib.suppress(OSError):
            descriptor = stack.enter_context(path.open("w")).fileno()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor


@machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _LowerForCallers(passes.NativeLowering):  # type: ignore[misc]
    """Lowers a function only to LLVM's intermediate language.

    Numba would also optimize the function and generate machine code, which takes a sixth of all compilation time. No
    caller uses this machine code, because the function is inlined into its callers, which are optimized as a whole.
    """

    _name = "girih_lower_for_callers"

    def run_pass(self, state: Any) -> bool:
        library = state.targetctx.codegen().create_library(state.func_id.func_qualname)

        def end() -> None:
            library._finalized = True

        library._optimize_final_module, library._finalize_final_module = (lambda: None), end
        state.library, state.flags.no_compile = library, True
        super().run_pass(state)
        lowered = state["cr"]
        entry: Any = [].append  # numba wants a unique built-in function as a key; it is never called
        state.targetctx.insert_user_function(entry, lowered.fndesc, [library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class _CompilerForCallers(compiler.CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        """Returns numba's own passes, except that native lowering is replaced."""
        lean = compiler.PassManager("girih_for_callers")
        for each, description in compiler.DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            lean.add_pass(_LowerForCallers if each is passes.NativeLowering else each, description)
        lean.finalize()
        return [lean]


class _Lean:
    """A function that numba inlines into its callers. If Python calls the function, in tests, it is compiled alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        functools.update_wrapper(self, function)
        options = {**_OPTIONS, "forceinline": True, "no_cpython_wrapper": True}
        self._inlined = numba.njit(**options, pipeline_class=_CompilerForCallers)(function)

    @property
    def _numba_type_(self) -> Any:
        return self._inlined._numba_type_

    @functools.cached_property
    def _alone(self) -> Any:
        return _cached(self.py_func)

    def __reduce__(self) -> Any:
        """Pickles the function by its name.

        Numba's cache identifies closures by their pickled contents. The pickled content of dispatchers would differ
        between processes.
        """
        return str, (f"{self.py_func.__module__}.{self.py_func.__qualname__}",)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._alone(*arguments, **named)


def njit_lean(function: F) -> F:
    """Decorates a function that is inlined into kernels. No entry point from Python is compiled.

    Compiling an entry point for all arrays of a shard takes longer than compiling most of these functions. All kernels
    are compiled without reference counts, because counting references to the arrays of a tuple takes ten times as long
    as reading a row. Therefore kernels must not create arrays.
    """
    return function if JIT_DISABLED else _Lean(function)  # type: ignore[return-value]


def reading(kind: Any, align: int) -> Any:
    """Returns a function for kernels that reads a value of type ``kind`` at an address. ``align`` is in bytes."""

    def value_at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            value = builder.load(place)
            value.align = align
            return value

        return kind(types.int64), generate

    return intrinsic(value_at)


def writing(kind: Any, align: int) -> Any:
    """Returns a function for kernels that writes a value of type ``kind`` at an address; see :func:`reading`."""

    def put_at(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            builder.store(arguments[1], place).align = align
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return intrinsic(put_at)


def warm_up() -> None:
    """Calls a trivial kernel, because the first kernel call of a process takes longer than later calls."""
    _identity(0)


@kernel()
def _identity(number: int) -> int:
    return number
