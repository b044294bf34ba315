"""Options for a store whose values lie in memory and, below it, in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Memory above a file: HybridHash (PICASSO §III-D).

    Attributes:
        directory: for the file, which has no name and ends with the process.
        hot_rows: rows of this store that stay in memory: those that were read most. Beside them there is room for the
            rows of a few batches, which grows with these.
        flush_every_steps: how often the hot rows are chosen anew.
        warm_up_steps: steps that only count, before they are chosen first.
        direct: False lets the page cache keep what was read from the file; for file systems that have no better way.
    """

    directory: str | os.PathLike[str]
    hot_rows: int
    flush_every_steps: int = 100
    warm_up_steps: int = 100
    direct: bool = True
