"""``EmbeddingBagCollection`` beside torch's modules, beside one ``EmbeddingBag`` per feature, and what it refuses."""

import copy

import pytest
import torch

import girih
from girih.errors import CheckpointError, ConfigError, NonFiniteError

F = girih.Categorical
SIZE = 4
NUM_IDS = 30
ADAGRAD, ADAM = girih.optim.Adagrad(lr=0.1), girih.optim.Adam(lr=0.1)


def collection(*features, **options):
    features = features or (F(name="user", dim=4, pooling="sum"), F(name="item", dim=4))
    return girih.nn.EmbeddingBagCollection(features, **{"optimizer": girih.optim.SGD(lr=0.5), **options})


def draw(names, generator, size=SIZE):
    """Bags of 0 to 3 ids of each feature, by name: (ids, offsets)."""
    lengths = {name: torch.randint(0, 4, (size,), generator=generator) for name in names}
    return {
        name: (torch.randint(0, NUM_IDS, (int(n.sum()),), generator=generator), n.cumsum(0) - n)
        for name, n in lengths.items()
    }


def packed(given):
    """The same ids for all features at once: ids[N], offsets int32[F·B+1]."""
    firsts = torch.tensor([0, *(len(ids) for ids, _ in given.values())]).cumsum(0)
    offsets = [own + first for (_, own), first in zip(given.values(), firsts, strict=False)]
    return torch.cat([ids for ids, _ in given.values()]), torch.cat([*offsets, firsts[-1:]]).int()


def set_rows(module, weights):
    """Gives every table the rows of a torch module's weight."""
    for table, weight in weights.items():
        module.assign(table, torch.arange(NUM_IDS), weight.detach())


def rows_of(module, name):
    others = {each.name: torch.empty(NUM_IDS, 0, dtype=torch.long) for each in module.features}
    with torch.no_grad():
        return module({**others, name: torch.arange(NUM_IDS)[:, None]})[name]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizer
