"""Makes batches from sources in many formats, and positions from which reading can resume.

Names are loaded on first use. Processes that keep rows use batches but read no files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from girih.data.batch import NULL_ID, Batch
    from girih.data.dataset import Dataset
    from girih.data.epoch import SkippedRows
    from girih.data.normalization import NormalizationStats
    from girih.data.options import DataOptions, open_dataset
    from girih.data.position import Position
    from girih.data.readers import (
        read_arrow,
        read_criteo,
        read_csv,
        read_jsonl,
        read_kafka,
        read_libffm,
        read_libsvm,
        read_parquet,
    )

__all__ = [
    "NULL_ID",
    "Batch",
    "DataOptions",
    "Dataset",
    "NormalizationStats",
    "Position",
    "SkippedRows",
    "open_dataset",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_jsonl",
    "read_kafka",
    "read_libffm",
    "read_libsvm",
    "read_parquet",
]

_HOMES = {
    "batch": ("NULL_ID", "Batch"),
    "dataset": ("Dataset",),
    "epoch": ("SkippedRows",),
    "normalization": ("NormalizationStats",),
    "options": ("DataOptions", "open_dataset"),
    "position": ("Position",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(f"girih.data.{_HOME_OF.get(name, 'readers')}"), name)
    raise AttributeError(f"module 'girih.data' has no attribute {name!r}")
