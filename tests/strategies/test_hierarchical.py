"""Hierarchical training without group servers: the EASGD-based system of HT §2.2."""

import pytest
from scenes import play, play_all, write

from runs import difference

CONFIGS = ("deepfm", "din", "mmoe", "star", "weighted")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hierarchical"))


@pytest.mark.parametrize("config", CONFIGS)
def test_one_group_of_one_trainer_with_one_net_equals_local_bit_for_bit(directory, config):
    play(directory, {"name": f"local-{config}", "config": config})
    scene = {"name": f"one-{config}", "config": config, "strategy": "hierarchical"}
    summary = play(directory, {**scene, "options": ["embedding_servers=2"]})
    assert summary["staleness_max"] == 0
    assert summary["dense_staleness"] == {"median": 0, "p99": 0, "max": 0}
    assert difference(directory / f"local-{config}", directory / scene["name"]) == (0, 0)


def test_several_nets(directory):
    scene = {
        "name": "nets",
        "strategy": "hierarchical",
        "options": ["nets=3"],
        "overrides": ["train.epochs=2"],
    }
    summary = play(directory, scene)
    print(summary)


def test_two(directory):
    scenes = [
        {
            "name": f"two-{a}",
            "strategy": "hierarchical",
            "options": ["groups=2", "dense_servers=2", f'averaging="{a}"', "average_every_steps=4"],
            "overrides": ["train.epochs=3"],
        }
        for a in ("easgd", "ma", "bmuf")
    ]
    for s in play_all(directory, scenes, 2).values():
        print(s)
    assert 0
