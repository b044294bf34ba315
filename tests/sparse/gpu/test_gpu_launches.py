"""Counts the launches and copies of a step. Groups of a half share one copy of each batch."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_gpu_group import batch_of

import girih
from girih.kernels.gpu import jit
from girih.models.needs import FIRST_ORDER
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.groups.pack import pack
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.store import Store
from girih.store.gpu import gpu_memory
from girih.store.gpu.options import Gpu
from support import cases

SCHEMA = girih.Schema(  # as in ``cases``, with tables of two widths and so two groups
    [
        girih.Categorical(name="user", dim=8),
        girih.Categorical(name="item", dim=4),
        girih.Sequence(name="history", table="item", pooling="mean"),
    ],
    labels="click",
)


def watched(monkeypatch, owner, name, note):
    """Calls ``note`` with the arguments of each call of a function, in all modules of girih."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        note(*args)
        return original(*args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("girih.") and vars(module).get(name) is original:
            monkeypatch.setattr(module, name, call)


def group_of(needs):
    schema = girih.Schema([girih.Categorical(name=name, dim=4) for name in needs], labels="click")
    (group,) = pack(schema, needs, girih.optim.Adam(lr=0.1))
    return group


@pytest.mark.parametrize(
    ("needs", "num_launches", "num_copies"),
    [({"embedding"}, 16, 4), ({"embedding", FIRST_ORDER}, 21, 4)],
    ids=["one segment", "two segments"],
)
def test_launches_and_copies_of_a_step(monkeypatch, needs, num_launches, num_copies):
    """Copies: ids, places of ids, addresses of gradients, options of optimizers. Bags of one id need no bounds."""
    group = group_of(dict.fromkeys(("user", "item"), frozenset(needs)))
    launches, copies = Counter(), []
    with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as store:
        gpu = GpuGroup(group, [store])
        for step in (1, 2):
            batch = batch_of(np.ones((2, 9), np.int64), np.arange(18) % 7 + step, weighted=False, seed=0)
            launches.clear()
            copies.clear()
            with monkeypatch.context() as patch:
                watched(patch, jit, "launch", lambda kernel, *_: launches.update([kernel.fn.__name__]))
                watched(patch, gpu_memory, "to_device", lambda array, _: copies.append(array))
                read, fill = gpu.lookup(batch, step, train=True)
                fill(slice(0, 9))
                given = [torch.ones_like(out).view(-1, out.shape[-1]) for out in read.outputs]
                gpu.apply(read, gpu.gradients(read, given, batch), step, 1.0)
    # counts of the second step, because the first one fills caches
    assert sum(launches.values()) == num_launches, launches
    assert len(copies) == num_copies, [array.shape for array in copies]


@pytest.mark.parametrize("prepares", [False, True])
def test_groups_share_one_copy_of_a_batch(monkeypatch, prepares):
    half = LocalSparse(replace(cases.spec(store=StoreOptions(tiers=("gpu",))), schema=SCHEMA))
    assert len(half.groups) == 2
    copies = []
    watched(monkeypatch, gpu_memory, "to_device", lambda array, _: copies.append(array))
    one, other = cases.batches()
    for batch in (one, other, one):
        prepared = half.prepare(batch) if prepares else None
        half.pull(batch, prepared).wait()
        of_batch = [array for array in copies if array is batch.ids or array is batch.offsets]
        assert len(of_batch) == 2
        copies.clear()
    half.close()
