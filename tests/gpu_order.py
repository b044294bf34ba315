"""Interpreted kernels whose programs, and whose lanes at atomics, take another order than the interpreter's, as on a GPU they may."""

import sys

import numpy as np
from triton.runtime import interpreter

ORDERS = ("forwards", "backwards", "shuffled")


def take(monkeypatch, order, block=16):
    """Has all that is launched from here on take an order, in programs of ``block`` items."""
    for name, module in list(sys.modules.items()):
        if name.startswith("girih.") and module is not None:
            for small in ("block_of", "rows_at_once"):
                if hasattr(module, small):
                    monkeypatch.setattr(module, small, lambda *_, **__: block)
    rng = np.random.default_rng(7)

    def permuted(size):
        return {
            "forwards": np.arange(size),
            "backwards": np.arange(size)[::-1],
            "shuffled": rng.permutation(size),
        }[order]

    builder, programs = interpreter.interpreter_builder, []
    begin, go_on = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(x, y, z):
        programs[:] = permuted(x).tolist()
        begin(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: go_on(programs[x], y, z))
    monkeypatch.setattr(interpreter, "_interpreter", _Lanes(interpreter._interpreter, permuted))


class _Lanes:
    """The interpreter's atomics, lane by lane in another order; all else as it is."""

    def __init__(self, own, permuted):
        self._own, self._permuted = own, permuted

    def __getattr__(self, name):
        return getattr(self._own, name)

    def atomic_cas(self, pointers, expected, wanted, sem):
        order = self._permuted(pointers.size)
        found = self._own.atomic_cas(*(_taken(each, order) for each in (pointers, expected, wanted)), sem)
        return _put(found, order, pointers.shape)

    def atomic_rmw(self, operation, pointers, values, mask, sem):
        order = self._permuted(pointers.size)
        given = (_taken(each, order) for each in (pointers, values, mask))
        return _put(self._own.atomic_rmw(operation, *given, sem), order, pointers.shape)


def _taken(lanes, order):
    return np.ascontiguousarray(lanes.reshape(-1)[order])


def _put(found, order, shape):
    lanes = np.empty_like(found)
    lanes[order] = found
    return lanes.reshape(shape)
