"""Every model of the zoo on a schema that serves it, and held to its naive twin."""

from __future__ import annotations

import numpy as np
import torch

from girih.models import create, needs_of
from girih.schema import Categorical, Numeric, Schema, Sequence
from models import naive_models as naive

SPARSE = [Categorical(name=name, dim=3) for name in ("user", "item", "city", "hour")]
NUMERIC = [Numeric(name="age"), Numeric(name="price")]
MIXED = [SPARSE[0], NUMERIC[0], *SPARSE[1:], NUMERIC[1]]
NEIGHBOURS = [
    Sequence(name="near", table="item"),
    Sequence(name="kinds", table="city"),
    Sequence(name="far", table="hour"),
]
RELATIONS = {"near": "item", "kinds": "seen", "far": "near"}
HISTORIES = ("din", "dien", "dsin", "atbrg", "can")
"""Models that read the ids of a sequence one by one."""
SIZES = {"hidden": [5, 4]}
OPTIONS = {
    "lr": {},
    "fm": {},
    "wide_deep": SIZES,
    "deepfm": SIZES,
    "dnn": SIZES,
    "dlrm": SIZES | {"bottom_hidden": [6]},
    "dcn": SIZES | {"cross_layers": 2},
    "dcnv2": SIZES | {"cross_layers": 2},
    "xdeepfm": SIZES | {"cin_layers": [4, 3]},
    "din": SIZES | {"attention_hidden": [4]},
    "dien": SIZES,
    "dsin": SIZES | {"session_length": 2, "max_sessions": 2, "heads": 3},
    "atbrg": SIZES | {"attention_hidden": [4]},
    "can": SIZES,
    "mmoe": {"num_experts": 3, "expert_hidden": [5, 4], "tower_hidden": [3]},
    "esmm": SIZES,
    "star": SIZES | {"auxiliary_hidden": [4], "indicator_dim": 2},
    "two_tower": SIZES | {"tower_dim": 3},
    "retrieval": SIZES | {"tower_dim": 3},
}
LAYERS, ORDERS = (3, 2), 2
"""Of CAN's micro-MLPs."""


def schema_of(features, num_labels=1):
    return Schema(features, [f"label{t}" for t in range(num_labels)])


def schema_for(name, features, num_labels=1):
    """As many labels, or as many as the model takes."""
    return schema_of(features, 2 if name == "esmm" else num_labels)


def features_for(name, features=MIXED):
    """The features, and what the model needs beside them."""
    more = []
    if name in HISTORIES and not any(isinstance(feature, Sequence) for feature in features):
        more.append(Sequence(name="seen", table="item"))
    if name == "atbrg":  # neighbours that share a table with one of the features
        tables = {feature.name for feature in features}
        more += [neighbour for neighbour in NEIGHBOURS if neighbour.table in tables]
    if name == "can":
        dim = next(feature.dim or 16 for feature in features if feature.name == "user")
        more.append(Categorical(name="units", dim=num_parameters(dim)))
    if name == "star":
        more.append(Numeric(name="scene"))
    return [*features, *more]


def num_parameters(dim):
    """Of a micro-MLP that is fed vectors of a dim."""
    first, second = LAYERS
    return dim * first + first + first * second + second


def required(name, schema):
    """The options without which a model cannot be built."""
    if name == "atbrg":
        names = {feature.name for feature in schema.features}
        return {"relations": {near: of for near, of in RELATIONS.items() if near in names}}
    if name == "can":
        return {"co_action": {"units": ["user", "seen"]}, "unit_layers": list(LAYERS), "orders": ORDERS}
    if name == "star":
        return {"domain": "scene", "num_domains": naive.SCENES}
    names = [feature.name for feature in schema.features]
    if name == "two_tower":
        return {"user": names[::2]}
    if name == "retrieval":
        item = [feature.name for feature in schema.sparse if isinstance(feature, Categorical)][-1]
        return {"user": [name for name in names if name != item][::2], "item_id": item}
    return {}


def build(name, schema, **options):
    torch.manual_seed(1)
    model = create(name, schema, OPTIONS[name] | required(name, schema) | options).double()
    for parameter in model.parameters():  # zeros and small initial values would hide mistakes
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def inputs_for(model, schema, **more):
    """A random batch of what the model reads."""
    relations = getattr(model, "relations", None)
    return naive.make_inputs(schema, needs_of(model, schema), relations=relations, **more)


def twin(name, model, schema, inputs, **options):
    """The naive twin's logits."""
    if name in naive.SEQUENCE_MODELS:
        return naive.Twin(name, model)(inputs.numeric, inputs.embeddings).detach().numpy()
    dims = {feature.name: schema.dim_of(feature) for feature in schema.sparse}
    numeric = [feature.name for feature in schema.numeric]
    if name == "din":
        dims = {k: v for k, v in dims.items() if k in needs_of(model, schema)}
        options["pairs"] = model.pairs
    if name == "mmoe":
        options |= {"num_experts": model.experts.num_members, "num_labels": len(schema.labels.names)}
    if name == "can":
        options |= {"co_action": model.co_action, "layers": LAYERS, "orders": ORDERS}
    if name == "star":
        place = numeric.index("scene")
        of_batch = naive.moments(inputs.examples, dims, place) if model.training else {}
        options |= {"place": place, "moments": of_batch}
    if name in ("two_tower", "retrieval"):
        user = required(name, schema)["user"]
        options |= {"user": user, "item": {*dims, *numeric} - set(user), "numeric": numeric}
    return naive.run(getattr(naive, name), model, inputs, dims=dims, **options)


def check(name, schema, packing="one", twin_options=None, **options):
    model = build(name, schema, **options)
    inputs = inputs_for(model, schema, packing=packing)
    logits = model(inputs.numeric, inputs.embeddings)
    assert logits.shape == (5, 6 if name == "retrieval" else len(schema.labels.names))
    agree(logits, twin(name, model, schema, inputs, **(twin_options or {})))


def agree(logits, expected):
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-11, atol=1e-11)
