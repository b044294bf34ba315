"""Compilation of kernels: ``njit`` with a cache that cannot go stale, and a prefetch.

Numba's on-disk cache looks at the file of the cached function only, not at those of the functions
that it calls. Here the cache directory carries a digest of all sources of ``kernels``, so that any
change compiles afresh. It lies in the user's cache directory (or ``NUMBA_CACHE_DIR``), so that a
read-only installation works; where neither can be written, kernels compile anew in each process.

``NUMBA_DISABLE_JIT=1`` runs the same kernels as plain Python.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba as _typed_numba
from numba import extending as _typed_extending
from numba.core import cgutils as _typed_cgutils
from numba.core import types as _typed_types

numba: Any = _typed_numba  # its own type hints cover only a part of it
cgutils: Any = _typed_cgutils
extending: Any = _typed_extending
intrinsic: Any = extending.intrinsic
types: Any = _typed_types

F = TypeVar("F", bound=Callable[..., Any])

JIT_DISABLED: bool = bool(numba.config.DISABLE_JIT)
"""True where kernels run as plain Python."""


def _sources_digest() -> str:
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
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


def _cache_directory() -> str | None:
    try:
        directory = _user_cache() / "girih" / _sources_digest()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return str(directory) if os.access(directory, os.W_OK | os.X_OK) else None


_CACHE_DIRECTORY = None if JIT_DISABLED else _cache_directory()


def _compiled(function: F, **options: Any) -> F:
    if JIT_DISABLED:
        return function
    options |= {"nogil": True, "fastmath": False, "error_model": "numpy"}
    if _CACHE_DIRECTORY is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    theirs = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_DIRECTORY  # read while decorating only: others' functions keep theirs
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    finally:
        numba.config.CACHE_DIR = theirs


def is_compiled() -> bool:
    """Whether kernels were compiled before; if not, the first use of each takes seconds."""
    return JIT_DISABLED or (_CACHE_DIRECTORY is not None and any(Path(_CACHE_DIRECTORY).rglob("*.nbi")))


def njit(function: F) -> F:
    """Compiles on first call, without the GIL, cached on disk; NaN and infinity behave as in NumPy."""
    return _compiled(function)


def warm_up() -> None:
    """Has numba begin: the first kernel that a process calls takes a third of a second more than any other."""
    _nothing(0)


def njit_lean(function: F) -> F:
    """As :func:`njit`, for functions that make no arrays: compiled without reference counts, and inlined.

    Counting references to the arrays of a tuple costs ten times as much as reading a row.
    """
    return _compiled(function, _nrt=False, forceinline=True)


if JIT_DISABLED:

    def prefetch_at(array: Any, row: Any, byte: Any) -> None:
        """Asks for the cache line ``byte`` bytes into ``array[row]``; does nothing without the JIT."""

else:

    @intrinsic
    def prefetch_at(typing_context: Any, array: Any, row: Any, byte: Any) -> Any:
        """Asks for the cache line ``byte`` bytes into ``array[row]``; any row number is safe."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            fields = context.make_array(signature.args[0])(context, builder, arguments[0])
            word = context.get_value_type(types.intp)
            number = context.cast(builder, arguments[1], signature.args[1], types.intp)
            start = context.cast(builder, arguments[2], signature.args[2], types.intp)
            stride = cgutils.unpack_tuple(builder, fields.strides)[0]
            offset = builder.add(builder.mul(number, stride), start)
            address = builder.add(builder.ptrtoint(fields.data, word), offset)
            flag = context.get_value_type(types.int32)
            function_type = cgutils.ir.FunctionType(
                cgutils.ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag]
            )
            function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch")
            read, keep, data = flag(0), flag(3), flag(1)
            builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), read, keep, data])
            return context.get_dummy_value()

        return types.void(array, row, byte), generate


@njit_lean
def prefetch(array: Any, row: Any) -> None:
    """Asks for the first cache line of ``array[row]``."""
    prefetch_at(array, row, 0)


@njit
def _nothing(number: int) -> int:
    return number
