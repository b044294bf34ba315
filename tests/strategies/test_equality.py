"""What is equal to what, after 60 steps, 200 in ``make test-all``: rows with their optimizer state, and dense parameters.

Dropout is off, and so is batch norm where it is not named. The same gradients are summed in another order (over a key's
examples by trainers first, over a step's examples by AllReduce), so float32 numbers differ in their last bits, and
optimizers carry that along: up to 6e-6 of a column's largest number in a table, and 2.4e-5 of a dense tensor's, were seen.
The tolerances are a little above. Where no sum has another order, there is none: bit for bit.
"""

import json

import numpy as np
import pytest
from scenes import SIZE, STEPS, counted, play, play_all, write

from runs import columns_of, difference, difference_of_rows, latest

ROWS, DENSE = 2e-5, 3e-5
NEAR = 0.03
"""Root of the mean square of what differs between rows that travelled as float16 and rows that did not, by the largest number
of a column: 0.007 was seen."""
CONFIGS = ("deepfm", "din", "mmoe", "star", "weighted")
SYNCHRONOUS = [{"name": f"synchronous-{c}", "config": c, "strategy": "synchronous"} for c in CONFIGS]
HYBRID = [
    {
        "name": f"hybrid-{c}",
        "config": c,
        "strategy": "hybrid",
        "options": ["staleness=0", "embedding_workers=2", "embedding_servers=3", *more],
    }
    for c, more in zip(CONFIGS, ([], ["loaders=2", "transport=tcp"], [], [], ["loaders=2"]), strict=True)
]
COMPRESSED = {
    "name": "compressed",
    "config": "weighted",
    "strategy": "hybrid",
    "options": ["staleness=0", "embedding_servers=2", "compress_ids=true"],
}
HALVES = ['wire_embeddings="float16"', 'wire_gradients="float16"']
HALF = {"name": "half", "config": "din", "strategy": "synchronous", "options": HALVES}
EPOCHS = 3
LONG = [
    {"name": f"long-{name}", "config": "din", "strategy": name, "options": options, "overrides": [f"train.epochs={EPOCHS}"]}
    for name, options in (("synchronous", []), ("asynchronous", ["staleness=0", "embedding_servers=2"]))
]  # fmt: skip
"""Each of two asynchronous trainers learns from its own batches, so that it learns faster at first."""
DIEN = [
    {
        "name": f"{strategy}-dien-{auxiliary}",
        "config": "din",
        "strategy": strategy,
        "overrides": [f'model={{name="dien", hidden=[8], auxiliary={auxiliary}}}', "train.max_steps=60"],
    }
    for strategy, auxiliary in (("local", 0.0), ("synchronous", 0.0), ("local", 1.0), ("synchronous", 1.0))
]
ONE_EACH = [
    {"name": f"one-{name}-{c}", "config": c, "strategy": name, "options": options}
    for name, c, options in (
        ("synchronous", "deepfm", []),
        ("synchronous", "mmoe", HALVES),
        ("hybrid", "din", ["staleness=0"]),
        ("asynchronous", "weighted", ["staleness=0"]),
    )
]
NORMED = [
    "model={name='deepfm', hidden=[16, 8], batch_norm=true}",
    "train.global_batch_norm=true",
    "dense_optimizer={name='sgd', lr=0.1}",  # biases before batch norm have no gradient but noise, which Adam scales up
    "data.batch_size=27",  # unequal shares, and one example in the last step
]
LAMB = ["dense_optimizer={name='lamb', lr=0.01}"]
WITH = {"normed": NORMED, "lamb": LAMB}
CHANGED = [
    {**SYNCHRONOUS[0], "name": "synchronous-normed", "overrides": NORMED},
    {**SYNCHRONOUS[0], "name": "synchronous-lamb", "overrides": LAMB},
    {**HYBRID[0], "name": "hybrid-normed", "overrides": NORMED},
]
LRU = "tables=[{name='user', eviction={name='lru', max_rows=40}}]"
HEAVY = {"synchronous-star", "hybrid-mmoe", "hybrid-star", "hybrid-normed"} | {
    scene["name"] for scene in DIEN
}
"""Left to ``make test-all``: what ``hybrid`` does with an mmoe of more labels is in ``test_labels_equal.py``."""
OF_TWO = [*SYNCHRONOUS, *HYBRID, *CHANGED, COMPRESSED, HALF, *DIEN[1::2]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("equality"), held_out=301)
    for config in CONFIGS:
        summary = play(directory, {"name": f"local-{config}", "config": config})
        (directory / f"local-{config}.json").write_text(json.dumps(summary))
    return directory


