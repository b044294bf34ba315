"""The description of a model in checkpoints, published versions and exports: everything except rows and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from girih import config
from girih.config.train import TrainOptions
from girih.data.normalization import NormalizationStats
from girih.errors import ConfigError, nearest
from girih.models import CLASSES
from girih.models.needs import Needs, check_needs
from girih.schema import Schema

KEPT = ("seed", "precision", "dense_forward")
"""The options that predictions depend on."""


class CheckedModel(NamedTuple):
    """A checked description, as objects."""

    schema: Schema
    needs: Needs
    options: TrainOptions
    normalization: NormalizationStats | None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as plain values.

    Attributes:
        schema: the result of ``Schema.to_dict``. fingerprint: the fingerprint of this schema.
        needs: maps each feature to the parts that the model reads, see :mod:`girih.models.needs`. Empty in checkpoints
            of format 2.
        recipe: ``{"model": …, "train": …}``, the values to build the module again and to compute with it. For a user's
            class, ``model`` is None, and ``options`` are the options of the config, never the class name.
        normalization: the normalization of standardized features, or None if it was not measured.
    """

    schema: Mapping[str, Any]
    fingerprint: str
    needs: Mapping[str, Sequence[str]]
    recipe: Mapping[str, Any]
    normalization: Mapping[str, Any] | None

    def checked(self, where: str) -> CheckedModel:
        """Returns the description as objects, without building the model, for processes without torch.

        Raises:
            ConfigError: an option is unknown, or a value has another type.
            KeyError, ValueError: a value is missing or does not fit.
        """
        schema = Schema.from_dict(self.schema, where)
        if schema.fingerprint() != self.fingerprint:
            raise ValueError(f"fingerprint {self.fingerprint} of a schema that has {schema.fingerprint()}")
        check_recipe(self.recipe)
        measured = self.normalization
        return CheckedModel(
            schema,
            check_needs(self.needs, schema, "its needs"),
            train_options(self.recipe["train"]),
            None if measured is None else NormalizationStats.from_dict(measured, schema),
        )


def train_options(kept: Mapping[str, object]) -> TrainOptions:
    """Returns the options that predictions depend on, from the entry ``train`` of a recipe.

    Raises:
        ConfigError: the option is unknown.
    """
    for name in config.build(Mapping[str, Any], kept, "recipe"):
        if name not in KEPT:
            raise ConfigError(f"recipe: unknown option {name!r}{nearest(name, KEPT)}")
    built: TrainOptions = config.build(TrainOptions, kept, "recipe")
    return built


def check_recipe(tree: Mapping[str, Any]) -> None:
    """Checks a recipe without building its model.

    Raises:
        ConfigError: the model or an option is unknown, or a value has another type. KeyError: a value is missing.
    """
    train_options(tree["train"])
    model = config.build(Mapping[str, Any] | None, tree["model"], "its recipe is damaged: model")
    if model is not None:
        config.build(Literal[tuple(CLASSES)], model["name"], "its recipe is damaged: model")
        config.build(Mapping[str, Any], model["options"], "its recipe is damaged: options")
