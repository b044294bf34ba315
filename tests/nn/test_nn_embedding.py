import threading

import numpy as np
import pytest
import torch

import girih
from girih.errors import ConfigError, NonFiniteError
from girih.store import Store

SGD = girih.optim.SGD(lr=0.5)


def bag_pair(mode="sum", num=20, dim=6, **options):
    theirs = torch.nn.EmbeddingBag(num, dim, mode=mode if mode != "sqrtn" else "sum")
    return girih.nn.EmbeddingBag.from_torch(theirs, mode, optimizer=SGD, **options), theirs


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bag_equals_torch_for_many_steps(mode, include_last_offset):
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.EmbeddingBag(20, 6, mode=mode, include_last_offset=include_last_offset)
    ours = girih.nn.EmbeddingBag.from_torch(theirs, optimizer=SGD)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(30):
        ids = torch.randint(0, 20, (17,), generator=generator)
        offsets = torch.tensor([0, 3, 3, 10, 17] if include_last_offset else [0, 3, 3, 10])
        a, b = ours(ids, offsets), theirs(ids, offsets)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for out in (a, b):
            (out**2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(ours(torch.arange(20)[:, None]), theirs.weight.detach(), rtol=1e-5, atol=1e-6)


def test_sqrtn_and_two_dimensional_ids():
    ours, theirs = bag_pair("sqrtn")
    ids = torch.tensor([[1, 2, 3], [4, 4, 5]])
    torch.testing.assert_close(ours(ids), theirs(ids) / 3**0.5)


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
def test_weights(mode):
    ours, theirs = bag_pair(mode)
    ids, weights = torch.tensor([[1, 2, 2], [4, 5, 6]]), torch.rand(2, 3)
    scale = {"sum": 1.0, "mean": 1 / 3, "sqrtn": 3**-0.5}[mode]
    expected = (
        torch.nn.functional.embedding_bag(ids, theirs.weight, mode="sum", per_sample_weights=weights) * scale
    )
    out = ours(ids, per_sample_weights=weights)
    torch.testing.assert_close(out, expected)
    before = theirs.weight.detach().clone()
    out.sum().backward()
    expected.sum().backward()
    after = ours.eval()(torch.arange(20)[:, None])
    if mode == "sum":
        torch.testing.assert_close(after, before - 0.5 * theirs.weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("learns", [True, False])
def test_weights_get_their_gradient(mode, learns):
    ours, theirs = bag_pair(mode)
    ours.train(learns)
    ids, offsets = torch.tensor([1, 2, 2, 4, 5]), torch.tensor([0, 3, 3])
    scale = {"sum": [1, 1, 1], "mean": [1 / 3, 1, 1 / 2], "sqrtn": [3**-0.5, 1, 2**-0.5]}[mode]
    weights = torch.rand(5, dtype=torch.float64).requires_grad_()
    their_weights = weights.detach().float().requires_grad_()
    sums = torch.nn.functional.embedding_bag(
        ids, theirs.weight, offsets, mode="sum", per_sample_weights=their_weights
    )
    expected = sums * torch.tensor(scale)[:, None]
    out = ours(ids, offsets, weights)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out, ours(ids, offsets, weights.detach()))
    before = theirs.weight.detach().clone()
    for each in (out, expected):
        (each**2).sum().backward()
    torch.testing.assert_close(weights.grad.float(), their_weights.grad)
    moved = before - 0.5 * theirs.weight.grad if learns else before
    torch.testing.assert_close(ours.eval()(torch.arange(20)[:, None]), moved)


def test_no_ids_at_all():
    bag, weights = girih.nn.EmbeddingBag(4, padding_idx=0), torch.ones(1, 2, requires_grad=True)
    bag(torch.tensor([[0, 0]]), per_sample_weights=weights).sum().backward()
    assert weights.grad.tolist() == [[0.0, 0.0]]
    assert bag.num_rows == 0


def test_a_model_that_is_moved_keeps_its_rows_in_host_memory():
    for module in (girih.nn.EmbeddingBag(4, "sum", optimizer=SGD), girih.nn.Embedding(4, optimizer=SGD)):
        model = torch.nn.Sequential(module).to("meta").to(torch.float64)
        before = model(torch.tensor([[3]])).detach().clone()
        model(torch.tensor([[3]])).sum().backward()
        torch.testing.assert_close(model.eval()(torch.tensor([[3]])), before - 0.5)


def test_arguments_are_called_as_torch_calls_them():
    ids = torch.tensor([[1, 2]])
    assert girih.nn.EmbeddingBag(dim=4)(input=ids).shape == (1, 4)
    assert girih.nn.Embedding(dim=4)(input=ids).shape == (1, 2, 4)


def test_shards_have_threads(monkeypatch):
    threads = set()
    lookup = Store.lookup

    def watched(self, *arguments):
        threads.add(threading.current_thread().name)
        return lookup(self, *arguments)

    monkeypatch.setattr(Store, "lookup", watched)
    bag = girih.nn.EmbeddingBag(4, seed=1, store=girih.StoreOptions(shards=3))
    same = girih.nn.Embedding(4, share=bag)
    ids = torch.arange(10_000)  # enough to share
    plain = girih.nn.Embedding(4, seed=1).eval()
    torch.testing.assert_close(bag(ids[:, None]), plain(ids))
    torch.testing.assert_close(same(ids), plain(ids))
    others = threads - {threading.current_thread().name}  # which reads the first shard itself
    assert others
    assert all(name.startswith("girih-shard") for name in others)


def test_embedding_of_any_shape_equals_torch():
    theirs = torch.nn.Embedding(20, 6)
    ours = girih.nn.Embedding.from_torch(theirs, optimizer=SGD)
    ids = torch.tensor([[[1, 2], [3, 1]]])
    a, b = ours(ids), theirs(ids)
    assert a.shape == (1, 2, 2, 6)
    torch.testing.assert_close(a, b)
    for out in (a, b):
        (out**2).sum().backward()
    torch.testing.assert_close(ours(torch.arange(20)), (theirs.weight - 0.5 * theirs.weight.grad).detach())


def test_padding_counts_as_absent():
    bag = girih.nn.EmbeddingBag(4, "mean", padding_idx=0, optimizer=SGD)
    out = bag(torch.tensor([[5, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(out[0], bag(torch.tensor([[5]]))[0])
    assert (out[1] == 0).all()
    embedding = girih.nn.Embedding(4, padding_idx=-1, optimizer=SGD)
    out = embedding(torch.tensor([7, -1]))
    assert (out[1] == 0).all()
    out.sum().backward()
    assert embedding.num_rows == 1
    theirs = torch.nn.Embedding(5, 4, padding_idx=2)
    torch.testing.assert_close(
        girih.nn.Embedding.from_torch(theirs)(torch.arange(5)), theirs(torch.arange(5))
    )


def test_any_id_gets_a_row_and_initial_values_do_not_depend_on_order():
    ids = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789012])
    one, other = (girih.nn.Embedding(8, seed=3) for _ in range(2))
    torch.testing.assert_close(one(ids), other(ids.flip(0)).flip(0), rtol=0, atol=0)
    assert one.num_rows == 5
    assert not torch.equal(girih.nn.Embedding(8, seed=4)(ids), one(ids))


def test_eval_and_no_grad_only_read():
    embedding = girih.nn.Embedding(4, seed=1)
    with torch.no_grad():
        unseen = embedding(torch.tensor([9]))
    assert embedding.num_rows == 0
    assert not unseen.requires_grad
    embedding.eval()
    assert not embedding(torch.tensor([9])).requires_grad
    assert embedding.num_rows == 0
    embedding.train()
    torch.testing.assert_close(embedding(torch.tensor([9])), unseen, rtol=0, atol=0)
    assert embedding.num_rows == 1


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
def test_frozen_rows_are_only_read(kind):
    module = kind(4, optimizer=SGD)
    model = torch.nn.Sequential(module, torch.nn.Linear(4, 1))
    model(torch.tensor([[1, 2]])).sum().backward()
    before = module(torch.tensor([[1, 2]])).detach().clone()
    assert module.requires_grad_(False) is module
    model.eval()
    model.train()  # as loops do around each evaluation
    model(torch.tensor([[1, 2, 3]])).sum().backward()  # the layer behind it learns
    assert model[1].weight.grad is not None
    torch.testing.assert_close(module(torch.tensor([[1, 2]])), before, rtol=0, atol=0)
    assert module.num_rows == 2
    module.requires_grad_()
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert module.num_rows == 3
    assert not torch.equal(module(torch.tensor([[1, 2]])), before)


def test_frozen_rows_let_their_weights_learn_and_others_that_share_them():
    frozen = girih.nn.EmbeddingBag(4, "sum", optimizer=SGD).requires_grad_(False)
    same = girih.nn.Embedding(4, share=frozen)
    weights = torch.ones(1, 2, requires_grad=True)
    frozen(torch.tensor([[1, 2]]), None, weights).sum().backward()
    assert weights.grad is not None
    assert frozen.num_rows == 0
    same(torch.tensor([1])).sum().backward()
    assert frozen.num_rows == 1


def test_two_uses_in_one_forward_are_two_steps():
    embedding = girih.nn.Embedding(2, optimizer=girih.optim.Adagrad(lr=1.0))
    embedding.assign(torch.tensor([1]), torch.zeros(1, 2))
    out = embedding(torch.tensor([1])) + embedding(torch.tensor([1]))
    out.sum().backward()
    # Adagrad: 1/√1 then 1/√2, not 2/√4 as one summed step would be
    torch.testing.assert_close(embedding.eval()(torch.tensor([1])), torch.full((1, 2), -(1 + 2**-0.5)))


def test_two_backwards_apply_both():
    embedding = girih.nn.Embedding(2, optimizer=SGD)
    embedding.assign(torch.tensor([1]), torch.zeros(1, 2))
    out = embedding(torch.tensor([1])).sum()
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(embedding.eval()(torch.tensor([1])), torch.full((1, 2), -1.0))


def test_clipping_does_not_see_rows_and_lr_scale_does():
    embedding = girih.nn.Embedding(2, optimizer=SGD)
    assert list(embedding.parameters()) == []
    embedding.assign(torch.tensor([1]), torch.zeros(1, 2))
    embedding.lr_scale = 0.1
    (embedding(torch.tensor([1])) * 100).sum().backward()
    torch.testing.assert_close(embedding.eval()(torch.tensor([1])), torch.full((1, 2), -5.0))


def test_non_finite_gradient_is_refused():
    embedding = girih.nn.Embedding(2, optimizer=SGD)
    before = embedding(torch.tensor([1])).detach().clone()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match=r"the gradient of Embedding\(dim=2\) is NaN or infinite"):
            (embedding(torch.tensor([1])) * bad).sum().backward()
    torch.testing.assert_close(embedding.eval()(torch.tensor([1])), before, rtol=0, atol=0)


def test_shared_rows():
    bag = girih.nn.EmbeddingBag(4, "sum", optimizer=SGD)
    same = girih.nn.Embedding(4, share=bag)
    torch.testing.assert_close(bag(torch.tensor([[3]])), same(torch.tensor([3])))
    same(torch.tensor([3])).sum().backward()
    torch.testing.assert_close(bag.eval()(torch.tensor([[3]])), same.eval()(torch.tensor([3])))
    assert bag.num_rows == same.num_rows == 1
    given = {"optimizer": SGD, "store": girih.StoreOptions(), "seed": 0, "dtype": "float32"}
    for options in ({name: value} for name, value in given.items()):
        with pytest.raises(ConfigError, match="options already"):
            girih.nn.Embedding(4, share=bag, **options)
    with pytest.raises(ConfigError, match="shared rows have dim 4"):
        girih.nn.Embedding(8, share=bag)


@pytest.mark.parametrize("shards", [1, 3])
def test_state_dict_round_trip_goes_on_the_same(tmp_path, shards):
    def run(module, steps):
        for step in range(steps):
            (module(torch.tensor([1, 2, step])) ** 2).sum().backward()

    adam = girih.optim.Adam(lr=0.1)
    one = girih.nn.Embedding(4, optimizer=adam, seed=2)
    run(one, 5)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other = girih.nn.Embedding(4, optimizer=adam, seed=2, store=girih.StoreOptions(shards=shards))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.num_rows == one.num_rows
    run(one, 5)
    run(other, 5)
    ids = torch.arange(8)
    torch.testing.assert_close(one.eval()(ids), other.eval()(ids), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("offsets", "last_included", "told"),
    [
        ([0, 3, 2], False, r"offsets\[2\] = 2 is below offsets\[1\] = 3"),
        ([0, 9], False, r"offsets\[1\] = 9 is more than there are ids"),
        ([1, 2], False, r"offsets\[0\] = 1"),
        ([-1, 2], False, r"offsets\[0\] = -1"),
        ([0, 2, 4], True, r"offsets\[2\] = 4, the last one"),
        ([0, 2, 6], True, r"offsets\[2\] = 6 is more than there are ids"),
        ([1], True, r"offsets\[0\] = 1"),
        ([0, -(2**63), 2**62, 5], True, r"offsets\[1\] = -9223372036854775808 is below offsets\[0\] = 0"),
        ([], True, "received none"),
    ],
)
def test_offsets_that_are_wrong_are_told_by_place(offsets, last_included, told):
    bag = girih.nn.EmbeddingBag(4, include_last_offset=last_included)
    with pytest.raises(ConfigError, match=f"^offsets: {told}; expected to rise from 0 to the 5 ids$"):
        bag(torch.arange(5), torch.tensor(offsets, dtype=torch.int64))


def test_inside_a_users_own_model_and_loop():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = torch.nn.Sequential(
        girih.nn.Embedding(8, optimizer=girih.optim.Adagrad(lr=0.1)), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        ids = torch.from_numpy(rng.integers(0, 50, 64))
        labels = (ids % 2).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 < losses[0]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: girih.nn.EmbeddingBag(0), "dim = 0"),
        (lambda: girih.nn.EmbeddingBag(4, "max"), "mode = 'max'"),
        (
            lambda: girih.nn.EmbeddingBag(4)(torch.tensor([1.0]), torch.tensor([0])),
            "expected a tensor of int64",
        ),
        (lambda: girih.nn.EmbeddingBag(4)([1, 2]), "expected a tensor of int64"),
        (lambda: girih.nn.EmbeddingBag(4)(torch.tensor([1])), "offsets: missing"),
        (lambda: girih.nn.EmbeddingBag(4)(torch.tensor([[1]]), torch.tensor([0])), "drop offsets"),
        (lambda: girih.nn.EmbeddingBag(4)(torch.tensor([1]), torch.tensor([1])), "expected to rise from 0"),
        (
            lambda: girih.nn.EmbeddingBag(4)(torch.tensor([1, 2]), torch.tensor([0, 3])),
            "expected to rise from 0",
        ),
        (lambda: girih.nn.EmbeddingBag(4)(torch.tensor([[[1]]])), "3 dimensions"),
        (lambda: girih.nn.EmbeddingBag(4)(torch.tensor([[1, 2]]), None, torch.ones(3)), "shape"),
        (lambda: girih.nn.Embedding(4).assign(torch.tensor([1, 1]), torch.zeros(2, 4)), "repeated"),
        (lambda: girih.nn.Embedding(4).assign(torch.tensor([1]), torch.zeros(1, 5)), "expected"),
    ],
)
def test_mistakes_are_named(use, message):
    with pytest.raises(ConfigError, match=message):
        use()


def test_torch_modules_with_options_without_meaning_here_are_refused():
    for kind, ours in (
        (torch.nn.Embedding, girih.nn.Embedding),
        (torch.nn.Embedding, girih.nn.EmbeddingBag),
        (torch.nn.EmbeddingBag, girih.nn.EmbeddingBag),
    ):
        for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
            with pytest.raises(ConfigError, match=next(iter(option))):
                ours.from_torch(kind(3, 4, **option))
    with pytest.raises(ConfigError, match="mode = 'max'"):
        girih.nn.EmbeddingBag.from_torch(torch.nn.EmbeddingBag(3, 4, mode="max"))
