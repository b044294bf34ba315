"""The dense net as a graph of operators: traced, rewritten, and split over a group's devices (HT §3.2.2, §4.1)."""

from __future__ import annotations

from girih.hierarchical.graph.partitioning import Exchange, Partitioned, ServerPart, partition
from girih.hierarchical.graph.splitting import fc_layers, split_as, split_fc
from girih.hierarchical.graph.tracing import CutParameter, TracedNet, trace

__all__ = [
    "CutParameter",
    "Exchange",
    "Partitioned",
    "ServerPart",
    "TracedNet",
    "fc_layers",
    "partition",
    "split_as",
    "split_fc",
    "trace",
]
