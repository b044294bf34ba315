"""Variants of ``asynchronous``."""

from matrix import Variant

SHARES = "each trainer learns from the mean over its own share, when it comes to it"
TRAINER = frozenset({"read", "forward", "backward", "apply", "push", "wait for rows"})
VARIANTS = [
    Variant(
        "asynchronous-one",
        "asynchronous",
        ("staleness=0", "embedding_servers=2"),
        trainers=1,
        exact=True,
        fast="weighted lamb",
        slow="labels interrupted resumed tiered tiered-resumed",
    ),
    Variant("asynchronous-one-server", "asynchronous", ("staleness=0",), trainers=1, exact=True, slow="lru"),
    Variant(
        "asynchronous",
        "asynchronous",
        ("staleness=2",),
        unequal=SHARES,
        staleness=2,
        phases={
            **dict.fromkeys(("trainer 0", "trainer 1"), TRAINER),
            "loader 0": frozenset({"dispatch"}),
            "embedding-worker 0": frozenset({"unpack", "dedup", "pool", "scatter"}),
            "embedding-server 0": frozenset({"lookup", "update"}),
        },
        slow="plain deepfm",
    ),
    Variant(
        "asynchronous-in-turn",
        "asynchronous",
        ("staleness=0", "embedding_servers=2"),
        unequal=SHARES,
        heavy="long",
    ),
    Variant(
        "asynchronous-servers",
        "asynchronous",
        ("staleness=3", "embedding_servers=2"),
        unequal=SHARES,
        staleness=3,
        slow="ragged tiered tiered-resumed skipped tail-16 tail-1 tail-weighted evaluated-deepfm evaluated-din",
    ),
]
