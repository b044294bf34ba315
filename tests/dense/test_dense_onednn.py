"""Linear through oneDNN is F.linear: its values, its gradients, its manners."""

import copy
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import girih
from girih import models
from girih.data import Batch
from girih.dense.accel import onednn
from girih.dense.accel.arithmetic import LinearBy
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.models import Block, Embeddings
from support.votes import apply

pytestmark = pytest.mark.skipif(not onednn.available(), reason="PyTorch has no such operator here")


@pytest.fixture(autouse=True)
def _as_where_it_pays(monkeypatch):
    monkeypatch.setattr(onednn, "pays", onednn.available)


ONEDNN = "mkldnn._linear_pointwise.default"


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 1)


def views(rows, columns, kind):
    """[rows, columns] in some memory layout."""
    match kind:
        case "contiguous":
            return torch.randn(rows, columns)
        case "transposed":
            return torch.randn(columns, rows).T
        case "strided":
            return torch.randn(2 * rows, 3 * columns)[::2, ::3]
        case "expanded":
            return torch.randn(1, columns).expand(rows, columns)


KINDS = st.sampled_from(["contiguous", "transposed", "strided", "expanded"])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=0, max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_linear(shape, inputs, outputs, bias, kinds, seed):
    torch.manual_seed(seed)
    rows = int(np.prod(shape, dtype=int))
    x = views(rows, inputs, kinds[0]).reshape(*shape, inputs)
    w = views(outputs, inputs, kinds[1])
    g = views(rows, outputs, kinds[2]).reshape(*shape, outputs)
    b = torch.randn(2 * outputs)[::2] if bias else None

    def results(function, dtype, of=torch.clone):
        leaves = [t if t is None else of(t.detach()).to(dtype).requires_grad_() for t in (x, w, b)]
        y = function(*leaves)
        y.backward(of(g).to(dtype))
        return y, [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "MIN_PRODUCTS", 1)
        with LinearBy(onednn.linear):
            y, ours = results(F.linear, torch.float32)
    assert "_OrderedLinear" in str([y.grad_fn, *(fn for fn, _ in y.grad_fn.next_functions)])
    _, torchs = results(F.linear, torch.float32)
    _, exact = results(F.linear, torch.float64)
    _, sizes = results(F.linear, torch.float64, of=torch.abs)  # of the terms, which may cancel
    for one, other, true, size in zip(ours, torchs, exact, sizes, strict=True):
        assert one.shape == other.shape
        assert one.dtype == torch.float32
        terms = max(rows, inputs, outputs)  # each may round once, however they are added up
        bound = 4 * (other - true).abs().max() + (2e-6 + terms * 2**-24) * size.max()
        assert (one - true).abs().max() <= bound


def test_an_empty_batch_and_wrong_shapes_are_torchs_affair(any_size):
    layer = nn.Linear(4, 3)
    with LinearBy(onednn.linear):
        y = layer(torch.empty(0, 4, requires_grad=True))
        y.sum().backward()
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            layer(torch.ones(2, 5))
    assert y.shape == (0, 3)
    assert layer.weight.grad.count_nonzero() == 0


def test_only_wanted_gradients_are_computed(any_size):
    def products(x, layer):
        with Calls() as calls, LinearBy(onednn.linear):
            layer(x).sum().backward()
        return calls.counts[ONEDNN]

    plain, leaf = torch.randn(8, 4), torch.randn(8, 4, requires_grad=True)
    assert products(plain, nn.Linear(4, 3)) == 2
    assert products(leaf, nn.Linear(4, 3)) == 3
    frozen = nn.Linear(4, 3)
    frozen.weight.requires_grad_(False)
    assert products(plain, frozen) == 1
    assert torch.equal(frozen.bias.grad, torch.full((3,), 8.0))
    assert products(leaf, frozen) == 2
    assert frozen.weight.grad is None


def test_a_layer_used_twice_sums_its_gradients(any_size):
    torch.manual_seed(0)
    ours = nn.Linear(5, 5)
    torchs = copy.deepcopy(ours)
    x = torch.randn(7, 5)
    with LinearBy(onednn.linear):
        ours(ours(x).relu_()).square().sum().backward()
    torchs(torchs(x).relu()).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, torchs.bias.grad)


