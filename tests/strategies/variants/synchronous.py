"""Variants of ``synchronous``."""

from matrix import Variant

FLOAT16 = ('wire_embeddings="float16"', 'wire_gradients="float16"')
RESUMED = "interrupted resumed"
VARIANTS = [
    Variant(
        "synchronous",
        "synchronous",
        fast="deepfm din mmoe weighted batch-norm lamb",
        slow=f"labels labels-cut softmax bpr plain {RESUMED} tiered tiered-resumed early-stop plateau max-steps"
        " evaluated-deepfm evaluated-din skipped stopped tail-16 tail-1 tail-weighted kernel-bytes kernel-bytes-long",
        heavy="star four-trainers dien",
    ),
    Variant(
        "synchronous-one",
        "synchronous",
        trainers=1,
        exact=True,
        fast="deepfm bfloat16",
        slow=f"lru {RESUMED}",
    ),
    Variant("synchronous-one-float16", "synchronous", FLOAT16, trainers=1, exact=True, fast="mmoe"),
    Variant(
        "synchronous-float16",
        "synchronous",
        FLOAT16,
        unequal="rows and gradients are rounded to float16 on the wire",
        fast="din",
        slow="plain",
    ),
    Variant(
        "synchronous-three",
        "synchronous",
        trainers=3,
        heavy=RESUMED,
    ),
]
