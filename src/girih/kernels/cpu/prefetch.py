"""Asking for cache lines before they are read. Any row, and any address, is safe: a line that is not there is not brought."""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.jit import JIT_DISABLED, cgutils, intrinsic, njit_lean, types

LINE_BYTES = 64

if JIT_DISABLED:

    def address_of(array: Any) -> Any:
        """The address of an array's first item."""
        return array.ctypes.data

    def prefetch_address(address: Any) -> None:
        """Asks for the cache line at an address; does nothing without the JIT."""

else:

    @intrinsic
    def address_of(typing_context: Any, array: Any) -> Any:
        """The address of an array's first item."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.ptrtoint(data, context.get_value_type(types.intp))

        return types.int64(array), generate

    @intrinsic
    def prefetch_address(typing_context: Any, address: Any) -> Any:
        """Asks for the cache line at an address."""

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
    """The address of ``array[row]``."""
    return address_of(array) + np.int64(row) * array.strides[0]


@njit_lean
def prefetch(array: Any, row: Any) -> None:
    """Asks for the first cache line of ``array[row]``."""
    prefetch_address(row_address(array, row))


@njit_lean
def prefetch_columns(array: Any, row: Any, first_column: Any, num_columns: Any) -> None:
    """Asks for the cache lines of some columns of ``array[row]``, of four bytes each; for rows that begin with a line."""
    address = row_address(array, row)
    for byte in range(4 * first_column, 4 * (first_column + num_columns), LINE_BYTES):
        prefetch_address(address + byte)


@njit_lean
def prefetch_words(address: Any, num_words: Any) -> None:
    """Asks for the cache lines of some words of four bytes that begin anywhere."""
    for byte in range(0, 4 * num_words, LINE_BYTES):
        prefetch_address(address + byte)
    prefetch_address(address + 4 * num_words - 1)
