"""A loss over the items of a step: two trainers, each with the items of both, learn what one does."""

import pytest
from scenes import play, play_all, write

from girih.errors import ConfigError
from runs import difference

pytestmark = pytest.mark.slow

ROWS, DENSE = 2e-5, 3e-5
TOWERS = "name='retrieval', user=['user', 'tags', 'history'], item_id='item', tower_dim=4, hidden=[8], similarity='cosine', temperature=0.2"
"""Cosines: with dot products the last bias of the item's tower adds the same to all scores of a user, so that its gradient is
nothing but rounding, which Adam scales up."""
KINDS = {
    # 101 examples a step leave one for the last, so that one trainer has none
    "softmax": [f"model={{{TOWERS}}}", "data.batch_size=101"],
    "bpr": [f"model={{{TOWERS}, loss='bpr'}}"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("in-batch"), held_out=1001)
    for kind, overrides in KINDS.items():
        play(directory, {"name": f"local-{kind}", "config": "din", "overrides": overrides})
    return directory


@pytest.fixture(scope="module")
def two(directory):
    scene = {"config": "din", "strategy": "synchronous"}
    return play_all(directory, [{"name": kind, "overrides": o, **scene} for kind, o in KINDS.items()], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_two_trainers_learn_what_one_does(directory, two, kind):
    assert two[kind]["auc"] > 0.5
    rows, dense = difference(directory / f"local-{kind}", directory / kind)
    assert rows < ROWS
    assert dense < DENSE


def test_what_cannot_have_such_a_loss_says_so(directory):
    scene = {"name": "refused", "config": "din"}
    with pytest.raises(ConfigError, match="hybrid: the loss of Retrieval supports local, synchronous only"):
        play(directory, {**scene, "strategy": "hybrid", "overrides": KINDS["bpr"]})
    cut = [*KINDS["bpr"], "schedule.micro_batches=2"]
    with pytest.raises(ConfigError, match=r"micro_batches = 2: the loss of Retrieval is of a whole batch"):
        play(directory, {**scene, "overrides": cut})
