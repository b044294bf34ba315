"""Ids and unseen shares of features over several evaluations of one trainer."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

import girih

ROWS = 64


def dataset(first_user, first_item):
    """Users that occur once each, and two items of each example, of which half are the same in all data."""
    count = np.arange(ROWS)
    columns = {
        "user": first_user + count,
        "items": [[item, first_item + item] for item in range(ROWS)],
        "click": count % 2,
    }
    return girih.read_arrow(pa.table(columns), SCHEMA, batch_size=ROWS // 4)


SCHEMA = girih.Schema(
    [girih.Categorical(name="user", dim=2), girih.Categorical(name="items", dim=2, pooling="sum")],
    labels="click",
)


def shares(trainer):
    features = trainer.summary(None, duration_s=0.0)["features"]
    return {name: (each["evaluated_ids"], each["unseen"]) for name, each in features.items()}


def test_the_last_evaluation_counts_and_predictions_do_not():
    train, half_new, new = dataset(0, 10**6), dataset(ROWS // 2, 10**6), dataset(10**9, 10**7)
    with girih.Trainer(girih.models.FM(SCHEMA)) as trainer:
        trainer.evaluate(train)
        assert shares(trainer) == {"user": (ROWS, 1.0), "items": (2 * ROWS, 1.0)}
        trainer.fit(train)
        trainer.evaluate(half_new)
        features = trainer.summary(None, duration_s=0.0)["features"]
        assert {name: each["ids"] for name, each in features.items()} == {"user": ROWS, "items": 2 * ROWS}
        assert {name: each["rows"] for name, each in features.items()} == {"user": ROWS, "items": 2 * ROWS}
        assert shares(trainer) == {"user": (ROWS, 0.5), "items": (2 * ROWS, 0.0)}
        trainer.predict(new)
        assert shares(trainer) == {"user": (ROWS, 0.5), "items": (2 * ROWS, 0.0)}
        trainer.evaluate(new)
        assert shares(trainer) == {"user": (ROWS, 1.0), "items": (2 * ROWS, 0.5)}
        trainer.fit(train, new)
        assert shares(trainer) == {"user": (ROWS, 1.0), "items": (2 * ROWS, 0.5)}


def test_without_an_evaluation_no_share_is_known():
    train = dataset(0, 10**6)
    with girih.Trainer(girih.models.FM(SCHEMA)) as trainer:
        trainer.fit(train)
        assert shares(trainer) == {"user": (0, None), "items": (0, None)}


def test_an_evaluation_during_which_a_process_restarts_has_no_shares(caplog):
    """The counters of the process begin at 0 again, so differences of counters mean nothing."""
    train = dataset(0, 10**6)
    incarnations = [0, 1, 1, 1]

    def stats_of_another(**options):
        stats = stats_of_trainer(**options)
        process = {"gauges": {"incarnation": incarnations[0]}}
        counts = {"peeks": 1, "absent": 1} if incarnations.pop(0) else {}
        return replace(stats, store={**stats.store, **counts}, processes={"embedding-server 0": process})

    with girih.Trainer(girih.models.FM(SCHEMA)) as trainer:
        trainer.fit(train)
        trainer.evaluate(train)
        stats_of_trainer, trainer.sparse.stats = trainer.sparse.stats, stats_of_another
        trainer.evaluate(train)
        features = trainer._run.scoring.features
        trainer.evaluate(train)
        assert not [line for line in caplog.messages if "have no row" in line]
        assert features == {}
        assert trainer._run.scoring.features["evaluated.user"] == ROWS
