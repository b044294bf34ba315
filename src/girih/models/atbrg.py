"""Adaptive Target-Behavior Relational Graph network (Feng et al., SIGIR 2020).

Shapes: N nodes, M neighbours of all nodes and relations together, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from girih.errors import ConfigError, DataError, nearest
from girih.models import checks
from girih.models.embeddings import Embeddings, Jagged
from girih.models.layers.attention import Attention, softmax_within
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP, AnyWidths, DeepOptions
from girih.models.model import Model
from girih.schema import Schema, Sequence


class Heads(nn.Module):
    """Finds the node of each neighbour: an example's neighbours are divided evenly among its nodes, in order.

    This is a separate module because it depends on the data. So the rest of the model can be traced.
    """

    __call__: Callable[..., Tensor]

    def forward(self, feature: str, nodes: Jagged, relation: str, tails: Jagged) -> Tensor:
        """Returns the node of each of the M neighbours that a relation gives to the nodes of a feature, int64[M].

        Raises:
            DataError: the nodes of an example have different numbers of neighbours by this relation.
        """
        num_nodes, num_tails = nodes.offsets.diff(), tails.offsets.diff()
        each = num_tails // num_nodes.clamp(min=1)
        uneven = (each * num_nodes != num_tails).nonzero()
        if len(uneven):
            first = int(uneven[0])
            raise DataError(
                f"atbrg: {relation!r} has {int(num_tails[first])} ids where {feature!r} has {int(num_nodes[first])}; "
                "expected the same number of neighbours for each node of an example: pad with an id that means none"
            )
        example = tails.examples()
        return nodes.offsets.index_select(0, example) + tails.positions() // each.index_select(0, example)


class ATBRG(Model):
    """logits = MLP([embeddings, numeric, z_target, Σ_j a(z_j, z_target) z_j for each history]) (§3).

    z is a node of the graph together with the information from its neighbours, collected from the leaves up
    (relation-aware extractor). ``a`` is DIN's activation unit on these nodes (representation activation). The data
    contains the graph: each relation is a sequence feature with the neighbours of its nodes side by side, the same
    number for each node. The data preparation connects and prunes the graph.

    Args:
        schema: the features and labels of the data.
        relations: neighbours (a sequence feature) → their nodes: a target, a history, or other neighbours, which makes
            the graph deeper. All have one dim.
        attention: history → its target, as for :class:`girih.models.DIN`; without it, neighbours do not count as
            histories.
        attention_hidden: widths of the activation unit's layers.
        softmax: normalise the activation over the history.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: relations of unknown features, in a cycle, or with different dims.

    Examples:
        Each item has neighbours: the brands of the item.

        >>> import girih
        >>> item = girih.Categorical(name="item", dim=8)
        >>> history = girih.Sequence(name="history", table="item", dim=8)
        >>> brands = girih.Sequence(name="item_brands", table="brand", dim=8)
        >>> schema = girih.Schema([item, history, brands], labels="clicked")
        >>> model = girih.models.ATBRG(
        ...     schema, relations={"item_brands": "item"}, hidden=[64, 32]
        ... )
        >>> model.pairs
        (('history', 'item'),)
    """

    not_substitutable = checks.NOT_SUBSTITUTABLE

    def __init__(
        self,
        schema: Schema,
        *,
        relations: dict[str, str],
        attention: dict[str, str] | None = None,
        attention_hidden: AnyWidths = (80, 40),
        softmax: bool = False,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema)
        _check_names(schema, relations)
        self.pairs = checks.pairs_of("atbrg", schema, attention, others=relations)
        roots = {name for pair in self.pairs for name in pair}
        depth = _depth(relations, roots)
        dim = checks.one_dim("atbrg: nodes of the graph", schema, {*roots, *relations})
        self.relations, self.heads = dict(relations), Heads()
        whole = [history for history, _ in self.pairs] + list(relations)
        self.relation_vectors = nn.Parameter(torch.randn(len(relations), dim) * dim**-0.5)
        self.extractors = nn.ModuleList(RelationAwareExtractor(dim) for _ in range(depth))
        self.units = nn.ModuleList(Attention(dim, attention_hidden, softmax=softmax) for _ in self.pairs)
        self.targets = tuple(dict.fromkeys(target for _, target in self.pairs))
        self.inputs = DenseInput(schema, self.read_whole(whole), for_products=True)
        width = self.inputs.width + dim * (len(self.targets) + len(self.pairs))
        self.deep = MLP(width, outputs=self.num_labels, **deep)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T].

        Raises:
            DataError: the nodes of an example have different numbers of neighbours by a relation.
        """
        targets = {target: self._extract(target, embeddings).values for target in self.targets}
        activated = [
            unit(targets[target], self._extract(history, embeddings))
            for unit, (history, target) in zip(self.units, self.pairs, strict=True)
        ]
        return self.deep(self.inputs(numeric, embeddings, *targets.values(), *activated))

    def _extract(self, feature: str, embeddings: Embeddings, level: int = 0) -> Jagged:
        """Returns the nodes of a feature with the information from their neighbours, which are extracted first."""
        nodes = embeddings.jagged(feature)
        neighbours = []
        for vector, (relation, heads) in zip(self.relation_vectors, self.relations.items(), strict=True):
            if heads == feature:
                tails = self._extract(relation, embeddings, level + 1)
                neighbours.append(
                    Neighbours(vector, tails.values, self.heads(feature, nodes, relation, tails))
                )
        if not neighbours:
            return nodes
        return nodes._replace(values=self.extractors[level](nodes.values, neighbours))


