"""The registry of a run: one small key-value service that says where roles listen and carries the run's notes.

It holds text. ``role/<role>/<index>`` maps to where that process listens and which life of it this is; trainers find
each other through it (:mod:`girih.comm.group`) and leave notes about stops and saves in it.

:class:`LocalRegistry` is the registry itself, :class:`RegistryServer` offers it to other processes, which have a
:class:`girih.comm.registry.remote.RemoteRegistry`. Between them go calls of :mod:`girih.comm.rpc`.
"""

from __future__ import annotations

from girih.comm.registry.entries import (
    WAIT_S,
    Entry,
    LocalRegistry,
    Registry,
    find,
    key_of,
    register,
    resolver,
)
from girih.comm.registry.server import RegistryServer

__all__ = [
    "WAIT_S",
    "Entry",
    "LocalRegistry",
    "Registry",
    "RegistryServer",
    "find",
    "key_of",
    "register",
    "resolver",
]
