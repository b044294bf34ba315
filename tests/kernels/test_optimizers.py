"""Every optimizer against its plain twin, and against torch.optim from equal initial values."""

import numpy as np
import pytest

from girih import optim
from girih.kernels.cpu import optimizers
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import GroupSpec, Keys, RowUpdate, Segment, Store, TableSpec
from girih.tables import Normal, Zeros
from support.twins import optimizer_state, optimizer_step

STEPS = 20 if JIT_DISABLED else 200
ALL = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, l2=0.01),
    optim.SGD(lr=0.1, momentum=0.9, l2=0.01),
    optim.Adagrad(lr=0.1),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.1, eps=1e-3, l2=0.01),
    optim.RowwiseAdagrad(lr=0.1),
    optim.RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.1, l2=0.01),
    optim.Adam(lr=0.01),
    optim.Adam(lr=0.01, betas=(0.5, 0.9), l2=0.01),
    optim.FTRL(lr=0.1),
    optim.FTRL(lr=0.1, beta=0.5, l1=0.3, l2=0.2),
]


def test_all_has_every_optimizer():
    assert {type(options) for options in ALL} == set(optim.BY_NAME.values())


@pytest.mark.parametrize("options", ALL, ids=repr)
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_every_optimizer_is_its_plain_twin(options, dim):
    rng = np.random.default_rng(0)
    row = rng.normal(size=dim).astype(np.float32)
    twin, twin_state = row.copy(), optimizer_state(options, row)
    widths = optimizers.state_columns(options, dim)
    assert [name for name, _ in widths] == list(twin_state)
    state = np.full(sum(width for _, width in widths), np.nan, np.float32)
    number = optimizers.number_of(options)
    optimizers.begin_row(number, row, state, optimizers.hyper_row(options, 1.0, 1))
    for step in range(1, STEPS):
        grad = rng.normal(size=dim).astype(np.float32)
        optimizers.update_row(number, row, state, grad, optimizers.hyper_row(options, 1 / step, step))
        optimizer_step(options, twin, twin_state, grad, step, lr_scale=1 / step)
        np.testing.assert_allclose(row, twin, rtol=1e-5, atol=1e-6)
        expected = np.concatenate([*twin_state.values(), np.zeros(0, np.float32)])
        np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-5)


def store_of(options, dim=6, initializer=None):
    segment = Segment("embedding", dim, options)
    return Store(GroupSpec("g", (TableSpec("t", (initializer or Normal(std=0.5),)),), (segment,)))


def weights_of(store, num_rows):
    out = np.empty((num_rows, store.spec.dim), np.float32)
    store.peek(Keys(np.arange(num_rows), np.zeros(num_rows, np.int32)), out)
    return out


TORCH = {
    "sgd": (optim.SGD(lr=0.1), lambda torch, p: torch.optim.SGD(p, lr=0.1), True),
    "sgd, weight decay": (
        optim.SGD(lr=0.1, l2=0.05),
        lambda torch, p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
        False,
    ),
    "sgd, momentum and weight decay": (
        optim.SGD(lr=0.1, momentum=0.9, l2=0.05),
        lambda torch, p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
        False,
    ),
    "adagrad": (optim.Adagrad(lr=0.1), lambda torch, p: torch.optim.Adagrad(p, lr=0.1), True),
    "adagrad, options": (
        optim.Adagrad(lr=0.1, initial_accumulator_value=0.2, eps=1e-5, l2=0.05),
        lambda torch, p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.2, eps=1e-5, weight_decay=0.05
        ),
        False,
    ),
    "adam": (optim.Adam(), lambda torch, p: torch.optim.SparseAdam(p), True),
    "adam, options": (
        optim.Adam(lr=0.03, betas=(0.8, 0.95), eps=1e-6),
        lambda torch, p: torch.optim.SparseAdam(p, lr=0.03, betas=(0.8, 0.95), eps=1e-6),
        True,
    ),
    "adam, weight decay": (
        optim.Adam(lr=0.01, l2=0.05),
        lambda torch, p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05, eps=1e-8),
        False,
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_training_from_equal_values_equals_torch(torch, case):
    """Sparse gradients touch a part of the rows; torch's weight decay needs dense ones, which touch all."""
    options, make, sparse = TORCH[case]
    num_rows = 30
    store = store_of(options)
    tables = np.zeros(num_rows, np.int32)
    start = np.empty((num_rows, 6), np.float32)
    store.lookup(Keys(np.arange(num_rows), tables), 1, start)
    embedding = torch.nn.Embedding(num_rows, 6, sparse=sparse, _weight=torch.from_numpy(start.copy()))
    torch_optimizer = make(torch, list(embedding.parameters()))
    rng = np.random.default_rng(1)
    for step in range(1, STEPS + 1):
        ids = np.sort(rng.permutation(num_rows)[: 10 if sparse else num_rows])
        grads = rng.normal(size=(len(ids), 6)).astype(np.float32)
        torch_optimizer.zero_grad()
        (embedding(torch.from_numpy(ids)) * torch.from_numpy(grads)).sum().backward()
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # it warns unless told
            torch_optimizer.step()
        out = np.empty_like(grads)
        rows = store.lookup(Keys(ids, tables[: len(ids)]), step, out)
        assert store.apply_gradients(Keys(ids, tables[: len(ids)], rows=rows), RowUpdate(grads, step)) == 0
        theirs = embedding.weight.detach().numpy()
        np.testing.assert_allclose(weights_of(store, num_rows), theirs, rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_is_adagrad_for_one_column():
    rng = np.random.default_rng(2)
    stores = [store_of(cls(lr=0.1), dim=1) for cls in (optim.Adagrad, optim.RowwiseAdagrad)]
    ids, tables = np.arange(9), np.zeros(9, np.int32)
    for step in range(1, 30):
        grads = rng.normal(size=(9, 1)).astype(np.float32)
        for store in stores:
            rows = store.lookup(Keys(ids, tables), step, np.empty_like(grads))
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, step))
    np.testing.assert_allclose(weights_of(stores[0], 9), weights_of(stores[1], 9), rtol=1e-6)


