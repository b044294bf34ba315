"""Checks the arguments of a trainer, and builds the specifications of both halves from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import UnionType
from typing import Any

import torch
from torch import nn

from girih.config.train import TrainOptions
from girih.data import Dataset
from girih.dense.accel.compiled import require_compiler
from girih.dense.half import DenseSpec, ScoredSteps
from girih.dense.halves.replica import made_by
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.errors import ConfigError, kind_of
from girih.metrics.custom import custom_metrics, random_examples
from girih.metrics.progressive import ProgressiveScores
from girih.metrics.result import OF_NUMBERS
from girih.models import needs_of
from girih.optim import Adagrad, SparseOptimizer
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Stats
from girih.training.learning_rate import LearningRate


def expect(name: str, value: object, kind: type | UnionType, expected: str) -> None:
    """Refuses a value that is not of type ``kind``."""
    if not isinstance(value, kind):
        shown = repr(value) if isinstance(value, str | int | float | None) else kind_of(value)
        mend = "; give an instance, not a class" if isinstance(value, type) else ""
        raise ConfigError(f"{name} = {shown}: expected {expected}{mend}")


def schema_of(model: nn.Module, schema: Schema | None) -> Schema:
    """Returns the given schema or the model's schema. Refuses two schemas that differ, and a model without a schema."""
    model_schema = getattr(model, "schema", None)
    schema = schema or model_schema
    if not isinstance(schema, Schema):
        raise ConfigError(f"{type(model).__name__} has no schema; give Trainer(model, schema=schema)")
    if isinstance(model_schema, Schema):
        refuse_other_schema("schema", schema, model_schema)
    return schema


def refuse_other_schema(source: str, schema: Schema, expected: Schema) -> None:
    """Refuses data whose features or labels differ from the model's."""
    if schema == expected or schema.fingerprint() == expected.fingerprint():
        return
    theirs, ours = ([*(f.name for f in s.features), *s.labels.names] for s in (schema, expected))
    differs = f"features and labels {theirs} instead of {ours}"
    if ours == theirs:
        differs = "features of other kinds, dims, tables or transforms"
    raise ConfigError(f"{source}: its schema differs from the model's: {differs}; make both with one schema")


def expect_data(source: str, data: Dataset, schema: Schema, *, labels: bool = True) -> None:
    """Refuses values that are not data with the model's schema, and data without labels if labels are needed."""
    value: Any = data
    reader = "read_parquet(paths, schema)"
    if hasattr(value, "__arrow_c_stream__"):
        reader = "read_arrow(frame, schema)"
    elif isinstance(value, Mapping):
        reader = "read_arrow(pyarrow.table(columns), schema)"
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        reader = "read_arrow(pyarrow.Table.from_pylist(rows), schema)"
    expect(source, data, Dataset, f"a girih.Dataset, for example from girih.{reader}")
    refuse_other_schema(source, data.schema, schema)
    if labels and not data.with_labels:
        raise ConfigError(f"{source}: read without labels; expected with_labels=True")


def check_metrics(options: TrainOptions, schema: Schema) -> None:
    """Refuses custom metrics that fail.

    Also refuses a metric for early stopping or the learning rate that the first label does not have.
    """
    for label, loss in zip(schema.labels.names, schema.labels.losses, strict=True):
        custom_metrics(options.metrics, label, random_examples(loss, options.gauc_by), strict=True)
    first, loss = schema.labels.names[0], schema.labels.losses[0]
    for name, metric in options.watched.items():
        if metric not in options.metric_names and (metric in OF_NUMBERS) == (loss == "bce"):
            fitting = "auc or logloss" if loss == "bce" else " or ".join(OF_NUMBERS)
            raise ConfigError(
                f"train: {name}: metric = {metric!r}: the loss of the first label, {first!r}, is {loss}; expected {fitting}"
            )


def sparse_spec(
    model: nn.Module,
    schema: Schema,
    options: TrainOptions,
    store: StoreOptions | None,
    optimizer: SparseOptimizer | None,
    first_order_optimizer: SparseOptimizer | None,
    gpu: int | None = None,
) -> SparseSpec:
    """Returns the spec of the sparse half: tables, needs and storage. Each shard gets one of torch's threads.

    Args:
        gpu: see :func:`gpu_of`.

    Raises:
        ConfigError: the model needs features that the schema does not have.
    """
    return SparseSpec(
        schema=schema,
        needs=needs_of(model, schema),
        optimizer=optimizer or Adagrad(),
        first_order_optimizer=first_order_optimizer,
        store=store or StoreOptions(),
        seed=options.seed,
        threads=torch.get_num_threads(),
        gpu=gpu,
    )


def dense_spec(
    model: nn.Module,
    schema: Schema,
    options: TrainOptions,
    optimizer: OptimizerFactory | None,
    stats: Stats,
    rank: int = 0,
) -> DenseSpec:
    """Returns the description of the dense half: the model, its optimizer and their options.

    Raises:
        ConfigError: the device does not exist, or does not support the option ``dense_forward``. Torch has no compiler
            for ``compile``. The optimizer does not support the learning rate schedule.
    """
    device = _device(options.device, rank)
    if options.dense_forward == "int8" and device.type != "cpu":
        raise ConfigError(
            f"dense_forward = 'int8' on {device.type} (device = {options.device!r}): expected device = 'cpu', or dense_forward ="
            " 'float32'"
        )
    optimizer = optimizer or optimizer_factory({"name": "adam"})
    scored = None
    if options.progressive_validation:
        scored = ScoredSteps(ProgressiveScores(len(schema.labels.names), losses=schema.labels.losses))
    if options.lr_schedule is not None:
        LearningRate(
            made_by(optimizer, [p for p in model.parameters() if p.requires_grad]), options.lr_schedule
        )
    if options.compile:
        require_compiler(device)
    return DenseSpec(
        module=model,
        optimizer=optimizer,
        precision=options.precision,
        forward=options.dense_forward,
        device=device,
        on_nonfinite=options.on_nonfinite,
        clip_norm=options.clip_norm,
        global_batch_norm=options.global_batch_norm,
        compile=options.compile,
        stats=stats,
        losses=schema.labels.losses,
        huber_delta=schema.labels.huber_delta,
        scored=scored,
    )


def gpu_of(device: torch.device, rank: int) -> int | None:
    """Returns the index of the GPU for rows: the dense half's GPU, else a GPU chosen by rank.

    Returns None if the host has at most one GPU.
    """
    if device.type == "cuda":
        return device.index
    return _in_turn(rank) if torch.cuda.device_count() > 1 else None


def _in_turn(rank: int) -> int:
    """Returns the index of a GPU of this host, chosen by the trainer's rank."""
    return int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()


def _device(name: str, rank: int = 0) -> torch.device:
    """Returns the device for "auto", "cpu" or "cuda", with or without a number. Refuses a device that does not exist.

    "auto" and "cuda" choose among the devices of this host by the trainer's rank.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.device_count() > 1:
        name = f"cuda:{_in_turn(rank)}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_devices = torch.cuda.device_count() or "no"
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ConfigError(
            f"device = {name!r}: torch finds {num_devices} CUDA device here; use 'cpu' or 'auto', or install a torch for"
            f" your GPU (torch {torch.__version__} is built {built})"
        )
    return device
