"""Classes of the user's own with every helper that docs/models.md describes: trained, exported, served, equal to ``girih.load``."""

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import cli
from girih.models import Embeddings, Jagged
from girih.models.operators import AttendedProjection
from girih.serving.model_directory import open_served
from girih.serving.reading import RequestReader
from serving.serving_site import Site, inputs_of, tensors_of

CLASSES = Path(__file__).with_name("own_networks.py")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CONFIG = """
[data]
train = "train.parquet"
batch_size = 64
[defaults]
dim = 8
[[features]]
name = "user"
kind = "categorical"
[[features]]
name = "item"
kind = "categorical"
[[features]]
name = "history"
kind = "sequence"
table = "item"
[[features]]
name = "age"
kind = "numeric"
[labels]
names = ["click"]
[sparse_optimizer]
lr = 0.5
[model]
name = "own_networks.py:Bags"
[train]
max_steps = 3
"""


def run(*words):
    return cli.run([str(word) for word in words])


def examples(rows, seed):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user": rng.integers(0, 50, rows),
            "item": rng.integers(0, 30, rows),
            "history": [rng.integers(0, 30, length).tolist() for length in rng.integers(0, 9, rows)],
            "age": rng.random(rows).astype(np.float32),
        }
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a config, data and the file of classes."""
    path = tmp_path_factory.mktemp("own")
    shutil.copy(CLASSES, path)
    (path / "config.toml").write_text(CONFIG)
    clicks = pa.array(np.random.default_rng(7).integers(0, 2, 400))
    pq.write_table(examples(400, 1).append_column("click", clicks), path / "train.parquet")
    return path


def trained(place, name, *overrides, to="run"):
    path = place / f"{to}-{name}"
    words = (f"model.name=own_networks.py:{name}", *overrides)
    sets = [word for each in words for word in ("--set", each)]
    assert run("train", place / "config.toml", "--run", path, *sets) == 0
    return path


def batches():
    """Requests of 1, 3 and 17 examples, with some histories empty, and with all of them empty."""
    for size in (1, 3, 17):
        table = examples(40, 2).slice(5, size)
        yield table
        yield table.set_column(2, "history", pa.array([[]] * size, pa.list_(pa.int64())))


@pytest.mark.parametrize(
    "name",
    [
        "Jagged",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Bags", "Attentive", "Encoded", "OwnDIN")),
    ],
)
def test_an_export_predicts_what_the_checkpoint_does(place, name, monkeypatch):
    monkeypatch.setattr("girih.serving.program.missing_for_onnx", lambda: "onnxscript")
    path = trained(place, name)
    assert run("export", path, "--out", place / name) == 0
    _, served = open_served(place / name)
    with girih.load(path) as model:
        for table in batches():
            expected = model.predict(table)
            found = served.predict(RequestReader(served.schema, 100).read(tensors_of(table)))[:, 0]
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_classes_use_every_helper_that_the_page_has():
    text, page = CLASSES.read_text(), PAGE.read_text()
    section = page[page.index("## Embeddings") : page.index("## Operators that may")]
    helpers = set(re.findall(r"\.([a-z]\w+)\(", section)) & {*vars(Jagged), *vars(Embeddings)}
    assert helpers == {"stacked", "concatenated", "examples", "positions", "padded", "last"}
    for name in (*helpers, "first_order_weights", "sequences"):
        assert f".{name}" in text, name
    table = page[page.index("## Operators that may") :]
    operators = set(re.findall(r"^\| `(\w+)`|a `(\w+MLP)`", table, flags=re.M))
    names = {name for pair in operators for name in pair if name} - {AttendedProjection.__name__}
    assert len(names) == 6  # of OwnDIN's is an AttendedProjection
    for name in names:
        assert f"{name}(schema" in text, name


@pytest.mark.parametrize("name", ["Unbounded", "Looped"])
def test_a_class_that_looks_at_values_is_refused_with_ways_out(place, name, capsys):
    path = trained(place, name)
    capsys.readouterr()
    assert run("export", path, "--out", place / name) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"girih: {name}: your class is served in the form of torch.export")
    assert "padded(max_length=...)" in line
    assert "girih.load" in line
    assert "girih serve --follow --model file.py:Class" in line
    with girih.load(path) as model:  # the second way out
        assert model.predict(examples(3, 2)).shape == (3,)


@pytest.mark.slow
def test_a_checkpoint_and_a_followed_run_are_served_with_the_class_by_name(place, tmp_path):
    pytest.importorskip("httptools")
    log, table = tmp_path / "log", examples(17, 2)
    path = trained(
        place,
        "Jagged",
        f"publish.to={log}",
        "publish.every_steps=1",
        "checkpoint.every_steps=3",
        to="published",
    )
    with girih.load(path) as model:
        expected = model.predict(table)
    (checkpoint,) = (path / "checkpoints").glob("step-*")
    for words in ((checkpoint,), (log, "--follow")):
        with Site(*words, "--model", f"{place / 'own_networks.py'}:Jagged") as site:
            status, content = site.infer({"inputs": inputs_of(table)})
            assert status == 200, content
            np.testing.assert_allclose(content["outputs"][0]["data"], expected, rtol=1e-5, atol=1e-6)