def mcmahan(gradients, alpha, beta, l1, l2, scales=None):
    """Algorithm 1 of McMahan et al. 2013 for one coordinate, in float64: the weight after each gradient.

    ``scales`` is what a schedule adds to it: each multiplies a gradient on its way into z.
    """
    z = n = 0.0
    weights = []
    for g, scale in zip(gradients, np.ones(len(gradients)) if scales is None else scales, strict=True):
        if abs(z) <= l1:
            w = 0.0
        else:
            w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z += scale * g - sigma * w
        n += g * g
        weights.append(0.0 if abs(z) <= l1 else -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
    return weights


def test_ftrl_is_algorithm_1_with_exact_zeros():
    options = optim.FTRL(lr=0.1, beta=1.0, l1=2.0, l2=0.5)
    store = store_of(options, dim=8, initializer=Zeros())
    rng = np.random.default_rng(3)
    drift = np.array([0, 0, 0, 0, 0.3, -0.3, 1, -1])
    gradients = (rng.normal(size=(STEPS, 8)) * 0.3 + drift).astype(np.float32)
    gradients[:, 3] = 0
    expected = np.array([mcmahan(column, 0.1, 1.0, 2.0, 0.5) for column in gradients.T.astype(np.float64)]).T
    key = np.zeros(1, np.int64), np.zeros(1, np.int32)
    for step in range(1, STEPS + 1):
        rows = store.lookup(Keys(*key), step, np.empty((1, 8), np.float32))
        store.apply_gradients(Keys(*key, rows=rows), RowUpdate(gradients[step - 1 : step], step))
        mine = weights_of(store, 1)[0]
        np.testing.assert_allclose(mine, expected[step - 1], rtol=1e-4, atol=1e-5)
        clear = np.abs(expected[step - 1]) > 1e-5
        assert (mine[(expected[step - 1] == 0) & ~clear] == 0).mean() > 0.5
    assert (expected == 0).mean() > 0.2
    assert mine[3] == 0
    assert (mine[4:] != 0).all()


def test_ftrl_keeps_a_value_that_was_set():
    options = optim.FTRL(lr=0.1, beta=1.0, l1=0.01, l2=0.5)
    store = store_of(options, dim=3, initializer=Normal(std=1.0))
    key = np.zeros(1, np.int64), np.zeros(1, np.int32)
    start = np.empty((1, 3), np.float32)
    for step, value in enumerate([None, [0.5, -2.0, 0.0], [3.0, 0.0, -1.0]], start=1):
        rows = store.lookup(Keys(*key), step, start)
        if value is not None:
            store.assign(Keys(*key), np.array([value], np.float32))
            start[:] = value
        store.apply_gradients(Keys(*key, rows=rows), RowUpdate(np.zeros((1, 3), np.float32), step))
        np.testing.assert_allclose(weights_of(store, 1), start, rtol=1e-5)
        store.apply_gradients(Keys(*key, rows=rows), RowUpdate(np.full((1, 3), 0.3, np.float32), step))


SCALES = np.resize([1.0, 0.5, 0.1, 0.0, 1e-3, 2.0], STEPS)


def ftrl_row(options, start):
    """A row of some columns, its state, and the function that moves it by a gradient."""
    row, number = np.array(start, np.float32), optimizers.number_of(options)
    state = np.empty(2 * len(row), np.float32)
    optimizers.begin_row(number, row, state, optimizers.hyper_row(options, 1.0, 1))

    def move(grad, scale):
        hyper = optimizers.hyper_row(options, scale, 1)
        optimizers.update_row(number, row, state, np.asarray(grad, np.float32), hyper)

    return row, state, move


def test_ftrl_under_a_schedule_is_its_float64_transcription():
    options = optim.FTRL(lr=0.1, beta=1.0, l1=0.5, l2=0.5)
    row, _, move = ftrl_row(options, np.zeros(6))
    rng = np.random.default_rng(4)
    gradients = (rng.normal(size=(STEPS, 6)) * 0.3 + [0, 0, 0.3, -0.3, 1, -1]).astype(np.float32)
    columns = gradients.T.astype(np.float64)
    expected = np.array([mcmahan(column, 0.1, 1.0, 0.5, 0.5, SCALES) for column in columns]).T
    for gradient, scale, weights in zip(gradients, SCALES, expected, strict=True):
        move(gradient, scale)
        np.testing.assert_allclose(row, weights, rtol=1e-4, atol=1e-5)


def test_a_schedule_scales_the_step_of_ftrl():
    """Without λ₁ the closed form is a step of -scale · g / ((β + √n) / α + λ₂) from the weight before."""
    options = optim.FTRL(lr=0.1, beta=0.5, l2=0.3)
    row, _, move = ftrl_row(options, [0.5, -2.0, 0.0, 0.1])
    weights, n = row.astype(np.float64), np.zeros(4)
    for step, scale in enumerate(SCALES):
        gradient = np.random.default_rng(step).normal(size=4).astype(np.float32)
        n += gradient.astype(np.float64) ** 2
        weights -= scale * gradient / ((0.5 + np.sqrt(n)) / 0.1 + 0.3)
        move(gradient, scale)
        np.testing.assert_allclose(row, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_zero_gradient_leaves_ftrls_weights_at_any_scale(beta):
    row, _, move = ftrl_row(optim.FTRL(beta=beta, l1=0.5), [0.5, -2.0, 0.0, 0.0])
    start = row.copy()
    for scale in SCALES:
        move(np.zeros(4), scale)
        np.testing.assert_allclose(row, start, rtol=1e-6)
    for gradient in ([1, -1, 0.4, 3], [0.5, 2, -0.2, 1]):
        move(gradient, 1.0)
    start = row.copy()
    assert row[2] == 0  # |z| is within λ₁, so that the zero is exact
    assert (row[[0, 1, 3]] != 0).all()
    for scale in SCALES:
        move(np.zeros(4), scale)
        np.testing.assert_allclose(row, start, rtol=1e-6)
        assert row[2] == 0
    move([1, -1, 0.01, 1], 0.0)
    np.testing.assert_allclose(row, start, rtol=1e-5)
    assert row[2] == 0


@pytest.mark.parametrize("options", ALL[3:], ids=repr)
@pytest.mark.parametrize("gradient", [1e15, 2e19, 3e38])
def test_a_huge_gradient_does_not_outlive_its_step(options, gradient):
    """Its square is infinite in float32, but the row and its state stay finite, and go on moving."""
    row = np.array([0.1, -0.2, 0.0], np.float32)
    number = optimizers.number_of(options)
    state = np.empty(sum(width for _, width in optimizers.state_columns(options, 3)), np.float32)
    optimizers.begin_row(number, row, state, optimizers.hyper_row(options, 1.0, 1))
    for step, huge in enumerate([gradient, -gradient, gradient], start=1):
        hyper = optimizers.hyper_row(options, 1.0, step)
        optimizers.update_row(number, row, state, np.array([huge, -huge, 1], np.float32), hyper)
        assert np.isfinite(state).all()
        assert (np.abs(row) < 1 + step).all()
    before = row.copy()
    hyper = optimizers.hyper_row(options, 1.0, 4)
    optimizers.update_row(number, row, state, np.array([gradient, gradient, 1], np.float32), hyper)
    assert np.isfinite(row).all()
    assert (row[:2] != before[:2]).all()


def test_segments_move_by_their_own_optimizers():
    segments = (Segment("a", 2, optim.SGD(lr=0.5)), Segment("b", 1, optim.SGD(lr=0.25)))
    store = Store(GroupSpec("g", (TableSpec("t", (Zeros(), Zeros())),), segments))
    key = np.zeros(1, np.int64), np.zeros(1, np.int32)
    store.lookup(Keys(*key), 1, np.empty((1, 3), np.float32))
    store.apply_gradients(Keys(*key), RowUpdate(np.array([[1, 2, 4]], np.float32), 1))
    assert weights_of(store, 1).tolist() == [[-0.5, -1.0, -1.0]]


@pytest.mark.parametrize(
    "options", [optim.Adagrad(eps=0.0), optim.RowwiseAdagrad(eps=0.0), optim.FTRL(beta=0.0)], ids=repr
)
def test_a_zero_gradient_makes_no_nan(options):
    store = store_of(options, initializer=Zeros())
    key = np.zeros(1, np.int64), np.zeros(1, np.int32)
    store.lookup(Keys(*key), 1, np.empty((1, 6), np.float32))
    store.apply_gradients(Keys(*key), RowUpdate(np.zeros((1, 6), np.float32), 1))
    assert (weights_of(store, 1) == 0).all()
    store.apply_gradients(Keys(*key), RowUpdate(np.ones((1, 6), np.float32), 2, lr_scale=0.0))
    assert (weights_of(store, 1) == 0).all()
