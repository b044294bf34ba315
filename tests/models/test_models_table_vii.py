"""What the models of PICASSO's Table VII have for themselves: xDeepFM, CAN, STAR and two towers."""

from __future__ import annotations

import naive_models as naive
import numpy as np
import pytest
import torch
from zoo_cases import LAYERS, MIXED, agree, build, check, features_for, num_parameters, schema_of, twin

from girih.errors import DataError
from girih.models import CAN, STAR, TwoTower, XDeepFM, needs_of
from girih.schema import Categorical, Sequence

SCENE = 2
"""Where the domain stands among the numeric features."""


@pytest.mark.parametrize("cin_layers", [[5], [4, 6, 3]])
def test_xdeepfm_passes_on_half_of_its_maps(cin_layers):
    check("xdeepfm", schema_of(MIXED), "split", {"split_half": True}, cin_layers=cin_layers, split_half=True)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("hidden", [[], [5]])
def test_two_tower_similarities(similarity, hidden):
    expected = {"cosine": similarity == "cosine", "temperature": 0.2}
    options = {"similarity": similarity, "temperature": 0.2, "hidden": hidden}
    check("two_tower", schema_of(MIXED), "split", expected, **options)


def test_what_is_in_neither_tower_is_not_read():
    model = TwoTower(schema_of(MIXED), user=("price", "city"), item=("item",), hidden=(4,))
    assert needs_of(model, model.schema) == {"item": {"embedding"}, "city": {"embedding"}}
    assert model.user[0].inputs.widths == {"city": 3, "price": 1}
    assert model.item[0].inputs.widths == {"item": 3}


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [0, 3, 0, 1, 2]])
def test_can_with_a_micro_mlp_for_each_order(lengths):
    more = [
        Categorical(name="others", dim=2 * num_parameters(5)),
        Categorical(name="units", dim=2 * num_parameters(3)),
        Sequence(name="seen", table="item"),
        Sequence(name="tags", dim=5),
    ]
    schema = schema_of([*MIXED, *more])
    co_action = {"units": ["seen", "user"], "others": ["tags"]}
    model = build("can", schema, co_action=co_action, independent_orders=True)
    assert model.co_action == {"others": ("tags",), "units": ("user", "seen")}  # as the schema has them
    needs = needs_of(model, schema)
    assert needs["tags"] == needs["seen"] == {"sequence"}
    assert needs["user"] == needs["units"] == {"embedding"}
    inputs = naive.make_inputs(schema, needs, lengths=lengths)
    logits = model(inputs.numeric, inputs.embeddings)
    agree(logits, twin("can", model, schema, inputs, independent_orders=True))
    logits.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in inputs.leaves.values() if leaf.numel())


@pytest.mark.parametrize("partitioned_norm", [False, True])
def test_star_predicts_with_the_running_moments_of_each_domain(partitioned_norm):
    schema = schema_of(features_for("star"))
    model = build("star", schema, partitioned_norm=partitioned_norm)
    inputs = naive.make_inputs(schema, needs_of(model, schema), num_examples=9)
    model(inputs.numeric, inputs.embeddings)
    found = naive.moments(inputs.examples, [feature.name for feature in schema.sparse], SCENE)
    assert len(found) > 1
    for domain, (mean, variance) in found.items() if partitioned_norm else ():
        count = sum(e.numeric[SCENE] == domain for e in inputs.examples)
        np.testing.assert_allclose(model.norm.running_mean[domain], 0.1 * mean)
        np.testing.assert_allclose(model.norm.running_var[domain], 0.9 + 0.1 * variance * count / (count - 1))
    model.eval()
    agree(model(inputs.numeric, inputs.embeddings), twin("star", model, schema, inputs))


def test_star_trains_on_the_smallest_batches():
    schema = schema_of(features_for("star"))
    model = build("star", schema, dropout=0.5)
    for num_examples in (1, 2):
        inputs = naive.make_inputs(
            schema, needs_of(model, schema), num_examples=num_examples, seed=num_examples
        )
        if num_examples == 2:
            inputs.numeric[:, SCENE] = torch.tensor([0.0, 2.0])
        logits = model(inputs.numeric, inputs.embeddings)
        assert torch.isfinite(logits).all()
        for before, buffer in ((0, model.norm.running_mean), (1, model.norm.running_var)):
            assert (buffer == before).all()  # one example of a domain has no variance


def test_a_domain_that_a_batch_lacks_has_gradients_of_zero():
    """On several trainers every parameter takes part in every step, whatever examples a trainer has."""
    schema = schema_of(features_for("star"))
    model = build("star", schema)
    inputs = naive.make_inputs(schema, needs_of(model, schema), num_examples=4)
    inputs.numeric[:, SCENE] = 1.0
    model(inputs.numeric, inputs.embeddings).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for stacked in (model.star[0].weight, model.star[-1].bias, model.norm.domain_shift):
        assert not stacked.grad[[0, 2]].any()
        assert stacked.grad[1].any()


@pytest.mark.parametrize("scene", [3.0, -1.0, 0.5, float("nan")])
def test_star_refuses_what_is_no_domain(scene):
    schema = schema_of(features_for("star"))
    model = build("star", schema)
    inputs = naive.make_inputs(schema, needs_of(model, schema))
    inputs.numeric[3, SCENE] = scene
    with pytest.raises(DataError, match=f"domain 'scene' is {scene:g} .*expected an integer from 0 to 2"):
        model(inputs.numeric, inputs.embeddings)


def test_domains_start_as_one():
    schema = schema_of(features_for("star"))
    model = STAR(
        schema, domain="scene", num_domains=3, partitioned_norm=False, hidden=(8,), auxiliary_hidden=()
    )
    inputs = naive.make_inputs(schema, needs_of(model, schema))
    torch.nn.init.zeros_(model.indicator.weight)
    model.double()
    logits = model(inputs.numeric, inputs.embeddings)
    inputs.numeric[:, SCENE] = 1.0
    torch.testing.assert_close(model(inputs.numeric, inputs.embeddings), logits)


def test_classes_take_plain_keywords():
    schema = schema_of(MIXED)
    assert XDeepFM(schema, cin_layers=(7, 5)).cin.width == 12
    assert XDeepFM(schema, cin_layers=(8, 5), split_half=True).cin.width == 9
    assert TwoTower(schema, user=("user",), tower_dim=9).item.width == 9
    assert STAR(schema_of(features_for("star")), domain="scene", num_domains=5).star[0].weight.shape[0] == 5
    can = CAN(schema_of(features_for("can")), co_action={"units": ("user",)}, unit_layers=LAYERS)
    assert can.units[0].width == 3 * sum(LAYERS)
