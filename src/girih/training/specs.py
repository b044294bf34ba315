"""Specifications of both halves, from what a trainer is given."""

from __future__ import annotations

import os

import torch
from torch import nn

from girih.config.train import TrainOptions
from girih.dense.halves.replica import made_by
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.dense.spec import DenseSpec
from girih.errors import ConfigError
from girih.models import needs_of
from girih.optim import Adagrad, SparseOptimizer
from girih.runs.stats import Stats
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.training.learning_rate import LearningRate


def sparse_spec(
    model: nn.Module,
    schema: Schema,
    options: TrainOptions,
    store: StoreOptions | None,
    optimizer: SparseOptimizer | None,
    first_order_optimizer: SparseOptimizer | None,
) -> SparseSpec:
    """Tables, what the model reads of them, and how they are kept; shards get a thread of torch's each.

    Raises:
        ConfigError: the model needs what the schema does not have.
    """
    return SparseSpec(
        schema=schema,
        needs=needs_of(model, schema),
        optimizer=optimizer or Adagrad(),
        first_order_optimizer=first_order_optimizer,
        store=store or StoreOptions(),
        seed=options.seed,
        threads=torch.get_num_threads(),
    )


def dense_spec(
    model: nn.Module, options: TrainOptions, optimizer: OptimizerFactory | None, stats: Stats, rank: int = 0
) -> DenseSpec:
    """The model and how it learns.

    Raises:
        ConfigError: a device that torch does not find here, or a schedule that the optimizer cannot follow.
    """
    optimizer = optimizer or optimizer_factory({"name": "adam"})
    if options.lr_schedule is not None:
        LearningRate(
            made_by(optimizer, [p for p in model.parameters() if p.requires_grad]), options.lr_schedule
        )
    return DenseSpec(
        module=model,
        optimizer=optimizer,
        precision=options.precision,
        device=_device(options.device, rank),
        clip_norm=options.clip_norm,
        stats=stats,
    )


def _device(name: str, rank: int = 0) -> torch.device:
    """ "auto", "cpu" or "cuda", with a number or not; refuses what torch does not find here.

    "auto" and "cuda" take the devices of this host in turn, by the rank of the trainer.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.device_count() > 1:
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise ConfigError(f"device = {name!r}: torch finds {found} CUDA device here; use 'cpu' or 'auto'")
    return device
