"""Variants of ``hybrid``."""

from matrix import Variant

IN_STEP = ("staleness=0", "embedding_workers=2", "embedding_servers=3")
RESUMED = "interrupted resumed"
BEHIND = "rows of a batch may be read before the gradients of earlier batches are applied"
TRAINER = frozenset({"read", "forward", "backward", "apply", "push", "wait for rows", "allreduce"})
WORKER = frozenset({"unpack", "dedup", "pool", "scatter"})
SERVER = frozenset({"lookup", "update"})
VARIANTS = [
    Variant(
        "hybrid",
        "hybrid",
        IN_STEP,
        equals="synchronous",
        exact=True,
        continued_by="synchronous",
        fast="deepfm weighted",
        slow=f"plain {RESUMED} tiered tiered-resumed early-stop plateau max-steps evaluated-deepfm evaluated-din skipped stopped"
        " tail-16 tail-1 tail-weighted packed unpacked then-unpacked then-packed no-prefetch cut-mlp-alone",
        heavy="mmoe star batch-norm",
    ),
    Variant(
        "hybrid-tcp",
        "hybrid",
        (*IN_STEP, "loaders=2", "transport=tcp"),
        equals="synchronous",
        exact=True,
        fast="din",
        slow="labels kernel-bytes",
        uncounted_bytes=12_000,
        heavy="four-trainers",
    ),
    Variant(
        "hybrid-compressed",
        "hybrid",
        (*IN_STEP, "compress_ids=true"),
        equals="hybrid",
        fast="weighted",
    ),
    Variant(
        "hybrid-one",
        "hybrid",
        ("staleness=0",),
        trainers=1,
        exact=True,
        fast="din bfloat16",
        slow=f"lru {RESUMED}",
    ),
    Variant(
        "hybrid-three", "hybrid", IN_STEP, trainers=3, equals="synchronous-three", exact=True, heavy=RESUMED
    ),
    Variant(
        "hybrid-stale",
        "hybrid",
        ("staleness=2", "embedding_workers=2", "embedding_servers=2"),
        unequal=BEHIND,
        staleness=2,
        phases={
            **dict.fromkeys(("trainer 0", "trainer 1"), TRAINER),
            **dict.fromkeys(("embedding-worker 0", "embedding-worker 1"), WORKER),
            **dict.fromkeys(("embedding-server 0", "embedding-server 1"), SERVER),
            "loader 0": frozenset({"dispatch"}),
        },
        slow="plain tiered tiered-resumed",
    ),
    Variant(
        "hybrid-two-loaders",
        "hybrid",
        ("staleness=4", "loaders=2"),
        unequal=BEHIND,
        staleness=4,
        slow="deepfm",
    ),
]
