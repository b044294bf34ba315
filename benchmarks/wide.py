"""Generated data as wide as those of the DES paper: 600 features, 950 ids an example (§6), unique ids as in Table 2.

Of each feature's ids, 95 % are drawn from a Zipf law (exponent 1.32, a million ids) and 5.3 % are new ones: two numbers
that were fitted to the five counts of Table 2, which they meet to 2 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

EXPONENT, NUM_IDS, NEW = 1.32, 1_000_000, 0.053
FEATURES, IDS_OF_EXAMPLE = 600, 950


def write_wide(
    file: Path,
    rows: int,
    batches: Sequence[int],
    features: int = FEATURES,
    each: float | None = None,
    *,
    seed: int = 0,
    group: int = 2048,
) -> dict[int, int]:
    """Writes a file; returns size of a batch → unique ids of the first one, of all features together.

    Args:
        each: ids of a feature in an example, on average, between 1 and 2; by default the paper's.
        group: rows of a row group.
    """
    rng = np.random.default_rng(seed)
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
    pq.write_table(pa.table(columns), file, row_group_size=group)
    return unique


def write_epoch(
    folder: Path,
    rows: int,
    num_files: int,
    batches: Sequence[int],
    *,
    distinct: int,
    features: int,
    each: float,
) -> dict[int, int]:
    """Writes an epoch of files with ``rows`` examples each, of which some are distinct and come again and again.

    What comes again is under one more name (a hard link), so that a long epoch takes little space. Ids within a batch of
    up to ``rows`` examples follow the law; across batches new ids are new the first time alone. A folder that is there
    is kept.

    Returns:
        As of :func:`write_wide`.
    """

    def write(file: Path, number: int) -> dict[int, int]:
        size = min(rows, 4096)
        return write_wide(file, rows, () if number else batches, features, each, seed=number, group=size)

    unique = link_epoch(folder, num_files, distinct, write)
    return {int(size): count for size, count in unique.items()}


def link_epoch(
    folder: Path, num_files: int, distinct: int, write: Callable[[Path, int], Mapping[Any, Any]]
) -> dict[str, Any]:
    """Writes an epoch of files of which some are distinct and come again and again, as hard links to them.

    Args:
        write: writes the distinct file of a number; what it returns of all of them is kept beside the files.

    Returns:
        That; of a folder that is there, what was kept.
    """
    facts = folder / "unique.json"
    if not facts.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        told: dict[Any, Any] = {}
        for number in range(distinct):
            told |= write(folder / f"distinct-{number}.parquet", number)
        for number in range(num_files):
            name = folder / f"train-{number:04}.parquet"
            name.unlink(missing_ok=True)
            name.hardlink_to(folder / f"distinct-{number % distinct}.parquet")
        facts.write_text(json.dumps(told) + "\n")
    found: dict[str, Any] = json.loads(facts.read_text())
    return found


def _ids(rng: np.random.Generator, cumulated: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    ids = np.searchsorted(cumulated, rng.random(count) * cumulated[-1])
    new = rng.random(count) < NEW
    ids[new] = rng.integers(1 << 40, 1 << 60, int(new.sum()))
    return ids


def config(
    train: Path | str,
    batch: int,
    model: dict[str, Any],
    *,
    features: int = FEATURES,
    each: float | None = None,
    dim: int = 8,
) -> dict[str, Any]:
    """A config for the files that :func:`write_wide` or :func:`write_epoch` wrote."""
    each = IDS_OF_EXAMPLE / FEATURES if each is None else each
    made = []
    for place in range(features):
        feature = {"name": f"f{place}", "kind": "categorical", "dim": dim}
        if (place + 1) * (each - 1) % 1 < each - 1:
            feature["pooling"] = "sum"
        made.append(feature)
    return {
        "data": {"train": str(train), "batch_size": batch, "shuffle": False},
        "features": made,
        "labels": {"names": ["click"]},
        "model": model,
        "first_order_optimizer": {"name": "ftrl"},
        "train": {"seed": 1},
    }
