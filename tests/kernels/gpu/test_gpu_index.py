"""The index of rows beside a dictionary, where it is crowded, wraps round and was left; rows' numbers; admission."""

import numpy as np
import pytest
import torch

from girih.kernels.cpu import admission as cpu_admission
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.hashing import key_hash
from girih.kernels.gpu import counting, index, jit, lookup
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.options import Gpu
from girih.store.gpu.record_kernels import DeviceKeys
from girih.store.store import Store
from girih.tables import MinCount, Probability
from support.store_verbs import group

pytestmark = pytest.mark.smoke

SLOTS, BITS, STRIDE = 64, 6, 8


class Rows:
    """Records of keys, and an index of them."""

    def __init__(self, ids, tables):
        self.records = torch.zeros((1 << BITS, STRIDE), dtype=torch.int32, device=jit.device())
        self.records.view(torch.int64)[: len(ids), 0] = to_device(ids, jit.device())
        self.records[:, at.TABLE] = at.NO_ROW
        self.records[: len(ids), at.TABLE] = to_device(tables, jit.device())
        self.chunks = torch.tensor([self.records.data_ptr()], device=jit.device())
        self.slots = index.rebuild(SLOTS, self.chunks, len(ids), BITS, STRIDE)

    def find(self, ids, tables):
        """The row of each key."""
        keys, of, ones = (to_device(each, jit.device()) for each in (ids, tables, np.ones_like(tables)))
        rows, is_new = torch.full_like(of, 77), torch.zeros_like(of)
        num = torch.full_like(of[:1], len(ids))
        jit.launch(
            lookup.read_known, len(ids), jit.block_of(32, len(ids)), self.slots, SLOTS, self.chunks, keys, of, ones, num, keys,
            of, 1, rows, is_new, MARKS=False, CHUNK_BITS=BITS, STRIDE=STRIDE,
        )  # fmt: skip
        return rows.tolist()

    def remove(self, rows):
        """Takes keys of rows out."""
        there = torch.tensor(rows, dtype=torch.int32, device=jit.device())
        index.remove(self.slots, self.chunks, there, BITS, STRIDE)


def of_last_slot(count):
    """Ids of table 0 that all want the last slot, so that all but one go on at the first."""
    ids = (
        i
        for i in range(1 << 20)
        if (int(key_hash(np.int64(i), np.int32(0))) >> 31) & (SLOTS - 1) == SLOTS - 1
    )
    return np.array([next(ids) for _ in range(count)], np.int64)


@pytest.mark.parametrize(
    "ids",
    [np.arange(60), np.array([-(2**63), 2**63 - 1, 0, -1]), of_last_slot(9)],
    ids=["crowded", "extremes", "wrapped_round"],
)
def test_every_key_is_found_and_no_other(ids):
    ids = ids.astype(np.int64)
    tables = (np.arange(len(ids)) % 2 if len(ids) == 60 else np.zeros(len(ids))).astype(np.int32)
    rows = Rows(ids, tables)
    assert rows.find(ids, tables) == list(range(len(ids)))
    assert rows.find(ids, 1 - tables) == [at.NO_ROW] * len(ids)
    assert rows.find(ids[::-1] ^ (1 << 50), tables) == [at.NO_ROW] * len(ids)


@pytest.mark.parametrize("ids", [np.arange(50), of_last_slot(9)], ids=["crowded", "wrapped_round"])
def test_keys_behind_slots_that_were_left_are_found(ids):
    tables = np.zeros(len(ids), np.int32)
    rows, ids = Rows(ids.astype(np.int64), tables), ids.astype(np.int64)
    rows.remove(list(range(0, len(ids), 2)))
    wanted = [at.NO_ROW if row % 2 == 0 else row for row in range(len(ids))]
    assert rows.find(ids, tables) == wanted
    rows.slots = index.rebuild(SLOTS, rows.chunks, len(ids), BITS, STRIDE)
    assert rows.find(ids, tables) == wanted
    assert not (rows.slots[:SLOTS] == index.LEFT.value).any()


@pytest.mark.parametrize("num_free", [0, 2, 9])
def test_free_rows_are_taken_before_new_ones(num_free):
    takes = np.array([1, 0, 1, 1, 0, 1, 0, 0], np.int32)
    free = np.arange(100, 100 + num_free, dtype=np.int32)
    words = np.array([num_free, 50, 40, 45], np.int64)
    there = [to_device(each, jit.device()) for each in (takes, free, words, np.full(8, at.NO_ROW, np.int32))]
    counting.number_rows(*there)
    left, ever, wanted = free.tolist(), 50, []
    for takes_one in takes:
        if not takes_one:
            wanted.append(at.NO_ROW)
        elif left:
            wanted.append(left.pop())
        else:
            wanted.append(ever)
            ever += 1
    assert there[3].tolist() == wanted
    assert there[2].tolist() == [len(left), ever, 44, 49]


@pytest.mark.parametrize("rule", [MinCount(count=3, cells=64), Probability(p=0.4)], ids=str)
def test_those_are_admitted_whom_the_filters_of_a_cpu_admit(rule):
    """All of a call are asked before any is counted."""
    spec, rng = group(admission=rule), np.random.default_rng(0)
    with Store(spec, arena=Gpu(chunk_bytes=4096)) as store:
        own, rows = store.state.layout.kernel, store.state.rows
        cells = np.zeros(max(1, store.state.layout.num_cells), np.uint8)
        seen = []
        for step in (1, 2, 3):
            ids, counts = np.unique(rng.integers(0, 30, 25), return_counts=True)
            tables, counts = np.zeros(len(ids), np.int32), counts.astype(np.int32)
            wanted = [
                cpu_admission.seen(cells, own.bloom, i, 0) + count >= 3
                if isinstance(rule, MinCount)
                else cpu_admission.lucky(own.table_seeds[0], i, np.int64(step), count, 0.4)
                for i, count in zip(ids, counts, strict=True)
            ]
            for i, count, admitted in zip(ids, counts, wanted, strict=True):
                if isinstance(rule, MinCount) and not admitted:
                    cpu_admission.add(cells, own.bloom, i, 0, count)
            there = [to_device(each, jit.device()) for each in (ids, tables, counts)]
            num = torch.full_like(there[1][:1], len(ids))
            keys = DeviceKeys(*there, num, np.array([len(ids)]))
            admitted = rows._admitted(keys, torch.ones_like(there[1]), step)
            assert admitted.tolist() == [int(each) for each in wanted]
            seen += wanted
        assert 0 < sum(seen) < len(seen)
        assert store.state.memory.cells.clamp(max=255).tolist() == cells.tolist()