def test_second_derivatives(any_size):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    found = []
    for mode in (LinearBy(onednn.linear), torch.enable_grad()):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        with mode:
            (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(*found)


def test_without_gradients_nothing_is_kept(any_size):
    layer = nn.Linear(4, 3)
    with LinearBy(onednn.linear), torch.no_grad(), Calls() as calls:
        y = layer(torch.randn(2, 4))
    assert calls.counts[ONEDNN] == 1
    assert y.grad_fn is None


def test_other_numbers_and_transforms_are_left_to_torch(any_size):
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    with Calls() as calls, LinearBy(onednn.linear):
        copy.deepcopy(layer).double()(x.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        torch.func.vmap(layer)(x)
        torch.func.grad(lambda v: layer(v).sum())(x)
    layer(x)
    assert calls.counts[ONEDNN] == 0


def test_small_products_are_left_to_torch():
    layer = nn.Linear(64, 64)
    with Calls() as calls, LinearBy(onednn.linear):
        layer(torch.randn(64, 64))
        assert calls.counts[ONEDNN] == 0
        layer(torch.randn(1024, 64))
    assert calls.counts[ONEDNN] == 1


SLICED = """
import torch
from girih.dense.accel.onednn import linear

for last in (64, 65):
    wide = torch.randn(1024, 2 * last)
    x = torch.randn(1024, 200)[:, 100:].requires_grad_()
    weight = torch.randn(last, 200)[:, 100:].requires_grad_()
    linear(x, weight).backward(wide[:, last:])
"""


def test_contents_wider_matrices_are_never_multiplied_number_by_number():
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SLICED], capture_output=True, text=True, check=True, env=environment
    )
    products = [line.split(",") for line in done.stdout.splitlines() if ",inner_product," in line]
    assert len(products) == 6
    assert not [words for words in products if words[6].startswith("ref")]


def test_the_same_bits_each_time():
    torch.manual_seed(0)
    layer, x = nn.Linear(367, 400), torch.randn(1000, 367, requires_grad=True)

    def run():
        layer.zero_grad()
        x.grad = None
        with LinearBy(onednn.linear):
            y = layer(x)
        y.square().sum().backward()
        return [y, x.grad, layer.weight.grad, layer.bias.grad]

    first = [t.clone() for t in run()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


class Users(nn.Module):
    """A user's model, plain torch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 1)

    def forward(self, numeric, embeddings):
        return self.last(torch.relu(self.first(embeddings["c0"])))


def batch_of(size, features, num_numeric, seed=0):
    rng = np.random.default_rng(seed)
    return Batch(
        ids=np.zeros(features * size, np.int64),
        offsets=np.arange(features * size + 1, dtype=np.int32),
        numeric=rng.normal(size=(size, num_numeric)).astype(np.float32),
        labels=(rng.random((size, 1)) < 0.25).astype(np.float32),
    )


@pytest.mark.parametrize(("vendor", "pays"), [("AuthenticAMD", True), ("", True), ("GenuineIntel", False)])
def test_it_pays_where_mkl_holds_back(monkeypatch, vendor, pays):
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "_vendor", lambda: vendor)
    assert onednn.pays() is pays


def test_replica_takes_a_users_linear_layers_through_onednn():
    batch = batch_of(512, 1, 0)
    embeddings = Embeddings((Block(("c0",), torch.randn(512, 1, 64)),))
    for precision, train, expected in (
        ("float32", True, 2),
        ("float32", False, 1),
        ("bfloat16", True, 0),
    ):  # 2: backward too
        spec = DenseSpec(module=Users(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), precision=precision)
        replica = Replica(spec)
        with Calls() as calls:
            (replica.compute if train else replica.predict)(batch, embeddings)
        assert calls.counts[ONEDNN] == expected, (precision, train)


def test_two_hundred_steps_of_dlrm_are_those_of_eager_torch():
    names = tuple(f"c{i}" for i in range(8))
    schema = girih.Schema(
        [
            *(girih.Categorical(name=n, dim=16) for n in names),
            *(girih.Numeric(name=f"x{i}") for i in range(5)),
        ],
        "click",
    )
    torch.manual_seed(0)
    ours = models.DLRM(schema, hidden=(128, 128), bottom_hidden=(128,))
    torchs = copy.deepcopy(ours)
    replica = Replica(DenseSpec(module=ours, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)))
    optimizer = torch.optim.Adam(torchs.parameters(), lr=1e-3)
    table = torch.randn(50, len(names), 16)
    for step in range(200):
        batch = batch_of(1024, len(names), 5, seed=step)
        rows = torch.randint(50, (1024,), generator=torch.Generator().manual_seed(step))
        batch.labels[:] = (rows % 3 == 0).float()[:, None].numpy()
        embeddings = Embeddings((Block(names, table[rows]),))
        labels = torch.from_numpy(batch.labels)
        computed = replica.compute(batch, embeddings)
        outcome = apply(computed)
        logits = torchs(torch.from_numpy(batch.numeric), embeddings)
        expected = F.binary_cross_entropy_with_logits(logits, labels)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert outcome.facts().loss == pytest.approx(expected.item(), rel=1e-4), step
    assert expected < 0.3
