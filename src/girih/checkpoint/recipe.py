"""The recipe of a model in its checkpoints: how to make the module again, and how to compute with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from girih import config
from girih.config.train import TrainOptions
from girih.errors import ConfigError, nearest
from girih.models import CLASSES

if TYPE_CHECKING:
    from torch import nn

_KEPT = ("seed", "precision", "dense_forward")


def recipe(model: nn.Module, options: TrainOptions) -> dict[str, object]:
    """``{"model": …, "train": …}`` as plain values.

    If the class is the user's own, ``model`` is None, and ``options`` are those that a config gave it: never its name.
    """
    from girih.models.zoo import description_of, options_of  # followers read recipes, and have no torch

    kept = {name: getattr(options, name) for name in _KEPT}
    made: dict[str, object] = {"model": description_of(model), "train": kept}
    return made if made["model"] is not None else made | {"options": options_of(model)}


def train_options(kept: Mapping[str, object]) -> TrainOptions:
    """The options that predictions depend on, of the ``train`` of a recipe.

    Raises:
        ConfigError: an option that there is not.
    """
    for name in config.build(Mapping[str, Any], kept, "recipe"):
        if name not in _KEPT:
            raise ConfigError(f"recipe: unknown option {name!r}{nearest(name, _KEPT)}")
    built: TrainOptions = config.build(TrainOptions, kept, "recipe")
    return built


def check_recipe(tree: Mapping[str, Any]) -> None:
    """Checks a recipe without making its model, for processes without torch.

    Raises:
        ConfigError: an unknown model or option, or a value of another type. KeyError: it lacks something.
    """
    train_options(tree["train"])
    model = config.build(Mapping[str, Any] | None, tree["model"], "recipe")
    if model is not None:
        config.build(Literal[tuple(CLASSES)], model["name"], "recipe: model")
        config.build(Mapping[str, Any], model["options"], "recipe: options")
