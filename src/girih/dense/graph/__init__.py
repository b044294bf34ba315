"""The dense net as a graph of operators: traced, rewritten, and taken apart for the devices of a group (HT §3.2.2, §4.1)."""

from __future__ import annotations

from girih.dense.graph.partitioning import Exchange, Partitioned, ServerPart, partition
from girih.dense.graph.splitting import fc_layers, split_as, split_fc
from girih.dense.graph.traced import CutParameter, TracedNet
from girih.dense.graph.tracing import trace

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
