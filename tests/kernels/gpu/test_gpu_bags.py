"""Pooling, its way back, and optimizer steps, beside plain twins in float64 and in float32."""

import numpy as np
import pytest
import torch

from girih import optim
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import gradients, jit, pool
from girih.kernels.gpu.dedup import BagTerms
from girih.kernels.gpu.gradients import Pieces, Sources, sum_pieces, sum_terms
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.options import Gpu
from girih.store.gpu.record_kernels import DeviceKeys
from girih.store.rows.record import hyper_rows
from reference import pool as plain_pool
from reference import weight_gradients as plain_gradients
from support.store_verbs import by_key, group, keys_of, look
from support.twins import optimizer_state, optimizer_step

pytestmark = pytest.mark.smoke

SIZE, WIDTH, FIRST, DIM = 5, 7, 2, 3


def there(array):
    return to_device(np.ascontiguousarray(array), jit.device())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernel", [pool.pool_short, pool.pool_long], ids=["short", "long"])
def test_bags_are_pooled(kernel, weighted):
    rng = np.random.default_rng(0)
    features, modes = np.array([2, 0, 1]), np.array([0, 1, 2], np.int32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 3 * SIZE))]).astype(np.int32)
    rows = rng.normal(size=(6, WIDTH)).astype(np.float32)
    inverse = rng.integers(0, 6, offsets[-1]).astype(np.int32)
    weights = rng.random(len(inverse) if weighted else 0).astype(np.float32)
    on_device = there(rows)
    addresses = there(on_device.data_ptr() + 4 * WIDTH * np.arange(6, dtype=np.int64))
    out = torch.full((SIZE * 3, DIM), 77.0, device=jit.device())
    bounds = there((features * SIZE).astype(np.int32))
    given = (
        addresses,
        there(inverse),
        there(offsets),
        there(weights) if weighted else out,
        bounds,
        there(pool.short_factors(modes) if kernel is pool.pool_short else modes),
        out,
    )
    shared = {"WEIGHTED": weighted, "DTYPE": at.FLOAT32, "ALIGNED": False, "COLUMNS": 4}
    first, bags = 3, 3 * (SIZE - 1)  # all but those of the first example
    if kernel is pool.pool_short:
        jit.launch(kernel, bags, 4, *given, first, bags, 3, 4 * FIRST, DIM, **shared)
    else:
        jit.launch(kernel, bags, 1, *given, first, 3, 4 * FIRST, DIM, AT_ONCE=4, **shared)
    wanted = plain_pool(rows, FIRST, inverse, offsets, weights, SIZE, features, modes, DIM)
    found = out.view(SIZE, 3, DIM).cpu().numpy()
    np.testing.assert_allclose(found[1:], wanted[1:], rtol=1e-5, atol=1e-6)
    assert (found[0] == 77).all()


