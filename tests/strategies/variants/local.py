"""Variants of ``local``, to which all others are compared."""

from matrix import Variant

VARIANTS = [
    Variant(
        "local",
        "local",
        trainers=1,
        exact=True,
        slow="interrupted resumed labels-cut tiered tiered-resumed",
    )
]