def _check_names(schema: Schema, relations: Mapping[str, str]) -> None:
    if not isinstance(relations, Mapping) or not relations:
        raise ConfigError(f"relations = {relations!r}: expected a table of neighbours = their nodes")
    sequences = [feature.name for feature in schema.sparse if isinstance(feature, Sequence)]
    for name in relations:
        if name not in sequences:
            raise ConfigError(f"relations: {name!r} is not a sequence feature{nearest(name, sequences)}")


def _depth(relations: Mapping[str, str], roots: set[str]) -> int:
    """Returns the number of layers between the farthest neighbours and a target or history."""
    for name in relations:
        if name in roots:
            raise ConfigError(
                f"relations: {name!r} is a history in attention; expected a sequence of neighbours"
            )
    depths = [len(_path(name, relations, roots)) for name in relations]
    return max(depths)


def _path(name: str, relations: Mapping[str, str], roots: set[str]) -> list[str]:
    """Returns the relations from some neighbours to a target or history."""
    path = [name]
    while (heads := relations[path[-1]]) not in roots:
        if heads not in relations:
            known = sorted({*roots, *relations})
            raise ConfigError(
                f"relations.{path[-1]} = {heads!r}: neither a target, a history nor neighbours{nearest(heads, known)}"
            )
        if heads in path:
            raise ConfigError(
                f"relations.{path[-1]} = {heads!r}: is a cycle; expected to end at a target or history"
            )
        path.append(heads)
    return path


class Neighbours(NamedTuple):
    """The neighbours by one relation.

    The relation's vector is float32[D]. The neighbours' vectors are float32[m, D]. The node of each neighbour is
    int64[m].
    """

    relation: Tensor
    values: Tensor
    nodes: Tensor


class RelationAwareExtractor(nn.Module):
    """x'_h = ReLU(W [x_h, Σ α(h, r, t) W_V [x_h, x_t]] + b), the sum over the neighbours (r, t) of h (after ATBRG).

    α(h, r, t) is the softmax over the neighbours of (W_Q x_r)ᵀ (W_K [x_h, x_t]) / √D: the relation is the query, and
    the pair of nodes is the key. The sum of a node without neighbours is 0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(dim)
        self.queries = nn.Linear(dim, dim, bias=False)
        self.keys = nn.Linear(2 * dim, dim, bias=False)
        self.values = nn.Linear(2 * dim, dim, bias=False)
        self.merge = nn.Linear(2 * dim, dim)

    def forward(self, nodes: Tensor, neighbours: Seq[Neighbours]) -> Tensor:
        """Maps float32[N, D] and the neighbours by each relation to float32[N, D]."""
        heads = torch.cat([each.nodes for each in neighbours])
        tails = torch.cat([each.values for each in neighbours])
        pairs = torch.cat([nodes.index_select(0, heads), tails], dim=1)
        wanted = self.queries(torch.stack([each.relation for each in neighbours]))
        wanted = torch.cat([row.expand(len(e.nodes), -1) for row, e in zip(wanted, neighbours, strict=True)])
        scores = (wanted * self.keys(pairs)).sum(dim=1).to(nodes.dtype) * self.scale
        weights = softmax_within(scores, heads, len(nodes))
        taken = torch.zeros_like(nodes).index_add(0, heads, weights[:, None] * self.values(pairs))
        return torch.relu(self.merge(torch.cat([nodes, taken], dim=1))).to(nodes.dtype)
