"""System functions for kernels: bytes at an address, functions of the C library, and memory shared with another writer.

A *function* is the address of a C function that takes up to seven integers or addresses, and returns an integer or an
address. Numba cannot cache ctypes functions on disk, but an address is a plain argument. Tests may pass another
function.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from girih.kernels.cpu.jit import JIT_DISABLED, cgutils, intrinsic, njit_lean, types


class System(NamedTuple):
    """Functions of the C library: ``pread``, ``syscall`` and the function that returns the address of ``errno``."""

    pread: int
    syscall: int
    errno: int


if JIT_DISABLED:
    _FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 7, use_errno=True)

    def copy_bytes(target: Any, source: Any, count: Any) -> None:
        """Copies bytes from one address to another. The ranges must not overlap."""
        ctypes.memmove(int(target), int(source), int(count))

    def call(function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
        """Calls a function of the C library."""
        return _FUNCTION(int(function))(*(int(each) for each in (a, b, c, d, e, f, g)))

    def errno_of(system: System) -> Any:
        """Returns the error number of the last function call in this thread."""
        return ctypes.get_errno()

    def load_acquire(array: Any) -> Any:
        """Returns the first item of int32[·] as int64. Earlier writes of the other writer are visible afterwards."""
        return int(array[0])  # on the tested processors, the interpreter itself keeps the order

    def store_release(array: Any, value: Any) -> None:
        """Sets the first item of int32[·]. A party that sees the item sees all earlier writes too."""
        array.view(np.uint32)[0] = value & 0xFFFFFFFF

else:
    ir = cgutils.ir
    _WORD = ir.IntType(64)

    @intrinsic
    def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
        """Copies bytes from one address to another. The ranges must not overlap."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, source = (builder.inttoptr(each, cgutils.voidptr_t) for each in arguments[:2])
            cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    @intrinsic
    def call(
        typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any
    ) -> Any:
        """Calls a function of the C library."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(_WORD, [_WORD] * 7)
            return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

        return types.int64(*[types.int64] * 8), generate

    @intrinsic
    def errno_of(typing_context: Any, system: Any) -> Any:
        """Returns the error number of the last function call in this thread."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = ir.IntType(32)
            kind = ir.FunctionType(number.as_pointer(), [])
            function = builder.extract_value(arguments[0], System._fields.index("errno"))
            place = builder.call(builder.inttoptr(function, kind.as_pointer()), [])
            return builder.sext(builder.load(place), _WORD)

        return types.int64(system), generate

    @intrinsic
    def load_acquire(typing_context: Any, array: Any) -> Any:
        """Returns the first item of int32[·] as int64. Earlier writes of other parties are visible afterwards."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.sext(builder.load_atomic(data, "acquire", 4), _WORD)

        return types.int64(array), generate

    @intrinsic
    def store_release(typing_context: Any, array: Any, value: Any) -> Any:
        """Sets the first item of int32[·]. A party that sees the item sees all earlier writes too."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            builder.store_atomic(builder.trunc(arguments[1], ir.IntType(32)), data, "release", 4)
            return context.get_dummy_value()

        return types.void(array, types.int64), generate


LINE_BYTES = 64

if JIT_DISABLED:

    def address_of(array: Any) -> Any:
        """Returns the address of an array's first item."""
        return array.ctypes.data

    def prefetch_address(address: Any) -> None:
        """Prefetches the cache line at an address. Does nothing without the JIT."""

else:

    @intrinsic
    def address_of(typing_context: Any, array: Any) -> Any:
        """Returns the address of an array's first item."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.ptrtoint(data, context.get_value_type(types.intp))

        return types.int64(array), generate

    @intrinsic
    def prefetch_address(typing_context: Any, address: Any) -> Any:
        """Prefetches the cache line at an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            flag = context.get_value_type(types.int32)
            kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
            pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
            read, keep, data = flag(0), flag(3), flag(1)
            builder.call(function, [pointer, read, keep, data])
            return context.get_dummy_value()

        return types.void(types.int64), generate


@njit_lean
def row_address(array: Any, row: Any) -> Any:
    """Returns the address of ``array[row]``."""
    return address_of(array) + np.int64(row) * array.strides[0]


@njit_lean
def prefetch(array: Any, row: Any) -> None:
    """Prefetches the first cache line of ``array[row]``."""
    prefetch_address(row_address(array, row))


@njit_lean
def prefetch_columns(array: Any, row: Any, first_column: Any, num_columns: Any) -> None:
    """Prefetches some columns of ``array[row]``, of four bytes each. Rows must begin at a cache line."""
    address = row_address(array, row)
    for byte in range(4 * first_column, 4 * (first_column + num_columns), LINE_BYTES):
        prefetch_address(address + byte)


@njit_lean
def prefetch_words(address: Any, num_words: Any) -> None:
    """Prefetches some words of four bytes that begin anywhere."""
    for byte in range(0, 4 * num_words, LINE_BYTES):
        prefetch_address(address + byte)
    prefetch_address(address + 4 * num_words - 1)