def test_equals_torch_modules_with_sparse_adagrad_for_many_steps():
    generator = torch.Generator().manual_seed(0)
    features = (
        F(name="user", dim=8, pooling="sum"),
        F(name="item", dim=6),
        F(name="history", dim=6, table="item", pooling="mean"),
    )
    ours = collection(*features, optimizer=ADAGRAD)
    theirs = {
        f.name: torch.nn.EmbeddingBag(NUM_IDS, f.dim, mode=f.pooling, sparse=True, dtype=torch.float32)
        for f in features
    }
    theirs["history"].weight = theirs["item"].weight
    weights = {"user": theirs["user"].weight, "item": theirs["item"].weight}
    set_rows(ours, weights)
    optimizer = torch.optim.Adagrad(weights.values(), lr=0.1)
    for _ in range(30):
        given = draw(theirs, generator)
        targets = {
            name: torch.randn(SIZE, theirs[name].embedding_dim, generator=generator) for name in theirs
        }
        outs = ours(given), {name: theirs[name](*given[name]) for name in theirs}
        for name in theirs:
            torch.testing.assert_close(outs[0][name], outs[1][name], rtol=1e-4, atol=1e-5)
        for out in outs:
            sum(((out[name] - targets[name]) ** 2).sum() for name in theirs).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in theirs:
        torch.testing.assert_close(rows_of(ours, name), theirs[name].weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_one_bag_per_feature_bit_for_bit(by_name, weighted):
    generator = torch.Generator().manual_seed(1)
    features = [
        F(name=f"f{i}", dim=4, pooling=mode) for i, mode in enumerate(["sum", "mean", "sqrtn", "sum"])
    ]
    tables = [girih.Table(name="f1", optimizer=ADAM), girih.Table(name="f3", optimizer=ADAM)]
    optimizers = [ADAGRAD, ADAM, ADAGRAD, ADAM]  # two groups, whose features alternate
    ours = collection(*features, tables=tables, optimizer=ADAGRAD)
    theirs = {
        f.name: girih.nn.EmbeddingBag(4, f.pooling, optimizer=o)
        for f, o in zip(features, optimizers, strict=True)
    }
    weights = {name: torch.randn(NUM_IDS, 4, generator=generator) for name in theirs}
    set_rows(ours, weights)
    for name, bag in theirs.items():
        bag.assign(torch.arange(NUM_IDS), weights[name])
    for _ in range(10):
        given = draw(theirs, generator)
        own = {name: torch.rand(len(ids), generator=generator) for name, (ids, _) in given.items()}
        alone = torch.stack([theirs[n](*given[n], own[n] if weighted else None) for n in theirs], dim=1)
        if by_name:
            out = torch.stack(list(ours(given, per_sample_weights=own if weighted else None).values()), dim=1)
        else:
            out = ours(*packed(given), torch.cat(list(own.values())) if weighted else None)
        torch.testing.assert_close(out, alone, rtol=0, atol=0)
        target = torch.randn(out.shape, generator=generator)
        for each in (out, alone):
            ((each - target) ** 2).sum().backward()
    assert ours.num_rows == sum(bag.num_rows for bag in theirs.values())


def test_both_forms_of_input_and_of_output():
    wide = collection(F(name="user", dim=4), F(name="item", dim=2, table="things"))
    given = draw(["user", "item"], torch.Generator().manual_seed(0))
    named = wide(given)
    assert {name: tuple(each.shape) for name, each in named.items()} == {"user": (4, 4), "item": (4, 2)}
    torch.testing.assert_close(wide(*packed(given)), torch.cat(list(named.values()), dim=1), rtol=0, atol=0)
    last = collection(F(name="user", dim=4), include_last_offset=True)
    assert last({"user": (torch.tensor([1, 2]), torch.tensor([0, 1, 2]))})["user"].shape == (2, 4)
    assert wide({"user": torch.empty(0, 3, dtype=torch.long), "item": torch.empty(0, 1, dtype=torch.long)})[
        "user"
    ].shape == (0, 4)


def test_weights_get_their_gradient_and_those_left_out_are_one():
    ours = collection()
    given = {"user": torch.tensor([[1, 2], [2, 3]]), "item": torch.tensor([[7], [8]])}
    weights = torch.rand(2, 2, requires_grad=True)
    plain = ours(given, per_sample_weights={"user": weights.detach()})
    learned = ours(given, per_sample_weights={"user": weights})
    for name in given:
        torch.testing.assert_close(learned[name], plain[name])
    torch.testing.assert_close(plain["item"], ours(given)["item"], rtol=0, atol=0)
    rows = rows_of(ours, "user")
    learned["user"].sum().backward()
    torch.testing.assert_close(weights.grad, rows[given["user"]].sum(2))
    expected = rows.index_add(
        0, given["user"].flatten(), -0.5 * weights.detach().flatten()[:, None].expand(-1, 4)
    )
    torch.testing.assert_close(rows_of(ours, "user"), expected)


def test_evaluation_makes_no_rows_and_forwards_may_precede_backwards():
    ours = collection()
    one = {"user": torch.tensor([[1]]), "item": torch.tensor([[2]])}
    with torch.no_grad():
        before = ours(one)["user"]
    assert not ours.eval()(one)["user"].requires_grad
    assert ours.num_rows == 0
    ours.train()
    outs = [ours(one), ours({"user": torch.tensor([[1]]), "item": torch.tensor([[3]])})]
    for out in outs:
        out["user"].sum().backward()
    torch.testing.assert_close(ours.eval()(one)["user"], before - 2 * 0.5)
    assert ours.tables.rows() == {"user": 1, "item": 2}


def test_tables_in_no_loss_stay_and_one_bad_gradient_moves_nothing():
    adam = girih.optim.Adam(lr=0.1)
    ours = collection(tables=[girih.Table(name="item", optimizer=adam)])
    given = {"user": torch.tensor([[1]]), "item": torch.tensor([[2]])}
    ours(given)["item"].sum().backward()  # Adam has a momentum now
    item, user = rows_of(ours, "item"), rows_of(ours, "user")
    ours(given)["user"].sum().backward()
    torch.testing.assert_close(rows_of(ours, "item"), item, rtol=0, atol=0)
    torch.testing.assert_close(rows_of(ours, "user")[1], user[1] - 0.5)
    user = rows_of(ours, "user")
    out = ours(given)
    with pytest.raises(
        NonFiniteError, match="gradient of feature 'item' of EmbeddingBagCollection is NaN or infinite"
    ):
        (out["user"].sum() + out["item"].sum() * float("inf")).backward()
    torch.testing.assert_close(rows_of(ours, "item"), item, rtol=0, atol=0)
    torch.testing.assert_close(rows_of(ours, "user"), user, rtol=0, atol=0)


def test_shards_have_threads_and_tables_their_own_rules():
    ids, offsets = torch.arange(20_000) % 7_000, torch.arange(20_001)  # enough to share
    three, one = (collection(store=girih.StoreOptions(shards=n), seed=3) for n in (3, 1))
    for _ in range(2):
        outs = three(ids, offsets), one(ids, offsets)
        torch.testing.assert_close(*outs, rtol=0, atol=0)
        for out in outs:
            (out**2).sum().backward()
    kept = collection(tables=[girih.Table(name="item", eviction=girih.tables.LRU(max_rows=5))], seed=3)
    kept({"user": ids[:10, None], "item": ids[:10, None]})
    kept({"user": ids[10:20, None], "item": ids[10:20, None]})
    assert kept.tables.rows() == {"user": 20, "item": 5}


@pytest.mark.parametrize("shards", [1, 3])
def test_state_dict_round_trip_goes_on_the_same(tmp_path, shards):
    def make(**options):
        return collection(tables=[girih.Table(name="item", optimizer=ADAM)], optimizer=ADAGRAD, **options)

    def run(module, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            (module(*packed(draw(["user", "item"], generator))) ** 2).sum().backward()

    one, other = make(seed=2), make(seed=2, store=girih.StoreOptions(shards=shards))
    run(one, 0)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.tables.rows() == one.tables.rows()
    for module in (one, other):
        run(module, 1)
    for name in ("user", "item"):
        torch.testing.assert_close(rows_of(one, name), rows_of(other, name), rtol=0, atol=0)
    before = rows_of(one, "user")
    for wrong, told in (
        (collection(optimizer=ADAGRAD), "optimizer is adagrad with sum, expected adam"),
        (collection(F(name="user", dim=4), F(name="ad", dim=4), optimizer=ADAGRAD), "table 'ad' is not"),
        (collection(F(name="user", dim=4), optimizer=ADAGRAD), "table 'item' is missing"),
    ):
        with pytest.raises(CheckpointError, match=told):
            one.load_state_dict(wrong.state_dict())
    torch.testing.assert_close(rows_of(one, "user"), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("use", "error", "told"),
    [
        (lambda m, given: torch.jit.trace(m, given), ConfigError, "which no graph can hold"),
        (lambda m, given: torch.export.export(m, given), ConfigError, "which no graph can hold"),
        (lambda m, _: torch.jit.script(m), ConfigError, "which no graph can hold"),
        (lambda m, _: copy.deepcopy(m), TypeError, "neither copied nor pickled; load state_dict"),
    ],
    ids=["trace", "export", "script", "deepcopy"],
)
def test_graphs_and_copies_are_refused(use, error, told):
    with pytest.raises(error, match=f"EmbeddingBagCollection.* {told}"):
        use(collection().eval(), (torch.arange(4), torch.arange(5)))


class EmbeddingBagConfig:
    """Looks like TorchRec's."""


class KeyedJaggedTensor:
    """Looks like TorchRec's."""

    def offsets_or_none(self):
        return None


IDS, OFFSETS = torch.arange(4), torch.arange(5)
Bags = girih.nn.EmbeddingBagCollection


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: Bags(1000, 16), r"EmbeddingBagCollection\(1000, 16\): rows appear as ids are seen"),
        (
            lambda: Bags([EmbeddingBagConfig()]),
            "features: a .*EmbeddingBagConfig; expected a list of girih.Cat",
        ),
        (
            lambda: Bags(F(name="user")),
            "features: a girih.schema.Categorical; expected a list",
        ),
        (lambda: Bags([F(name="a", max_length=3)]), "feature 'a': max_length: is for reading data"),
        (lambda: Bags([F(name="a"), F(name="a")]), "feature 'a' is listed 2 times"),
        (lambda: Bags([F(name="a", dim=4)], [girih.Table(name="b")]), "table 'b' is used by no feature"),
        (lambda: Bags([F(name="a", dim=4)], device="cpu"), r"device: module.cuda\(\) takes rows to a GPU"),
        (lambda: Bags([F(name="a", dim=4)], is_weighted=True), "is_weighted: weights come with the ids"),
        (
            lambda: Bags([F(name="a")], embedding_dim=4),
            r'it is an option of features; write .*Categorical\(name="user", dim=16',
        ),
        (
            lambda: Bags([F(name="a")], eviction=girih.tables.LRU(max_rows=3)),
            r"eviction: it is an option of tables, as in .*eviction=\.\.\.",
        ),
        (lambda: Bags([F(name="a")], optimiser=ADAM), "unknown option 'optimiser'; did you mean 'optimizer'"),
        (lambda: Bags([F(name="a")], optimizer=torch.optim.Adam), "expected one of girih.optim"),
        (lambda: collection()(IDS), r"offsets: missing; give ids\[N\] and offsets"),
        (lambda: collection()(KeyedJaggedTensor()), r"give ids.values\(\) and ids.offsets\(\)"),
        (lambda: collection()(IDS, OFFSETS[:4]), "expected to rise from 0 to the 4 ids"),
        (
            lambda: collection()(IDS, torch.tensor([0, 2, 4, 4])),
            r"offsets: received 4, expected F·B\+1, which is 2·B\+1 for these 2 features",
        ),
        (lambda: collection()(IDS[:, None], OFFSETS), "ids: 2 dimensions, expected 1"),
        (lambda: collection()({"user": IDS[:, None]}), "ids: feature 'item' is missing"),
        (lambda: collection()({"user": IDS, "itme": IDS}), "unknown feature 'itme'; did you mean 'item'"),
        (lambda: collection()({"user": IDS, "item": IDS}), "feature 'user': offsets: missing"),
        (
            lambda: collection()({"user": IDS[:, None], "item": (IDS, torch.tensor([0, 1]))}),
            "feature 'item': 2 bags, but feature 'user' has 4",
        ),
        (
            lambda: collection()({"user": IDS[:, None], "item": (IDS, torch.tensor([0, 5, 2, 3]))}),
            "feature 'item': offsets: .* expected to rise",
        ),
        (
            lambda: collection()({"user": IDS[:, None], "item": (IDS, IDS, IDS)}),
            r"feature 'item': received 3 values, expected \(ids, offsets\), or",
        ),
        (
            lambda: collection()({"user": IDS[:, None], "item": IDS[:, None]}, OFFSETS),
            "offsets: ids come by name",
        ),
        (lambda: collection()({}, None, torch.ones(4)), "per_sample_weights: expected a dict"),
        (lambda: collection()(IDS, OFFSETS, torch.ones(3)), "per_sample_weights: shape"),
        (
            lambda: collection().assign("users", IDS, torch.ones(4, 4)),
            "table 'users' is not one .* mean 'user'",
        ),
    ],
)
def test_mistakes_are_named(use, told):
    with pytest.raises(ConfigError, match=told) as caught:
        use()
    assert "\n" not in str(caught.value)
