"""How trainers learn what rank 0 has to say, and what is refused then."""

import os
import threading
from pathlib import Path

import pytest

from girih.cluster import rendezvous
from girih.cluster.cluster import Cluster
from girih.cluster.options import ClusterOptions
from girih.cluster.rendezvous import one_host, share_openly, share_privately
from girih.comm.registry import LocalRegistry
from girih.errors import ConfigError, RoleError

HELLO = {"registry": "tls://127.0.0.1:1", "secret": "of this run", "segments": "", "bind": "127.0.0.1"}


class Store(dict):
    """As torch's: anybody may read it."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


def test_a_store_that_anybody_reads_is_told_where_to_look_and_no_secret():
    store = Store()
    with share_privately(store, HELLO) as said:
        with share_privately(store, None) as heard:
            assert heard == said == HELLO
        (word,) = store.values()
        path = Path(word.decode())
        assert b"of this run" not in word
        assert path.stat().st_mode & 0o077 == 0
    assert not path.exists()


def test_a_file_of_another_user_is_not_believed(monkeypatch):
    store, user = Store(), os.geteuid()
    with share_privately(store, HELLO):
        monkeypatch.setattr(rendezvous.os, "geteuid", lambda: user + 1)
        with pytest.raises(RoleError, match="another user"), share_privately(store, None):
            pass


def test_between_hosts_the_store_tells_it_all():
    store = Store()
    with share_openly(store, HELLO) as said, share_openly(store, None) as heard:
        assert said == heard == HELLO


@pytest.mark.parametrize("binds", [("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.2")])
def test_trainers_on_several_hosts_are_refused_where_all_is_to_be_encrypted(binds):
    registry, found = LocalRegistry(), {}

    def meet(rank):
        try:
            found[rank] = one_host(registry, rank, 2, binds[rank])
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if binds[0] == binds[1]:
        assert found == {0: "127.0.0.1", 1: "127.0.0.1"}
    else:
        assert found[0] == found[1]
        assert "trainers on 10.0.0.1, 10.0.0.2: messages of trainers on several hosts by gloo" in found[0]


def test_torchrun_on_several_hosts_is_refused_before_anybody_meets(monkeypatch):
    words = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"encrypt = true, LOCAL_WORLD_SIZE is not 2: .* NCCL"):
        Cluster.join(options=ClusterOptions(bind="127.0.0.2", encrypt=True))


def test_addresses_say_whether_tls_goes_over_them():
    plain, secure = (Cluster.join(options=ClusterOptions(encrypt=encrypt)) for encrypt in (False, True))
    assert plain.address("loader", 0) == "tcp://127.0.0.1:*"
    assert secure.address("loader", 0) == "tls://127.0.0.1:*"
    for each in (plain, secure):
        each.close()