def features_of_local(directory, config):
    return json.loads((directory / f"local-{config}.json").read_text())["features"]


@pytest.fixture(scope="module")
def two(directory):
    return play_all(directory, [scene for scene in OF_TWO if scene["name"] not in HEAVY], 2)


@pytest.fixture(scope="module")
def more(directory, two):
    """Those of ``two``, and the heavy ones."""
    return two | play_all(directory, [scene for scene in OF_TWO if scene["name"] in HEAVY], 2)


def played_by_two(strategy):
    """Each config, and the fixture that plays its scene."""
    names = {config: f"{strategy}-{config}" for config in CONFIGS}
    return [
        pytest.param(config, "more", id=config, marks=pytest.mark.heavy)
        if name in HEAVY
        else pytest.param(config, "two", id=config)
        for config, name in names.items()
    ]


@pytest.fixture(scope="module")
def four(directory):
    return play_all(directory, [{**s, "name": f"four-{s['name']}"} for s in (SYNCHRONOUS[1], HYBRID[1])], 4)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_dimension_of_one_column_that_is_wrong_by_a_hundredth_is_seen(directory, config):
    columns = columns_of(latest(directory / f"local-{config}"))
    assert difference_of_rows(columns, columns) == 0
    for name, (ids, values) in columns.items():
        for dimension in np.flatnonzero(values.any(axis=0)):
            wrong = values.copy()
            wrong[:, dimension] *= 1.01
            assert difference_of_rows(columns, columns | {name: (ids, wrong)}) > 100 * ROWS, name


@pytest.mark.parametrize("config", ["deepfm", "din"])
def test_rows_ids_and_unseen_shares_of_features_are_those_of_the_files(directory, config):
    features = {name: (name, name) for name in ("user", "item", "tags")}
    if config == "din":
        features["history"] = ("history", "item")
    expected = counted(directory, features)
    assert 0 < expected["user"]["unseen"] < 1
    assert features_of_local(directory, config) == expected


@pytest.mark.parametrize(("config", "played"), played_by_two("synchronous"))
def test_synchronous_on_two_trainers_equals_local(directory, request, config, played):
    summary = request.getfixturevalue(played)[f"synchronous-{config}"]
    assert summary["steps"] == STEPS
    assert summary["features"] == features_of_local(directory, config)
    rows, dense = difference(directory / f"local-{config}", directory / f"synchronous-{config}")
    assert rows < ROWS
    assert dense < DENSE


@pytest.mark.parametrize(("config", "played"), played_by_two("hybrid"))
def test_hybrid_without_staleness_equals_synchronous_bit_for_bit(directory, request, config, played):
    two = request.getfixturevalue(played)
    assert two[f"hybrid-{config}"]["staleness_max"] == 0
    assert difference(directory / f"synchronous-{config}", directory / f"hybrid-{config}") == (0, 0)
    for name in ("auc", "logloss", "num_rows", "num_examples", "by_label", "features"):
        assert two[f"hybrid-{config}"][name] == two[f"synchronous-{config}"][name]


@pytest.mark.heavy
def test_dien_on_two_trainers_equals_local_but_for_the_negatives_that_each_finds_in_its_share(
    directory, more
):
    for scene in DIEN[::2]:
        play(directory, scene)
    rows, dense = difference(directory / "local-dien-0.0", directory / "synchronous-dien-0.0")
    assert rows < ROWS
    assert dense < DENSE
    rows, dense = difference(directory / "local-dien-1.0", directory / "synchronous-dien-1.0")
    assert dense > DENSE
    assert more["synchronous-dien-1.0"]["auc"] == pytest.approx(more["synchronous-dien-0.0"]["auc"], abs=0.1)


@pytest.mark.parametrize("name", WITH)
def test_global_batch_norm_and_lamb_are_those_of_local(directory, two, name):
    local = play(directory, {"name": f"local-{name}", "overrides": WITH[name]})
    assert two[f"synchronous-{name}"]["steps"] == local["steps"] >= STEPS
    rows, dense = difference(directory / f"local-{name}", directory / f"synchronous-{name}")
    assert rows < ROWS
    assert dense < DENSE  # running moments too


