"""Variants of ``synchronous``."""

from matrix import Variant

FLOAT16 = ('wire_embeddings="float16"', 'wire_gradients="float16"')
RESUMED = "interrupted resumed"
PHASES = frozenset({"read", "forward", "backward", "apply", "push", "pull", "allreduce", "wait for rows"})
EXCHANGES = frozenset({"exchange ids", "exchange embeddings", "exchange gradients", "exchange vote"})
VARIANTS = [
    Variant(
        "synchronous",
        "synchronous",
        phases=dict.fromkeys(("trainer 0", "trainer 1"), PHASES | EXCHANGES),
        uncounted_bytes=5000,
        fast="deepfm din mmoe weighted batch-norm lamb",
        slow=f"labels labels-cut softmax bpr plain {RESUMED} tiered tiered-resumed early-stop plateau max-steps"
        " evaluated-deepfm evaluated-din skipped stopped tail-16 tail-1 tail-weighted kernel-bytes"
        " packed unpacked no-prefetch then-unpacked then-packed turns turns-ahead turns-auto unpacked-turns cut cut-mlp cut-unpacked cut-turns",
        heavy="deepfm-packed deepfm-unpacked deepfm-no-prefetch deepfm-turns deepfm-turns-ahead deepfm-cut deepfm-cut-mlp deepfm-cut-unpacked deepfm-cut-turns mmoe-packed mmoe-unpacked mmoe-no-prefetch mmoe-turns mmoe-turns-ahead mmoe-cut mmoe-cut-mlp mmoe-cut-unpacked mmoe-cut-turns star four-trainers dien",
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
