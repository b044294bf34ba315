"""The sparse half on a GPU: the conformance suite, and each batch beside the CPU's group."""

import os

import numpy as np
import pytest
import torch

import girih
from girih.data.batch import Batch
from girih.kernels.gpu import gradients, jit
from girih.sparse.groups import gpu_bags, gpu_group
from girih.sparse.groups.gpu_group import GpuGradients, GpuGroup
from girih.sparse.groups.group import CpuGroup
from girih.sparse.groups.pack import pack
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.store import Keys, Store
from girih.store.gpu.options import Gpu
from girih.tables import LRU, Fixed
from gpu_order import ORDERS, take
from support import cases
from support.sparse_suite import SparseHalfSuite
from support.store_verbs import by_key, keys_of, peek
from support.votes import push

OPTIMIZERS = [
    girih.optim.SGD(lr=0.1),
    girih.optim.SGD(lr=0.1, momentum=0.9, l2=0.01),
    girih.optim.Adagrad(lr=0.1),
    girih.optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    girih.optim.Adam(lr=0.1),
    girih.optim.FTRL(l1=0.01),
]


class TestGpuHalf(SparseHalfSuite):
    def make(self):
        return LocalSparse(cases.spec(store=StoreOptions(tiers=("gpu",))))


class TestGpuHalfAhead(SparseHalfSuite):
    def make(self):
        return LocalSparse(cases.spec(store=StoreOptions(tiers=("gpu",))), micro_batches=3, ahead=True)


