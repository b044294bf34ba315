"""Models by name: what is refused, and modules of the user's own."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import naive_models as naive
import pytest
import torch
from zoo_cases import features_for, num_parameters, required, schema_for

from girih.errors import ConfigError
from girih.models import BY_NAME, CLASSES, DNN, create, needs_of
from girih.models.zoo import description_of
from girih.schema import Categorical, Numeric, Schema, Sequence

USER, ITEM = Categorical(name="user", dim=4), Categorical(name="item", dim=4)
SCHEMA = Schema([USER, ITEM, Numeric(name="age"), Sequence(name="seen", table="item")], "click")
NEAR = Sequence(name="near", table="item")
GRAPH = Schema([*SCHEMA.features, NEAR, Sequence(name="far", table="item")], "click")
PLAIN = Schema([USER, ITEM], "click")
TWO_LABELS = Schema([USER, ITEM], ["click", "like"])
DIMS = Schema([USER, Categorical(name="city", dim=8)], "click")


def refused(message, *arguments, **keywords):
    with pytest.raises(ConfigError, match=message) as caught:
        create(*arguments, **keywords)
    assert str(caught.value).startswith("[model]")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options_are_those_of_the_constructor_on_early_releases_of_python_3_11(monkeypatch):
    """There, the signature of a class is that of its __new__, even of an inherited one."""
    signature = inspect.signature

    def early(function):
        if not inspect.isclass(function) or function.__new__ is object.__new__:
            return signature(function)
        return signature(function.__new__.__get__(function))

    monkeypatch.setattr(inspect, "signature", early)
    model = create("deepfm", PLAIN, {"hidden": [8]})
    assert description_of(model) == {"name": "deepfm", "options": {"hidden": [8]}}


@pytest.mark.parametrize("name", BY_NAME)
def test_defaults_build(name):
    schema = schema_for(name, features_for(name, SCHEMA.features))
    model = create(name, schema, required(name, schema))
    assert type(model) is BY_NAME[name]
    assert model.schema is schema  # what a trainer takes it from


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lr", {"hidden": [4]}, "unknown option 'hidden'"),
        ("fm", {"dropout": 0.1}, "unknown option 'dropout'"),
        ("mmoe", {"hidden": [4]}, "unknown option 'hidden'; did you mean"),
        ("dnn", {"hiden": [4]}, "unknown option 'hiden'; did you mean 'hidden'"),
        ("dnn", {"cross_layers": 2}, "unknown option 'cross_layers'"),
        ("deepfm", {"hidden": 400}, "expected a list"),
        ("deepfm", {"hidden": [400, "a"]}, "expected an integer"),
        ("deepfm", {"hidden": [400, 0]}, r"hidden = \[400, 0\]: expected a list of integers of at least 1"),
        ("deepfm", {"hidden": []}, "at least one of them"),
        ("wide_deep", {"hidden": []}, "at least one of them"),
        ("din", {"hidden": []}, "at least one of them"),
        ("mmoe", {"expert_hidden": []}, "expert_hidden"),
        ("mmoe", {"tower_hidden": [-1]}, "tower_hidden"),
        ("mmoe", {"num_experts": 0}, "num_experts = 0: expected an integer of at least 1"),
        (
            "esmm",
            {"hidden": [4]},
            r"esmm: labels \['click'\] with losses \['bce'\]; expected two with bce: a click",
        ),
        ("dlrm", {"bottom_hidden": [0]}, "bottom_hidden"),
        ("dnn", {"dropout": 1.0}, "dropout = 1.0: expected a finite number ≥ 0 and < 1"),
        ("dnn", {"dropout": -0.5}, "dropout = -0.5"),
        ("dnn", {"dropout": "0.5"}, "expected a number"),
        ("dnn", {"batch_norm": 1}, "expected true or false"),
        ("dcn", {"cross_layers": 0}, "cross_layers = 0"),
        ("dcn", {"rank": 3}, "unknown option 'rank'"),
        ("dcnv2", {"rank": 0}, "rank = 0"),
        ("dcnv2", {"rank": 14}, "rank = 14: expected at most 13"),
        ("dcnv2", {"structure": "paralel"}, "expected one of 'parallel', 'stacked'"),
        ("din", {"attention": {}}, "expected a table of sequence = target"),
        ("din", {"attention": {"sen": "item"}}, "'sen' is not a sequence feature; did you mean 'seen'"),
        ("din", {"attention": {"seen": "itm"}}, "attention.seen = 'itm': .*; did you mean 'item'"),
        ("din", {"attention": {"seen": 3}}, "expected a string"),
        ("din", {"softmax": "yes"}, "expected true or false"),
        ("dien", {"hidden": []}, "at least one of them"),
        ("dien", {"auxiliary": -0.5}, "auxiliary = -0.5: expected a finite number ≥ 0"),
        ("dien", {"attention": {"seen": "itm"}}, "attention.seen = 'itm': .*; did you mean 'item'"),
        ("dsin", {"session_length": 0}, "session_length = 0: expected an integer of at least 1"),
        ("dsin", {"max_sessions": 0}, "max_sessions = 0"),
        ("dsin", {"heads": 3}, "heads = 3: expected a divisor of 4, the dim of 'seen'"),
        ("dsin", {"session_lenght": 5}, "unknown option 'session_lenght'; did you mean 'session_length'"),
        ("xdeepfm", {"cin_layers": []}, "cin_layers"),
        ("xdeepfm", {"split_half": 1}, "expected true or false"),
        (
            "xdeepfm",
            {"cin_layers": [5, 4], "split_half": True},
            r"cin_layers = \[5, 4\]: split_half needs even",
        ),
        ("retrieval", {"user": ["user"]}, "option 'item_id' is missing"),
        ("retrieval", {"user": ["user"], "item_id": "user"}, r"item_id = 'user': .* one of \['item'\]"),
        (
            "retrieval",
            {"user": ["user"], "item_id": "item", "loss": "bce"},
            "expected one of 'softmax', 'bpr'",
        ),
        (
            "retrieval",
            {"user": ["user"], "item_id": "item", "loss": "bpr", "log_q": True},
            "no softmax to correct",
        ),
        ("retrieval", {"user": ["user"], "item_id": "item", "frequency_rate": 0.0}, "frequency_rate = 0.0"),
        ("two_tower", {}, "option 'user' is missing"),
        ("two_tower", {"user": []}, r"user = \[\]: expected a list of features"),
        ("two_tower", {"user": "user"}, "expected a list"),
        ("two_tower", {"user": ["usr"]}, "user: 'usr' is not a feature; did you mean 'user'"),
        ("two_tower", {"user": ["user", "age", "user"]}, "user: 'user' is listed 2 times"),
        ("two_tower", {"user": ["user"], "item": ["user"]}, "item: 'user' is in the user's tower"),
        ("two_tower", {"user": ["user", "item", "age", "seen"]}, "user has all features"),
        ("two_tower", {"user": ["user"], "similarity": "cosin"}, "expected one of 'dot', 'cosine'"),
        (
            "two_tower",
            {"user": ["user"], "temperature": 0.0},
            "temperature = 0.0: expected a finite number > 0",
        ),
        ("two_tower", {"user": ["user"], "tower_dim": 0}, "tower_dim = 0"),
        ("star", {"num_domains": 2}, "option 'domain' is missing"),
        ("star", {"domain": "age"}, "option 'num_domains' is missing"),
        ("star", {"domain": "age", "num_domains": 0}, "num_domains = 0"),
        ("star", {"domain": "agee", "num_domains": 2}, "domain = 'agee': .*; did you mean 'age'"),
        (
            "star",
            {"domain": "user", "num_domains": 2},
            "no ids: add one of kind numeric with column = 'user'",
        ),
        ("star", {"domain": "age", "num_domains": 2, "batch_norm": True}, "unknown option 'batch_norm'"),
        ("star", {"domain": "age", "num_domains": 2, "dropout": 1.0}, "dropout = 1.0"),
        ("can", {}, "option 'co_action' is missing"),
        ("can", {"co_action": {}}, "expected a table of item"),
        ("can", {"co_action": {"itm": ["user"]}}, "'itm' is not a categorical feature; did you mean 'item'"),
        ("can", {"co_action": {"seen": ["user"]}}, "'seen' is not a categorical feature"),
        (
            "can",
            {"co_action": {"item": ["age"]}},
            "co_action.item: 'age' is not a categorical or sequence feature",
        ),
        ("can", {"co_action": {"item": ["item"]}}, "co_action.item: 'item' is fed to itself"),
        ("can", {"co_action": {"item": ["user"]}}, "feature 'item' has dim 4; expected 76, .*set dim = 76"),
        ("can", {"co_action": {"item": ["user"]}, "orders": 0}, "orders = 0"),
        ("can", {"co_action": {"item": ["user"]}, "unit_layers": []}, "unit_layers"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    refused(message, name, SCHEMA, options)


def test_python_callers_are_checked_too():
    for options in ({"hidden": [4, True]}, {"hidden": "44"}, {"batch_norm": "yes"}, {"dropout": None}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            DNN(SCHEMA, **options)
    with pytest.raises(ConfigError, match="structure = 'paralel': expected one of 'parallel', 'stacked'"):
        BY_NAME["dcnv2"](SCHEMA, structure="paralel")


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("lr", TWO_LABELS, "lr: 2 labels"),
        ("fm", TWO_LABELS, "fm: 2 labels"),
        ("fm", DIMS, r"fm: features must have one dim, received 4 \(as 'user'\), 8 \(as 'city'\)"),
        ("deepfm", DIMS, "deepfm: features must have one dim"),
        ("dlrm", DIMS, "dlrm: features must have one dim"),
        ("xdeepfm", DIMS, "xdeepfm: features must have one dim"),
        ("din", PLAIN, "no sequence feature"),
        ("dien", PLAIN, "dien: the schema has no sequence feature"),
        ("dsin", Schema([USER, Sequence(name="seen")], "click"), "dsin: .*expected one categorical feature"),
        ("din", Schema([USER, Sequence(name="seen")], "click"), "expected one categorical feature"),
        (
            "din",
            Schema(
                [ITEM, Categorical(name="last", table="item"), Sequence(name="seen", table="item")], "click"
            ),
            r"with \['item', 'last'\]; expected one",
        ),
    ],
)
def test_schemas_without_an_answer_are_refused(name, schema, message):
    refused(message, name, schema)


def test_din_pairs_must_have_one_dim():
    schema = Schema([USER, Sequence(name="tags", dim=8)], "click")
    refused("din: tags and user: features must have one dim", "din", schema, {"attention": {"tags": "user"}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "option 'relations' is missing"),
        ({"relations": {}}, r"relations = {}: expected a table of neighbours = their nodes"),
        ({"relations": {"nea": "item"}}, "relations: 'nea' is not a sequence feature; did you mean 'near'"),
        (
            {"relations": {"near": "itm", "far": "near"}},
            "relations.near = 'itm': neither .*; did you mean 'item'",
        ),
        (
            {"relations": {"near": "far", "far": "near"}},
            "relations.far = 'near': is a cycle; expected to end",
        ),
        (
            {"relations": {"near": "item"}, "attention": {"near": "item"}},
            "relations: 'near' is a history in attention",
        ),
    ],
)
def test_relations_hang_from_targets_and_histories(options, message):
    refused(message, "atbrg", GRAPH, options)


def test_a_graph_has_one_dim():
    schema = Schema([*SCHEMA.features, Sequence(name="kinds", dim=8)], "click")
    refused(
        "atbrg: nodes of the graph: features must have one dim",
        "atbrg",
        schema,
        {"relations": {"kinds": "seen"}},
    )


def test_what_two_tower_star_and_can_cannot_do_with_a_schema():
    refused("two_tower: 2 labels", "two_tower", TWO_LABELS, {"user": ["user"]})
    scene = Numeric(name="scene", transform="standardize")
    options = {"domain": "scene", "num_domains": 2}
    refused(
        r"domain = 'scene': its transform \['standardize'\]", "star", Schema([USER, scene], "click"), options
    )
    units = Categorical(name="units", dim=num_parameters(4))
    schema = Schema([USER, Sequence(name="tags", dim=8), units], "click")
    options = {"co_action": {"units": ["tags", "user"]}}
    refused("can: user, tags of units: features must have one dim, received 4", "can", schema, options)


def test_names_in_other_letters_or_begun_alone_are_meant():
    from girih.errors import nearest

    assert nearest("AdamW", ["adam", "adamw", "sgd"]) == "; did you mean 'adamw'?"
    assert nearest("sync", ["hybrid", "synchronous", "asynchronous"]) == "; did you mean 'synchronous'?"
    assert (
        nearest("emb", ["embedding-server", "embedding-worker"])
        == "; valid: embedding-server, embedding-worker"
    )
    assert nearest("", ["a"]) == "; valid: a"


def test_unknown_names_get_the_nearest():
    assert "did you mean 'deepfm'" in refused("unknown model", "depfm", SCHEMA)
    refused("unknown model", "", SCHEMA)
    refused("unknown model", 3, SCHEMA)
    with pytest.raises(ConfigError, match=r"^run.toml: \[model\] dnn: unknown option"):
        create("dnn", SCHEMA, {"x": 1}, "run.toml: [model]")


OWN = '''
from __future__ import annotations
import torch
from torch import nn
from girih.schema import Schema
import neighbour_of_own

class TwoTower(nn.Module):
    def __init__(self, schema, *, width: int = 4, names: list[str] = ()):
        super().__init__()
        self.user, self.item = nn.Linear(4, width), nn.Linear(4, width)

    def forward(self, numeric, embeddings):
        scores = self.user(embeddings["user"]) * self.item(embeddings["item"])
        return neighbour_of_own.double(scores.sum(1, keepdim=True))

class Annotated(nn.Module):
    def __init__(self, features: Schema, scale: float = 1.0):
        super().__init__()
        self.names, self.scale = [f.name for f in features.sparse], scale

class Bare(nn.Module):
    """No parameters, no constructor."""
    def forward(self, numeric, embeddings):
        return embeddings.concatenated().sum(1, keepdim=True)

class Schemaless(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

class Broken(nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.layer = nn.Linear("four", 2)

class Forgetful(nn.Module):
    def __init__(self, schema):
        self.layer = nn.Linear(4, 2)

def function(schema):
    return nn.Linear(1, 1)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    elsewhere = [directory for directory in sys.path if not Path(directory, "own.py").exists()]
    monkeypatch.setattr(sys, "path", elsewhere)
    for name in ("own", "neighbour_of_own"):
        monkeypatch.setitem(sys.modules, name, None)  # so that undoing takes away what the test imports
        del sys.modules[name]
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "neighbour_of_own.py").write_text("def double(x):\n    return 2 * x\n")
    return tmp_path


def test_a_users_file_works_in_the_place_of_a_model(own):
    model = create("own.py:TwoTower", SCHEMA, {"width": 6}, directory=own)
    assert model.user.out_features == 6
    inputs = naive.make_inputs(SCHEMA, needs_of(model, SCHEMA))
    logits = model.double()(inputs.numeric, inputs.embeddings)
    user, item = (inputs.embeddings[name] for name in ("user", "item"))
    torch.testing.assert_close(logits, 2 * (model.user(user) * model.item(item)).sum(1, keepdim=True))
    assert type(create(f"{own}/own.py:TwoTower", SCHEMA)).__name__ == "TwoTower"


def test_a_users_package_works_too(own):
    assert create("own:TwoTower", SCHEMA, directory=own).user.out_features == 4


def test_files_of_one_name_do_not_meet(own):
    (own / "other").mkdir()
    (own / "other" / "own.py").write_text("from torch import nn\nclass Other(nn.Module):\n    pass\n")
    first = create("own.py:Bare", SCHEMA, directory=own)
    assert type(create("other/own.py:Other", SCHEMA, directory=own)).__name__ == "Other"
    assert sys.modules[type(first).__module__].TwoTower


def test_the_schema_goes_to_those_that_ask(own):
    assert create("own.py:Annotated", SCHEMA, {"scale": 2}, directory=own).scale == 2.0
    assert create("own.py:Schemaless", SCHEMA, {"scale": 3.0}, directory=own).scale == 3.0
    bare = create("own.py:Bare", SCHEMA, directory=own)
    assert list(bare.parameters()) == []
    inputs = naive.make_inputs(SCHEMA, needs_of(bare, SCHEMA))
    assert bare(inputs.numeric, inputs.embeddings).shape == (5, 1)


def test_options_of_a_users_model_are_checked(own):
    assert create("own.py:TwoTower", SCHEMA, {"names": ["a"]}, directory=own)
    for options, message in [
        ({"widht": 3}, "unknown option 'widht'; did you mean 'width'"),
        ({"width": "wide"}, "expected an integer"),
        ({"names": [3]}, "expected a string"),
        ({"schema": 3}, "unknown option 'schema'"),
    ]:
        refused(message, "own.py:TwoTower", SCHEMA, options, directory=own)
    refused("option 'scale' is missing", "own.py:Schemaless", SCHEMA, directory=own)
    refused("unknown option 'width'", "own.py:Bare", SCHEMA, {"width": 3}, directory=own)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py:Model", "no such file"),
        ("own.py:TwoTowr", "no class 'TwoTowr'; did you mean 'TwoTower'"),
        ("own.py:function", "not a class derived from torch.nn.Module"),
        ("own.py:Schema", "not a class derived from torch.nn.Module"),
        ("own.py:", "expected path/to/file.py:Class"),
        (":TwoTower", "expected path/to/file.py:Class"),
        ("no_such_package.at_all:Model", "no module 'no_such_package.at_all'"),
        ("own.inner:Model", "no module 'own.inner'"),
        ("sub/own:Model", "name a file with its ending"),
        ("own.py:Broken", r"could not be built: TypeError: .* at .*own.py:\d+"),
        ("own.py:Forgetful", r"could not be built: AttributeError: .* at .*own.py:\d+"),
    ],
)
def test_what_is_wrong_with_a_users_model_is_said_in_a_line(own, name, message):
    refused(message, name, SCHEMA, directory=own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "failed to load: SyntaxError"),
        ("import no_such_thing_here\n", "failed to load: ModuleNotFoundError.*no_such_thing_here.*bad.py:1"),
        ("x = 1\ny = x / 0\n", "failed to load: ZeroDivisionError.*bad.py:2"),
        ("x = '\udcff'\n", "failed to load"),
    ],
)
def test_a_file_that_does_not_load_is_refused(own, text, message):
    (own / "bad.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(message, "bad.py:Model", SCHEMA, directory=own)
    refused(message.replace("bad.py", ".*bad.py"), "bad:Model", SCHEMA, directory=own)
    assert not [name for name in sys.modules if re.fullmatch("bad(_[0-9a-f]{8})?", name)]


def test_processes_without_torch_know_the_names_of_all_models():
    assert list(BY_NAME) == list(CLASSES)
