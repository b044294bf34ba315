"""The recipe of a model in its checkpoints: how to make the module again, and how to compute with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from girih import config
from girih.config.train import TrainOptions
from girih.errors import ConfigError, nearest
from girih.models.names import NAMES

if TYPE_CHECKING:
    from torch import nn

_KEPT = ("seed", "precision", "dense_forward")


def recipe(model: nn.Module, options: TrainOptions) -> dict[str, Any]:
    """``{"model": …, "train": …}`` as plain values; the model is None where it is of a class of the user's own."""
    from girih.models.zoo import description_of  # followers read recipes, and have no torch

    return {"model": description_of(model), "train": {name: getattr(options, name) for name in _KEPT}}


def train_options(kept: Mapping[str, Any]) -> TrainOptions:
    """The options that predictions depend on, of the ``train`` of a recipe.

    Raises:
        ConfigError: an option that there is not.
    """
    for name in config.build(Mapping[str, Any], kept, "recipe"):
        if name not in _KEPT:
            raise ConfigError(f"recipe: unknown option {name!r}{nearest(name, _KEPT)}")
    built: TrainOptions = config.build(TrainOptions, kept, "recipe")
    return built


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelRecipe:
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    model: _ModelRecipe | None
    train: Mapping[str, Any]


def check_recipe(tree: Any) -> None:
    """Checks a recipe without making its model, for processes without torch.

    Raises:
        ConfigError: an unknown model or option, or a value of another type.
    """
    built: _Recipe = config.build(_Recipe, tree, "recipe")
    if built.model is not None and built.model.name not in NAMES:
        raise ConfigError(f"recipe: unknown model {built.model.name!r}{nearest(built.model.name, NAMES)}")
    train_options(built.train)
