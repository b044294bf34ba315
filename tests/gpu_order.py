"""Runs the programs of interpreted kernels, and the lanes of their atomics, in other orders, as a GPU may.

In the shuffled order, plain reads of words that atomics of the same launch write return the value from before the launch, as the caches of a
GPU may hold it.
"""

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
    lanes = _Lanes(interpreter._interpreter, permuted, reads_old=order == "shuffled")
    begin, go_on = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(x, y, z):
        programs[:] = permuted(x).tolist()
        lanes.before.clear()
        begin(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: go_on(programs[x], y, z))
    monkeypatch.setattr(interpreter, "_interpreter", lanes)


class _Lanes:
    """The interpreter's atomics, lane by lane in another order.

    Attributes:
        before: the value of each word that atomics of this launch wrote, from before the launch.
    """

    def __init__(self, own, permuted, *, reads_old):
        self._own, self._permuted, self._reads_old = own, permuted, reads_old
        self.before = {}

    def __getattr__(self, name):
        return getattr(self._own, name)

    def atomic_cas(self, pointers, expected, wanted, sem):
        order = self._permuted(pointers.size)
        found = self._own.atomic_cas(*(_taken(each, order) for each in (pointers, expected, wanted)), sem)
        self._note(_taken(pointers, order), found)
        return _put(found, order, pointers.shape)

    def atomic_rmw(self, operation, pointers, values, mask, sem):
        order, shape = self._permuted(pointers.size), pointers.shape
        pointers, values, mask = given = [_taken(each, order) for each in (pointers, values, mask)]
        found = self._own.atomic_rmw(operation, *given, sem)
        self._note(pointers[mask], found[mask])
        return _put(found, order, shape)

    def load(self, pointers, mask, other, dtype):
        found = self._own.load(pointers, mask, other, dtype)
        if self._reads_old and self.before:
            for place in np.flatnonzero(mask):
                found.flat[place] = self.before.get(int(pointers.flat[place]), found.flat[place])
        return found

    def _note(self, pointers, found):
        for pointer, value in zip(pointers.tolist(), found.tolist(), strict=True):
            self.before.setdefault(pointer, value)


def _taken(lanes, order):
    return np.ascontiguousarray(lanes.reshape(-1)[order])


def _put(found, order, shape):
    lanes = np.empty_like(found)
    lanes[order] = found
    return lanes.reshape(shape)
