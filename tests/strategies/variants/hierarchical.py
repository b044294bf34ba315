"""Variants of ``hierarchical``. Its nets, groups and taggings are in ``test_hierarchical.py``."""

from matrix import Variant

GROUPS = "each group has a copy of the parameters, and copies are averaged now and then"
NETS = "nets of a trainer share parameters, and none waits for another's update"
VARIANTS = [
    Variant(
        "one-net",
        "hierarchical",
        ("embedding_servers=2",),
        trainers=1,
        exact=True,
        fast="deepfm weighted stepwise interrupted resumed",
        heavy="din mmoe star",
    ),
    Variant(
        "group-servers-one",
        "hierarchical",
        ("servers_per_group=2", "split_fc=false", 'wire_dense_gradients="topk"'),
        trainers=1,
        unequal="only the largest gradients travel, and the others are added later",
        slow="interrupted resumed",
    ),
    Variant("groups", "hierarchical", ("groups=2",), unequal=GROUPS, slow="deepfm"),
    Variant(
        "one-group",
        "hierarchical",
        ("groups=1", "trainers_per_group=2", "servers_per_group=1"),
        unequal="trainers of a group share no step",
        staleness=2,
        slow="deepfm",
    ),
    Variant(
        "groups-of-nets",
        "hierarchical",
        ("groups=2", "servers_per_group=1", "nets=2"),
        unequal=NETS,
        staleness=2,
        slow="deepfm",
    ),
]
