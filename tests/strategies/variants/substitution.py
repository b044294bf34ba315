"""Variants of ``substitution``. Its operators, models and optimizers are in ``test_substitution.py``."""

from matrix import Variant

SLOW = "deepfm mmoe wide-labels interrupted resumed tiered tiered-resumed kernel-bytes"
RESUMED = "interrupted resumed"
REPLICATED, SPLIT = ('dense="replicated"',), ('dense="split"',)
VARIANTS = [
    Variant(
        "replicated",
        "substitution",
        REPLICATED,
        uncounted_bytes=3000,
        slow=f"{SLOW} deepfm-cut-mlp-no-prefetch deepfm-unpacked",
    ),
    Variant(
        "split",
        "substitution",
        SPLIT,
        uncounted_bytes=3000,
        slow=f"{SLOW} wide-labels-cut deepfm-cut deepfm-unpacked",
    ),
    Variant("replicated-one", "substitution", REPLICATED, trainers=1, slow=RESUMED),
    Variant("split-one", "substitution", SPLIT, trainers=1, slow=RESUMED),
    Variant("replicated-three", "substitution", REPLICATED, trainers=3, heavy=RESUMED),
    Variant("split-three", "substitution", SPLIT, trainers=3, heavy=RESUMED),
]
