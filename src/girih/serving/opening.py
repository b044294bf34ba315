"""Opens the results of a run: its configuration, the checkpoint with its final weights, its model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from girih import checkpoint, models
from girih.app.run_config import RunConfig
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.description import train_options
from girih.checkpoint.load import load as load_checkpoint
from girih.config.train import ScheduleOptions, TrainOptions
from girih.config.user_code import reference
from girih.data.dataset import BATCH_SIZE
from girih.errors import CheckpointError, ConfigError, MissingFileError, RunDirectoryError
from girih.models.zoo import from_recipe
from girih.runs.directory import read_summary
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.strategies.local import Local
from girih.training.specs import expect, refuse_other_schema

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """A model and the place of its weights, which are not read yet.

    Attributes:
        place: the checkpoint.
        manifest: the index of the checkpoint.
        final: True if the run ended with this checkpoint.
        batch_size: the number of examples that are computed together, as in ``girih predict``.
    """

    place: Storage
    manifest: Manifest
    final: bool
    schema: Schema
    model: nn.Module
    options: TrainOptions
    store: StoreOptions
    batch_size: int


def final_weights(run: str | os.PathLike[str]) -> tuple[Storage, bool]:
    """Returns the checkpoint with the final weights of a run, and whether the run has ended.

    The run's summary names it. Without a summary, :func:`girih.checkpoint.final_of` finds it.

    Raises:
        MissingFileError, CheckpointError: there is no checkpoint. RunDirectoryError: the summary is damaged.
    """
    local = Storage.at(run).local
    summary = None if local is None else read_summary(local)
    if summary is not None:
        return checkpoint.find(run, step=summary["checkpoint_step"]), True
    return checkpoint.final_of(run)


def open_config(run: Path, model: str | None = None, *, own_metrics: bool = False) -> RunConfig:
    """Loads the configuration in a run directory, for one process that only reads.

    Args:
        model: the user's class, as ``file.py:Class``, which replaces the configured class.
        own_metrics: True loads the user's metrics that the configuration names, too.

    Raises:
        MissingFileError: there is no such directory.
        RunDirectoryError: the directory holds no run of ``girih train``.
    """
    if run.suffix == ".toml" and not run.is_dir():
        raise RunDirectoryError(
            f"{run}: names a config file; expected a run directory, as runs/first, which girih train {run} --run runs/first makes"
        )
    if not run.exists():
        raise MissingFileError(f"{run}: no such run directory; girih train CONFIG --run {run} makes one")
    if not (run / "config.toml").is_file():
        raise RunDirectoryError(f"{run}: not a run directory (it has no config.toml)")
    overrides: dict[str, object] = {} if model is None else {"model.name": reference(model)}
    overrides |= {"train.early_stopping": None, "train.lr_schedule": None}
    overrides |= {} if own_metrics else {"train.metrics": []}
    # one process is enough to read
    settings = RunConfig.load(run / "config.toml", overrides=overrides, strategy=Local.name, run=run)
    settings = replace(settings, schedule=ScheduleOptions())  # one process needs no schedule
    if settings.store.arena == "shared":  # embedding servers used it
        settings = replace(settings, store=replace(settings.store, arena="heap"))
    return replace(settings, store=settings.store.within(run))


def open_model(run: str | os.PathLike[str], model: nn.Module | str | None = None) -> OpenedModel:
    """Finds the final or the given checkpoint of a run, and makes its model.

    Args:
        model: a module; or the user's class as ``file.py:Class``, which gets the options of the config or the
            checkpoint.

    Raises:
        MissingFileError, CheckpointError: there is no checkpoint.
        ConfigError: the model's class is the user's, and neither ``model`` nor a ``config.toml`` names it.
    """
    named = str if isinstance(model, str) and ":" in model else nn.Module
    expect(
        "model", model, named | None, "a torch.nn.Module of the run's class and options, or 'file.py:Class'"
    )
    place, final = final_weights(run)
    if not final and place != Storage.at(run):
        _LOG.warning("%s: not finished; using %s", os.fspath(run), place.name)
    manifest = Manifest.read(place)
    local = Storage.at(run).local
    schema = Schema.from_dict(manifest.schema, place.url)
    if local is not None and (local / "config.toml").is_file():
        settings = open_config(local, model if isinstance(model, str) else None)
        made = model if isinstance(model, nn.Module) else _made(settings.model)
        _check_schema(made, schema)
        return OpenedModel(
            place,
            manifest,
            final,
            settings.schema,
            made,
            settings.train,
            settings.store,
            settings.data.batch_size,
        )
    try:
        recipe = manifest.recipe
        options, described = train_options(recipe.get("train") or {}), recipe.get("model")
        if model is None and described is not None:
            tensors = load_checkpoint(place, schema).dense["model"]
            model = from_recipe(described, schema, tensors, place)
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{place}: its recipe is damaged: {error}; give load(..., model=...)") from None
    if model is None:
        raise ConfigError(
            f"{place}: the model's class is your own, which a checkpoint does not name;"
            " give load(..., model=YourModel(schema)), or --model file.py:Class"
        )
    if isinstance(model, str):
        model = _made(partial(models.create, model, schema, recipe.get("options"), "model"))
    _check_schema(model, schema)
    return OpenedModel(place, manifest, final, schema, model, options, StoreOptions(), BATCH_SIZE)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    """Makes a model whose initial values do not matter, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        return make()


def _check_schema(model: nn.Module, schema: Schema) -> None:
    own = getattr(model, "schema", None)
    if isinstance(own, Schema):
        refuse_other_schema("model", own, schema)
