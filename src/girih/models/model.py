"""The base class of all models of girih."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

from torch import nn

from girih import config
from girih.models import needs
from girih.schema import Schema


class Model(nn.Module):
    """A module that knows its schema, and declares its needs: the parts of each feature that it reads.

    girih's own constructors check their options by their annotations.

    Args:
        kinds: the needs for every categorical and sequence feature, see ``needs``; by default the embedding.
    """

    made_with: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the constructor, from which the same model can be made again."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Checks and notes the arguments."""
        is_ours = cls.__init__.__module__.startswith("girih.models.")
        hints = config.parameter_hints(cls.__init__) if is_ours else {}
        for name, value in options.items():
            if name in hints:
                config.build(hints[name], value, name)
        made = super().__new__(cls)
        made.__dict__["made_with"] = arguments, options
        return made

    def __init__(self, schema: Schema, *kinds: str) -> None:
        super().__init__()
        self.schema = schema
        self.needs = needs.of_all(schema, *(kinds or (needs.EMBEDDING,)))
        self.num_labels = len(schema.labels.names)

    def read_whole(self, sequences: Collection[str]) -> list[str]:
        """Declares that the model reads these sequences whole. Returns the names of the features that stay pooled.

        Args:
            sequences: names of sequence features.
        """
        self.needs |= dict.fromkeys(sequences, frozenset({needs.SEQUENCE}))
        return [feature.name for feature in self.schema.sparse if feature.name not in sequences]
