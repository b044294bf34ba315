"""State that a module of growing rows cannot take: the module by its place, what came, and what to do."""

import pytest
import torch

import girih
from girih.errors import CheckpointError, ConfigError

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
    with pytest.raises(ConfigError) as caught:
        ours.load_state_dict(theirs.state_dict())
    assert str(caught.value) == (
        f"user: {kind}(dim=8): state_dict has 'user.weight', torch's weights of shape (10, 8); expected rows, as"
        f" state_dict() of girih.nn gives them: load it into a torch.nn.{kind}, and make this module by {kind}.from_torch of that"
        " one, or leave the key out"
    )
    with pytest.raises(ConfigError):  # rather than going on without rows
        ours.load_state_dict(theirs.state_dict(), strict=False)
    assert ours.load_state_dict({}, strict=False).missing_keys == ["user._extra_state"]


def test_weights_of_many_modules_of_torch():
    bags = torch.nn.ModuleDict({"embedding_bags": torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(3, 4)})})
    with pytest.raises(ConfigError, match=r"has 'user.embedding_bags.a.weight'.* set rows by module.assign"):
        around(girih.nn.EmbeddingBagCollection([F(name="a", dim=4)])).load_state_dict(
            around(bags).state_dict()
        )


@pytest.mark.parametrize("state", [torch.zeros(3), {"step": 1}, None])
def test_state_of_something_else(state):
    with pytest.raises(CheckpointError, match=r"^Embedding\(dim=8\): state_dict: its extra state is a "):
        girih.nn.Embedding(8).load_state_dict({"_extra_state": state})
