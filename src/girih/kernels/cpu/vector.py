"""Arithmetic on whole rows, sixteen floats at a time.

Plain loops in numba test repeatedly whether two rows overlap, and process rows of 16 floats one float at a time. The
results of this module are bit-identical to plain loops: multiplication and addition round separately, in the order of
columns.

Arrays are C-contiguous float32[·, ·]. A place in an array is a row and a column. An *address* is the address of a float
in any array. Rows of several shards are read in place by their addresses. With addresses, LLVM does not test repeatedly
whether two arrays overlap. *Lanes* are the sixteen floats at an address. They are a register under the JIT, and a
separate array without the JIT.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I32, I64
from girih.kernels.cpu.jit import (
    JIT_DISABLED,
    cgutils,
    extending,
    intrinsic,
    njit_lean,
    reading,
    types,
    writing,
)
from girih.kernels.cpu.system import address_of

_LANES = 16

if JIT_DISABLED:
    _add, _multiply = np.add, np.multiply

    def _floats_at(address: Any, count: int) -> F32:
        return np.ctypeslib.as_array((ctypes.c_float * count).from_address(int(address)))

    def _lanes_at(address: Any) -> F32:
        return _floats_at(address, _LANES).copy()

    def _float_at(address: Any) -> Any:
        return _floats_at(address, 1)[0]

    def _put_at(address: Any, lanes: F32) -> None:
        _floats_at(address, _LANES)[:] = lanes

    def _put_float_at(address: Any, value: Any) -> None:
        _floats_at(address, 1)[0] = value

    def _all_lanes(value: Any) -> F32:
        return np.full(_LANES, value, np.float32)

    def _within(lanes: F32, bound: Any) -> F32:
        return np.clip(lanes, -bound, bound)

    def _add_up(lanes: F32) -> Any:
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return lanes[0]

else:
    ir = cgutils.ir
    _VECTOR = ir.VectorType(ir.FloatType(), _LANES)
    _WORD = ir.IntType(32)

    class _Lanes(types.Type):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="lanes")

    @extending.register_model(_Lanes)
    class _LanesModel(extending.models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, _VECTOR)

    lanes_type = _Lanes()

    def _splat(builder: Any, value: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _WORD(0))
        zeros = ir.Constant(ir.VectorType(_WORD, _LANES), [0] * _LANES)
        return builder.shuffle_vector(first, first, zeros)

    def _arithmetic(instruction: str) -> Any:
        def two_lanes(typing_context: Any, first: Any, second: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return getattr(builder, instruction)(*arguments)

            return lanes_type(lanes_type, lanes_type), generate

        return intrinsic(two_lanes)

    _add, _multiply = _arithmetic("fadd"), _arithmetic("fmul")

    _lanes_at, _put_at = reading(lanes_type, 4), writing(lanes_type, 4)
    _float_at, _put_float_at = reading(types.float32, 4), writing(types.float32, 4)

    @intrinsic
    def _all_lanes(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _splat(builder, arguments[0])

        return lanes_type(types.float32), generate

    @intrinsic
    def _within(typing_context: Any, lanes: Any, bound: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes, most = arguments[0], _splat(builder, arguments[1])
            least = builder.fneg(most)
            lanes = builder.select(builder.fcmp_ordered(">", lanes, most), most, lanes)
            return builder.select(builder.fcmp_ordered("<", lanes, least), least, lanes)

        return lanes_type(lanes, types.float32), generate

    @intrinsic
    def _add_up(typing_context: Any, lanes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes, width = arguments[0], _LANES
            while width > 1:
                width //= 2
                numbers = [list(range(first, first + width)) for first in (0, width)]
                masks = [ir.Constant(ir.VectorType(_WORD, width), half) for half in numbers]
                lanes = builder.fadd(*(builder.shuffle_vector(lanes, lanes, mask) for mask in masks))
            return builder.extract_element(lanes, _WORD(0))

        return types.float32(lanes), generate


@njit_lean
def float_address(array: F32, row: Any, column: Any) -> Any:
    """Returns the address of a place in an array."""
    return address_of(array) + 4 * (np.int64(row) * array.shape[1] + column)


@njit_lean
def copy_row(
    target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
) -> None:
    """Copies ``dim`` floats from one place to another."""
    copy_from(float_address(target, row, column), float_address(source, from_row, from_column), dim)


@njit_lean
def add_scaled(
    target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any, factor: Any
) -> None:
    """Adds ``factor`` times the ``dim`` floats at one place to the floats at another place."""
    at, start = float_address(target, row, column), float_address(source, from_row, from_column)
    whole = dim - dim % _LANES
    for d in range(0, whole, _LANES):
        scaled = _multiply(_all_lanes(factor), _lanes_at(start + 4 * d))
        _put_at(at + 4 * d, _add(_lanes_at(at + 4 * d), scaled))
    for d in range(whole, dim):
        target[row, column + d] += factor * source[from_row, from_column + d]


@njit_lean
def add_row(
    target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
) -> None:
    """Adds the ``dim`` floats at one place to the floats at another place."""
    add_scaled(target, row, column, source, from_row, from_column, dim, np.float32(1.0))


@njit_lean
def copy_from(target: Any, address: Any, dim: Any) -> None:
    """Copies ``dim`` floats from one address to another."""
    whole = dim - dim % _LANES
    for d in range(0, whole, _LANES):
        _put_at(target + 4 * d, _lanes_at(address + 4 * d))
    for d in range(whole, dim):
        _put_float_at(target + 4 * d, _float_at(address + 4 * d))


@njit_lean
def sum_from(
    target: Any,
    addresses: I64,
    start_byte: Any,
    numbers: I32,
    start: Any,
    stop: Any,
    dim: Any,
    factor: Any,
) -> None:
    """Writes ``factor`` times the sum of rows of ``dim`` floats, added in their order.

    The rows are at ``addresses[numbers[start:stop]] + start_byte``.
    """
    whole = dim - dim % _LANES
    for d in range(0, whole, _LANES):
        lanes = _all_lanes(np.float32(0.0))
        for i in range(np.uint64(start), np.uint64(stop)):  # unsigned: no test for negative indices
            lanes = _add(lanes, _lanes_at(addresses[np.uint64(numbers[i])] + start_byte + 4 * d))
        _put_at(target + 4 * d, _multiply(lanes, _all_lanes(factor)))
    for d in range(whole, dim):
        total = np.float32(0.0)
        for i in range(start, stop):
            total += _float_at(addresses[numbers[i]] + start_byte + 4 * d)
        _put_float_at(target + 4 * d, factor * total)


@njit_lean
def weigh_from(
    target: Any,
    addresses: I64,
    start_byte: Any,
    numbers: I32,
    start: Any,
    stop: Any,
    dim: Any,
    weights: F32,
    factor: Any,
) -> None:
    """Works like :func:`sum_from`, but multiplies each row by its weight in ``weights[start:stop]``."""
    whole = dim - dim % _LANES
    for d in range(0, whole, _LANES):
        lanes = _all_lanes(np.float32(0.0))
        for i in range(start, stop):
            lanes = _add(
                lanes,
                _multiply(_all_lanes(weights[i]), _lanes_at(addresses[numbers[i]] + start_byte + 4 * d)),
            )
        _put_at(target + 4 * d, _multiply(lanes, _all_lanes(factor)))
    for d in range(whole, dim):
        total = np.float32(0.0)
        for i in range(start, stop):
            total += weights[i] * _float_at(addresses[numbers[i]] + start_byte + 4 * d)
        _put_float_at(target + 4 * d, factor * total)


@njit_lean
def sum_rows(
    target: F32, row: Any, column: Any, source: F32, numbers: I32, start: Any, stop: Any, dim: Any
) -> None:
    """Writes the sum of the rows ``numbers[start:stop]`` of ``source`` to a place.

    Rows have ``dim`` floats and are added in their order.
    """
    at, origin, row_bytes = float_address(target, row, column), address_of(source), 4 * source.shape[1]
    whole = dim - dim % _LANES
    for d in range(0, whole, _LANES):
        lanes = _all_lanes(np.float32(0.0))
        for i in range(np.uint64(start), np.uint64(stop)):  # unsigned: no test for negative indices
            lanes = _add(lanes, _lanes_at(origin + np.int64(numbers[i]) * row_bytes + 4 * d))
        _put_at(at + 4 * d, lanes)
    for d in range(whole, dim):
        total = np.float32(0.0)
        for i in range(start, stop):
            total += source[numbers[i], d]
        target[row, column + d] = total


@njit_lean
def sum_of_squares(grad: F32, row: F32, l2: Any, bound: Any) -> Any:
    """Returns Σ g². Here g = grad + l2 · row, float32[D], limited to ±bound.

    Computes 16 sums in parallel. Then adds one half of the sums to the other half, until one sum is left.
    """
    dim = row.shape[0]
    whole = dim - dim % _LANES
    lanes, at, start = _all_lanes(np.float32(0.0)), address_of(grad), address_of(row)
    for d in range(0, whole, _LANES):
        g = _within(_add(_lanes_at(at + 4 * d), _multiply(_all_lanes(l2), _lanes_at(start + 4 * d))), bound)
        lanes = _add(lanes, _multiply(g, g))
    total = _add_up(lanes)
    for d in range(whole, dim):
        value = max(min(grad[d] + l2 * row[d], bound), -bound)
        total += value * value
    return total
