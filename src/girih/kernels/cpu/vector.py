"""Arithmetic on whole rows, sixteen floats at a time.

Numba's own loops check again and again whether two rows overlap, and take rows of 16 one float after the other.
Results are the same to the last bit: multiplication and addition round separately, in the order of columns.

Arrays are C-contiguous float32[·, ·]; a place in one is a row and a column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I32
from girih.kernels.cpu.jit import JIT_DISABLED, cgutils, intrinsic, njit_lean, types

_LANES = 16


def _address(context: Any, builder: Any, array_type: Any, array: Any, place: Any, place_type: Any) -> Any:
    """The address of the float at a flat position, as a pointer to sixteen of them."""
    ir = cgutils.ir
    data = context.make_array(array_type)(context, builder, array).data
    position = context.cast(builder, place, place_type, types.intp)
    word = context.get_value_type(types.intp)
    address = builder.add(builder.ptrtoint(data, word), builder.shl(position, word(2)))
    return builder.inttoptr(address, ir.VectorType(ir.FloatType(), _LANES).as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    lanes = builder.load(pointer)
    lanes.align = 4
    return lanes


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 4


def _all_lanes(builder: Any, value: Any) -> Any:
    ir = cgutils.ir
    lanes = ir.VectorType(ir.FloatType(), _LANES)
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, first, zeros)


def _add_up(builder: Any, lanes: Any) -> Any:
    """The sum of sixteen lanes: halves are added to halves."""
    ir = cgutils.ir
    width = _LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                lanes, lanes, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(at, at + width)))
            )
            for at in (0, width)
        ]
        lanes = builder.fadd(*halves)
    return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))


def _two_places(combine: Callable[[Any, Any, Any], Any]) -> Any:
    def lanes(typing_context: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            into = _address(
                context, builder, signature.args[0], arguments[0], arguments[1], signature.args[1]
            )
            out_of = _address(
                context, builder, signature.args[2], arguments[2], arguments[3], signature.args[3]
            )
            _store(builder, combine(builder, into, _load(builder, out_of)), into)
            return context.get_dummy_value()

        return types.void(target, at, source, start), generate

    return intrinsic(lanes)


if JIT_DISABLED:

    def copy_row(
        target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
    ) -> None:
        """Copies ``dim`` floats from one place to another."""
        target[row, column : column + dim] = source[from_row, from_column : from_column + dim]

    def add_row(
        target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
    ) -> None:
        """Adds ``dim`` floats at one place to those at another."""
        target[row, column : column + dim] += source[from_row, from_column : from_column + dim]

    def add_scaled(
        target: F32,
        row: Any,
        column: Any,
        source: F32,
        from_row: Any,
        from_column: Any,
        dim: Any,
        factor: Any,
    ) -> None:
        """Adds ``factor`` times ``dim`` floats at one place to those at another."""
        target[row, column : column + dim] += factor * source[from_row, from_column : from_column + dim]

    def sum_rows(
        target: F32,
        row: Any,
        source: F32,
        from_column: Any,
        numbers: I32,
        start: Any,
        stop: Any,
        dim: Any,
        factor: Any,
    ) -> None:
        """``factor`` times the sum of the rows ``numbers[start:stop]``, ``dim`` floats each, in their order."""
        total = np.zeros(dim, np.float32)
        for i in range(start, stop):
            total += source[numbers[i], from_column : from_column + dim]
        target[row, :dim] = factor * total

    def sum_of_squares(grad: F32, row: F32, l2: Any, bound: Any) -> Any:
        """Σ g² with g = grad + l2 · row within ±bound, float32[D] each: 16 sums side by side, then halves to halves."""
        g = np.clip(grad + l2 * row, -bound, bound)
        squares, whole = g * g, len(g) - len(g) % _LANES
        lanes = np.zeros(_LANES, np.float32)
        for start in range(0, whole, _LANES):
            lanes += squares[start : start + _LANES]
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total = lanes[0]
        for square in squares[whole:]:
            total += square
        return total

else:
    _copy_lanes = _two_places(lambda builder, into, lanes: lanes)
    _add_lanes = _two_places(lambda builder, into, lanes: builder.fadd(_load(builder, into), lanes))

    @intrinsic
    def _add_scaled_lanes(
        typing_context: Any, target: Any, at: Any, source: Any, start: Any, factor: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            into = _address(
                context, builder, signature.args[0], arguments[0], arguments[1], signature.args[1]
            )
            out_of = _address(
                context, builder, signature.args[2], arguments[2], arguments[3], signature.args[3]
            )
            scaled = builder.fmul(_all_lanes(builder, arguments[4]), _load(builder, out_of))
            _store(builder, builder.fadd(_load(builder, into), scaled), into)
            return context.get_dummy_value()

        return types.void(target, at, source, start, types.float32), generate

    @intrinsic
    def _sum_lanes(
        typing_context: Any,
        target: Any,
        at: Any,
        source: Any,
        column: Any,
        width: Any,
        numbers: Any,
        start: Any,
        stop: Any,
        factor: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            ir = cgutils.ir
            lanes = ir.VectorType(ir.FloatType(), _LANES)
            word = context.get_value_type(types.intp)
            column, width, first, last = (
                context.cast(builder, arguments[n], signature.args[n], types.intp) for n in (3, 4, 6, 7)
            )
            rows = context.make_array(signature.args[5])(context, builder, arguments[5]).data
            total = cgutils.alloca_once_value(builder, ir.Constant(lanes, [0.0] * _LANES))
            with cgutils.for_range_slice(builder, first, last, word(1), word) as (i, _):
                number = builder.sext(builder.load(builder.gep(rows, [i])), word)
                place = builder.add(builder.mul(number, width), column)
                out_of = _address(context, builder, signature.args[2], arguments[2], place, types.intp)
                builder.store(builder.fadd(builder.load(total), _load(builder, out_of)), total)
            into = _address(
                context, builder, signature.args[0], arguments[0], arguments[1], signature.args[1]
            )
            scaled = builder.fmul(builder.load(total), _all_lanes(builder, arguments[8]))
            _store(builder, scaled, into)
            return context.get_dummy_value()

        return types.void(target, at, source, column, width, numbers, start, stop, types.float32), generate

    @njit_lean
    def sum_rows(
        target: F32,
        row: Any,
        source: F32,
        from_column: Any,
        numbers: I32,
        start: Any,
        stop: Any,
        dim: Any,
        factor: Any,
    ) -> None:
        """``factor`` times the sum of the rows ``numbers[start:stop]``, ``dim`` floats each, in their order."""
        whole = dim - dim % _LANES
        for d in range(0, whole, _LANES):
            at = row * target.shape[1] + d
            _sum_lanes(target, at, source, from_column + d, source.shape[1], numbers, start, stop, factor)
        for d in range(whole, dim):
            total = np.float32(0.0)
            for i in range(start, stop):
                total += source[numbers[i], from_column + d]
            target[row, d] = factor * total

    @intrinsic
    def _square_lanes(typing_context: Any, grad: Any, row: Any, l2: Any, bound: Any, whole: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            ir = cgutils.ir
            lanes = ir.VectorType(ir.FloatType(), _LANES)
            l2_lanes, most = _all_lanes(builder, arguments[2]), _all_lanes(builder, arguments[3])
            least = builder.fneg(most)
            word = context.get_value_type(types.intp)
            total = cgutils.alloca_once_value(builder, ir.Constant(lanes, [0.0] * _LANES))
            stop = context.cast(builder, arguments[4], signature.args[4], types.intp)
            with cgutils.for_range_slice(builder, word(0), stop, word(_LANES), word) as (start, _):
                places = [
                    _address(context, builder, signature.args[n], arguments[n], start, types.intp)
                    for n in (0, 1)
                ]
                g, x = (_load(builder, place) for place in places)
                g = builder.fadd(g, builder.fmul(l2_lanes, x))
                g = builder.select(builder.fcmp_ordered(">", g, most), most, g)
                g = builder.select(builder.fcmp_ordered("<", g, least), least, g)
                builder.store(builder.fadd(builder.load(total), builder.fmul(g, g)), total)
            return _add_up(builder, builder.load(total))

        return types.float32(grad, row, types.float32, types.float32, whole), generate

    @njit_lean
    def sum_of_squares(grad: F32, row: F32, l2: Any, bound: Any) -> Any:
        """Σ g² with g = grad + l2 · row within ±bound, float32[D] each: 16 sums side by side, then halves to halves."""
        dim = row.shape[0]
        whole = dim - dim % _LANES
        total = _square_lanes(grad, row, l2, bound, whole)
        for d in range(whole, dim):
            g = max(min(grad[d] + l2 * row[d], bound), -bound)
            total += g * g
        return total

    @njit_lean
    def copy_row(
        target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
    ) -> None:
        """Copies ``dim`` floats from one place to another."""
        at = row * target.shape[1] + column
        start = from_row * source.shape[1] + from_column
        whole = dim - dim % _LANES
        for d in range(0, whole, _LANES):
            _copy_lanes(target, at + d, source, start + d)
        for d in range(whole, dim):
            target[row, column + d] = source[from_row, from_column + d]

    @njit_lean
    def add_row(
        target: F32, row: Any, column: Any, source: F32, from_row: Any, from_column: Any, dim: Any
    ) -> None:
        """Adds ``dim`` floats at one place to those at another."""
        at = row * target.shape[1] + column
        start = from_row * source.shape[1] + from_column
        whole = dim - dim % _LANES
        for d in range(0, whole, _LANES):
            _add_lanes(target, at + d, source, start + d)
        for d in range(whole, dim):
            target[row, column + d] += source[from_row, from_column + d]

    @njit_lean
    def add_scaled(
        target: F32,
        row: Any,
        column: Any,
        source: F32,
        from_row: Any,
        from_column: Any,
        dim: Any,
        factor: Any,
    ) -> None:
        """Adds ``factor`` times ``dim`` floats at one place to those at another."""
        at = row * target.shape[1] + column
        start = from_row * source.shape[1] + from_column
        whole = dim - dim % _LANES
        for d in range(0, whole, _LANES):
            _add_scaled_lanes(target, at + d, source, start + d, factor)
        for d in range(whole, dim):
            target[row, column + d] += factor * source[from_row, from_column + d]
