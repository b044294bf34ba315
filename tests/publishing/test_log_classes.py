"""A log names no code; a follower serves a class of the user's own that an argument names."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from following import EVERY, follower, publish_here, version_in

import girih
from girih import cli
from girih.checkpoint import Storage
from girih.checkpoint.description import check_recipe
from girih.errors import CheckpointError, ConfigError
from girih.publishing.log import Log
from girih.serving.model_directory import ModelDirectory
from girih.serving.reading import RequestReader
from serving.serving_site import tensors_of

MINE = """
import pathlib
import girih

pathlib.Path({marker!r}).touch()

class Mine(girih.models.DNN):
    pass
"""


def rewritten(log, recipe):
    """Has the newest snapshot of a log hold another recipe, its checksums correct."""
    found = Log(Storage(str(log)))
    head = found.head()
    place, number = found.place(head.snapshot.number, whole=True), head.snapshot.number
    content = replace(found.read(number, whole=True), recipe=recipe).to_bytes()
    place.replace("manifest.json", content)
    import zlib

    snapshot = replace(head.snapshot, manifest_crc32=zlib.crc32(content))
    found.write_head(replace(head, newest=snapshot, snapshot=snapshot))


@pytest.mark.parametrize("value", [True, 0.5, [8], "sum", {"a": 1}, None])
def test_a_recipe_may_have_options_of_any_type(value):
    options = {"seed": 0, "precision": "float32", "dense_forward": "float32"}
    check_recipe({"model": {"name": "deepfm", "options": {"batch_norm": value}}, "train": options})


def test_a_recipe_in_a_log_names_no_code(log_source, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(MINE.format(marker=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    log = tmp_path / "log"
    publish_here(log_source / "config.toml", tmp_path / "run", log, *EVERY, "train.max_steps=1")
    head = Log(Storage(str(log))).head()
    recipe = Log(Storage(str(log))).read(head.snapshot.number, whole=True).recipe
    names = (f"{tmp_path / 'evil_module.py'}:Mine", "evil_module:Mine", "os:system")
    for number, name in enumerate(names):
        rewritten(log, recipe | {"model": {"name": name, "options": {}}})
        following = follower(log, tmp_path / f"named-{number}")
        assert not following.poll()
        assert version_in(tmp_path / f"named-{number}") is None
        following.close()
    assert not (tmp_path / "ran").exists()
    for number, hidden in enumerate(([10**9, 10**9], [40_000, 40_000])):
        rewritten(log, recipe | {"model": {"name": "deepfm", "options": {"hidden": hidden}}})
        following = follower(log, tmp_path / f"followed-{number}")
        assert following.poll()
        with pytest.raises(CheckpointError, match="its recipe is damaged"):
            ModelDirectory(tmp_path / f"followed-{number}")
        following.close()


def test_a_follower_serves_a_class_that_an_argument_names(log_directory, tmp_path, capsys):
    (log_directory / "mine.py").write_text(MINE.format(marker=str(tmp_path / "ran")))
    log, run = tmp_path / "log", tmp_path / "run"
    settings = ["train.max_steps=2", "model={name='mine.py:Mine', hidden=[6]}"]
    publish_here(log_directory / "config.toml", run, log, *EVERY, *settings)
    following = follower(log, tmp_path / "followed")
    assert following.poll()
    followed = version_in(tmp_path / "followed")
    assert followed.recipe["model"] is None
    assert followed.recipe["options"] == {"hidden": [6]}
    assert "mine" not in json.dumps(followed.recipe).lower()
    with pytest.raises(ConfigError, match=r"class is your own; give --model file\.py:Class"):
        ModelDirectory(tmp_path / "followed")
    table = pq.read_table(log_directory / "test.parquet").select(["user", "item", "tags", "x0"]).slice(0, 64)
    served = ModelDirectory(tmp_path / "followed", f"{log_directory / 'mine.py'}:Mine").served
    found = served.predict(RequestReader(served.schema, 1000).read(tensors_of(table)))[:, 0]
    with girih.load(run) as model:
        np.testing.assert_array_equal(found, model.predict(table))
    following.close()
    capsys.readouterr()
    assert cli.run(["serve", str(log), "--follow", "--port", "0"]) == 2
    assert "give --model file.py:Class" in capsys.readouterr().err
