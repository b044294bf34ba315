"""The trainers meet at rank 0 before they form a group. Some groups are refused."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from girih.cluster.roles import LOOPBACK
from girih.comm.registry import Registry
from girih.errors import ConfigError, RoleError

PLAIN = (
    "messages of trainers on several hosts by gloo or NCCL cannot be encrypted; put all trainers on one host, or leave"
    " encrypt out and connect the hosts by a private network, for example a VPN (docs/security.md)"
)
_HELLO = "hello"
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GROUPS = itertools.count()  # groups of this process's trainers: the same number on all ranks of a script


class TorchStore(Protocol):
    """The part of torch's stores that girih uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


Share = Callable[[TorchStore, Mapping[str, str] | None], AbstractContextManager[Mapping[str, str]]]


def count_started(trainers: int, *, has_launcher: bool) -> int | None:
    """Returns the number of trainers that a launcher or torchrun started; None in a single process.

    Raises:
        ConfigError: another number than ``trainers``, if that is not 1.
    """
    if not has_launcher and not all(name in os.environ for name in RENDEZVOUS):
        if trainers > 1:
            raise ConfigError(
                f"strategy: trainers = {trainers}: this is one process; start the script by"
                f" torchrun --nproc-per-node={trainers}, or use girih train"
            )
        return None
    size = int(os.environ["WORLD_SIZE"])
    if trainers not in (1, size):
        raise ConfigError(
            f"strategy: trainers = {trainers}, but {size} were started; leave it out, or make them agree"
        )
    return size


def torchrun_store(size: int, bind: str, *, encrypt: bool) -> tuple[TorchStore, Share]:
    """Returns the store of torchrun's trainers, and the function that shares a secret through it.

    Raises:
        ConfigError: trainers on several hosts cannot reach each other, or only without encryption.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if bind == LOOPBACK and int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size:
        raise ConfigError(
            "trainers on several hosts listen where the others can reach them: set cluster.bind to the address of"
            ' each host, as bind = "${HOST_IP}"'
        )
    is_one_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size
    if encrypt and not is_one_host:
        raise ConfigError(f"cluster.encrypt = true, LOCAL_WORLD_SIZE is not {size}: {PLAIN}")
    store, _, _ = next(rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"girih/{life}/{next(_GROUPS)}"  # earlier trainers of a script left their keys
    return PrefixStore(prefix, store), share_privately if is_one_host else share_openly


@contextmanager
def share_openly(store: TorchStore, hello: Mapping[str, str] | None) -> Iterator[Mapping[str, str]]:
    """Sends ``hello`` through a store, which everybody who reaches it can read. With None, receives it."""
    if hello is not None:
        store.set(_HELLO, json.dumps(hello))
    yield hello or json.loads(store.get(_HELLO))


@contextmanager
def share_privately(store: TorchStore, hello: Mapping[str, str] | None) -> Iterator[Mapping[str, str]]:
    """Sends ``hello`` through a file that only this user can read. With None, receives it.

    The store has the path of the file. The file is removed after the body.

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
    """Returns loopback, the address for collectives of trainers on one host.

    Args:
        bind: the address of this trainer's host.

    Raises:
        ConfigError: the trainers are on several hosts.
    """
    keys = [f"bind/{each}" for each in range(size)]
    registry.set(keys[rank], bind)
    registry.wait(keys)
    hosts = sorted({registry.get(key) or "" for key in keys})
    if len(hosts) > 1:
        raise ConfigError(f"cluster.encrypt = true, trainers on {', '.join(hosts)}: {PLAIN}")
    return LOOPBACK