@pytest.mark.parametrize("kernel", [pool.weigh_short, pool.weigh_long], ids=["short", "long"])
def test_weights_get_their_gradients(kernel):
    rng = np.random.default_rng(0)
    features, modes = np.array([2, 0, 1]), np.array([0, 1, 2], np.int32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 3 * SIZE))]).astype(np.int32)
    rows = rng.normal(size=(6, WIDTH)).astype(np.float32)
    inverse = rng.integers(0, 6, offsets[-1]).astype(np.int32)
    gradients = rng.normal(size=(SIZE, 3, DIM)).astype(np.float32)
    out = torch.full((offsets[-1],), 7.0, device=jit.device())
    given = there(rows), there(inverse), there(offsets), there(gradients)
    poolings = pool.short_factors(modes) if kernel is pool.weigh_short else modes
    given += there((features * SIZE).astype(np.int32)), there(poolings), out
    if kernel is pool.weigh_short:
        jit.launch(kernel, 3 * SIZE, 4, *given, 3 * SIZE, 3, WIDTH, FIRST, DIM, COLUMNS=4)
    else:
        jit.launch(kernel, 3 * SIZE, 1, *given, 3, WIDTH, FIRST, DIM, COLUMNS=4, AT_ONCE=4)
    wanted = plain_gradients(rows, FIRST, inverse, offsets, gradients, SIZE, features, modes, DIM)
    np.testing.assert_allclose(out.cpu().numpy() - 7, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("long", [256, 4])
def test_gradients_of_keys_are_sums_of_their_terms(monkeypatch, long):
    """One feature is pooled, the ids of the other have gradients of their own."""
    monkeypatch.setattr(gradients, "LONG", long)
    rng, counts = np.random.default_rng(0), np.array([1, 0, 23, 5, 4], np.int32)
    n = int(counts.sum())
    keys = np.repeat(np.arange(len(counts)), counts)
    features, examples = rng.integers(0, 2, n).astype(np.int32), rng.integers(0, SIZE, n).astype(np.int32)
    positions, factors = rng.permutation(n).astype(np.int32), rng.random(n).astype(np.float32)
    pooled, whole = (rng.normal(size=(rows, DIM)).astype(np.float32) for rows in (SIZE, n))
    starts = np.zeros(n + 1, np.int32)
    starts[1 : len(counts) + 1] = np.cumsum(counts)
    starts[len(counts) + 1 :] = n
    padded = np.zeros(n, np.int32)
    padded[: len(counts)] = counts
    lent = there(pooled), there(whole)
    described = np.array(
        [[lent[0].data_ptr(), 0], [4 * DIM, 0], [0, lent[1].data_ptr()], [0, 4 * DIM]], np.int64
    )
    totals = torch.full((n, WIDTH), 77.0, device=jit.device())
    nonfinite = there(np.array([-1], np.int32))
    terms = BagTerms(*(there(each) for each in (starts, features, examples, positions, factors)))
    num_keys = there(np.array([len(counts)], np.int32))
    sources, pieces = Sources(there(described), pooled=True, whole=True, aligned=False), Pieces(there(padded))
    sums = sum_pieces(sources, terms, pieces, num_keys, DIM)
    sum_terms(sources, terms, pieces, sums, num_keys, totals, FIRST, DIM, nonfinite)
    each = np.where(
        (features == 0)[:, None], pooled[examples].astype(float) * factors[:, None], whole[positions]
    )
    wanted = np.zeros((len(counts), DIM))
    np.add.at(wanted, keys, each)
    found = totals.cpu().numpy()
    own = slice(FIRST, FIRST + DIM)
    np.testing.assert_allclose(found[: len(counts), own], wanted, rtol=1e-5, atol=1e-5)
    assert (np.delete(found, np.arange(WIDTH)[own], axis=1) == 77).all()
    assert nonfinite.item() == -1
    lent[0][examples[keys == 2][features[keys == 2] == 0][0], 1] = float("inf")
    sums = sum_pieces(sources, terms, pieces, num_keys, DIM)
    sum_terms(sources, terms, pieces, sums, num_keys, totals, FIRST, DIM, nonfinite)
    assert not np.isfinite(totals.cpu().numpy()[nonfinite.item(), own]).all()


OPTIMIZERS = [
    optim.SGD(lr=0.1, l2=0.01),
    optim.SGD(lr=0.1, momentum=0.9),
    optim.Adagrad(lr=0.1),
    optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    optim.Adam(lr=0.1),
    optim.FTRL(l1=0.01),
]


def test_optimizers_has_every_optimizer():
    assert {type(optimizer) for optimizer in OPTIMIZERS} == set(optim.BY_NAME.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_rows_move_as_the_plain_twin_says(optimizer):
    spec = group(optimizer=optimizer)
    ids, tables = keys_of(5, -3, 9, 0)
    with Store(spec, arena=Gpu(chunk_bytes=4096)) as store:
        rows, values = look(store, ids, tables, 1)
        states = [optimizer_state(optimizer, row) for row in values]
        moving = rows.copy()
        moving[2] = at.NO_ROW  # one that stays as it is
        keys = DeviceKeys(
            there(ids),
            there(tables),
            there(np.ones_like(tables)),
            there(np.array([4], np.int32)),
            np.array([4]),
        )
        for step in (1, 2, 3):
            grads = np.random.default_rng(step).normal(size=values.shape).astype(np.float32)
            hyper = hyper_rows(spec, 0.5, step)
            store.state.kernels.move(keys, there(moving), there(grads), hyper, step)
            for number in (0, 1, 3):
                optimizer_step(optimizer, values[number], states[number], grads[number], step, 0.5)
        found = by_key(store)
    for key_id, row, state in zip(ids.tolist(), values, states, strict=True):
        mine = found["t", key_id]
        np.testing.assert_allclose(mine["embedding"], row, rtol=1e-6, atol=1e-7)
        for name, columns in state.items():
            np.testing.assert_allclose(mine[f"embedding.{name}"], columns, rtol=1e-6, atol=1e-7)
