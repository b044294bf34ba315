import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from girih import config
from girih.app.run_config import RunConfig
from girih.errors import ConfigError

MODEL = "from torch import nn\n\n\nclass Own(nn.Module):\n    pass\n"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Writes a config to ``here``, moves its repetition to ``there``, and gives both, read."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "own.py").write_text(MODEL)
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("ELSEWHERE", "/data")
    monkeypatch.setenv("BELOW", "parts")
    monkeypatch.setenv("OWN", "own")

    def read(data, **more):
        mapping = {
            "data": data,
            "features": [{"name": "user", "kind": "categorical"}],
            "labels": {"names": ["click"]},
            "model": {"name": "${OWN}.py:Own"},
        }
        (tmp_path / "here" / "config.toml").write_text(tomli_w.dumps(mapping | more))
        first = RunConfig.load(tmp_path / "here" / "config.toml")
        config.write_toml(tmp_path / "there" / "config.toml", first.with_absolute_paths())
        return first, RunConfig.load(tmp_path / "there" / "config.toml")

    return read


def test_what_the_environment_holds_does_not_reach_the_disk(settings, tmp_path, monkeypatch):
    first, second = settings({"train": "s3://${SECRET}@bucket/a", "valid": ["${ELSEWHERE}/b", "c"]})
    text = (tmp_path / "there" / "config.toml").read_text()
    assert "hunter2" not in text
    assert "s3://${SECRET}@bucket/a" in text
    assert '"${ELSEWHERE}/b"' in text
    assert first.data.train == second.data.train == "s3://hunter2@bucket/a"
    assert second.data.valid == ("/data/b", str(tmp_path / "here" / "c"))
    monkeypatch.delenv("SECRET")
    with pytest.raises(ConfigError, match=r"\$\{SECRET\} is not set in the environment; export SECRET="):
        RunConfig.load(tmp_path / "there" / "config.toml")


def test_relative_paths_hold_from_anywhere_whatever_they_are_made_of(settings, tmp_path):
    here = str(tmp_path / "here")
    _, second = settings(
        {"train": "${BELOW}/a", "valid": "x/${BELOW}"}, store={"arena": "file", "directory": "${BELOW}"}
    )
    assert (second.data.train, second.data.valid) == (f"{here}/parts/a", f"{here}/x/parts")
    assert second.store.directory == f"{here}/parts"
    assert type(second.model()).__name__ == "Own"


def test_overrides_are_expanded_and_kept_as_written(settings, tmp_path):
    settings({"train": "a"})
    overridden = RunConfig.load(
        tmp_path / "here" / "config.toml", overrides=["data.train=${ELSEWHERE}/x", "model.name=lr"]
    )
    assert overridden.data.train == "/data/x"
    assert overridden.with_absolute_paths()["data"]["train"] == "${ELSEWHERE}/x"


def test_the_options_of_the_old_model_are_named_once(settings, tmp_path, caplog):
    settings({"train": "a"})
    path = tmp_path / "here" / "config.toml"
    path.write_text(path.read_text().replace("[model]", "[model]\nwidth = 3", 1))
    RunConfig.load(path, overrides=["model.name=lr"])
    assert [record.getMessage() for record in caplog.records if "old model" in record.getMessage()] == [
        f"{path}: [model] lr: dropped width of the old model"
    ]


NESTED = {
    "brackets": f"a = {'[' * 1000}{']' * 1000}",
    "half as many brackets": f"a = {'[' * 60}{']' * 60}",
    "a dotted key": f"{'a.' * 20_000}a = 1",
    "a dotted section": f"[{'a.' * 20_000}a]",
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_a_file_nested_too_deep_is_refused(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config.toml: lists or keys more than 50 deep; expected sections"):
        config.read_toml(file)


@pytest.mark.parametrize(
    "change", [f"{'a.' * 20_000}a=1", f"train.epochs={'[' * 1000}", f"train.a={'[' * 60}{']' * 60}"]
)
def test_an_override_nested_too_deep_is_refused(tmp_path, change):
    (tmp_path / "config.toml").write_text("[train]\nepochs = 1")
    with pytest.raises(ConfigError, match=r"--set.*: lists or keys more than 50 deep") as caught:
        config.with_overrides(tmp_path / "config.toml", [change], None)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    ["[" * 300_000, "a." * 300_000, f"x = {{{'a.' * 300_000}", f"x = {'9' * 5000}", "x = 0" + "_0" * 5000],
    ids=["brackets", "dots", "dots in a table", "digits", "zeros"],
)
def test_text_that_is_slow_or_odd_to_parse_is_refused_at_once(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    start = time.perf_counter()
    with pytest.raises(
        ConfigError, match=r"config.toml: (not valid TOML|lists or keys more than 50)"
    ) as caught:
        config.read_toml(file)
    assert time.perf_counter() - start < 2
    assert len(str(caught.value)) < 400


def test_a_huge_config_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "config.toml"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"config.toml: 1,099,511,627,776 bytes; expected a config"):
        config.read_toml(file)


def test_many_numbers_with_points_on_a_line_are_no_long_key(tmp_path):
    (tmp_path / "config.toml").write_text(f"a = [{', '.join(['0.5'] * 200)}]\nb = '{'x.' * 200}'")
    assert len(config.read_toml(tmp_path / "config.toml")["a"]) == 200


def test_a_default_dim_is_of_what_says_none_itself_and_set_finds_features_by_name(settings, tmp_path):
    features = [{"name": "user", "kind": "categorical"}, {"name": "item", "kind": "categorical", "dim": 4},
                {"name": "past", "kind": "sequence", "table": "item"}]  # fmt: skip
    settings({"train": "a"}, defaults={"dim": 24}, features=features)
    path = tmp_path / "here" / "config.toml"
    dims = [RunConfig.load(path).schema.dim_of(feature) for feature in RunConfig.load(path).schema.sparse]
    assert dims == [24, 4, 4]
    schema = RunConfig.load(
        path, overrides=["features.item.dim=8", "features.user.table=own", "defaults.dim=2"]
    ).schema
    assert [(each.name, each.dim) for each in schema.tables] == [("own", 2), ("item", 8)]
    assert schema.features[0].table_name == "own"


@pytest.mark.parametrize(
    ("train", "most"),
    [({"epochs": 3}, 30), ({"epochs": 3, "max_steps": 5}, 20), ({"max_steps": 5}, 10), ({}, 10)],
)
def test_a_run_trains_on_its_epochs_or_up_to_its_last_step(settings, tmp_path, train, most):
    rows = {"user": range(10), "click": [0.0, 1.0] * 5}
    pq.write_table(pa.table(rows), tmp_path / "here" / "a.parquet")
    first, _ = settings({"train": "a.parquet", "batch_size": 4}, train=train)
    assert first.most_examples(first.dataset("train")) == most
