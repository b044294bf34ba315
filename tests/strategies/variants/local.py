"""Variants of ``local``, to which all others are compared."""

from matrix import Variant

VARIANTS = [
    Variant(
        "local",
        "local",
        trainers=1,
        exact=True,
        slow="interrupted resumed labels-cut tiered tiered-resumed"
        " packed unpacked no-prefetch then-unpacked then-packed cut cut-mlp cut-unpacked deepfm-unpacked",
        heavy="mmoe-unpacked deepfm-no-prefetch mmoe-no-prefetch deepfm-cut mmoe-cut deepfm-cut-mlp mmoe-cut-mlp deepfm-cut-unpacked mmoe-cut-unpacked",
    )
]
