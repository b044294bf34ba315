"""The workloads as their users write them in plain PyTorch: an ``nn.EmbeddingBag`` a feature, joined by ``torch.cat``.

Tables are static; ids are taken modulo their rows. Of the network everything is shared that a user would share: what is
joined once is read by all experts.

Shapes: B examples, L ids of a sequence, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.data import Batch
from girih.models.layers.mlp import MLP

TABLE_ROWS = 1000
Ids = dict[str, tuple[Tensor, Tensor]]
"""Feature → ids int64[·] and where each example's begin, int64[B]."""


class Plain:
    """A model, its two optimizers, and a step.

    Args:
        config: that of the workload, see ``picasso.config``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        features = config["features"]
        self.names = [feature["name"] for feature in features if feature["kind"] != "numeric"]
        numeric = len(features) - len(self.names)
        model, dims = config["model"], {f["name"]: f["dim"] for f in features if "dim" in f}
        networks = {"wide_deep": _WideDeep, "mmoe": _MMoE, "can": _CAN}
        self.network = networks[model["name"]](dims, numeric, len(config["labels"]["names"]), model)
        tables = [
            p for module in self.network.modules() if hasattr(module, "sparse") for p in module.parameters()
        ]
        others = {id(p) for p in tables}
        dense = [p for p in self.network.parameters() if id(p) not in others]
        self.optimizers = [torch.optim.Adagrad(tables, lr=0.01), torch.optim.Adam(dense, lr=1e-3, fused=True)]

    def prepare(self, batch: Batch) -> tuple[Ids, Tensor, Tensor]:
        """A batch in the form that a data loader would give it."""
        size, offsets, ids = (
            batch.num_examples,
            torch.from_numpy(batch.offsets).long(),
            torch.from_numpy(batch.ids),
        )
        found: Ids = {}
        for place, name in enumerate(self.names):
            begins = offsets[place * size : (place + 1) * size]
            end = offsets[(place + 1) * size]
            found[name] = (ids[begins[0] : end] % TABLE_ROWS, begins - begins[0])
        return found, torch.from_numpy(batch.numeric), torch.from_numpy(batch.labels)

    def step(self, prepared: tuple[Ids, Tensor, Tensor]) -> None:
        """Forward, backward, update."""
        ids, numeric, labels = prepared
        loss = F.binary_cross_entropy_with_logits(self.network(ids, numeric), labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class _Bags(nn.Module):
    """A table for each feature; bags of all of them side by side, and the numbers."""

    def __init__(self, dims: Mapping[str, int], numeric: int, mode: str = "mean") -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(TABLE_ROWS, dim, mode=mode, sparse=True) for name, dim in dims.items()}
        )
        self.width = sum(dims.values()) + numeric

    def forward(self, ids: Ids, *more: Tensor) -> Tensor:
        return torch.cat([*(bag(*ids[name]) for name, bag in self.bags.items()), *more], dim=1)


class _WideDeep(nn.Module):
    def __init__(self, dims: Mapping[str, int], numeric: int, labels: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.bags, self.wide = _Bags(dims, numeric), _Bags(dict.fromkeys(dims, 1), 0)
        self.wide_numeric = nn.Linear(numeric, labels)
        self.deep = MLP(self.bags.width, tuple(model["hidden"]), labels)

    def forward(self, ids: Ids, numeric: Tensor) -> Tensor:
        wide = self.wide(ids).sum(dim=1, keepdim=True) + self.wide_numeric(numeric)
        deep: Tensor = self.deep(self.bags(ids, numeric))
        return wide + deep


class _MMoE(nn.Module):
    def __init__(self, dims: Mapping[str, int], numeric: int, labels: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.bags, self.labels = _Bags(dims, numeric), labels
        width, hidden, count = self.bags.width, tuple(model["expert_hidden"]), model["num_experts"]
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(count))
        self.gates = nn.Linear(width, labels * count, bias=False)
        self.towers = nn.ModuleList(MLP(hidden[-1], tuple(model["tower_hidden"]), 1) for _ in range(labels))

    def forward(self, ids: Ids, numeric: Tensor) -> Tensor:
        x = self.bags(ids, numeric)
        opinions = torch.stack([expert(x) for expert in self.experts], dim=1)
        gates = self.gates(x).view(len(x), self.labels, -1).softmax(dim=2)
        mixed = torch.bmm(gates, opinions)
        return torch.cat([tower(mixed[:, label]) for label, tower in enumerate(self.towers)], dim=1)


class _CAN(nn.Module):
    def __init__(self, dims: Mapping[str, int], numeric: int, labels: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.co_action: Mapping[str, Sequence[str]] = model["co_action"]
        in_units = {name for item, feeds in self.co_action.items() for name in (item, *feeds)}
        self.bags = _Bags({name: dim for name, dim in dims.items() if name not in in_units}, numeric)
        self.own = nn.ModuleDict(
            {name: nn.Embedding(TABLE_ROWS, dims[name], sparse=True) for name in sorted(in_units)}
        )
        layers, width = tuple(model["unit_layers"]), self.bags.width
        self.orders = model.get("orders", 3)
        self.shapes = {
            item: tuple(pairwise((dims[feeds[0]], *layers))) for item, feeds in self.co_action.items()
        }
        width += sum(len(feeds) for feeds in self.co_action.values()) * self.orders * sum(layers)
        self.deep = MLP(width, tuple(model["hidden"]), labels)

    def forward(self, ids: Ids, numeric: Tensor) -> Tensor:
        found = []
        for item, feeds in self.co_action.items():
            parameters = self.own[item](ids[item][0])
            for name in feeds:
                feed = self.own[name](ids[name][0]).unflatten(0, (len(parameters), -1))  # [B, L, D]
                found.append(self._unit(parameters, feed, self.shapes[item]).sum(dim=1))
        logits: Tensor = self.deep(self.bags(ids, numeric, *found))
        return logits

    def _unit(self, parameters: Tensor, feed: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """float32[B, ·] and float32[B, L, D] to all layers' outputs for each order, side by side."""
        sizes = [size for inputs, outputs in shapes for size in (inputs * outputs, outputs)]
        pieces = parameters.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        layers = list(zip(pieces[::2], pieces[1::2], shapes, strict=True))
        found = []
        for order in range(self.orders):
            h = feed ** (order + 1)
            for number, (weight, bias, shape) in enumerate(layers, start=1):
                h = torch.baddbmm(bias[:, None], h, weight.unflatten(1, shape))
                h = h.tanh() if number < len(layers) else h
                found.append(h)
        return torch.cat(found, dim=2)
