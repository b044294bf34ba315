"""Four trainers on two hosts, which are two addresses of this machine: grouping what goes between them changes nothing."""

import json
from functools import partial

import pytest
from scenes import play, write

from companions import together
from girih.comm.group import TrainerGroup
from runs import difference

pytestmark = pytest.mark.slow

STEPS, SIZE = 12, 32
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.1")
HALVES = ['wire_embeddings="float16"', 'wire_gradients="float16"']
SCENES = {"float32": [], "float16": HALVES}


def train(directory, ranks):
    """Plays each scene on one host and on two; returns how many messages this trainer sent to the other host."""
    two = TrainerGroup(ranks.rank, ranks.size, ranks.registry, host=ADDRESSES[ranks.rank], name="two hosts")
    exchanges, features = [], []
    for name, options in SCENES.items():
        for title, group in (("one host", ranks), ("two hosts", two)):
            scene = {
                "name": f"{name} on {title}",
                "config": "din",
                "strategy": "synchronous",
                "options": options,
            }
            summary = play(
                directory, scene, group, act=lambda trainer: exchanges.append(trainer.sparse.exchange)
            )
            features.append(summary["features"])
    two.close()
    assert features[0]["history"]["unseen"] > 0
    assert features.count(features[0]) == len(features)
    return [getattr(exchange, "num_messages", None) for exchange in exchanges]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hosts"), num_examples=STEPS * SIZE, size=SIZE, held_out=SIZE)


@pytest.fixture(scope="module")
def sent(directory):
    return together(partial(train, directory), len(ADDRESSES))


@pytest.mark.parametrize("name", SCENES)
def test_two_hosts_equal_one_bit_for_bit(directory, sent, name):
    assert difference(directory / f"{name} on one host", directory / f"{name} on two hosts") == (0, 0)


def test_the_plan_has_the_hosts_and_each_exchange_is_a_message_between_them(directory, sent):
    plans = [
        json.loads((directory / f"float32 on {title}" / "plan.json").read_text())
        for title in ("one host", "two hosts")
    ]
    hosts = {f"trainer {rank}": address for rank, address in enumerate(ADDRESSES)}
    assert [plan["hosts"] for plan in plans] == [{}, hosts]
    num_groups = len(plans[0]["groups"])
    # one trainer of each host sends for all: numbers of keys, keys and rows of each step and of the evaluation; gradients of
    # each step; which keys have no row in the evaluation
    messages = (STEPS + 1) * (2 + num_groups) + STEPS * num_groups + num_groups
    assert [each[:2] for each in sent] == [[None, messages], [None, messages], [None, 0], [None, 0]]
