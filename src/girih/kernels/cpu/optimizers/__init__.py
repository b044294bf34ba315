"""The sparse optimizers on the CPU, one file each, and the functions that choose the optimizer by its number.

The same arithmetic on GPUs is in :mod:`girih.kernels.gpu.optimizers`. In both modules, the last branch runs FTRL.

Each file has ``state_columns`` (names and widths of the state), ``hyper`` (the optimizer's numbers for one step, in
Python's float64), and ``update``, a kernel on one row. Arithmetic is float32, in torch's order. Gradients of equal keys
are summed before. Optimizers that sum g² limit g to ±2⁵⁰ (see ``bound``).
"""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np

from girih import optim
from girih.kernels.cpu.arrays import F32, F64, sealed
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.optimizers import adagrad, adam, ftrl, rowwise_adagrad, sgd

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = range(5)
HYPER_COLUMNS = 8
_FIRST_STATE = HYPER_COLUMNS - 1  # the column of the initial value of the state
_NUMBERS: dict[type, int] = {
    optim.SGD: SGD,
    optim.Adagrad: ADAGRAD,
    optim.RowwiseAdagrad: ROWWISE_ADAGRAD,
    optim.Adam: ADAM,
    optim.FTRL: FTRL,
}
_MODULES: tuple[Any, ...] = (sgd, adagrad, rowwise_adagrad, adam, ftrl)
UPDATES: dict[str, Any] = {module.__name__.rpartition(".")[2]: module.update for module in _MODULES}
"""Each optimizer's name and kernel on one row, in the order of their numbers."""


def number_of(options: optim.SparseOptimizer) -> int:
    """Returns the optimizer's number in kernels."""
    return _NUMBERS[type(options)]


def state_columns(options: optim.SparseOptimizer, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns the names and widths of an optimizer's state for one row with ``dim`` columns."""
    return cast(tuple[tuple[str, int], ...], _MODULES[number_of(options)].state_columns(options, dim))


@functools.lru_cache(maxsize=64)
def hyper_row(options: optim.SparseOptimizer, lr_scale: float, step: int) -> F64:
    """Returns the hyperparameters of one step for kernels, float64[8].

    Segments with equal hyperparameters share the array.
    """
    row = np.zeros(HYPER_COLUMNS)
    numbers = _MODULES[_NUMBERS[type(options)]].hyper(options, lr_scale, step)
    row[: len(numbers)] = numbers
    row[_FIRST_STATE] = getattr(options, "initial_accumulator_value", 0.0)
    return sealed(row)


@njit_lean
def update_row(optimizer: Any, row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates the columns of one segment of a row, float32[dim], and their state, in place."""
    if optimizer == SGD:
        sgd.update(row, state, grad, hyper)
    elif optimizer == ADAGRAD:
        adagrad.update(row, state, grad, hyper)
    elif optimizer == ROWWISE_ADAGRAD:
        rowwise_adagrad.update(row, state, grad, hyper)
    elif optimizer == ADAM:
        adam.update(row, state, grad, hyper)
    else:
        ftrl.update(row, state, grad, hyper)


@njit_lean
def begin_row(optimizer: Any, row: F32, state: F32, hyper: F64) -> None:
    """Writes the state of a new row whose value is ``row``."""
    state[:] = np.float32(hyper[_FIRST_STATE])
    settle_row(optimizer, row, state, hyper)


@njit_lean
def settle_row(optimizer: Any, row: F32, state: F32, hyper: F64) -> None:
    """Adapts the state to a row that was set from outside. Only the state of FTRL depends on the row."""
    if optimizer == FTRL:
        ftrl.settle(row, state, hyper)
