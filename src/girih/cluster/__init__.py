"""Roles as processes, and what starts them. Names are loaded on first use: the launcher imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from girih.cluster.cluster import Cluster
    from girih.cluster.hosts import Hosts, HostSpec
    from girih.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions", "HostSpec", "Hosts"]

_HOMES = {
    "Cluster": "cluster",
    "ClusterOptions": "options",
    "HostSpec": "hosts",
    "Hosts": "hosts",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"girih.cluster.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'girih.cluster' has no attribute {name!r}")
