"""The ways in which trainers learn what rank 0 has to say before they form a group, and what is refused then."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from girih.cluster.roles import LOOPBACK
from girih.comm.registry import Registry
from girih.errors import ConfigError, RoleError

PLAIN = (
    "what trainers on several hosts send each other by gloo or NCCL cannot be encrypted; put all trainers on one host, or leave"
    " encrypt out and connect the hosts by a network that nobody else reaches, as a VPN (docs/security.md)"
)
_HELLO = "hello"


class TorchStore(Protocol):
    """The part of torch's stores that is used here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


@contextmanager
def telling_openly(store: TorchStore, hello: Mapping[str, str] | None) -> Iterator[Mapping[str, str]]:
    """Tells by a store, which whoever reaches it may read; None hears what another told."""
    if hello is not None:
        store.set(_HELLO, json.dumps(hello))
    yield hello or json.loads(store.get(_HELLO))


@contextmanager
def telling_privately(store: TorchStore, hello: Mapping[str, str] | None) -> Iterator[Mapping[str, str]]:
    """Tells by a file that this user alone reads, and that is gone with the body; the store says which.

    Raises:
        RoleError: the file is another user's.
    """
    if hello is None:
        path = store.get(_HELLO).decode()
        with open(path) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise RoleError(f"{path}: a file of another user; who else reaches torchrun's MASTER_PORT?")
            hello = json.load(file)
        yield hello or {}
        return
    with tempfile.NamedTemporaryFile("w", prefix="girih-") as file:
        json.dump(hello, file)
        file.flush()
        store.set(_HELLO, file.name)
        yield hello


def one_host(registry: Registry, rank: int, size: int, bind: str) -> str:
    """The address at which collectives of trainers listen for each other, all of whom are on one host: loopback.

    Args:
        bind: the address at which this trainer's host is reached.

    Raises:
        ConfigError: they are on several.
    """
    keys = [f"bind/{each}" for each in range(size)]
    registry.set(keys[rank], bind)
    registry.wait(keys)
    hosts = sorted({registry.get(key) or "" for key in keys})
    if len(hosts) > 1:
        raise ConfigError(f"cluster.encrypt = true, trainers on {', '.join(hosts)}: {PLAIN}")
    return LOOPBACK
