"""girih trains deep recommender models whose embedding tables exceed the memory of a single machine.

Names are loaded on first use: importing girih imports neither torch nor numba.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from girih.version import __version__

if TYPE_CHECKING:
    from girih import errors, models, nn, optim, tables
    from girih.checkpoint import CheckpointOptions
    from girih.config.train import EarlyStopping, ScheduleOptions, TrainOptions
    from girih.data import (
        Dataset,
        read_arrow,
        read_criteo,
        read_csv,
        read_jsonl,
        read_kafka,
        read_libffm,
        read_libsvm,
        read_parquet,
    )
    from girih.metrics import Metrics
    from girih.publishing.log import PublishOptions
    from girih.runs.callbacks import Callback, MLflow, TensorBoard, WandB
    from girih.schema import Categorical, Labels, Numeric, Schema, Sequence
    from girih.serving.loaded import LoadedModel, load
    from girih.sparse.options import StoreOptions
    from girih.strategies.asynchronous import Asynchronous
    from girih.strategies.hierarchical import Hierarchical
    from girih.strategies.hybrid import Hybrid
    from girih.strategies.local import Local
    from girih.strategies.substitution import Substitution
    from girih.strategies.synchronous import Synchronous
    from girih.tables import Table
    from girih.trainer import Trainer

__all__ = [
    "Asynchronous",
    "Callback",
    "Categorical",
    "CheckpointOptions",
    "Dataset",
    "EarlyStopping",
    "Hierarchical",
    "Hybrid",
    "Labels",
    "LoadedModel",
    "Local",
    "MLflow",
    "Metrics",
    "Numeric",
    "PublishOptions",
    "ScheduleOptions",
    "Schema",
    "Sequence",
    "StoreOptions",
    "Substitution",
    "Synchronous",
    "Table",
    "TensorBoard",
    "TrainOptions",
    "Trainer",
    "WandB",
    "__version__",
    "errors",
    "load",
    "models",
    "nn",
    "optim",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_jsonl",
    "read_kafka",
    "read_libffm",
    "read_libsvm",
    "read_parquet",
    "tables",
]

_HOMES = {
    "girih.runs.callbacks": "Callback MLflow TensorBoard WandB",
    "girih.checkpoint": "CheckpointOptions",
    "girih.data": "Dataset read_arrow read_criteo read_csv read_jsonl read_kafka read_libffm read_libsvm read_parquet",
    "girih.metrics": "Metrics",
    "girih.publishing.log": "PublishOptions",
    "girih.config.train": "EarlyStopping ScheduleOptions TrainOptions",
    "girih.schema": "Categorical Labels Numeric Schema Sequence",
    "girih.serving.loaded": "LoadedModel load",
    "girih.sparse.options": "StoreOptions",
    "girih.strategies.asynchronous": "Asynchronous",
    "girih.strategies.hierarchical": "Hierarchical",
    "girih.strategies.hybrid": "Hybrid",
    "girih.strategies.local": "Local",
    "girih.strategies.substitution": "Substitution",
    "girih.strategies.synchronous": "Synchronous",
    "girih.tables": "Table",
    "girih.trainer": "Trainer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if sys.version_info >= (3, 11):  # noqa: UP036 (__main__ refuses older versions, which cannot read this module)
    import_module("girih.dense.accel.process_settings").set_omp_spin()


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in __all__:
        return import_module(f"girih.{name}")
    raise AttributeError(f"module 'girih' has no attribute {name!r}")


def __dir__() -> "list[str]":  # Python 3.6 also reads this file, before __main__ refuses it
    return __all__
