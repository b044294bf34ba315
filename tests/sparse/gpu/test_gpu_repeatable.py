"""Steps that run twice from scratch give the same outputs, rows and counters, bit for bit, at full size on a GPU."""

import numpy as np
import pytest
import torch
from test_gpu_group import batch_of

import girih
from girih.kernels.gpu import jit
from girih.kernels.gpu.counting import ROWS_EVER
from girih.kernels.gpu.layout import VALUES
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.groups.pack import pack
from girih.store import Store
from girih.store.gpu.options import Gpu
from gpu_order import take

NUM_TABLES, DIM, STEPS = 10, 64, 3
NUM_IDS = 1 << (4 if jit.INTERPRETED else 20)
"""Of each table, in one step."""


def zipf_ids():
    """Ids of all tables, at Zipf 1.05 over ``NUM_IDS`` ranks."""
    bounds = np.cumsum(np.arange(1.0, NUM_IDS + 1) ** -1.05)
    draws = np.random.default_rng(0).random(NUM_TABLES * NUM_IDS) * bounds[-1]
    return np.searchsorted(bounds, draws)


def equal_ids():
    return np.full(NUM_TABLES * NUM_IDS, 5)


def some_group():
    names = [f"f{number}" for number in range(NUM_TABLES)]
    schema = girih.Schema(
        [girih.Categorical(name=name, table=name) for name in names],
        labels="click",
        tables=[girih.Table(name=name, dim=DIM) for name in names],
    )
    needs = dict.fromkeys(names, frozenset({"embedding"}))
    (group,) = pack(schema, needs, girih.optim.RowwiseAdagrad(lr=0.1))
    return group


def outcome_of_steps(ids, bag):
    """The outputs of all steps, then all records, as tensors; and the counters."""
    group, found = some_group(), []
    lengths = np.full((NUM_TABLES, NUM_IDS // bag), bag)
    with Store(group.spec, arena=Gpu()) as store:
        gpu = GpuGroup(group, [store])
        for step in range(1, STEPS + 1):
            batch = batch_of(lengths, ids + step * (NUM_IDS // 4), weighted=False, seed=0)
            read, fill = gpu.lookup(batch, step, train=True)
            fill(slice(0, batch.num_examples))
            gradients = [(0.25 + 0.5 * output).reshape(-1, DIM) for output in read.outputs]
            sums = gpu.gradients(read, gradients, batch)
            gpu.apply(read, sums, step, 1.0)
            found += read.outputs
        memory, num_words = (
            store.state.memory,
            VALUES.value + DIM + 1,
        )  # and row-wise Adagrad's sum; padding is never written
        records = memory.records(int(memory.known()[ROWS_EVER]))
        found.append(torch.cat([record[:, :num_words] for _, record in records]))
        return found, store.counters()


@pytest.mark.parametrize("bag", [1, 4])
@pytest.mark.parametrize("make_ids", [zipf_ids, equal_ids])
def test_steps_that_run_twice_are_the_same_bit_for_bit(make_ids, bag, monkeypatch):
    ids = make_ids()
    found, counters = outcome_of_steps(ids, bag)
    if jit.INTERPRETED:
        take(monkeypatch, "shuffled", block=32)
    found_again, counters_again = outcome_of_steps(ids, bag)
    assert counters_again == counters
    assert counters["updates"] > 0
    assert len(found) == STEPS + 1
    for first, second in zip(found, found_again, strict=True):
        assert torch.equal(first, second)
