"""Co-Action Network (Bian et al., WSDM 2022).

Shapes: B examples, K feeds, M vectors of the longest feed, O orders, D dim of a vector, P parameters
of a micro-MLP, H outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import Count
from girih.errors import ConfigError, nearest
from girih.models import checks
from girih.models.embeddings import Embeddings, Jagged
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP, DeepOptions, Widths
from girih.models.model import Model
from girih.schema import Categorical, Schema, Sequence


class CAN(Model):
    """logits = MLP([embeddings, numeric, co-action units]).

    The unit of an item and a sequence is the sum over the sequence's ids; an empty sequence gives zeros. The paper
    combines the units with DIEN. This model pools other sequences instead.

    Args:
        schema: the features and labels of the data.
        co_action: item (a categorical feature, whose rows are the micro-MLP's parameters) → the features whose
            embeddings are fed to it, all of one dim. Only the units read these features. If the MLP must also read such
            a column, define another feature for it.
        unit_layers: widths of the micro-MLP's layers.
        orders: the highest power of the vectors that are fed to it.
        independent_orders: each power has its own micro-MLP, so the item's rows are ``orders`` times as wide.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: unknown features, or an item whose dim is not the number of the micro-MLP's parameters.

    Examples:
        A micro-MLP of widths 8 → 8 → 4 has 108 weights and biases, so the item's rows have dim 108.

        >>> import girih
        >>> item = girih.Categorical(name="item", dim=108)
        >>> user = girih.Categorical(name="user", dim=8)
        >>> schema = girih.Schema([item, user], labels="clicked")
        >>> model = girih.models.CAN(
        ...     schema, co_action={"item": ["user"]}, unit_layers=[8, 4], hidden=[64, 32]
        ... )
        >>> model.units[0].num_parameters
        108
    """

    not_substitutable = (
        "a unit needs the rows of an item together with all its inputs; use strategy 'synchronous'"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        co_action: dict[str, tuple[str, ...]],
        unit_layers: Widths = (8, 4),
        orders: Count = 3,
        independent_orders: bool = False,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema)
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
        self.deep = MLP(width, outputs=self.num_labels, **deep)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        co_actions = [
            unit(embeddings[item], [embeddings.jagged(feed) for feed in feeds])
            for unit, (item, feeds) in zip(self.units, self.co_action.items(), strict=True)
        ]
        return self.deep(self.inputs(numeric, embeddings, *co_actions))


def _checked(schema: Schema, co_action: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Checks the pairs, and returns them in the schema's order."""
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


Layers = list[tuple[Tensor, Tensor]]
"""The weight [·, inputs, outputs] and the bias [·, 1, outputs] of each layer of B micro-MLPs, or of B · O independent ones."""


class CoActionUnit(nn.Module):
    """A micro-MLP whose weights and biases are a row of a table: h_i = tanh(h_{i−1} W_i + b_i), h_0 = the vector fed.

    The output is all h_i side by side ("Co-Action Unit"), for each power of the vector, from the first to ``orders``
    ("Multi-order Enhancement"), summed over the vectors of a feed. As in the authors' code, the last layer has no tanh.
    It is linear, so its input is the sums.

    Args:
        layers: the width of each layer.
        independent_orders: each power has its own micro-MLP ("orders independence").

    Attributes:
        num_parameters: P: W_1 row by row, b_1, W_2, b_2 and so on, times ``orders`` if these are independent.
        width: of the output for one feed.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, dim: int, layers: tuple[int, ...], orders: int, *, independent_orders: bool = False
    ) -> None:
        super().__init__()
        self.shapes = tuple(pairwise((dim, *layers)))
        self.orders, self.num_micro = orders, orders if independent_orders else 1
        self.num_parameters = self.num_micro * sum(dim * width + width for dim, width in self.shapes)
        self.width = orders * sum(layers)

    def forward(self, parameters: Tensor, feeds: Seq[Jagged]) -> Tensor:
        """Maps float32[B, P] and K feeds to [B, K · width], one feed after the other. An empty feed gives zeros."""
        layers = self._layers(parameters)
        together = Feeds.padded_together(feeds)
        outputs = [self._fed(layers, padded) for padded in together]
        if len(outputs) == 1:
            return outputs[0].flatten(1)
        numbers = [number for padded in together for number in padded.numbers]
        by_number = torch.tensor(numbers, device=parameters.device).argsort()
        return torch.cat(outputs, dim=1).index_select(1, by_number).flatten(1)

    def _fed(self, layers: Layers, feeds: Feeds) -> Tensor:
        """Returns [B, K, width]."""
        size, num_feeds, length, dim = feeds.values.shape
        micro, per_micro = size * self.num_micro, self.orders // self.num_micro
        powers = [feeds.values]
        for _ in range(1, self.orders):
            powers.append(powers[-1] * feeds.values)
        h = torch.stack(powers, dim=1).view(micro, per_micro * num_feeds * length, dim)
        outputs = []
        for weight, bias in layers[:-1]:
            h = torch.baddbmm(bias, h, weight).tanh()
            outputs.append(feeds.summed(h, self.orders))
        total = outputs[-1] if outputs else feeds.summed(h, self.orders)
        weight, bias = layers[-1]
        counts = feeds.counts.repeat(1, self.orders).view(micro, per_micro * num_feeds, 1)
        last = torch.baddbmm(counts * bias, total.view(micro, per_micro * num_feeds, weight.shape[1]), weight)
        outputs.append(last.view(size, self.orders, num_feeds, weight.shape[2]))
        return torch.cat([sums.transpose(1, 2) for sums in outputs], dim=3).flatten(2)

    def _layers(self, parameters: Tensor) -> Layers:
        sizes = [size for inputs, outputs in self.shapes for size in (inputs * outputs, outputs)]
        rows = parameters.reshape(len(parameters) * self.num_micro, sum(sizes))
        pieces = rows.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        return [
            (weight.unflatten(1, shape), bias[:, None])
            for weight, bias, shape in zip(pieces[::2], pieces[1::2], self.shapes, strict=True)
        ]


class Feeds(NamedTuple):
    """Feeds of similar length, padded to the longest.

    Attributes:
        numbers: their numbers among all feeds.
        values: float32[B, K, M, D], zeros after each end. mask: float32[B, K, M], 1 for real vectors. counts:
            float32[B, K].
    """

    numbers: list[int]
    values: Tensor
    mask: Tensor
    counts: Tensor

    @classmethod
    def padded_together(cls, feeds: Seq[Jagged]) -> list[Feeds]:
        """Pads all feeds in groups. A group holds feeds whose longest sequences end between the same powers of two.

        So no feed is padded to twice the length of its own longest sequence.
        """
        lengths = torch.stack([feed.offsets for feed in feeds]).diff()
        longest = F.pad(lengths, (0, 1)).amax(dim=1).tolist()  # a batch may have no examples
        alike: dict[int, list[int]] = {}
        for number, length in enumerate(longest):
            alike.setdefault(max(0, length - 1).bit_length(), []).append(number)
        return [
            cls._padded(numbers, feeds, lengths, max(1, *(longest[number] for number in numbers)))
            for numbers in alike.values()
        ]

    @classmethod
    def _padded(cls, numbers: list[int], feeds: Seq[Jagged], lengths: Tensor, width: int) -> Feeds:
        values = torch.cat([feeds[number].values for number in numbers])
        feed_lengths = lengths[numbers] if len(numbers) < len(feeds) else lengths
        num_feeds, size = feed_lengths.shape
        each = feed_lengths.flatten()  # all examples of the first feed, then of the next feed
        begins = (
            torch.arange(num_feeds * size, device=feed_lengths.device).view(size, num_feeds).T.flatten()
            * width
        )
        shifts = begins - each.cumsum(0) + each
        targets = shifts.repeat_interleave(each, output_size=len(values)) + torch.arange(
            len(values), device=feed_lengths.device
        )
        padded = values.new_zeros(size * num_feeds * width, values.shape[1]).index_copy(0, targets, values)
        counts = feed_lengths.T.contiguous()
        mask = torch.arange(width, device=feed_lengths.device) < counts[:, :, None]
        return cls(
            numbers,
            padded.view(size, num_feeds, width, values.shape[1]),
            mask.to(values.dtype),
            counts.to(values.dtype),
        )

    def summed(self, h: Tensor, orders: int) -> Tensor:
        """Maps [·, ·, H], all orders of all feeds, to the sums over real vectors: [B, O, K, H]."""
        each = h.reshape(len(self.mask), orders, *self.mask.shape[1:], h.shape[-1])
        return torch.matmul(self.mask[:, None, :, None], each).squeeze(3)
