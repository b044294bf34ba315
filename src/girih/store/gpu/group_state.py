"""A shard whose embeddings a group reads in GPU memory. It has verbs for host arrays and verbs for tensors.

The verbs for tensors do not wait for the GPU. An embedding group on a GPU calls them. The verbs for arrays copy host
arrays to the GPU, call the verbs for tensors, copy the results back, and wait for the copies. Evaluation by hand,
loading and tests use the verbs for arrays.

Shapes: U unique keys, n the capacity of the arrays, W columns of a row, T tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu.gradients import FusedInputs
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.record_kernels import DeviceKeys, RecordKernels
from girih.store.keys import Keys, RowUpdate
from girih.store.spec import Floats, Ints, Longs
from girih.store.state import State

RowNumbers: TypeAlias = Ints | Tensor
"""Rows of keys, int32[n] or int32[U], on the host or on the device."""


class DeviceUpdate(NamedTuple):
    """One optimizer step on the rows of keys on a device.

    Attributes:
        gradients: float32[n, W].
        refused: int32[1]: no row is updated if this is not negative.
        direct: the third result of :meth:`RecordKernels.direct_sums`.
    """

    gradients: Tensor
    refused: Tensor
    step: int
    lr_scale: float
    direct: FusedInputs | None = None


class GroupState(State):
    """A shard whose embeddings a group reads in GPU memory.

    Attributes:
        kernels: the kernels for its records.
    """

    kernels: RecordKernels

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.kernels.device

    @abstractmethod
    def begin_read(self, keys: DeviceKeys) -> None:
        """Starts to copy the rows of keys to the GPU, on the current stream. Changes no result."""

    @abstractmethod
    def read(self, keys: DeviceKeys, step: int) -> tuple[RowNumbers, Tensor]:
        """Reads rows for training.

        Returns:
            Row numbers for :meth:`move`, and the address of each key's columns, int64[n], valid until the next verb.
        """

    @abstractmethod
    def peeked(self, keys: DeviceKeys) -> tuple[RowNumbers, Tensor]:
        """Reads rows for evaluation, and counts the keys without a row; see :meth:`read`."""

    @abstractmethod
    def move(self, keys: DeviceKeys, rows: RowNumbers, change: DeviceUpdate) -> None:
        """Makes one optimizer step on the row of each key. ``rows`` are hints for finding the rows."""

    @abstractmethod
    def look(self, keys: DeviceKeys) -> tuple[RowNumbers, Tensor]:
        """Reads rows like :meth:`peeked`, without counts."""

    @abstractmethod
    def set_rows(self, keys: DeviceKeys, values: Tensor, step: int) -> RowNumbers:
        """Sets rows to ``values``, float32[n, W]. Makes missing rows without an admission check."""

    def lookup(self, keys: Keys, step: int, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for training."""
        return self._copy_rows(keys, out, addresses, lambda there: self.read(there, step))

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation."""
        return self._copy_rows(keys, out, addresses, self.look)

    def fetch(self, keys: Keys) -> None:
        """Starts to copy the rows of keys to the GPU."""
        self.begin_read(self._keys(keys)[1])

    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Updates rows by gradients."""
        if change.terms is not None:
            raise ConfigError("a store with rows in GPU memory takes sums of gradients; leave terms out")
        order, there = self._keys(keys)
        hints = np.full(len(order), at.NO_ROW, np.int32) if keys.rows is None else keys.rows[order]
        gradients, before = to_device(change.grads[order], self.device), self.memory.counters()["dropped"]
        refused = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        self.move(there, hints, DeviceUpdate(gradients, refused, change.step, change.lr_scale))
        return self.memory.counters()["dropped"] - before

    def assign(self, keys: Keys, values: Floats) -> Ints:
        """Sets rows."""
        order, there = self._keys(keys)
        with self.memory.setting() as step:
            rows = self.set_rows(there, to_device(values[order], self.device), step)
        return _in_order(order, rows)

    def _copy_rows(
        self,
        keys: Keys,
        out: Floats,
        addresses: Longs | None,
        read: Callable[[DeviceKeys], tuple[RowNumbers, Tensor]],
    ) -> Ints:
        """Copies the rows that ``read`` returns to ``out``, float32[U, W], and returns their numbers."""
        if addresses is not None:
            raise ConfigError(
                "addresses: rows are in GPU memory, where the host cannot read them; leave it out"
            )
        order, there = self._keys(keys)
        rows, places = read(there)
        out[order] = self.kernels.columns(there, places).cpu().numpy()
        return _in_order(order, rows)

    def _keys(self, keys: Keys) -> tuple[Longs, DeviceKeys]:
        """Returns keys on the device, sorted by table, and the index of each among the given keys."""
        order = np.argsort(keys.tables, kind="stable")
        ids, tables = keys.ids[order], keys.tables[order]
        if len(np.unique(np.stack([ids, tables]), axis=1).T) < len(ids):
            raise ConfigError("a duplicate key; rows in GPU memory take unique keys only")
        counts = keys.counts[order] if len(keys.counts) else np.ones(len(ids), np.int32)
        num = torch.full((1,), len(ids), dtype=torch.int32, device=self.device)
        on_ids, on_tables, on_counts = (to_device(array, self.device) for array in (ids, tables, counts))
        most = np.bincount(tables, minlength=len(self.spec.tables))
        return order, DeviceKeys(on_ids, on_tables, on_counts, num, most, Keys(ids, tables, counts))


def _in_order(order: Longs, rows: RowNumbers) -> Ints:
    """Returns row numbers from the device in the original order of the keys."""
    in_order = np.empty(len(order), np.int32)
    in_order[order] = torch.as_tensor(rows).cpu().numpy()
    return in_order
