"""Linear with an 8-bit forward pass: its numbers, the float32 gradients behind it, its manners, and what it learns."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import girih
from girih.app.run_config import RunConfig
from girih.data import Batch
from girih.data.click_log import click_log
from girih.dense.accel import int8, onednn
from girih.dense.accel.arithmetic import LinearBy
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.errors import ConfigError
from girih.models import Embeddings
from support.votes import apply

F32 = np.float32


def quantized(x, w, b):
    """The 8-bit layer in NumPy: float32 where the layer has float32, integers as int64."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = max((high - low) / 255, 2.0**-100)
    zero = -128 - round(low / step)
    codes = np.clip(np.rint(x * F32(1 / step) + F32(zero)), -128, 127).astype(np.int64)
    steps = np.maximum(np.abs(w).max(1) / F32(127), F32(2.0**-100))
    weights = np.rint(w / steps[:, None]).astype(np.int64)
    assert abs(weights).max() <= 127
    steps = steps * F32(step)
    offset = weights.sum(1).astype(F32) * steps * F32(-zero)
    if b is not None:
        offset = offset + b
    return (codes @ weights.T).astype(F32) * steps + offset


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


@pytest.fixture(params=["integers", "floats"])
def way(request, monkeypatch):
    """Both ways to multiply integers, as far as this machine has them."""
    if request.param == "floats":
        monkeypatch.setattr(int8, "_multiplies_integers", lambda: False)
    elif not int8._multiplies_integers():
        pytest.skip("no instructions for products of 8-bit integers here")


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    kinds=st.tuples(KINDS, KINDS),
    relu=st.booleans(),
    size=st.sampled_from([1.0, 1e-30, 1e15]),
    floats=st.booleans(),
    seed=st.integers(0, 99),
)
def test_forward_is_the_quantized_layer_to_the_bit(
    shape, inputs, outputs, bias, kinds, relu, size, floats, seed
):
    torch.manual_seed(seed)
    rows = math.prod(shape)
    x = views(rows, inputs, kinds[0]) * size
    x = (x.relu() if relu else x).reshape(*shape, inputs)
    w = views(outputs, inputs, kinds[1])
    b = torch.randn(2 * outputs)[::2] if bias else None
    with pytest.MonkeyPatch.context() as patch, LinearBy(int8.linear):
        patch.setattr(int8, "_NUMBERS_OF_A_PART", 100)  # several parts, the last one shorter
        if floats:
            patch.setattr(int8, "_multiplies_integers", lambda: False)
        got = F.linear(x, w, b)
    want = quantized(x.reshape(rows, inputs).numpy(), w.numpy(), None if b is None else b.numpy())
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), want.reshape(*shape, outputs))


def test_sums_of_integers_are_exact(way):
    torch.manual_seed(0)
    for b, i, o in ((1, 1, 1), (1, 1, 5), (3, 1, 2), (1, 7, 4), (5, 1024, 3), (4, 2500, 3)):
        x = torch.randint(-128, 128, (b, i), dtype=torch.int8)
        w = torch.randint(-127, 128, (o, i), dtype=torch.int8)
        x[0], w[0] = -128, 127  # nothing saturates
        found = int8.product(x, w)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), x.long() @ w.long().T), (b, i, o)


def test_rounding_stays_within_its_bound():
    torch.manual_seed(0)
    x, layer = torch.randn(64, 200), nn.Linear(200, 50)
    with LinearBy(int8.linear), torch.no_grad():
        got = layer(x)
    want = layer.double()(x.double())
    step = (x.max() - x.min()) / 255
    steps = layer.weight.abs().amax(1) / 127
    # half a step of each activation by its weight, half of each weight by its activation, and both
    bound = step / 2 * (layer.weight.abs() + steps[:, None] / 2).sum(1) + steps / 2 * x.abs().sum(
        1, keepdim=True
    )
    assert ((got - want).abs() <= bound * (1 + 1e-4)).all()
    assert (got - want).abs().max() > 1e-4  # it does round


def test_a_weight_that_another_net_moves_meanwhile_keeps_its_sign(monkeypatch):
    weight, amax = torch.ones(2, 8), torch.Tensor.amax

    def moved(self, *arguments):
        found = amax(self, *arguments)
        weight.mul_(1.5)
        return found

    monkeypatch.setattr(torch.Tensor, "amax", moved)
    assert (int8.linear(torch.ones(1, 8), weight) > 7).all()


@pytest.mark.parametrize("pays", [False, True])
def test_gradients_are_the_float32_layers(pays, monkeypatch):
    """Straight-through: dx = g W, dW = gᵀ x, db = Σ g, with the numbers before rounding."""
    monkeypatch.setattr(onednn, "pays", lambda: pays and onednn.available())
    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 1)
    torch.manual_seed(0)
    layer, x, g = nn.Linear(40, 30), torch.randn(2, 25, 40, requires_grad=True), torch.randn(2, 25, 30)
    with LinearBy(int8.linear):
        layer(x).backward(g)
    flat, g = x.detach().view(50, 40).double(), g.view(50, 30).double()
    for found, want in (
        (x.grad.view(50, 40), g @ layer.weight.double()),
        (layer.weight.grad, g.T @ flat),
        (layer.bias.grad, g.sum(0)),
    ):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_only_wanted_gradients_and_those_of_gradients():
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    layer.weight.requires_grad_(False)
    with LinearBy(int8.linear):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((4,), 3.0))
    x.requires_grad_()
    with LinearBy(int8.linear):
        (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, layer.weight.sum(0).expand(3, 6))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_out_as_float32_has_it(bad):
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    x[1, 2] = bad
    with LinearBy(int8.linear), torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), equal_nan=True)
        layer.weight[2, 3] = bad
        assert not layer(torch.randn(3, 6))[:, 2].isfinite().any()


