import json

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from girih.checkpoint import save

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    leaves | st.just("a tensor"),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner, min_size=1)
    ),
)


def with_tensors(tree):
    """The same tree with a tensor in place of each marker."""
    if isinstance(tree, dict):
        return {key: with_tensors(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [with_tensors(item) for item in tree]
    return torch.arange(3) if tree == "a tensor" else tree


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(deadline=None)
@given(nested)
@example({save.ITEMS: None})
@example({save.TENSOR: "a tensor"})
def test_split_and_join_are_inverse_through_json(tree):
    tree = with_tensors(tree)
    plain, tensors = save.split(tree)
    assert same(save.join(json.loads(json.dumps(plain)), tensors), tree)


def test_an_optimizer_state_survives():
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain, tensors = save.split(optimizer.state_dict())
    other = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    other.load_state_dict(save.join(json.loads(json.dumps(plain)), tensors))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert other.param_groups[0]["lr"] == 0.1


def test_keys_that_give_tensors_the_same_path_keep_their_own():
    tree = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "n": {1: torch.ones(3), "1": torch.zeros(3)}}
    plain, tensors = save.split(tree)
    assert same(save.join(json.loads(json.dumps(plain)), tensors), tree)
    assert "a.b" in tensors  # what has a path of its own is called by it
