"""DeepFM on real data: 200 steps with rows in GPU memory are those with rows in DRAM, to the order of sums."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from girih.app.run_config import RunConfig
from support.store_verbs import by_key

RECIPE = Path(__file__).parents[3] / "recipes" / "frappe" / "frappe.toml"
STEPS = 200


def trained(tier):
    """Keys, all rows as one vector, optimizer state included, and the net as another."""
    short = (
        "data.batch_size=32",
        f"train.max_steps={STEPS}",
        "train.device=cpu",
        "model.dropout=0.0",
        "train.epochs=1",
    )
    settings = RunConfig.load(RECIPE, overrides=(*short, f'store.tiers=["{tier}"]'))
    train = replace(settings.train, early_stopping=None, lr_schedule=None)  # which judge by whole evaluations
    settings = replace(settings, train=train)
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        assert trainer.state.step == STEPS
        rows = by_key(*(store for _, store in trainer.sparse.stores()))
        dense = [tensor.double().numpy().reshape(-1) for tensor in trainer.model.state_dict().values()]
    columns = [
        np.concatenate(
            [
                np.ravel(rows[key][name])
                for name in sorted(rows[key])
                if name.startswith(("embedding", "first_order"))
            ]
        )
        for key in sorted(rows)
    ]
    return sorted(rows), np.concatenate(columns).astype(float), np.concatenate(dense)


@pytest.mark.heavy
@pytest.mark.timeout(2400)  # 14 minutes with kernels interpreted
def test_two_hundred_steps_of_deepfm_on_frappe_are_those_of_a_cpu(public_data, monkeypatch):
    monkeypatch.setenv("GIRIH_DATA", str(public_data.resolve()))
    (keys, *mine), (other_keys, *expected) = trained("gpu"), trained("dram")
    assert keys == other_keys
    assert len(keys) > 1000
    for found, wanted in zip(mine, expected, strict=True):
        assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)
