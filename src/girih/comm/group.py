"""The trainers of a run as one of them sees them: who it is, how many there are, what they tell each other.

Tensors go through ``torch.distributed``, everything else as JSON in tensors of bytes: nothing is pickled.
"""

from __future__ import annotations

import datetime
import gc
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

PATIENCE = datetime.timedelta(minutes=30)
"""How long a trainer waits for the others: as long as the slowest may evaluate or save."""


class TrainerGroup:
    """This trainer's number among all. Methods that send are called by all trainers, in the same order.

    Args:
        rank, size: which of how many.
        store: where they meet; None for one that is alone.
        backend: of ``torch.distributed``; None takes gloo, and NCCL for what lies on GPUs.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: torch._C._distributed_c10d.Store | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._lockstep = True
        self.store = store
        self._stop, self._agreed_stop = False, False
        self._number, self._num_stops = 0, 0
        self.lost = threading.Event()
        """Set where a process of the run is gone, so that nothing more is to be waited for."""
        self.process_group: dist.ProcessGroup | None = None
        if size > 1:
            if backend is None:
                on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
                backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
            self.process_group = dist.group.WORLD

    @property
    def first(self) -> bool:
        """Whether this one writes the run's files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each value, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_by_name(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The sum over all ranks of each count; all have the same names."""
        names = sorted(counts)
        return {n: int(v) for n, v in zip(names, self.sum([counts[n] for n in names]), strict=True)}

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over all ranks of each value."""
        if self.size == 1:
            return list(values)
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def vote(self, loss: float, *, refusing: bool = False) -> tuple[float, int]:
        """Once a step, all ranks learn the step's loss, how many refuse it, and whether one wants to stop.

        Returns:
            The sum of the losses, and how many refuse.
        """
        total, num_refusing, num_stopping = self.sum([loss, float(refusing), float(self._stop)])
        self._agreed_stop = num_stopping > 0
        return total, int(num_refusing)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.sum([float(flag)])[0] > 0 if self.size > 1 else flag

    def request_stop(self) -> None:
        """Has all ranks stop together. Callable from a signal handler."""
        self._stop = True

    def forget_stop(self) -> None:
        """Ends what :meth:`request_stop` began; all ranks do, together."""
        self._stop, self._agreed_stop = False, False
        self._num_stops += 1

    @property
    def stopping(self) -> bool:
        """Whether all ranks stop now: the same on all of them, as of when they agreed last."""
        return self._stop if self.size == 1 else self._agreed_stop

    @property
    def stop_requested(self) -> bool:
        """Whether this one was asked to stop, whatever the others know."""
        return self._stop

    def step_apart(self) -> None:
        """From here on each trainer goes at its own pace between two saves; else all do every step together."""
        self._lockstep = False

    def poll_stop(self) -> None:
        """Of trainers out of step, tells the others that this one stops, or learns that one of them does."""
        if self.size > 1 and not self._lockstep and not self._agreed_stop and self.store is not None:
            note = f"stop/{self._num_stops}"
            if self._stop:
                self.store.set(note, "1")
            self._agreed_stop = self._stop or self.store.check([note])

    def rendezvous(self) -> bool:
        """Before all do something together: whether none of them leaves, or has left, to stop.

        Trainers in step have agreed on that already.
        """
        if self.size > 1 and not self._lockstep:
            self._count_leaving(False)
            return not self._agreed_stop
        return True

    def finish(self) -> None:
        """Returns when all have done their last step."""
        while self.size > 1 and self._count_leaving(True) < self.size:
            pass  # others came to a meeting, which is off now

    def _count_leaving(self, leaving: bool) -> int:
        num_leaving, num_stopping = self.sum([float(leaving), float(self._stop or self._agreed_stop)])
        self._agreed_stop = self._agreed_stop or num_stopping > 0
        return int(num_leaving)

    def stop_together(self) -> bool:
        """Asks all whether one wants to stop; each then is."""
        self._agreed_stop = self.any(self._stop or self._agreed_stop)
        return self._agreed_stop

    def broadcast(self, value: Any) -> Any:
        """What rank 0 has: anything that JSON can hold."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.first else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0)
        content = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return json.loads(bytes(content.numpy()))

    def gather(self, value: Any) -> list[Any] | None:
        """On rank 0, what each rank has (anything that JSON can hold); None on the others."""
        arrays = self.gather_arrays({"": np.frombuffer(json.dumps(value).encode(), np.uint8)})
        return None if arrays is None else [json.loads(bytes(each[""])) for each in arrays]

    def gather_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """On rank 0, the arrays of each rank, its own included; None on the others."""
        if self.size == 1:
            return [dict(arrays)]
        if self.first:
            return [dict(arrays), *(self._receive(source) for source in range(1, self.size))]
        described = [(name, array.dtype.str, list(array.shape)) for name, array in arrays.items()]
        text = json.dumps(described).encode()
        dist.send(torch.tensor([len(text)]), 0)
        dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        for array in arrays.values():
            if array.size:
                dist.send(_bytes_of(array), 0)
        return None

    def exchange(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        """AllToAllv: the parts of a flat tensor go to the ranks in turn; returns what they sent here, in turn."""
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes))
        return received

    def next_number(self) -> int:
        """Counts on: the same number on all ranks that call it as often."""
        self._number += 1
        return self._number

    def put(self, key: str, text: str) -> None:
        """Leaves a note for the others, from any thread."""
        if self.store is not None:
            self.store.set(key, text)

    def take(self, key: str) -> str | None:
        """Takes a note away; None while there is none."""
        if self.store is None or not self.store.check([key]):
            return None
        text: str = self.store.get(key).decode()
        self.store.delete_key(key)
        return text

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Sums a tensor over all ranks, in place; with ``async_op`` returns the work."""
        return dist.all_reduce(tensor, group=self.process_group, async_op=async_op) if self.size > 1 else None

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrites a tensor by rank 0's, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0, group=self.process_group)

    def barrier(self) -> None:
        """Returns when all have come here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leaves the others.

        Threads of the group end only once nothing refers to it any more; one that is alive when the interpreter ends
        may abort the process.
        """
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()
        self.process_group = None
        gc.collect()

    def _receive(self, source: int) -> dict[str, NDArray[Any]]:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source)
        arrays = {}
        for name, dtype, shape in json.loads(bytes(text.numpy())):
            array = np.empty(shape, np.dtype(dtype))
            if array.size:
                dist.recv(_bytes_of(array), source)
            arrays[name] = array
        return arrays


def _bytes_of(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