def test_what_there_is_nothing_to_round_of_is_torchs_affair():
    layer = nn.Linear(4, 3)
    with LinearBy(int8.linear):
        assert layer(torch.empty(0, 4)).shape == (0, 3)
        assert nn.Linear(4, 3).double()(torch.randn(2, 4).double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            layer(torch.ones(2, 5))
        torch.testing.assert_close(layer(torch.zeros(2, 4)), layer.bias.expand(2, 3))
        torch.func.vmap(layer)(torch.randn(2, 4))


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, numeric, embeddings):
        return self.layer(numeric)


def test_a_replica_computes_so_in_training_and_evaluation():
    torch.manual_seed(0)
    module = OneLayer()
    numeric, labels = torch.randn(16, 6), torch.rand(16, 1)
    ids, offsets = np.empty(0, np.int64), np.zeros(1, np.int32)
    batch = Batch(ids=ids, offsets=offsets, numeric=numeric.numpy(), labels=labels.numpy())
    want = quantized(*(each.detach().numpy() for each in (numeric, module.layer.weight, module.layer.bias)))
    replica = Replica(
        DenseSpec(module=module, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), forward="int8")
    )
    empty = Embeddings(())
    np.testing.assert_array_equal(replica.predict(batch, empty), want)
    before, logits = module.layer.weight.detach().clone(), torch.from_numpy(want)
    computed = replica.compute(batch, empty)
    outcome = apply(computed)
    loss = F.binary_cross_entropy_with_logits(logits, labels)
    assert outcome.facts().loss == pytest.approx(loss.item(), rel=1e-6)
    gradient = (logits.sigmoid() - labels).T @ numeric / 16
    torch.testing.assert_close(module.layer.weight.detach(), before - 0.5 * gradient)
    assert replica.state()["model"]["layer.weight"].dtype == torch.float32


@pytest.fixture(scope="module")
def learnable(tmp_path_factory):
    """A log of few ids, so that a short run learns most of it."""
    directory, start = tmp_path_factory.mktemp("log"), 0
    for name, rows in (("train", 12_000), ("test", 5_000)):
        table, _ = click_log(rows, start=start, cardinality=60)
        pq.write_table(table, directory / f"{name}.parquet")
        start += rows
    (directory / "config.toml").write_text("""
data = { train = "train.parquet", test = "test.parquet", batch_size = 256 }
features = [
    { name = "user", kind = "categorical", dim = 8 }, { name = "item", kind = "categorical", dim = 8 },
    { name = "x0", kind = "numeric", transform = ["log1p", "standardize"] },
    { name = "x1", kind = "numeric", transform = ["standardize"] },
]
labels = { names = ["click"] }
model = { name = "dlrm", hidden = [32, 16], bottom_hidden = [16] }
dense_optimizer = { name = "adam", lr = 0.005 }
train = { epochs = 1, seed = 3, device = "cpu" }
store = { shards = 1 }
""")
    return directory


def trained(directory, *overrides):
    configured = RunConfig.load(directory / "config.toml", overrides=overrides)
    with configured.trainer() as trainer:
        trainer.fit(configured.dataset("train"))
        state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        return trainer.evaluate(configured.dataset("test")), state


def test_it_learns_nearly_what_float32_does(learnable):
    whole, parameters = trained(learnable)
    eight, others = trained(learnable, "train.dense_forward=int8")
    assert whole.auc > 0.7
    assert abs(eight.auc - whole.auc) < 0.01
    assert eight.logloss != whole.logloss
    assert parameters.keys() == others.keys()
    for name, tensor in others.items():
        assert tensor.dtype == parameters[name].dtype
        assert tensor.shape == parameters[name].shape


def test_what_does_not_go_together_is_one_line(learnable, monkeypatch):
    with pytest.raises(ConfigError, match="dense_forward = 'int8' with precision = 'bfloat16': expected"):
        girih.TrainOptions(dense_forward="int8", precision="bfloat16")
    with pytest.raises(ConfigError, match="dense_forward = 'int4': expected one of 'float32', 'int8'"):
        RunConfig.load(learnable / "config.toml", overrides=["train.dense_forward=int4"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda", "auto"):
        configured = RunConfig.load(
            learnable / "config.toml", overrides=["train.dense_forward=int8", f"train.device={device}"]
        )
        with pytest.raises(
            ConfigError, match=f"on cuda .device = '{device}'.: expected device = 'cpu'"
        ) as told:
            configured.trainer()
        assert "\n" not in str(told.value)
