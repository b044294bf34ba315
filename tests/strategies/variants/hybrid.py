"""Variants of ``hybrid``."""

from matrix import Variant

IN_STEP = ("staleness=0", "embedding_workers=2", "embedding_servers=3")
RESUMED = "interrupted resumed"
BEHIND = "rows of a batch may be read before the gradients of earlier batches are applied"
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
        " tail-16 tail-1 tail-weighted",
        heavy="mmoe star batch-norm",
    ),
    Variant(
        "hybrid-tcp",
        "hybrid",
        (*IN_STEP, "loaders=2", "transport=tcp"),
        equals="synchronous",
        exact=True,
        fast="din",
        slow="labels kernel-bytes kernel-bytes-long",
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
        slow="plain tiered",
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
