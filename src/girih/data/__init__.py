"""Sources and formats to batches; positions that can be resumed from."""

from girih.data.batch import NULL_ID, Batch
from girih.data.dataset import Dataset
from girih.data.epoch import SkippedRows
from girih.data.normalization import NormalizationStats
from girih.data.options import DataOptions, open_dataset
from girih.data.position import Position
from girih.data.read_ahead import ReadAhead, read_ahead
from girih.data.readers import (
    read_arrow,
    read_criteo,
    read_csv,
    read_jsonl,
    read_kafka,
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
    "ReadAhead",
    "SkippedRows",
    "open_dataset",
    "read_ahead",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_jsonl",
    "read_kafka",
    "read_libsvm",
    "read_parquet",
]
