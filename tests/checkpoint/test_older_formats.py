"""A checkpoint of format 2, which girih wrote at commit 44f97912: its weights predict as they did, and a run goes on from it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import girih
from girih.checkpoint import Manifest, Storage

OLD = Path(__file__).with_name("format_2") / "step-00000003"
PREDICTIONS = [0.4891458, 0.4427750, 0.4420724, 0.4404588, 0.4475531, 0.4486455, 0.4372689, 0.4837350]
"""Of the first eight examples, by the girih that wrote it."""
SCHEMA = girih.Schema(
    [
        girih.Categorical(name="user", dim=4),
        girih.Categorical(name="item", dim=4),
        girih.Sequence(name="tags", dim=4, max_length=3),
        girih.Numeric(name="price", transform=["standardize"]),
    ],
    ["click"],
)


@pytest.fixture(scope="module")
def columns():
    """The examples that it was trained on."""
    rng = np.random.default_rng(5)
    return {
        "user": rng.integers(0, 20, 96),
        "item": [f"i{n}" for n in rng.integers(0, 30, 96)],
        "tags": [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 4, 96)],
        "price": rng.random(96).astype(np.float32),
        "click": rng.integers(0, 2, 96),
    }


def predictions(model, columns):
    return model.predict({name: values[:8] for name, values in columns.items()})


def test_its_model_predicts_as_it_did(columns, torch):
    with girih.load(OLD) as model:
        assert model.step == 3
        np.testing.assert_allclose(predictions(model, columns), PREDICTIONS, rtol=1e-5)


def test_its_manifest_is_read_as_one_of_this_format():
    manifest = Manifest.read(Storage.at(OLD))
    assert manifest.recipe["model"] == {"name": "deepfm", "options": {"hidden": [4]}}
    assert manifest.normalization["price"]["count"] == 96
    assert not {"recipe", "normalization"} & manifest.state.keys()
    assert (manifest.format, manifest.needs) == (3, {})


def test_a_run_goes_on_from_it_and_saves_this_format(columns, tmp_path, torch):
    train = girih.read_arrow(pa.table(columns), SCHEMA, batch_size=32)
    with girih.Trainer(girih.models.DeepFM(SCHEMA, hidden=(4,)), run=str(tmp_path / "run")) as trainer:
        trainer.load(OLD)
        assert (trainer.state.step, trainer.state.epoch) == (3, 1)
        trainer.fit(train)
        assert trainer.state.step == 6
        place = Storage.at(trainer.save(tmp_path / "saved"))
    saved = Manifest.read(place)
    assert (saved.format, saved.normalization) == (3, Manifest.read(Storage.at(OLD)).normalization)
    assert saved.needs["user"] == ["embedding", "first_order"]
    with girih.load(place.url) as model:
        assert not np.allclose(predictions(model, columns), PREDICTIONS, rtol=1e-3)
