"""Co-Action Network (Bian et al., WSDM 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from girih.config.options import flag, integer
from girih.errors import ConfigError, nearest
from girih.models import checks, needs
from girih.models.embeddings import Embeddings, Jagged
from girih.models.layers.co_action import CoActionUnit
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP
from girih.models.model import Model
from girih.schema import Categorical, Schema, Sequence


class CAN(Model):
    """logits = MLP([embeddings, numeric, co-action units]).

    The unit of an item and a sequence is the sum over the sequence's ids; an empty one gives zeros. The paper puts DIEN
    beside the units; here other sequences are pooled.

    Args:
        co_action: item (a categorical feature, whose rows are the micro-MLP's parameters) → the features whose embeddings
            are fed to it, all of one dim. These features are read by the units alone: a column that the MLP reads as
            well is read by another feature.
        unit_layers, orders, independent_orders: see :class:`CoActionUnit`.
    """

    not_substitutable = (
        "a unit needs the rows of an item beside all that is fed to it; use strategy 'synchronous'"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        co_action: dict[str, tuple[str, ...]],
        unit_layers: tuple[int, ...] = (8, 4),
        orders: int = 3,
        independent_orders: bool = False,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(schema, needs.EMBEDDING)
        hidden = checks.widths("hidden", hidden)
        unit_layers = checks.widths("unit_layers", unit_layers)
        integer("orders", orders)
        flag("independent_orders", independent_orders)
        self.co_action = _checked(schema, co_action)
        dims = {feature.name: schema.dim_of(feature) for feature in schema.sparse}
        units: list[CoActionUnit] = []
        width = 0
        for item, feeds in self.co_action.items():
            dim = checks.one_dim(f"can: {', '.join(feeds)} of {item}", schema, feeds)
            unit = CoActionUnit(dim, unit_layers, orders, independent_orders=independent_orders)
            if dims[item] != unit.num_parameters:
                raise ConfigError(
                    f"can: feature {item!r} has dim {dims[item]}; expected {unit.num_parameters}, the weights and biases of"
                    f" unit_layers = {list(unit_layers)} on inputs of dim {dim}; set dim = {unit.num_parameters}"
                )
            units.append(unit)
            width += len(feeds) * unit.width
        self.units = nn.ModuleList(units)
        in_units = {name for item, feeds in self.co_action.items() for name in (item, *feeds)}
        whole = {f.name for f in schema.sparse if f.name in in_units and isinstance(f, Sequence)}
        pooled = self.read_whole(whole)
        self.inputs = DenseInput(schema, [name for name in pooled if name not in in_units])
        width += self.inputs.width
        self.deep = MLP(width, hidden, self.num_labels, dropout=dropout, batch_norm=batch_norm)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        co_actions = [
            unit(embeddings[item], [_fed(feed, embeddings) for feed in feeds])
            for unit, (item, feeds) in zip(self.units, self.co_action.items(), strict=True)
        ]
        return self.deep(self.inputs(numeric, embeddings, *co_actions))


def _fed(feed: str, embeddings: Embeddings) -> Jagged:
    """The vectors of a feature that go through units: those of a sequence, or one for each example."""
    if feed in embeddings.sequences:
        return embeddings.sequences[feed]
    values = embeddings[feed]
    return Jagged(values, torch.arange(len(values) + 1, device=values.device))


def _checked(schema: Schema, co_action: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The pairs in the schema's order."""
    if not isinstance(co_action, Mapping) or not co_action:
        raise ConfigError(f"co_action = {co_action!r}: expected a table of item = [features]")
    sparse = [feature.name for feature in schema.sparse]
    items = [feature.name for feature in schema.sparse if isinstance(feature, Categorical)]
    checked = {}
    for item, feeds in co_action.items():
        if item not in items:
            raise ConfigError(f"co_action: {item!r} is not a categorical feature{nearest(item, items)}")
        kind = "categorical or sequence feature"
        checked[item] = checks.some_of(f"co_action.{item}", feeds, sparse, kind)
        if item in checked[item]:
            raise ConfigError(f"co_action.{item}: {item!r} is fed to itself; expected other features")
    return {item: checked[item] for item in items if item in checked}
