"""Every model against its naive twin, and what all of them have in common."""

from __future__ import annotations

import naive_models as naive
import pytest
import torch
from zoo_cases import (
    HISTORIES,
    MIXED,
    NUMERIC,
    OPTIONS,
    SPARSE,
    agree,
    build,
    check,
    features_for,
    inputs_for,
    required,
    schema_for,
    schema_of,
    twin,
)

from girih.models import BY_NAME, DCN, DIN, DLRM, DNN, DCNv2, MMoE, create, needs_of
from girih.schema import Categorical, Sequence

SEVERAL = [name for name in OPTIONS if name not in ("lr", "fm", "two_tower", "retrieval")]
WITHOUT_HISTORIES = [name for name in OPTIONS if name not in HISTORIES]


def test_every_model_is_tried():
    assert OPTIONS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("packing", ["one", "split"])
@pytest.mark.parametrize("name", BY_NAME)
def test_forward_is_the_papers_formula(name, packing):
    check(name, schema_for(name, features_for(name)), packing)


@pytest.mark.parametrize("name", BY_NAME)
def test_forward_without_numeric_features(name):
    check(name, schema_for(name, features_for(name, SPARSE)))


@pytest.mark.parametrize("name", [name for name in WITHOUT_HISTORIES if name != "retrieval"])
def test_forward_of_numeric_features_alone(name):
    check(name, schema_for(name, features_for(name, NUMERIC)))


@pytest.mark.parametrize(
    "name", [name for name in WITHOUT_HISTORIES if name not in ("two_tower", "retrieval")]
)
def test_forward_of_one_feature(name):
    check(name, schema_for(name, features_for(name, SPARSE[:1])))


@pytest.mark.parametrize("name", SEVERAL)
def test_forward_of_several_labels(name):
    check(name, schema_for(name, features_for(name), num_labels=3), "split")


@pytest.mark.parametrize(
    "name", ["dnn", "wide_deep", "dcn", "dcnv2", "mmoe", "star", "two_tower", *HISTORIES]
)
@pytest.mark.parametrize("packing", ["one", "split"])
def test_dims_may_differ_where_the_formula_allows(name, packing):
    wide = [Categorical(name="device", dim=7), *features_for(name), Categorical(name="brand", dim=7)]
    check(name, schema_of(wide), packing)


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("hidden", [[], [5]])
def test_dcnv2_structures(structure, rank, hidden):
    extra = {"rank": rank} if rank else {}
    check(
        "dcnv2",
        schema_of(MIXED),
        "split",
        {"structure": structure},
        structure=structure,
        hidden=hidden,
        **extra,
    )


def test_dcn_of_crosses_alone():
    check("dcn", schema_of(MIXED), hidden=[])


def test_dlrm_and_mmoe_of_single_layers():
    check("dlrm", schema_of(MIXED), hidden=[], bottom_hidden=[])
    check("mmoe", schema_of(MIXED, 2), tower_hidden=[])


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [0, 3, 0, 1, 0], [2, 1, 4, 1, 2]])
def test_din_of_empty_and_full_histories(softmax, lengths):
    schema = schema_of(features_for("din"))
    model = build("din", schema, softmax=softmax)
    inputs = inputs_for(model, schema, lengths=lengths)
    logits = model(inputs.numeric, inputs.embeddings)
    expected = twin("din", model, schema, inputs, softmax=softmax)
    agree(logits, expected)
    logits.sum().backward()
    assert torch.isfinite(inputs.embeddings.sequences["seen"].values.grad).all()


def test_din_attends_to_the_pairs_it_is_given():
    history = Sequence(name="cities", dim=3)
    schema = schema_of([*features_for("din"), history, Sequence(name="tags", dim=5)])
    model = build("din", schema, attention={"cities": "user", "seen": "item"})
    assert model.pairs == (("seen", "item"), ("cities", "user"))
    needs = needs_of(model, schema)
    assert needs["seen"] == needs["cities"] == {"sequence"}
    assert needs["tags"] == needs["item"] == {"embedding"}
    inputs = inputs_for(model, schema, packing="split")
    expected = twin("din", model, schema, inputs)
    logits = model(inputs.numeric, inputs.embeddings)
    agree(logits, expected)


def test_din_ignores_the_order_of_a_history():
    schema = schema_of(features_for("din"))
    model = build("din", schema)
    inputs = inputs_for(model, schema, lengths=[3, 0, 4, 1, 2])
    seen = inputs.embeddings.sequences["seen"]
    before = model(inputs.numeric, inputs.embeddings)
    order = torch.tensor([2, 0, 1, 6, 5, 4, 3, 7, 9, 8])
    inputs.embeddings.sequences["seen"] = seen._replace(values=seen.values[order])
    torch.testing.assert_close(model(inputs.numeric, inputs.embeddings), before)


