"""The registry of a run: one small key-value service that says where roles listen and carries the run's notes.

It holds text. ``role/<role>/<index>`` maps to where that process listens and which life of it this is; trainers find
each other through it (:mod:`girih.comm.group`) and leave notes about stops and saves in it.

On the wire: frames of JSON, each behind its length. The server begins with a challenge; whoever cannot prove that it
knows the run's secret within five seconds is dropped before anything else it says is read. The secret itself is
never sent, and the server proves that it knows it, too.
"""

from __future__ import annotations

from girih.comm.registry.client import RemoteRegistry
from girih.comm.registry.entries import (
    WAIT_S,
    Entry,
    LocalRegistry,
    Registry,
    key_of,
    register,
    resolve,
    resolver,
)
from girih.comm.registry.server import RegistryServer

__all__ = [
    "WAIT_S",
    "Entry",
    "LocalRegistry",
    "Registry",
    "RegistryServer",
    "RemoteRegistry",
    "key_of",
    "register",
    "resolve",
    "resolver",
]
