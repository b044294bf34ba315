"""Specifications of both halves, from what a trainer is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from girih.config.train import TrainOptions
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.dense.spec import DenseSpec
from girih.models import needs_of
from girih.optim import Adagrad, SparseOptimizer
from girih.runs.stats import Stats
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.training.arguments import device


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
    spec = SparseSpec(
        schema=schema,
        needs=needs_of(model, schema),
        optimizer=optimizer or Adagrad(),
        first_order_optimizer=first_order_optimizer,
        store=store or StoreOptions(),
        seed=options.seed,
    )
    return replace(spec, threads=torch.get_num_threads())


def dense_spec(
    model: nn.Module, options: TrainOptions, optimizer: OptimizerFactory | None, stats: Stats, rank: int = 0
) -> DenseSpec:
    """The model and how it learns.

    Raises:
        ConfigError: a device that torch does not find here.
    """
    return DenseSpec(
        module=model,
        optimizer=optimizer or optimizer_factory({"name": "adam"}),
        precision=options.precision,
        device=device(options.device, rank),
        clip_norm=options.clip_norm,
        stats=stats,
    )
