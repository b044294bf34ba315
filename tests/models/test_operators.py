"""Conformance of every substitutable operator: partial results of any split of the features combine to the whole.

A new operator is one line of ``OPERATORS``.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from girih import Categorical, Numeric, Schema, Sequence
from girih.errors import ConfigError
from girih.models import Block, Embeddings, Jagged
from girih.models.layers.attention import Attention
from girih.models.layers.inputs import DenseInput
from girih.models.operators import (
    Aggregated,
    AttendedProjection,
    FieldMLP,
    FieldProjection,
    Fields,
    FirstOrder,
    SecondOrder,
    VectorCrosses,
    operators_of,
)

DIM, EXAMPLES = 3, 7
SCHEMA = Schema(
    [
        Categorical(name="user", dim=DIM),
        Numeric(name="age"),
        Sequence(name="seen", dim=DIM),
        Categorical(name="shop", dim=DIM),
        Numeric(name="price"),
        Numeric(name="hour"),
        Categorical(name="city", dim=DIM),
    ],
    "click",
)
SPARSE = [feature.name for feature in SCHEMA.sparse]
NUMERIC = [feature.name for feature in SCHEMA.numeric]
WIDTH = DenseInput(SCHEMA).width


def crosses(schema):
    made = VectorCrosses(schema, 3, torch.randn(2, DenseInput(schema).width))
    nn.init.normal_(made.biases)
    return made


OPERATORS = {
    "first order": lambda: FirstOrder(SCHEMA, bias=True),
    "first order without bias": lambda: FirstOrder(SCHEMA, bias=False),
    "second order": lambda: SecondOrder(SCHEMA, DIM),
    "field projection": lambda: FieldProjection(SCHEMA, nn.Linear(WIDTH, 5)),
    "field projection without bias": lambda: FieldProjection(SCHEMA, nn.Linear(WIDTH, 5, bias=False)),
    "projection of numbers": lambda: FieldProjection(SCHEMA, nn.Linear(len(NUMERIC), 5), ()),
    "projection of some": lambda: FieldProjection(SCHEMA, nn.Linear(2 * DIM + 3, 5), ("shop", "user")),
    "projection of a tower": lambda: FieldProjection(
        SCHEMA, nn.Linear(2 * DIM + 2, 5), ("shop", "user"), ("age", "hour")
    ),
    "crosses": lambda: crosses(SCHEMA),
    "fields": lambda: Fields(SCHEMA, DIM),
    "fields of numbers too": lambda: Fields(SCHEMA, DIM, with_numeric=True),
}


def part_of(schema, names):
    return Schema([feature for feature in schema.features if feature.name in names], schema.labels)


def embeddings_of(vectors, weights, names, blocks=1):
    """The embeddings of some features, in one block or several."""
    sizes = [len(names)] if blocks == 1 else [1] * len(names)
    found, first_order, at = [], [], 0
    for size in sizes:
        own = names[at : at + size]
        at += size
        if own:
            found.append(Block(tuple(own), torch.stack([vectors[name] for name in own], dim=1)))
            first_order.append(Block(tuple(own), torch.stack([weights[name] for name in own], dim=1)))
    return Embeddings(tuple(found), {}, tuple(first_order))


def made(name, seed):
    """An operator in float64 with parameters that are nowhere zero, and its inputs."""
    torch.manual_seed(seed)
    operator = OPERATORS[name]().double()
    for parameter in operator.parameters():
        nn.init.normal_(parameter)
    vectors = {f: torch.randn(EXAMPLES, DIM, dtype=torch.double, requires_grad=True) for f in SPARSE}
    weights = {f: torch.randn(EXAMPLES, 1, dtype=torch.double, requires_grad=True) for f in SPARSE}
    numeric = torch.randn(EXAMPLES, len(NUMERIC), dtype=torch.double)
    return operator, vectors, weights, numeric


def gradients(output, tensors):
    torch.manual_seed(99)
    found = torch.autograd.grad(
        output, tensors, torch.randn_like(output), retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_whole_at_once_is_the_split_into_one(name, blocks):
    operator, vectors, weights, numeric = made(name, 1)
    embeddings = embeddings_of(vectors, weights, SPARSE, blocks)
    partial = operator.partial(numeric, embeddings)
    assert partial.shape == (EXAMPLES, operator.columns)
    close(operator.combine(partial), operator(numeric, embeddings))


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_partial_results_of_any_split_combine_to_the_whole_forward_and_backward(name, data):
    owners = {f.name: data.draw(st.integers(0, 3), label=f.name) for f in SCHEMA.features}
    operator, vectors, weights, numeric = made(name, data.draw(st.integers(0, 5), label="seed"))
    whole = operator(numeric, embeddings_of(vectors, weights, SPARSE))
    inputs = [*vectors.values(), *weights.values()]
    named = dict(operator.named_parameters())
    expected = gradients(whole, [*inputs, *named.values()])

    parts, partials, places, splits = [], [], [], []
    for rank in sorted(set(owners.values())):
        own = part_of(SCHEMA, {f for f, owner in owners.items() if owner == rank})
        part = copy.deepcopy(operator)
        places.append(part.places(own))
        splits.append(part.narrow(own))
        parts.append(part)
        names = [feature.name for feature in own.sparse]
        columns = [place for place, f in enumerate(NUMERIC) if owners[f] == rank]
        partials.append(part.partial(numeric[:, columns], embeddings_of(vectors, weights, names)))
    if operator.aggregation == "sum":
        total = sum(partials)
    else:
        total = partials[0].new_empty(EXAMPLES, operator.columns)
        total = total.index_copy(1, torch.cat(places), torch.cat(partials, dim=1))
    combined = parts[0].combine(total)
    close(combined, whole)

    found = gradients(combined, inputs)
    for name_, parameter in named.items():
        if name_ not in splits[0]:
            found += gradients(combined, [dict(parts[0].named_parameters())[name_]])
            continue
        gradient = torch.full_like(parameter, torch.nan)
        for part, split in zip(parts, splits, strict=True):
            own = dict(part.named_parameters())[name_]
            assert split[name_].size == parameter.shape[split[name_].dim]
            gradient.index_copy_(split[name_].dim, split[name_].places, *gradients(combined, [own]))
        found.append(gradient)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


def test_crosses_equal_the_papers_layers():
    operator, vectors, weights, numeric = made("crosses", 3)
    embeddings = embeddings_of(vectors, weights, SPARSE)
    x0 = x = DenseInput(SCHEMA)(numeric, embeddings)
    for weight, bias in zip(operator.weights, operator.biases, strict=True):
        x = x0 * (x @ weight)[:, None] + bias + x
    close(operator(numeric, embeddings), x @ operator.outputs.T)


def test_an_mlp_on_features_is_an_mlp_on_their_flat_input():
    torch.manual_seed(0)
    _, vectors, weights, numeric = made("first order", 0)
    deep = FieldMLP(SCHEMA, (6, 4), 2).double()
    embeddings = embeddings_of(vectors, weights, SPARSE)
    x = DenseInput(SCHEMA)(numeric, embeddings)
    x = torch.relu(nn.functional.linear(x, deep[0].weight, deep[0].bias))
    for layer in list(deep)[2:]:
        x = layer(x)
    close(deep(numeric, embeddings), x)
    with pytest.raises(ValueError, match="at least one layer"):
        FieldMLP(SCHEMA, ())


def test_a_model_that_reads_embeddings_past_its_operators_is_told():
    with pytest.raises(ConfigError, match="stacked: only operators of"):
        Aggregated({}).stacked()


def test_operators_are_found_in_the_order_of_their_declaration():
    from girih.models import DeepFM

    assert [name for name, _ in operators_of(DeepFM(SCHEMA))] == ["first_order", "second_order", "deep.0"]


def test_interests_are_made_where_their_history_is():
    torch.manual_seed(0)
    schema = Schema(
        [
            Categorical(name="item", dim=DIM),
            Sequence(name="seen", table="item"),
            Numeric(name="age"),
            Categorical(name="shop", dim=DIM),
            Sequence(name="visited", table="shop"),
            Categorical(name="city", dim=DIM),
        ],
        "click",
    )
    pairs = (("seen", "item"), ("visited", "shop"))
    operator = AttendedProjection(
        schema,
        nn.Linear(3 * DIM + 1 + 2 * DIM, 5),
        ("item", "shop", "city"),
        pairs,
        nn.ModuleList(Attention(DIM, (4,)) for _ in pairs),
    ).double()
    assert operator.colocated_features == pairs
    vectors = {name: torch.randn(EXAMPLES, DIM, dtype=torch.double) for name in ("item", "shop", "city")}
    bounds = torch.tensor([0, 2, 2, 3, 6, 6, 9, 10])
    histories = {
        name: Jagged(torch.randn(10, DIM, dtype=torch.double), bounds) for name in ("seen", "visited")
    }
    numeric = torch.randn(EXAMPLES, 1, dtype=torch.double)

    def embeddings(names):
        pooled = [name for name in vectors if name in names]
        block = Block(tuple(pooled), torch.stack([vectors[name] for name in pooled], dim=1))
        return Embeddings((block,), {name: own for name, own in histories.items() if name in names})

    whole = operator(numeric, embeddings([f.name for f in schema.features]))
    named = dict(operator.named_parameters())
    expected = gradients(whole, list(named.values()))
    parts, total, splits = [], 0.0, []
    for names in (("item", "seen"), ("age", "shop", "visited"), ("city",)):
        part = copy.deepcopy(operator)
        splits.append(part.narrow(part_of(schema, names)))
        parts.append(part)
        total = total + part.partial(numeric if "age" in names else numeric[:, :0], embeddings(names))
    combined = parts[0].combine(total)
    close(combined, whole)
    assert set(splits[0]) == set(named) - {"bias"}
    for (name, parameter), gradient in zip(named.items(), expected, strict=True):
        if name not in splits[0]:
            continue
        found = torch.full_like(parameter, torch.nan)
        for part, split in zip(parts, splits, strict=True):
            own = gradients(combined, [dict(part.named_parameters())[name]])[0]
            found.index_copy_(split[name].dim, split[name].places, own)
        close(found, gradient)
