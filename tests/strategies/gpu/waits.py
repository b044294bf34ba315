"""Waits of the host for a GPU: found by operators where kernels are interpreted, and in traces of torch's profiler where they are not."""

import sys
import threading
import traceback
from collections import Counter
from itertools import pairwise

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from girih.dense.half import Outcome
from girih.sparse.halves.sharded import ShardedHalf

ATEN = torch.ops.aten
SIZED_BY_VALUES = {
    ATEN.nonzero, ATEN.masked_select, ATEN.bincount, ATEN._unique, ATEN._unique2, ATEN.unique_dim,
    ATEN.unique_consecutive, ATEN.unique_dim_consecutive,
}  # fmt: skip
"""Operators whose result is as long as numbers on the device say, which the host has to learn first."""
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
MASKS = (torch.bool, torch.uint8)
HOST_COPIES = ("cpu", "tolist")
"""Methods of tensors that copy to the host, and dispatch to nothing where the tensor is there already."""
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
TO_PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
MARK = "girih step"
"""The annotation, of no length, with which a step begins in a trace."""


class CountWaits(TorchDispatchMode):
    """Notes what would wait on a GPU, where kernels are interpreted; not what the interpreter does. A sparse half's thread is watched too.

    Attributes:
        found: of each, what it was and by whom it was called.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.active, self.launching, self.found = False, 0, []
        for name, module in list(sys.modules.items()):
            if name.startswith("girih.kernels.gpu") and hasattr(module, "launch"):
                self._replace(monkeypatch, module, "launch", self._unheard)
        for name, module in list(sys.modules.items()):
            if name.startswith("girih.") and hasattr(module, "to_host"):
                self._replace(monkeypatch, module, "to_host", self._heard)
        self._replace(monkeypatch, ShardedHalf, "_submit", self._done)
        self._newest = None
        self._replace(monkeypatch, Outcome, "__init__", self._made)
        self._replace(monkeypatch, Outcome, "facts", self._asked)
        for name in HOST_COPIES:
            self._replace(monkeypatch, torch.Tensor, name, self._heard)

    def __enter__(self):
        self.active = True
        return super().__enter__()

    def __exit__(self, *error):
        self.active = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masked = packet in INDEXING and any(each is not None and each.dtype in MASKS for each in args[1])
        by_counts = func is ATEN.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if func is ATEN._local_scalar_dense.default or packet in SIZED_BY_VALUES or masked or by_counts:
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    def _note(self, what):
        if self.active and not self.launching:
            self.found.append(what + "\n" + "".join(traceback.format_stack(limit=8)[:-2]))

    def _done(self, name, call, args, kwargs):
        """What is asked of a sparse half's thread: modes are of one thread each."""
        half, work = args
        asking = threading.current_thread()

        def watched():
            if threading.current_thread() is asking or not self.active:
                return work()
            with _Watched(self):
                return work()

        return call(half, watched)

    def _replace(self, monkeypatch, owner, name, around):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: around(name, original, args, kwargs))

    def _unheard(self, name, call, args, kwargs):
        self.launching += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.launching -= 1

    def _made(self, name, call, args, kwargs):
        self._newest = args[0]
        call(*args, **kwargs)

    def _asked(self, name, call, args, kwargs):
        """The outcome of a step is told by pinned memory: a wait for the GPU to be idle where no later step is launched."""
        if args[0] is self._newest and args[0]._facts is None:
            self._note("the outcome of the newest step")
        return self._unheard(name, call, args, kwargs)

    def _heard(self, name, call, args, kwargs):
        self._note(name)
        return call(*args, **kwargs)


class _Watched(TorchDispatchMode):
    """Has what another thread does noted."""

    def __init__(self, counting):
        super().__init__()
        self._counting = counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._counting.__torch_dispatch__(func, types, args, kwargs)


def waits_by_step(trainer, data, monkeypatch, counted=None):
    """What would wait in each step of a run, from one forward pass to the next, once all is warm."""
    counted = counted or CountWaits(monkeypatch)
    trainer._run.open(data)
    for _, store in trainer.sparse.stores():
        store.state.memory.make_room(1 << 12)  # which it would wait for once
    original, waits = trainer.dense.compute, []

    def compute(*args, **kwargs):
        waits.append(len(counted.found))
        return original(*args, **kwargs)

    trainer.dense.compute = compute
    with counted:
        trainer.fit(data)
    return [counted.found[first:last] for first, last in pairwise(waits[2:])]


def waits_in(trace):
    """Counts waits between the first and the last mark of a trace, as ``export_chrome_trace`` writes it, on whatever thread.

    A copy to pinned memory is none; one to other memory is, whether or not the program waits for its stream as well.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event["name"] == MARK and event.get("cat") == "user_annotation"]
    begin, end = (choose(mark["ts"] for mark in marks) for choose in (min, max))

    def within(event):
        return event is not None and begin <= event["ts"] < end

    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    by_correlation = {event["args"]["correlation"]: event for event in calls}
    found = Counter(event["name"] for event in calls if within(event) and event["name"] in SYNCHRONIZING)
    for event in events:
        if event.get("cat") == "gpu_memcpy" and event["name"] == TO_PAGEABLE:
            found[TO_PAGEABLE] += within(by_correlation.get(event["args"]["correlation"]))
    return +found
