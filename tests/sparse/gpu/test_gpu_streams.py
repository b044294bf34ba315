"""Memory is not reused while a stream still reads it. The tests delay streams and overwrite freed memory with NaN.

The interpreter has no streams. It shows that steps give equal numbers, and that no kernel reads freed memory.
"""

import contextlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_gpu_group import batch_of, groups_of, some_batch

import girih
from girih.kernels.gpu import jit
from girih.sparse.groups.gpu_bags import SideStream
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.store import Store
from girih.store.gpu.options import Gpu
from girih.tables import MinCount
from support import cases
from support.store_verbs import by_key
from support.votes import deferred_vote

NUM_EXAMPLES, NUM_IDS, LARGEST = (24, 30, 14) if jit.INTERPRETED else (8192, 5000, 26)
STEPS = 4
SCHEMA = girih.Schema(  # as in ``cases``, with tables of two widths and so two groups
    [
        girih.Categorical(name="user", dim=8),
        girih.Categorical(name="item", dim=4),
        girih.Sequence(name="history", table="item", pooling="mean"),
    ],
    labels="click",
)


def delay():
    """Keeps the current stream busy for about 0.1 s. The host and other streams run ahead of it."""
    if not jit.INTERPRETED:
        torch.cuda._sleep(200_000_000)


def overwrite():
    """Writes NaN to free memory of the current stream."""
    device = jit.device()
    del [torch.full((1 << power,), float("nan"), device=device) for power in range(4, LARGEST + 1)][:]


@pytest.fixture
def late(monkeypatch):
    """Delays the ``side`` or ``main`` stream, and overwrites memory that either stream freed."""

    def patch(name):
        on_side, lookup = SideStream.__call__, GpuGroup.lookup

        @contextlib.contextmanager
        def delayed(stream):
            with on_side(stream) as ready:
                if name == "side":
                    delay()
                overwrite()
                yield ready

        def looked_up(*args, **kwargs):
            found = lookup(*args, **kwargs)
            if name == "main":
                delay()
            overwrite()
            return found

        monkeypatch.setattr(SideStream, "__call__", delayed)
        monkeypatch.setattr(GpuGroup, "lookup", looked_up)

    return patch


def batches():
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        lengths = rng.integers(0, 4, (3, NUM_EXAMPLES))
        lengths[:2] = 1
        yield batch_of(lengths, rng.zipf(1.3, lengths.sum()) % NUM_IDS, weighted=False, seed=step)


def weighted_squares(values):
    """A loss whose gradient depends on the values, and on the column."""
    return (values.square() * torch.arange(1, 1 + values.shape[-1], device=values.device)).sum()


def trained(tiers, *, ahead):
    """Returns all outputs, and the rows after the last step. With ``ahead`` keys are found one batch early."""
    store = StoreOptions(tiers=tiers, **({"hot_rows": 20} if len(tiers) > 1 else {}))
    half = LocalSparse(replace(cases.spec(store=store), schema=SCHEMA), ahead=ahead)
    outputs, prepared, coming = [], None, [*batches(), None]
    for step, (batch, following) in enumerate(pairwise(coming), start=1):
        pulled = half.pull(batch, prepared)
        prepared = half.prepare(following) if ahead and following is not None else None
        embeddings = pulled.wait()
        parts = [*embeddings.blocks, *embeddings.first_order, *embeddings.sequences.values()]
        outputs += [part.values.detach().clone() for part in parts]
        loss = sum(weighted_squares(part.values) for part in parts)
        loss.backward()
        pulled.push(step, 0.3, deferred_vote(jit.device()))
        del pulled, embeddings, parts, loss
        overwrite()
    rows = by_key(*(store for _, store in half.stores()))
    half.close()
    return [output.cpu() for output in outputs], rows


@pytest.mark.parametrize("stream", ["side", "main"])
@pytest.mark.parametrize("tiers", [("gpu",), ("gpu", "dram")], ids=str)
def test_batches_that_are_found_ahead_give_the_same_bits_whichever_stream_is_late(late, tiers, stream):
    expected, rows = trained(tiers, ahead=False)
    late(stream)
    outputs, rows_ahead = trained(tiers, ahead=True)
    assert len(outputs) == len(expected) > 0
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert rows_ahead == rows


@pytest.mark.smoke
def test_initial_values_last_as_long_as_what_reads_them():
    group = groups_of(admission=MinCount(count=99, cells=1000))
    with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as store:
        gpu, batch = GpuGroup(group, [store]), some_batch(1, 1)
        read, fill = gpu.lookup(batch, 1, train=True)
        fill(slice(0, batch.num_examples))
        expected = [output.clone() for output in read.outputs]
        gpu.lookup(some_batch(1, 2), 2, train=True)
        num_values = len(read.keys.unique.keys) * group.spec.dim
        kept = [torch.full((num_values,), float("nan"), device=gpu.device) for _ in range(64)]
        fill(slice(0, batch.num_examples))
        assert len(kept) == 64
        for output, values in zip(read.outputs, expected, strict=True):
            assert torch.equal(output, values)
