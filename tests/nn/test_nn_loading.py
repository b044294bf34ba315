"""State that a module of growing rows cannot take: the module by its place, what came, and what to do."""

import copy

import pytest
import torch

import girih
from girih.errors import CheckpointError
from girih.store import clock
from girih.tables import TTL

F = girih.Categorical


def around(module):
    return torch.nn.ModuleDict({"user": module})


def state_of(module, ids):
    module(ids).sum().backward()
    return around(module).state_dict()


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
def test_rows_of_another_dim(kind):
    name = kind.__name__
    with pytest.raises(CheckpointError) as caught:
        around(kind(8)).load_state_dict(state_of(kind(16), torch.tensor([[1, 2]])))
    assert str(caught.value) == (
        f"user: {name}(dim=8): state_dict: table 'rows': embedding has dim 16, expected 8; set dim to match"
    )


def test_rows_of_another_dim_for_a_module_alone():
    with pytest.raises(CheckpointError, match=r"^Embedding\(dim=8\): state_dict: table 'rows': "):
        girih.nn.Embedding(8).load_state_dict(girih.nn.Embedding(16).state_dict())


def test_a_collections_other_dims_and_tables():
    given = {"a": torch.tensor([[1]]), "b": torch.tensor([[2]])}
    theirs = girih.nn.EmbeddingBagCollection([F(name="a", dim=8), F(name="b", dim=8)])
    theirs(given)["a"].sum().backward()
    state = around(theirs).state_dict()
    for features, told in (
        (
            [F(name="a", dim=4), F(name="b", dim=4)],
            "tables 'a', 'b': embedding has dim 8, expected 4; set dim to match",
        ),
        ([F(name="a", dim=8)], "table 'b' is not in this model's group"),
    ):
        ours = girih.nn.EmbeddingBagCollection(features)
        with pytest.raises(CheckpointError, match=f"^user: EmbeddingBagCollection: state_dict: {told}"):
            around(ours).load_state_dict(state)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_weights_of_torch(kind):
    theirs, ours = around(getattr(torch.nn, kind)(10, 8)), around(getattr(girih.nn, kind)(8))
    with pytest.raises(CheckpointError) as caught:
        ours.load_state_dict(theirs.state_dict())
    assert str(caught.value) == (
        f"user: {kind}(dim=8): state_dict has 'user.weight', torch's weights of shape (10, 8); expected rows from the"
        f" state_dict() of a girih.nn module: load it into a torch.nn.{kind}, and make this module by {kind}.from_torch of that"
        " one, or leave the key out"
    )
    with pytest.raises(CheckpointError):  # rather than going on without rows
        ours.load_state_dict(theirs.state_dict(), strict=False)
    assert ours.load_state_dict({}, strict=False).missing_keys == ["user._extra_state"]


def test_weights_of_many_modules_of_torch():
    bags = torch.nn.ModuleDict({"embedding_bags": torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(3, 4)})})
    with pytest.raises(
        CheckpointError, match=r"has 'user.embedding_bags.a.weight'.* set rows by module.assign"
    ):
        around(girih.nn.EmbeddingBagCollection([F(name="a", dim=4)])).load_state_dict(
            around(bags).state_dict()
        )


@pytest.mark.parametrize("state", [torch.zeros(3), {"step": 1}, None])
def test_state_of_something_else(state):
    with pytest.raises(CheckpointError, match=r"^Embedding\(dim=8\): state_dict: its extra state is a "):
        girih.nn.Embedding(8).load_state_dict({"_extra_state": state})


class Projected(girih.nn.EmbeddingBag):
    """A module with parameters of its own beside its rows."""

    def __init__(self):
        super().__init__(4)
        self.proj = torch.nn.Linear(4, 2)
        self.embedding_bags = torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(3, 4)})
        self.weight = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("key", ["proj.weight", "embedding_bags.a.weight", "weight"])
def test_weights_that_are_a_subclasss_own(key):
    module = Projected()
    ours = module.get_parameter(key)
    theirs = torch.full_like(ours, 2.0)
    around(module).load_state_dict({f"user.{key}": theirs}, strict=False)
    torch.testing.assert_close(ours.detach(), theirs)


@pytest.mark.parametrize(
    "module", [girih.nn.Embedding(4), girih.nn.EmbeddingBagCollection([F(name="a", dim=4)])]
)
def test_weights_of_other_modules_of_a_whole_model(module):
    model = torch.nn.ModuleDict(
        {
            "layer": torch.nn.Linear(4, 1),
            "bags": torch.nn.ModuleDict(
                {"embedding_bags": torch.nn.ModuleDict({"a": torch.nn.Embedding(3, 4)})}
            ),
        }
    )
    assert module.load_state_dict(model.state_dict(), strict=False).missing_keys == ["_extra_state"]
    module.load_state_dict({"embedding_bags.a.extra.weight": torch.zeros(3)}, strict=False)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_state_freezes_no_rows_and_thaws_none(frozen):
    theirs = girih.nn.Embedding(4)
    theirs(torch.tensor([1])).sum().backward()
    ours = girih.nn.Embedding(4).requires_grad_(not frozen)
    ours.load_state_dict(theirs.requires_grad_(frozen).state_dict())
    assert ours.num_rows == 1
    assert ours.learns is not frozen
    with pytest.raises(TypeError, match="neither copied nor pickled"):  # frozen or not
        copy.deepcopy(ours)


@pytest.mark.parametrize("late_s", [0, 3600])
def test_rows_that_would_all_expire_are_read_and_not_trained(monkeypatch, late_s):
    eviction = TTL(seconds=60)
    theirs = girih.nn.EmbeddingBag(4, eviction=eviction)
    theirs(torch.tensor([[1, 2]])).sum().backward()
    state = theirs.state_dict()
    ours, now_s = girih.nn.EmbeddingBag(4, eviction=eviction), clock.steady_clock()
    monkeypatch.setattr(clock.refuse_expired, "__defaults__", (lambda: now_s + late_s,))
    ours.load_state_dict(state)
    ours.eval()
    assert ours(torch.tensor([[1, 2]])).shape == (1, 4)
    ours.train()
    if late_s:
        with pytest.raises(CheckpointError, match="all of its rows would expire"):
            ours(torch.tensor([[1, 2]]))
    else:
        ours(torch.tensor([[1, 2]])).sum().backward()