@pytest.mark.heavy
def test_hybrid_has_the_global_batch_norm_of_synchronous_bit_for_bit(directory, more):
    assert more["hybrid-normed"]["steps"] == more["synchronous-normed"]["steps"]
    assert difference(directory / "synchronous-normed", directory / "hybrid-normed") == (0, 0)


def test_a_dense_server_moves_whole_parameters_by_lamb(directory):
    overrides = [*LAMB, "train.max_steps=40"]
    play(directory, {"name": "local-short-lamb", "overrides": overrides})
    served = {
        "name": "served-lamb",
        "strategy": "asynchronous",
        "options": ["staleness=0"],
        "overrides": overrides,
    }
    play(directory, served)
    assert difference(directory / "local-short-lamb", directory / "served-lamb") == (0, 0)


def test_compressed_ids_change_nothing_but_the_order_of_ids_in_a_bag(directory, two):
    assert two["compressed"]["num_rows"] == two["hybrid-weighted"]["num_rows"]
    rows, dense = difference(directory / "hybrid-weighted", directory / "compressed")
    assert rows < ROWS
    assert dense < DENSE


def test_rows_that_travel_as_float16_are_near_those_that_do_not(directory, two):
    assert two["half"]["num_rows"] == two["synchronous-din"]["num_rows"]
    whole, half = (columns_of(latest(directory / name)) for name in ("synchronous-din", "half"))
    for name, (ids, values) in whole.items():
        np.testing.assert_array_equal(half[name][0], ids)
        apart = (half[name][1] - values) / np.abs(values).max(axis=0)
        assert 0 < np.sqrt(np.square(apart).mean()) < NEAR
    assert two["half"]["auc"] == pytest.approx(two["synchronous-din"]["auc"], abs=0.01)


@pytest.mark.heavy
def test_four_trainers_equal_local_and_each_other(directory, four):
    rows, dense = difference(directory / "local-din", directory / "four-synchronous-din")
    assert rows < ROWS
    assert dense < DENSE
    assert difference(directory / "four-synchronous-din", directory / "four-hybrid-din") == (0, 0)


@pytest.mark.parametrize("scene", ONE_EACH, ids=lambda scene: scene["name"])
def test_one_trainer_equals_local_bit_for_bit(directory, scene):
    summary = play(directory, scene)
    assert summary["staleness_max"] == 0
    assert summary["features"] == features_of_local(directory, scene["config"])
    assert difference(directory / f"local-{scene['config']}", directory / scene["name"]) == (0, 0)


@pytest.mark.heavy
def test_asynchronous_on_two_trainers_trains_on_all_examples(directory):
    played = play_all(directory, LONG, 2)
    synchronous, asynchronous = (played[scene["name"]] for scene in LONG)
    assert asynchronous["num_examples"] == EPOCHS * STEPS * SIZE
    assert asynchronous["num_rows"] == synchronous["num_rows"]
    assert asynchronous["auc"] == pytest.approx(synchronous["auc"], abs=0.03)


@pytest.mark.slow
def test_a_bounded_table_is_equal_where_its_rows_live_in_one_shard(directory):
    overrides = [LRU, "store.shards=1"]
    local = play(directory, {"name": "local-lru", "overrides": overrides})
    assert local["store"]["evicted"] > 100
    for name in ("hybrid", "asynchronous", "synchronous"):
        options = [] if name == "synchronous" else ["staleness=0"]
        summary = play(
            directory, {"name": f"lru-{name}", "strategy": name, "options": options, "overrides": overrides}
        )
        assert summary["store"]["evicted"] == local["store"]["evicted"]
        assert difference(directory / "local-lru", directory / f"lru-{name}") == (0, 0)


def test_bfloat16_and_clipping_are_those_of_local(directory):
    overrides = ["train.precision=bfloat16", "train.clip_norm=0.01", "train.max_steps=50"]
    play(directory, {"name": "local-bf16", "overrides": overrides})
    for name in ("hybrid", "synchronous"):
        options = [] if name == "synchronous" else ["staleness=0"]
        play(
            directory, {"name": f"bf16-{name}", "strategy": name, "options": options, "overrides": overrides}
        )
        assert difference(directory / "local-bf16", directory / f"bf16-{name}") == (0, 0)