def batch_of(lengths, ids, *, weighted, seed):
    """``lengths``: int[F, B]."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int32)
    return Batch(
        ids=ids.astype(np.int64),
        offsets=offsets,
        numeric=np.empty((lengths.shape[1], 0), np.float32),
        labels=np.zeros((lengths.shape[1], 1), np.float32),
        weights=rng.random(len(ids)).astype(np.float32) if weighted else None,
    )


def some_batch(longest, seed, *, weighted=False, num_examples=24, num_ids=30):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, (4, num_examples))
    if longest == 1:
        lengths[1:] = 1
    ids = rng.integers(-7, num_ids, lengths.sum())
    return batch_of(lengths, ids, weighted=weighted, seed=seed)


def groups_of(optimizer=None, dtype="float32", dim=5, **rules):
    tables = [girih.Table(name=name, dim=dim, dtype=dtype, **rules) for name in ("user", "tags")]
    schema = girih.Schema(
        [
            girih.Categorical(name="user", table="user"),
            girih.Categorical(name="tags", table="tags", pooling="mean"),
            girih.Categorical(name="more", table="tags", pooling="sqrtn"),
            girih.Sequence(name="history", table="user", pooling="sum"),
        ],
        "click",
        tables=tables,
    )
    needs = {
        "user": frozenset({"embedding", "first_order"}),
        "tags": frozenset({"embedding", "first_order"}),
        "more": frozenset({"embedding"}),
        "history": frozenset({"embedding", "sequence"}),
    }
    (group,) = pack(schema, needs, optimizer or girih.optim.Adagrad(lr=0.1))
    return group


def both(group):
    there, here = Store(group.spec, arena=Gpu(chunk_bytes=4096)), Store(group.spec)
    return (GpuGroup(group, [there]), there), (CpuGroup(group, [here], None), here)


def run(group, batch, step, rng, *, train=True):
    """A pull and a push; returns the outputs."""
    read, fill = group.lookup(batch, step, train=train)
    for examples in (slice(0, batch.num_examples // 3), slice(batch.num_examples // 3, batch.num_examples)):
        fill(examples)
    outputs = [torch.as_tensor(output).cpu().numpy().copy() for output in read.outputs]
    if train:
        given = [rng.normal(size=output.shape).astype(np.float32) for output in outputs]
        given = [gradient.reshape(-1, gradient.shape[-1]) for gradient in given]
        if isinstance(group, GpuGroup):
            given = [torch.from_numpy(gradient).to(jit.device()) for gradient in given]
        found = group.gradients(read, given, batch)
        assert found.nonfinite_key == -1
        group.apply(read, found, step, 0.7)
    return outputs


def assert_same_rows(there, here, **tolerance):
    mine, expected = by_key(there), by_key(here)
    assert mine.keys() == expected.keys()
    for key, columns in expected.items():
        for name, value in columns.items():
            np.testing.assert_allclose(mine[key][name], value, err_msg=f"{key} {name}", **tolerance)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("longest", [1, 4, pytest.param(40, marks=pytest.mark.smoke)])
def test_bags_and_updates_are_the_cpus(longest, weighted):
    (gpu, there), (cpu, here) = both(groups_of())
    for step in range(1, 4):
        batch = some_batch(longest, step, weighted=weighted)
        outputs = [run(group, batch, step, np.random.default_rng(step)) for group in (gpu, cpu)]
        for mine, expected in zip(*outputs, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    assert_same_rows(there, here, rtol=1e-4, atol=1e-5)
    assert there.counters() == here.counters()
    probe = some_batch(longest, 99, weighted=weighted)
    outputs = [run(group, probe, 4, None, train=False) for group in (gpu, cpu)]
    for mine, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    assert there.num_rows == here.num_rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_every_optimizer_is_the_cpus(optimizer):
    (gpu, there), (cpu, here) = both(groups_of(optimizer))
    for step in range(1, 4):
        batch = some_batch(3, step)
        for group in (gpu, cpu):
            run(group, batch, step, np.random.default_rng(step))
    assert_same_rows(there, here, rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("longest", [1, 9])
def test_programs_take_many_tiles_in_turn(monkeypatch, longest):
    """With bags of many ids, one kernel sums the gradients and moves the rows."""
    monkeypatch.setattr(jit, "MOST_PROGRAMS", 2)
    for module in (jit, gradients):
        monkeypatch.setattr(module, "rows_at_once", lambda width, elements=1024: 64)
    (gpu, there), (cpu, here) = both(groups_of())
    for step in (1, 2):
        batch = some_batch(longest, step, num_examples=200, num_ids=900)
        for group in (gpu, cpu):
            run(group, batch, step, np.random.default_rng(step))
    assert there.num_rows > 64 * 2 * 3
    assert_same_rows(there, here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_are_rounded_by_the_same_noise(dtype):
    (gpu, there), (cpu, here) = both(groups_of(girih.optim.SGD(lr=0.1), dtype))
    batch = some_batch(1, 1)  # one term a key at most where ids do not repeat: the same sums to the bit
    batch = batch_of(np.ones((4, 60), np.int64), np.arange(240), weighted=False, seed=0)
    for step in (1, 2):
        for group in (gpu, cpu):
            run(group, batch, step, np.random.default_rng(step))
    assert_same_rows(there, here, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [4, 8, 16])
def test_keys_without_rows_read_the_initial_values_of_the_cpu(dim, dtype):
    """A row has a first-order column. Some keys of the batch have rows."""
    (gpu, there), (cpu, here) = both(groups_of(dtype=dtype, dim=dim))
    assert there.spec.dim == dim + 1
    known, batch = some_batch(1, 1, num_ids=10), some_batch(1, 2, num_ids=40)
    outputs = []
    for group in (gpu, cpu):
        group.lookup(known, 1, train=True)
        outputs.append(run(group, batch, 1, None, train=False))
    assert there.num_rows == here.num_rows > 0
    for mine, expected in zip(*outputs, strict=True):
        np.testing.assert_array_equal(mine, expected)
    keys = keys_of(*range(-7, 40))
    np.testing.assert_array_equal(peek(there, *keys), peek(here, *keys))


# "a million": interpreted, that takes minutes
MANY = int(os.environ.get("GIRIH_MANY", "100000" if jit.INTERPRETED else "1000000"))


def edge_cases():
    ones = np.ones((4, 8), np.int64)
    empty = np.zeros((4, 8), np.int64)
    million = empty.copy()
    million[1, 3] = MANY
    spread_out = empty.copy()
    spread_out[3] = MANY // 8
    return {
        "one id a million times": (spread_out, np.full(MANY, 5)),
        "a bag of a million ids": (million, np.arange(MANY) % 1000),
        "empty bags": (empty, np.zeros(0, np.int64)),
        "all ids new": (ones, np.arange(32) * 10**15),
        "unsorted int64 ids": (ones, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 32)),
        "all ids equal": (ones, np.full(32, -(2**63))),
    }


def plain_step(group, batch, lr, rng):
    """The plain twin of a step with SGD, in float64: outputs, and {(table, id): columns} after it."""
    size, names = batch.num_examples, [table.name for table in group.spec.tables]
    bounds = batch.offsets[np.arange(len(group.features) + 1) * size]
    of_feature = dict(zip(group.features.tolist(), group.tables.tolist(), strict=True))
    keys = {
        (table, int(i))
        for f, table in of_feature.items()
        for i in np.unique(batch.ids[bounds[f] : bounds[f + 1]])
    }
    keys = sorted(keys)
    rows = np.empty((len(keys), group.spec.dim), np.float32)
    with Store(group.spec) as initial:
        ids, tables = np.array([i for _, i in keys], np.int64), np.array([t for t, _ in keys], np.int32)
        initial.peek(Keys(ids, tables), rows)
    rows, place = rows.astype(float), {key: number for number, key in enumerate(keys)}
    outputs, moves = [], np.zeros_like(rows)
    for output in group.outputs:
        own = slice(output.first_column, output.first_column + output.segment.dim)
        shape = output.shape_in(batch)
        found, given = np.zeros(shape), rng.normal(size=shape).astype(np.float32).astype(float)
        for p, (f, mode) in enumerate(zip(output.features.tolist(), output.modes.tolist(), strict=True)):
            values, inverse = np.unique(batch.ids[bounds[f] : bounds[f + 1]], return_inverse=True)
            numbers = np.array([place[of_feature[f], int(i)] for i in values], int)[inverse]
            lengths = np.diff(batch.offsets[f * size : (f + 1) * size + 1])
            bag = np.repeat(np.arange(size), lengths)
            scale = (lengths[bag].astype(float) ** -[0, 1, 0.5][mode])[:, None]
            gradient = given if output.whole else scale * given[bag, p]
            for column, number in enumerate(range(own.start, own.stop)):
                moves[:, number] += np.bincount(numbers, gradient[:, column], len(rows))
                if not output.whole:
                    pooled = (scale * rows[numbers, own])[:, column]
                    found[:, p, column] = np.bincount(bag, pooled, size)
            if output.whole:
                found[:] = rows[numbers, own]
        outputs.append(found)
    return outputs, {(names[t], i): row for (t, i), row in zip(keys, rows - lr * moves, strict=True)}


def assert_near(mine, expected):
    """To the rounding of long sums of float32, beside numbers of both signs."""
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("case", edge_cases())
def test_edges(case):
    lengths, ids = edge_cases()[case]
    batch = batch_of(lengths, ids, weighted=False, seed=0)
    group = groups_of(girih.optim.SGD(lr=1e-3))
    expected, rows = plain_step(group, batch, 0.7e-3, np.random.default_rng(1))
    with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as there:
        outputs = run(GpuGroup(group, [there]), batch, 1, np.random.default_rng(1))
        for mine, wanted in zip(outputs, expected, strict=True):
            assert_near(mine, wanted)
        found = by_key(there)
    assert found.keys() == rows.keys()
    for key, columns in rows.items():
        mine = np.concatenate([found[key][segment.name] for segment in group.spec.segments])
        assert_near(mine, columns)


def test_results_do_not_depend_on_how_work_is_cut(monkeypatch):
    rows = []
    for at_once, long, short in ((1024, 256, 16), (16, 256, 0), (64, 4, 16)):
        for module in (jit, gradients):
            monkeypatch.setattr(module, "rows_at_once", lambda width, elements=1024, n=at_once: n)
        monkeypatch.setattr(gradients, "LONG", long)
        monkeypatch.setattr(gpu_bags, "SHORT_BAG", short)
        (gpu, there), _ = both(groups_of())
        for step in range(1, 3):
            run(gpu, some_batch(6, step), step, np.random.default_rng(step))
        rows.append(by_key(there))
    for other in rows[1:]:
        for key, columns in rows[0].items():
            for name, value in columns.items():
                np.testing.assert_allclose(other[key][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("eviction", [Fixed(max_rows=9), LRU(max_rows=9)], ids=str)
def test_a_full_table_serves_the_keys_that_a_cpus_serves(eviction):
    """Each batch has more keys than either table takes; what has no row is read, and moves nothing."""
    (gpu, there), (cpu, here) = both(groups_of(eviction=eviction))
    for step in range(1, 4):
        batch = some_batch(2, step, num_examples=16, num_ids=40)
        outputs = [run(group, batch, step, np.random.default_rng(step)) for group in (gpu, cpu)]
        for mine, expected in zip(*outputs, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
        assert [there.num_rows_of(table) for table in (0, 1)] == [9, 9]
    assert_same_rows(there, here, rtol=1e-4, atol=1e-5)
    assert there.counters() == here.counters()
    assert there.counters()["full" if eviction.name == "none" else "evicted"] > 0


@pytest.mark.smoke
def test_zero_features_take_their_steps():
    schema = girih.Schema([girih.Numeric(name="x")], labels="y")
    store = StoreOptions(tiers=("gpu",))
    half = LocalSparse(SparseSpec(schema=schema, needs={}, optimizer=girih.optim.SGD(lr=1.0), store=store))
    batch = batch_of(np.zeros((0, 3), np.int64), np.empty(0), weighted=False, seed=0)
    pulled = half.pull(batch, half.prepare(batch))
    embeddings = pulled.wait()
    assert (len(embeddings.blocks), len(embeddings.first_order), len(embeddings.sequences)) == (0, 0, 0)
    push(pulled, 1, 1.0).wait()
    assert half.stats().store.get("rows", 0) == 0
    half.close()


@pytest.mark.skipif(not jit.INTERPRETED, reason="a GPU takes an order of its own")
def test_results_do_not_depend_on_the_order_in_which_programs_run(monkeypatch):
    """To the bit: of unique keys, of rows' numbers, of sums of long runs in pieces."""
    found = []
    for order in ORDERS:
        with monkeypatch.context() as patched:
            take(patched, order)
            patched.setattr(gradients, "LONG", 8)
            group = groups_of()
            with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as store:
                gpu = GpuGroup(group, [store])
                outputs = []
                for step in range(1, 3):
                    batch = some_batch(4, step, num_examples=5, num_ids=8)
                    outputs += run(gpu, batch, step, np.random.default_rng(step))
                found.append((outputs, by_key(store), store.counters()))
    (outputs, rows, counters), *others = found
    for other_outputs, other_rows, other_counters in others:
        for mine, expected in zip(other_outputs, outputs, strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert other_rows == rows
        assert other_counters == counters


@pytest.mark.smoke
def test_a_gradient_that_is_not_finite_moves_no_row():
    (gpu, there), _ = both(groups_of())
    batch = some_batch(1, 1)
    read, fill = gpu.lookup(batch, 1, train=True)
    fill(slice(0, batch.num_examples))
    before = by_key(there)
    given = [torch.zeros_like(output).reshape(-1, output.shape[-1]) for output in read.outputs]
    given[0][5, 2] = float("nan")
    found = gpu.gradients(read, given, batch)
    assert found.nonfinite_key >= 0
    gpu.apply(read, found, 1, 1.0)
    assert by_key(there) == before


class Summing(GpuGroup):
    """Sums all gradients into an array before any row moves."""

    def gradients(self, read, given, batch):
        sources = self._bags.sources(given, batch)
        return GpuGradients(
            *self._state.kernels.sums(read.keys.keys, *read.keys.of_training(), sources), None
        )


@pytest.mark.parametrize(
    ("optimizer", "dtype", "few", "largest"),
    [
        (girih.optim.Adam(lr=0.1), "float16", 0, 1.0),
        (girih.optim.FTRL(l1=0.01), "float32", 0, 1.0),
        (girih.optim.SGD(lr=0.1, momentum=0.9), "bfloat16", 0, 1e36),
        (girih.optim.RowwiseAdagrad(lr=0.1), "float32", 0, 3e38),
        (girih.optim.Adagrad(lr=0.1), "float32", 9, 1.0),
    ],
    ids=["adam", "with l1", "sums might overflow", "sums overflow", "too many gradients to look at"],
)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_rows_are_moved_by_the_same_bits_whichever_kernel_sums(monkeypatch, optimizer, dtype, few, largest):
    monkeypatch.setattr(gpu_group, "_FEW", few)
    monkeypatch.setattr(gradients, "LONG", 8)  # keys with one term, with several, with pieces
    group, found = groups_of(optimizer, dtype), []
    for kind in (GpuGroup, Summing):
        with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as store:
            gpu, rng = kind(group, [store]), np.random.default_rng(0)
            for step in (1, 2):
                batch = some_batch(3, step, num_ids=60)
                read, fill = gpu.lookup(batch, step, train=True)
                fill(slice(0, batch.num_examples))
                given = [
                    torch.from_numpy(rng.random(out.shape, np.float32) * largest).to(jit.device())
                    for out in read.outputs
                ]
                sums = gpu.gradients(read, [each.view(-1, each.shape[-1]) for each in given], batch)
                assert (sums.direct is None) == (kind is Summing or few == 9)
                assert (sums.nonfinite_key >= 0) == (largest > 1e38)
                gpu.apply(read, sums, step, 0.7)
            found.append(by_key(store))
    assert found[0] == found[1]


def test_a_gradient_that_no_id_has_part_in_refuses_nothing(monkeypatch):
    """It is seen beforehand, and sums are then looked at themselves."""
    monkeypatch.setattr(gpu_group, "_FEW", 0)
    (gpu, _), _ = both(groups_of())
    batch = batch_of(np.array([[0, 1]] * 4), np.arange(4), weighted=False, seed=0)
    read, fill = gpu.lookup(batch, 1, train=True)
    fill(slice(0, 2))
    given = [torch.ones_like(output) for output in read.outputs]
    for each, output in zip(given, gpu.group.outputs, strict=True):
        if not output.whole:
            each[0] = float("nan")  # of empty bags
    assert gpu.gradients(read, given, batch).nonfinite_key == -1


def test_the_next_batch_is_prepared_before_this_one_moves_rows():
    (gpu, there), (cpu, here) = both(groups_of())
    batches = [some_batch(3, seed) for seed in range(4)]
    for group in (gpu, cpu):
        found = group.find(batches[0])
        for step, batch in enumerate(batches, start=1):
            read, fill = group.lookup(batch, step, train=True, keys=found)
            fill(slice(0, batch.num_examples))
            found = group.find(batches[step % 4])
            given = [
                np.ones((output.reshape(-1, output.shape[-1])).shape, np.float32) for output in read.outputs
            ]
            if group is gpu:
                given = [torch.from_numpy(gradient).to(jit.device()) for gradient in given]
            group.apply(read, group.gradients(read, given, batch), step, 1.0)
    assert_same_rows(there, here, rtol=1e-4, atol=1e-5)
