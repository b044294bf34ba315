import tomllib
from typing import NamedTuple

import pytest

from girih import config
from girih.config.sections import check_call
from girih.config.train import TrainOptions
from girih.errors import ConfigError, MissingFileError
from girih.optim import FTRL, Adam, SparseOptimizer
from girih.schema import Feature, Schema
from girih.tables import LRU, Eviction, Initializer, Zeros


def test_union_is_told_apart_by_name_and_a_string_stands_for_it():
    assert config.build(SparseOptimizer, {"name": "ftrl", "lr": 1}, "x") == FTRL(lr=1.0)
    assert config.build(Initializer, "zeros", "x") == Zeros()
    assert config.build(Eviction, {"name": "lru", "max_rows": 3}, "x") == LRU(max_rows=3)
    assert config.build(SparseOptimizer, {"name": "adam", "betas": [0.8, 0.9]}, "x") == Adam(betas=(0.8, 0.9))


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (SparseOptimizer, {"name": "adagard"}, "did you mean 'adagrad'"),
        (SparseOptimizer, {"lr": 1.0}, "key 'name' is missing"),
        (SparseOptimizer, {"name": "sgd", "momentun": 0.9}, "did you mean 'momentum'"),
        (SparseOptimizer, {"name": "adagrad", "momentum": 0.9}, "unknown key 'momentum'"),
        (SparseOptimizer, {"name": "sgd", "lr": "fast"}, "lr = 'fast': expected a finite number"),
        (SparseOptimizer, {"name": "sgd", "lr": True}, "expected a finite number"),
        (SparseOptimizer, {"name": "sgd", "lr": -1.0}, "≥ 0"),
        (SparseOptimizer, {"name": "sgd", "lr": float("nan")}, "finite"),
        (SparseOptimizer, {"name": "adam", "betas": [0.9]}, "list of 2"),
        (SparseOptimizer, 3, "expected a table"),
        (Feature, {"name": "a", "kind": "categoricl"}, "did you mean 'categorical'"),
        (Feature, {"name": "a", "kind": "categorical", "dim": 0}, "from 1 to 4096"),
        (Feature, {"name": "a", "kind": "categorical", "dim": 1.5}, "expected an integer"),
        (Feature, {"name": "", "kind": "numeric"}, "non-empty"),
        (TrainOptions, {"epochs": "two"}, "expected an integer"),
        (TrainOptions, {"epochs": -1}, "at least 0"),
        (TrainOptions, {"epoch": 1}, "did you mean 'epochs'"),
        (TrainOptions, {"precision": "float16"}, "'bfloat16'"),
        (TrainOptions, {"clip_norm": 0}, "> 0"),
        (TrainOptions, {"early_stopping": {"patience": -1}}, "at least 0"),
    ],
)
def test_mistakes_are_named(kind, value, message):
    with pytest.raises(ConfigError, match="(?s)" + message.replace("[", r"\[")):
        config.build(kind, value, "f.toml: [x]")


def test_environment_is_expanded(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text('[data]\ntrain = ["${HERE}/a", "b"]\n')
    monkeypatch.setenv("HERE", "/x")
    assert config.read_toml(file) == {"data": {"train": ["/x/a", "b"]}}
    assert config.read_toml(file, expanded=False) == {"data": {"train": ["${HERE}/a", "b"]}}
    monkeypatch.delenv("HERE")
    with pytest.raises(ConfigError, match="HERE"):
        config.read_toml(file)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(MissingFileError, match="no such config file"):
        config.read_toml(tmp_path / "none.toml")
    with pytest.raises(MissingFileError, match="directory"):
        config.read_toml(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.read_toml(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        config.read_toml(broken)


def test_overrides_read_toml_values_and_fall_back_to_strings():
    mapping = {"train": {"epochs": 1}}
    for assignment in (
        "train.epochs=3",
        "model.hidden=[4, 4]",
        "data.train=x/*.parquet",
        "strategy.name=hybrid",
    ):
        config.apply_override(mapping, assignment)
    assert mapping == {
        "train": {"epochs": 3},
        "model": {"hidden": [4, 4]},
        "data": {"train": "x/*.parquet"},
        "strategy": {"name": "hybrid"},
    }
    for bad in ("epochs=3", "train.epochs", "=3", "train.epochs.x=3"):
        with pytest.raises(ConfigError):
            config.apply_override(mapping, bad)


def test_plain_is_the_inverse_of_build(tmp_path):
    text = """
    [[features]]
    name = "user"
    kind = "categorical"
    dim = 8
    [[features]]
    name = "price"
    kind = "numeric"
    transform = ["log1p", "standardize"]
    [[tables]]
    name = "user"
    initializer = "zeros"
    eviction = { name = "lru", max_rows = 10 }
    optimizer = { name = "ftrl", lr = 0.1 }
    [labels]
    names = ["click"]
    derive = { click = "n > 3" }
    """
    schema = Schema.from_dict(tomllib.loads(text))
    file = tmp_path / "c.toml"
    config.write_toml(file, schema.to_dict())
    assert Schema.load(file) == schema
    assert Schema.load(file).fingerprint() == schema.fingerprint()


def test_check_call_knows_a_signature():
    def function(first, *, width: int, name: str = "a"):
        return first, width, name

    assert config.check_call(function, {"width": 3}, "x") == {"width": 3}
    for options, message in [({"widht": 3}, "width"), ({"width": "a"}, "integer"), ({}, "missing")]:
        with pytest.raises(ConfigError, match=message):
            config.check_call(function, options, "x")


class Pair(NamedTuple):
    first: int
    second: int


def test_options_of_a_class_without_an_init_are_those_of_its_new():
    assert check_call(Pair, {"first": 3, "second": 4}, "pair", skip=0) == {"first": 3, "second": 4}


MODEL = '[model]\nname = "deepfm"\nhidden = [8]\ndropout = 0.1\n'


@pytest.mark.parametrize(
    ("overrides", "model", "dropped"),
    [
        (["model.name=mmoe"], {"name": "mmoe"}, ["hidden", "dropout"]),
        ({"model.name": "mmoe"}, {"name": "mmoe"}, ["hidden", "dropout"]),
        (["model.hidden=[4]", "model.name=dnn"], {"name": "dnn", "hidden": [4]}, ["dropout"]),
        (["model.name=deepfm", "model.dropout=0.2"], {"name": "deepfm", "hidden": [8], "dropout": 0.2}, []),
        (["model={name='lr'}"], {"name": "lr"}, ["hidden", "dropout"]),
    ],
)
def test_another_model_drops_the_options_of_the_old_one(tmp_path, overrides, model, dropped):
    path = tmp_path / "c.toml"
    path.write_text(MODEL)
    written = config.with_overrides(path, overrides, None)
    assert written["model"] == model
    assert config.dropped_options(config.read_toml(path), written) == dropped
