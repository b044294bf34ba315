"""Compilation of kernels: functions that Python calls, and functions that those are made of.

Numba's on-disk cache looks at the file of the cached function only, not at those of the functions that it calls. Here
the cache directory carries a digest of all sources of ``kernels``, of their path (numba finds kernels by it), of the
processor and of numba's version, so that any change compiles afresh. It lies in the user's cache directory (or
``NUMBA_CACHE_DIR``), so that a read-only installation works, or else in one for temporary files; where none can be
written, kernels compile anew in each process. :mod:`girih.kernels.cpu.ahead` compiles them before they are needed.

``NUMBA_DISABLE_JIT=1`` runs the same kernels as plain Python.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding as _typed_llvm
import numba as _typed_numba
from numba import extending as _typed_extending
from numba.core import caching as _typed_caching
from numba.core import cgutils as _typed_cgutils
from numba.core import codegen as _typed_codegen
from numba.core import compiler as _typed_compiler
from numba.core import compiler_machinery as _typed_machinery
from numba.core import typed_passes as _typed_passes
from numba.core import types as _typed_types

numba: Any = _typed_numba  # its own type hints cover only a part of it
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

JIT_DISABLED: bool = bool(numba.config.DISABLE_JIT)
"""True where kernels run as plain Python."""


def _digest() -> str:
    root = Path(__file__).resolve().parents[1]
    machine = llvm.get_host_cpu_name(), codegen.get_host_cpu_features(), numba.__version__
    place = os.path.abspath(__file__)
    digest = hashlib.sha256(repr((*machine, sys.implementation.cache_tag, place)).encode())
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _own_temporary() -> Path:
    """A directory for temporary files which nobody else can write: what lies there is run."""
    path = Path(tempfile.gettempdir(), f"girih-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode != stat.S_IFDIR | 0o700:
        raise PermissionError(path)
    return path


def _cache_directory() -> str | None:
    for parent in (_user_cache, _own_temporary):
        try:
            directory = parent() / "girih" / _digest()
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError):  # RuntimeError: there is no home directory
            continue
        if os.access(directory, os.W_OK | os.X_OK):
            return str(directory)
    return None


CACHE_DIRECTORY: str | None = None if JIT_DISABLED else _cache_directory()
"""The directory that keeps compiled kernels; None if nothing can be written."""

_OPTIONS = {"nogil": True, "fastmath": False, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


class Kernel(NamedTuple):
    """A kernel, as numba's dispatcher, and the types of arguments that it is called with.

    Attributes:
        kinds: for each compilation, the types of parameters that their annotations leave open.
    """

    dispatcher: Any
    kinds: tuple[Mapping[str, Any], ...]


KERNELS: dict[str, Kernel] = {}
"""All kernels of the modules that were imported, by module and name; none where kernels run as plain Python."""


def kernel(*kinds: Mapping[str, Any]) -> Callable[[F], F]:
    """Makes a kernel: compiled without the GIL and cached on disk; NaN and infinity behave as in NumPy.

    Its annotations say by which types it is compiled, and so it has to be called.

    Args:
        kinds: where parameters may be of several types, those of each compilation.
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
    if CACHE_DIRECTORY is None:
        return numba.njit(**_OPTIONS)(function)
    theirs = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = CACHE_DIRECTORY  # read while decorating only: others' functions keep theirs
    try:
        dispatcher = numba.njit(**_OPTIONS)(function)
        dispatcher._cache = _Cache(function)
        return dispatcher
    finally:
        numba.config.CACHE_DIR = theirs


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Loads a compiled kernel as it lies on the disk.

    Numba would register all that it can compile before: a third of a second in each process, and memory. Where a kernel is
    compiled after all, the compiler does so itself.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for some types of arguments; None where it is not there."""
        found = None
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        return found


@machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _LowerForCallers(passes.NativeLowering):  # type: ignore[misc]
    """Lowers a function to LLVM's language and goes no further.

    Numba would optimize it by itself and make machine code of it, which nobody calls, and that takes a sixth of all
    compiling. What it is inlined into is optimized as a whole.
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
        entry: Any = [].append  # a built-in function, as numba wants it, like no other: it is a key, and never called
        state.targetctx.insert_user_function(entry, lowered.fndesc, [library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class _CompilerForCallers(compiler.CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        """Numba's own passes, but for the last but one."""
        lean = compiler.PassManager("girih_for_callers")
        for each, description in compiler.DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            lean.add_pass(_LowerForCallers if each is passes.NativeLowering else each, description)
        lean.finalize()
        return [lean]


class _Lean:
    """A function that numba inlines into those that call it; where Python calls it, in tests, it is a kernel."""

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
        """Its name: numba's cache tells closures apart by what they hold, pickled, and dispatchers differ by process."""
        return str, (f"{self.py_func.__module__}.{self.py_func.__qualname__}",)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._alone(*arguments, **named)


def njit_lean(function: F) -> F:
    """Makes a function of which kernels are made: inlined into each, and no way into it from Python compiled.

    That way, for all arrays of a shard, takes longer to compile than what most of them do. All kernels are compiled
    without reference counts: counting those to the arrays of a tuple costs ten times as much as reading a row. So they
    make no arrays.
    """
    return function if JIT_DISABLED else _Lean(function)  # type: ignore[return-value]


def warm_up() -> None:
    """Has numba begin: the first kernel that a process calls takes longer than any other."""
    _nothing(0)


@kernel()
def _nothing(number: int) -> int:
    return number
