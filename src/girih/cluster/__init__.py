"""Roles as processes, and what starts them."""

from __future__ import annotations

from girih.cluster.cluster import STARTED_BY_GIRIH, Cluster, end_with_parent
from girih.cluster.hosts import Hosts, HostSpec

__all__ = [
    "STARTED_BY_GIRIH",
    "Cluster",
    "HostSpec",
    "Hosts",
    "end_with_parent",
]
