"""Generated data as wide as those of the DES paper: 600 features, 950 ids an example (§6), unique ids as in Table 2.

Of each feature's ids, 95 % are drawn from a Zipf law (exponent 1.32, a million ids) and 5.3 % are new ones: two numbers
that were fitted to the five counts of Table 2, which they meet to 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

EXPONENT, NUM_IDS, NEW = 1.32, 1_000_000, 0.053
FEATURES, IDS_OF_EXAMPLE = 600, 950


def write_wide(
    directory: Path, rows: int, batches: Sequence[int], features: int = FEATURES, each: float | None = None
) -> dict[int, int]:
    """Writes ``train.parquet``; returns size of a batch → unique ids of the first one, of all features together.

    Args:
        each: ids of a feature in an example, on average, between 1 and 2; by default the paper's.
    """
    rng = np.random.default_rng(0)
    each = IDS_OF_EXAMPLE / FEATURES if each is None else each
    cumulated = np.cumsum(np.arange(1, NUM_IDS + 1.0) ** -EXPONENT)
    columns: dict[str, Any] = {}
    unique = dict.fromkeys(batches, 0)
    for place in range(features):
        count = 2 if (place + 1) * (each - 1) % 1 < each - 1 else 1  # of an example, spread evenly
        ids = _ids(rng, cumulated, rows * count)
        for size in batches:
            unique[size] += len(np.unique(ids[: size * count]))
        drawn = pa.array(ids)
        if count > 1:
            bounds = pa.array(np.arange(0, rows * count + 1, count, dtype=np.int32))
            drawn = pa.ListArray.from_arrays(bounds, drawn)
        columns[f"f{place}"] = drawn
    columns["click"] = (rng.random(rows) < 0.25).astype(np.int8)
    pq.write_table(pa.table(columns), directory / "train.parquet", row_group_size=2048)
    return unique


def _ids(rng: np.random.Generator, cumulated: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    ids = np.searchsorted(cumulated, rng.random(count) * cumulated[-1])
    new = rng.random(count) < NEW
    ids[new] = rng.integers(1 << 40, 1 << 60, int(new.sum()))
    return ids


def config(
    directory: Path,
    batch: int,
    model: dict[str, Any],
    *,
    features: int = FEATURES,
    each: float | None = None,
    dim: int = 8,
) -> dict[str, Any]:
    """A config for what :func:`write_wide` wrote."""
    each = IDS_OF_EXAMPLE / FEATURES if each is None else each
    made = []
    for place in range(features):
        feature = {"name": f"f{place}", "kind": "categorical", "dim": dim}
        if (place + 1) * (each - 1) % 1 < each - 1:
            feature["pooling"] = "sum"
        made.append(feature)
    return {
        "data": {"train": str(directory / "train.parquet"), "batch_size": batch, "shuffle": False},
        "features": made,
        "labels": {"names": ["click"]},
        "model": model,
        "first_order_optimizer": {"name": "ftrl"},
        "train": {"seed": 1},
    }
