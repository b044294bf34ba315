from __future__ import annotations

import pytest
from torch import nn
from zoo_cases import HISTORIES, features_for, required, schema_for

from girih.errors import ConfigError
from girih.models import BY_NAME, create, needs_of
from girih.schema import Categorical, Numeric, Schema, Sequence

SCHEMA = Schema(
    [
        Categorical(name="user"),
        Numeric(name="age"),
        Categorical(name="item"),
        Sequence(name="seen", table="item"),
    ],
    "click",
)


class Own(nn.Module):
    def __init__(self, needs=None):
        super().__init__()
        if needs is not None:
            self.needs = needs


def test_a_module_that_says_nothing_reads_every_embedding():
    assert needs_of(Own(), SCHEMA) == {name: {"embedding"} for name in ("user", "item", "seen")}


def test_needs_come_in_the_schemas_order_without_empty_ones():
    needs = needs_of(
        Own({"seen": ["sequence", "embedding"], "item": set(), "user": ("first_order",)}), SCHEMA
    )
    assert list(needs.items()) == [("user", {"first_order"}), ("seen", {"sequence", "embedding"})]
    assert all(isinstance(kinds, frozenset) for kinds in needs.values())
    assert needs_of(Own({}), SCHEMA) == {}


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"usr": {"embedding"}}, "unknown feature 'usr'; did you mean 'user'"),
        ({"age": {"embedding"}}, "'age' is numeric"),
        ({"user": {"embeding"}}, "unknown need 'embeding'; did you mean 'embedding'"),
        ({"user": {"sequence"}}, "'sequence' of a categorical feature"),
        ({"user": "embedding"}, "expected a set"),
        ({"user": 3}, "expected a set"),
        ({"user": [["embedding"]]}, "unknown need"),
        (["user"], "expected a mapping"),
    ],
)
def test_mistakes_are_named(needs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        needs_of(Own(needs), SCHEMA)
    assert str(caught.value).startswith("Own.needs")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BY_NAME)
def test_models_of_girih_declare_theirs(name):
    schema = schema_for(name, features_for(name, SCHEMA.features))
    both = {"first_order", "embedding"}
    kinds = dict.fromkeys(("fm", "wide_deep", "deepfm", "xdeepfm"), both) | {"lr": {"first_order"}}
    expected = {feature.name: kinds.get(name, {"embedding"}) for feature in schema.sparse}
    if name in HISTORIES:
        expected["seen"] = {"sequence"}
    if name == "atbrg":
        expected["near"] = {"sequence"}
    assert needs_of(create(name, schema, required(name, schema)), schema) == expected