@pytest.mark.parametrize("packing", ["one", "split"])
@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_reach_every_table_and_parameter(name, packing):
    schema = schema_for(name, features_for(name))
    model = build(name, schema)
    inputs = inputs_for(model, schema, num_examples=16, packing=packing)
    model(inputs.numeric, inputs.embeddings).square().sum().backward()
    for where, leaf in inputs.leaves.items():
        assert leaf.grad is not None, where
        assert leaf.grad.abs().amax(dim=tuple(range(leaf.dim() - 1))).min() > 0, where
    for where, parameter in model.named_parameters():
        assert parameter.grad is not None, where
        assert parameter.grad.abs().max() > 0, where


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_are_the_differences_of_the_formula(name):
    schema = schema_for(name, features_for(name))
    model = build(name, schema)
    inputs = inputs_for(model, schema, num_examples=3, lengths=[2, 0, 1])
    model(inputs.numeric, inputs.embeddings).sum().backward()
    step = 1e-6
    for where, leaf in inputs.leaves.items():
        values = leaf.detach().view(-1)
        for place in {0, values.numel() // 2, values.numel() - 1}:
            differences = []
            for sign in (1, -1):
                values[place] += sign * step
                with torch.no_grad():
                    differences.append(sign * model(inputs.numeric, inputs.embeddings).sum())
                values[place] -= sign * step
            expected = sum(differences) / (2 * step)
            torch.testing.assert_close(leaf.grad.view(-1)[place], expected, rtol=1e-5, atol=1e-6, msg=where)


@pytest.mark.parametrize("name", BY_NAME)
def test_bfloat16_autocast_stays_close(name):
    schema = schema_for(name, features_for(name))
    model = build(name, schema).float()
    inputs = inputs_for(model, schema, num_examples=64)
    inputs = to_float(inputs)
    exact = model(inputs.numeric, inputs.embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(inputs.numeric, inputs.embeddings)
    rounded.float().sum().backward()
    assert rounded.shape == exact.shape
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()
    for where, leaf in inputs.leaves.items():
        assert leaf.grad.dtype == torch.float32, where


def to_float(inputs):
    for block in (*inputs.embeddings.blocks, *inputs.embeddings.first_order):
        object.__setattr__(block, "values", block.values.detach().float().requires_grad_())
    for name, (values, offsets) in list(inputs.embeddings.sequences.items()):
        inputs.embeddings.sequences[name] = naive.Jagged(values.detach().float().requires_grad_(), offsets)
    inputs.numeric = inputs.numeric.float()
    return inputs


@pytest.mark.parametrize("name", [*(name for name in SEVERAL if name != "star"), "two_tower"])
@pytest.mark.parametrize("num_examples", [1, 2])
def test_batch_norm_and_dropout_train_on_the_smallest_batches(name, num_examples):
    schema = schema_for(name, features_for(name))
    model = build(name, schema, batch_norm=True, dropout=0.5).train()
    assert any(isinstance(layer, torch.nn.BatchNorm1d) for layer in model.modules())
    assert {type(m) for m in model.modules() if "Dropout" in type(m).__name__} == {torch.nn.Dropout}
    inputs = inputs_for(model, schema, num_examples=num_examples)
    logits = model(inputs.numeric, inputs.embeddings)
    assert logits.shape == (num_examples, len(schema.labels.names))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", BY_NAME)
def test_models_start_near_even_odds(name):
    """Tables start near 0, so an untrained model says about ½ whatever it is."""
    schema = schema_for(name, features_for(name))
    torch.manual_seed(2)
    model = create(name, schema, required(name, schema)).double()
    inputs = inputs_for(model, schema, num_examples=32)
    for leaf in inputs.leaves.values():
        leaf.data.mul_(0.01)
    logits = model(inputs.numeric, inputs.embeddings)
    near_a_half = logits[:, :1] if name == "esmm" else logits  # the second of esmm's is a product, about ¼
    assert near_a_half.abs().max() < 1


@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_fit_any_packing_and_any_process(name):
    """A state dict of one model loads into a twin, which then says the same."""
    schema = schema_for(name, features_for(name))
    options = OPTIONS[name] | required(name, schema)
    model, other = build(name, schema), create(name, schema, options).double()
    other.load_state_dict(model.state_dict())
    inputs = inputs_for(model, schema, packing="one")
    split = inputs_for(model, schema, packing="split")
    torch.testing.assert_close(
        model(inputs.numeric, inputs.embeddings),
        other(split.numeric, split.embeddings),
        rtol=1e-12,
        atol=1e-12,
    )


def test_classes_take_plain_keywords():
    schema = schema_of(features_for("din"), 2)
    assert DNN(schema, hidden=(8,)).deep.width == 2
    assert len(DCN(schema, cross_layers=5).cross.weights) == 5
    assert DCNv2(schema, structure="stacked").final.in_features == 400
    assert DLRM(schema, bottom_hidden=(8,)).bottom.width == 3
    assert DIN(schema, softmax=True).deep[0].attention[0].softmax
    assert MMoE(schema, num_experts=7).experts.num_members == 7
