"""Sources and formats to batches; positions that can be resumed from."""

from girih.data.ahead import ReadAhead, read_ahead
from girih.data.batch import Batch
from girih.data.columns import NULL_ID
from girih.data.dataset import Dataset, SkippedRows
from girih.data.moments import Moments
from girih.data.options import DataOptions, open_dataset
from girih.data.position import Position
from girih.data.readers import read_criteo, read_csv, read_libsvm, read_parquet
from girih.data.synthetic import click_log, click_log_schema

__all__ = [
    "NULL_ID",
    "Batch",
    "DataOptions",
    "Dataset",
    "Moments",
    "Position",
    "ReadAhead",
    "SkippedRows",
    "click_log",
    "click_log_schema",
    "open_dataset",
    "read_ahead",
    "read_criteo",
    "read_csv",
    "read_libsvm",
    "read_parquet",
]
