"""Hierarchical training with group servers (HT §3): the net is traced, tagged and cut, its parts are run by servers."""

import pytest
from scenes import play, play_all, write

from runs import difference

CONFIGS = ("deepfm", "din", "mmoe", "star", "weighted")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize(
    ("config", "num_servers", "tagging", "most"),
    [
        ("deepfm", 2, "refined", 0),
        ("din", 1, "rules", 0),
        ("mmoe", 3, "none", 3e-5),  # gradients of what several parts read are summed in another order
        ("star", 2, "rules", 0),
        ("weighted", 2, "refined", 0),
    ],
)
def test_one_trainer_with_one_net_equals_local(directory, config, num_servers, tagging, most):
    if not (directory / f"local-{config}").exists():
        play(directory, {"name": f"local-{config}", "config": config})
    scene = {"name": f"one-{config}-{num_servers}", "config": config, "strategy": "hierarchical"}
    options = [f"servers_per_group={num_servers}", f'tagging="{tagging}"']
    summary = play(directory, {**scene, "options": options})
    assert summary["dense_staleness"] == {"median": 0, "p99": 0, "max": 0}
    assert summary["wire_bytes"]["activations"] > 0
    assert max(difference(directory / f"local-{config}", directory / scene["name"])) <= most


def test_trainers_and_nets_of_a_group_share_one_copy(directory):
    options = ["trainers_per_group=2", "servers_per_group=2", "nets=2"]
    (summary,) = play_all(
        directory, [{"name": "group", "strategy": "hierarchical", "options": options}], 2
    ).values()
    assert summary["auc"] > 0.55
    assert summary["dense_staleness"]["max"] > 0


def test_groups_are_averaged_by_dense_servers(directory):
    options = ["groups=2", "servers_per_group=2", "nets=2", "dense_servers=2", "average_every_steps=3"]
    scene = {"name": "groups", "strategy": "hierarchical", "options": options}
    (summary,) = play_all(directory, [scene], 2).values()
    assert summary["auc"] > 0.55
