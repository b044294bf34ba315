"""The collectives of a run's trainers.

Tensors are sent through ``torch.distributed``, on a separate process group. All other values are sent as JSON in
tensors of bytes, or are stored as notes in the run's registry. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.process_group import AbortableGroup, RegistryStore
from girih.comm.registry import LocalRegistry, Registry
from girih.errors import GirihError
from girih.telemetry.busy import waiting

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
_FOREVER_S = 1e9
_LITTLE_BYTES = 256  # up to this size, every rank sums the whole tensor
_RING_BYTES = 1 << 17  # larger tensors are summed around a ring, which copies less


class Collectives:
    """This trainer's rank among all trainers. All trainers call methods that send, in the same order.

    Args:
        rank, size: this trainer's rank, and the number of ranks.
        registry: the registry through which the ranks find each other. A single trainer needs no registry.
        host: the host at which this trainer listens for other trainers, or None to let gloo choose.
        name: the name of the group in the registry. It is the same on all ranks, and is used for only one group.

    Attributes:
        lost: set if a process of the run is gone, so that this rank must not wait for other ranks any more.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        registry: Registry | None = None,
        *,
        host: str | None = LOOPBACK,
        name: str = "trainers",
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.registry: Registry = registry or LocalRegistry()
        self.lost = threading.Event()
        self._host = host
        self._number, self._num_splits = 0, 0
        self._parts: weakref.WeakSet[Collectives] = weakref.WeakSet()
        self._group: AbortableGroup | None = None
        if size > 1:
            store = RegistryStore(self.registry, f"{name}/group")
            self._group = AbortableGroup(store, rank, size, host=host, name=name)
            words = (weakref.ref(self), self.registry, f"{name}/abort/{rank}")
            threading.Thread(target=_watch, args=words, name="girih-abort", daemon=True).start()

    @property
    def process_group(self) -> Any:
        """The group for the ``group`` argument of ``torch.distributed``, or None for a single trainer."""
        return None if self._group is None else self._group.process_group

    @property
    def first(self) -> bool:
        """True if this rank writes the run's files."""
        return self.rank == 0

    def split(self, members: Sequence[int]) -> Self | None:
        """Returns a group of some ranks, in the given order, or None if this rank is not a member.

        All ranks call this method. Members of a group pass the same ranks. Different groups have no common rank.
        """
        self._num_splits += 1
        if self.rank not in members:
            return None
        name = f"{self.name}/{self._num_splits}.{members[0]}"
        rank = list(members).index(self.rank)
        part = type(self)(rank, len(members), self.registry, host=self._host, name=name)
        self._parts.add(part)
        return part

    def abort(self) -> None:
        """Makes current and later collectives raise on all ranks. Callable from any thread."""
        self._abort_here()
        if self.size > 1:
            with contextlib.suppress(GirihError):  # if the registry is gone, all other ranks notice this too
                for rank in range(self.size):
                    self.registry.set(f"{self.name}/abort/{rank}", "1")

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sum over all ranks of each value, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(total)
        return total.tolist()

    def sum_by_name(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the sum over all ranks of each count. All ranks pass the same names."""
        names = sorted(counts)
        return {n: int(v) for n, v in zip(names, self.sum([counts[n] for n in names]), strict=True)}

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of each value over all ranks."""
        if self.size == 1:
            return list(values)
        most = torch.tensor(values, dtype=torch.float64)
        await_work(self.process_group.allreduce(most, dist.ReduceOp.MAX))
        return most.tolist()

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is true on any rank."""
        return self.sum([float(flag)])[0] > 0

    def broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0 on all ranks. JSON must be able to represent the value."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.first else b""
        length = torch.tensor([len(text)])
        self.broadcast_tensor(length)
        content = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
        self.broadcast_tensor(content)
        return json.loads(bytes(content.numpy()))

    def gather(self, value: T) -> list[T] | None:
        """Returns the values of all ranks on rank 0, and None on all other ranks.

        JSON must be able to represent the values.
        """
        arrays = self.gather_arrays({"": np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)})
        return None if arrays is None else [json.loads(bytes(each[""])) for each in arrays]

    def gather_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """Returns the arrays of each rank, including rank 0, on rank 0, and None on all other ranks."""
        if self.size == 1:
            return [dict(arrays)]
        if self.first:
            return [dict(arrays), *(self._receive(source) for source in range(1, self.size))]
        described = [(name, array.dtype.str, list(array.shape)) for name, array in arrays.items()]
        text = json.dumps(described).encode()
        self._send(torch.tensor([len(text)]))
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for array in arrays.values():
            if array.size:
                self._send(_bytes_of(array))
        return None

    def exchange(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        """AllToAllv: sends the parts of a flat tensor to the ranks in order, and returns the received parts."""
        return self.begin_exchange(sent, sent_sizes, received_sizes)()

    def begin_exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Begins :meth:`exchange`. The returned function ends it, and returns the received parts.

        For a tensor on a GPU, the returned function makes the current stream wait, but not the host.
        """
        if self.size == 1:
            return lambda: sent
        received = sent.new_empty(sum(received_sizes))
        work = self.process_group.alltoall_base(received, sent, list(received_sizes), list(sent_sizes))

        def end() -> Tensor:
            await_work(work)
            return received

        return end

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks in the order of ranks, [size, ...]. All tensors have the same shape."""
        counts = [tensor.numel()] * self.size
        flat = self.exchange(tensor.reshape(-1).repeat(self.size), counts, counts)
        return flat.view(self.size, *tensor.shape)

    def hosts(self) -> tuple[str, ...]:
        """Returns the address at which each rank listens, by rank. Ranks of one host have the same address."""
        return tuple(self.broadcast(self.gather(self._host or socket.gethostname())))

    def next_number(self) -> int:
        """Returns the next number of a counter. The n-th call returns the same number on all ranks."""
        self._number += 1
        return self._number

    def put(self, key: str, text: str) -> None:
        """Leaves a note for other ranks. Callable from any thread."""
        self.registry.set(f"{self.name}/note/{key}", text)

    def has(self, key: str) -> bool:
        """Returns whether a note exists."""
        return self.registry.check([f"{self.name}/note/{key}"])

    def take(self, key: str) -> str | None:
        """Returns and deletes a note. Returns None if the note does not exist."""
        key = f"{self.name}/note/{key}"
        text = self.registry.get(key)
        if text is not None:
            self.registry.delete(key)
        return text

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Sums a tensor over all ranks, in place. With ``async_op``, returns the work."""
        if self.size == 1:
            return None
        if not async_op and tensor.device.type == "cpu" and 0 < tensor.nbytes <= _RING_BYTES:
            tensor.copy_(self._small_sum(tensor.reshape(-1)).view_as(tensor))
            return None
        work = self.process_group.allreduce([tensor])
        return work if async_op else await_work(work)

    def _small_sum(self, flat: Tensor) -> Tensor:
        """Returns the sum of a small tensor. Sends at most half the messages of a ring.

        gloo adds 144 bytes to each message, so fewer messages are better.
        """
        if flat.nbytes <= _LITTLE_BYTES:
            return _in_turn(self.all_gather(flat))
        counts = [flat.numel()] * self.size
        parts = [(rank + 1) * n // self.size - rank * n // self.size for rank, n in enumerate(counts)]
        own = [parts[self.rank]] * self.size
        part = _in_turn(self.exchange(flat, parts, own).view(self.size, own[0]))
        return self.exchange(part.repeat(self.size), own, parts)

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrites a tensor with the tensor of rank 0, in place."""
        if self.size > 1:
            await_work(self.process_group.broadcast(tensor, 0))

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        if self.size > 1:
            await_work(self.process_group.barrier())

    def close(self) -> None:
        """Leaves the group.

        Threads of the group end only when nothing refers to the group any more. A thread that is alive when the
        interpreter ends may abort the process.
        """
        for part in list(self._parts):
            part.close()
        if self._group is not None:
            self._group = None
            with contextlib.suppress(GirihError):  # deleting this key ends the thread that watches it
                self.registry.set(f"{self.name}/abort/{self.rank}", "closed")
            gc.collect()

    def _abort_here(self) -> None:
        self.lost.set()
        for part in list(self._parts):
            part._abort_here()
        group = self._group
        if group is not None:
            group.abort()

    def _send(self, tensor: Tensor) -> None:
        await_work(self.process_group.send([tensor], 0, 0))

    def _receive(self, source: int) -> dict[str, NDArray[Any]]:
        length = torch.zeros(1, dtype=torch.int64)
        await_work(self.process_group.recv([length], source, 0))
        text = torch.empty(int(length), dtype=torch.uint8)
        await_work(self.process_group.recv([text], source, 0))
        arrays = {}
        for name, dtype, shape in json.loads(bytes(text.numpy())):
            array = np.empty(shape, np.dtype(dtype))
            if array.size:
                await_work(self.process_group.recv([_bytes_of(array)], source, 0))
            arrays[name] = array
        return arrays


def await_work(work: dist.Work) -> bool:
    """Waits until all ranks have joined a collective and all bytes have arrived."""
    with waiting():
        return work.wait()


def _in_turn(rows: Tensor) -> Tensor:
    """Returns the sum of rows, added in the order of ranks. So a sum does not depend on its place in the tensor."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _bytes_of(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]).reshape(-1).view(np.uint8))


def _watch(of: weakref.ref[Collectives], registry: Registry, key: str) -> None:
    """Aborts the group on this rank if another rank aborts or the registry is gone. Runs until the group is closed."""
    with contextlib.suppress(GirihError):
        registry.wait([key], _FOREVER_S)
    group = of()
    if group is not None and group._group is not None:
        group._abort_here()
