"""The registry of a run: what it keeps, who may ask it, and what becomes of those who wait."""

import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from girih.comm import registry as entries
from girih.comm.registry import (
    Entry,
    LocalRegistry,
    RegistryServer,
    find,
    register,
    resolver,
)
from girih.comm.registry import remote as remote_module
from girih.comm.registry.remote import RemoteRegistry
from girih.comm.rpc import server as server_module
from girih.errors import WireError, WireTimeout
from support.transport_ends import until

SECRET = b"of this run"


@pytest.fixture
def server():
    server = RegistryServer(LocalRegistry(), SECRET)
    yield server
    server.close()


@pytest.fixture
def remote(server):
    remote = RemoteRegistry(server.address, SECRET)
    yield remote
    remote.close()


@pytest.fixture(params=["local", "remote"])
def registry(request, server, remote):
    return server.registry if request.param == "local" else remote


def test_keys_are_set_read_compared_counted_and_deleted(registry):
    assert registry.get("a") is None
    assert not registry.check(["a"])
    registry.set("a", "ü\0")
    assert registry.get("a") == "ü\0"
    assert registry.check(["a"])
    assert not registry.check(["a", "b"])
    assert [registry.add("n", 2), registry.add("n", -3)] == [2, -1]
    assert registry.compare_set("a", "other", "new") == "ü\0"
    assert registry.compare_set("a", "ü\0", "new") == "new" == registry.get("a")
    assert registry.compare_set("b", "", "first") == "first" == registry.get("b")
    assert registry.compare_set("c", "expected", "x") == "expected"
    assert registry.get("c") is None
    assert [registry.delete("a"), registry.delete("a")] == [True, False]


def test_a_key_is_waited_for_and_not_for_ever(registry, server):
    threading.Timer(0.3, server.registry.set, ("late", "x")).start()
    registry.wait(["late"], 20)
    registry.wait(["late"], 0)
    with pytest.raises(WireTimeout, match="never: not in the registry"):
        registry.wait(["late", "never"], 0.12)


def test_one_thread_that_waits_does_not_hold_up_the_others(remote):
    waiting = threading.Thread(target=remote.wait, args=(["late"], 20))
    waiting.start()
    time.sleep(0.1)
    remote.set("other", "x")
    assert remote.get("other") == "x"
    remote.set("late", "x")
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_role_is_found_again_in_its_next_life(registry):
    register(registry, "loader", 1, Entry("tcp://127.0.0.1:1"))
    assert find(registry, "loader", 1) == Entry("tcp://127.0.0.1:1", 0)
    register(registry, "loader", 1, Entry("tcp://127.0.0.1:2", 1, 77, "left"))
    assert find(registry, "loader", 1) == Entry("tcp://127.0.0.1:2", 1, 77, "left")
    assert resolver(registry, "loader", 1)() == "tcp://127.0.0.1:2"
    with pytest.raises(LookupError, match="loader 0"):
        resolver(registry, "loader", 0)()
    assert find(registry, "loader", 0) is None


def test_it_travels_to_other_processes(remote):
    remote.set("a", "1")
    other = pickle.loads(pickle.dumps(remote))
    assert other.get("a") == "1"
    other.close()


def refused(server):
    return getattr(getattr(server, "_server", None), "num_refused", 0)


def test_whoever_does_not_know_the_secret_is_refused(server, monkeypatch):
    monkeypatch.setattr(remote_module, "PATIENCE_S", 0.3)
    stranger = RemoteRegistry(server.address, b"of another run")
    with pytest.raises(WireError, match="does it have the same secret"):
        stranger.get("a")
    assert refused(server)
    stranger.close()


@pytest.mark.parametrize("said", [b"", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_who_prove_nothing_are_dropped_in_time_and_leave_room(server, said, monkeypatch):
    monkeypatch.setattr(server_module, "_STRANGER_S", 0.2)
    host, port = server.address.removeprefix("tcp://").split(":")
    crowd = [socket.create_connection((host, int(port)), 10) for _ in range(20)]
    remote = RemoteRegistry(server.address, SECRET)
    try:
        for stranger in crowd:
            stranger.sendall(said)
        remote.set("a", "1")
        assert remote.get("a") == "1"
        for stranger in crowd:
            with suppress(ConnectionResetError):
                while stranger.recv(1 << 10):  # its challenge, and then the end
                    pass
        until(lambda: refused(server) == len(crowd))
    finally:
        remote.close()
        for stranger in crowd:
            stranger.close()


@pytest.mark.parametrize("asked", [["close"], ["__init__"], ["get"]])
def test_what_is_not_asked_of_a_registry_fails_and_ends_nothing(remote, asked):
    with pytest.raises(WireError, match="the registry cannot be reached, or failed: "):
        remote.ask(*asked)
    remote.set("a", "1")
    assert remote.get("a") == "1"


def test_a_host_that_cannot_be_listened_at_is_told():
    with pytest.raises(WireError, match=r"cannot listen at .*; set cluster.bind to an address of this host"):
        RegistryServer(LocalRegistry(), SECRET, "192.0.2.1")


def test_nobody_waits_for_a_process_that_is_gone(server, monkeypatch):
    monkeypatch.setattr(server_module, "_SESSION_S", 0.5)
    words = (
        "import sys; from girih.comm.registry.remote import RemoteRegistry;"
        "RemoteRegistry(sys.argv[1], b'of this run').wait(['never'], 3600)"
    )
    with subprocess.Popen([sys.executable, "-c", words, server.address]) as waiting:
        until(lambda: server.registry.entries._waits, 30)
        waiting.kill()
    until(lambda: not server.registry.entries._waits, 20)
    server.registry.set("never", "x")
    assert server.registry.get("never") == "x"


def test_who_waits_learns_that_the_registry_is_gone(server, remote):
    raised = []

    def wait():
        try:
            remote.wait(["never"], 60)
        except WireError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    server.close()
    thread.join(10)
    assert raised
    began = time.monotonic()
    with pytest.raises(WireError, match="cannot be reached"):
        remote.get("a")
    assert time.monotonic() - began < 2


def test_who_only_offers_it_listens_before_numpy_is_loaded():
    code = "import sys; from girih.comm.registry import RegistryServer; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_could_not_open_closes_all_the_same(monkeypatch):
    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(remote_module, "serve", fails)
    server = RegistryServer(LocalRegistry(), SECRET)
    server.close()
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)


@pytest.mark.parametrize(
    ("key", "value"), [("k" * 1025, "v"), ("k", 1), (1, "v"), ("k", "v" * 65), ("third", "v")]
)
def test_it_keeps_texts_and_so_many(registry, monkeypatch, key, value):
    monkeypatch.setattr(entries, "MOST_KEYS", 2)
    monkeypatch.setattr(entries, "MOST_CHARACTERS", 64)
    for name in ("k", "other"):
        registry.set(name, "v")
    with pytest.raises(WireError, match=r"expected|is full"):
        registry.set(key, value)
    assert registry.get("k") == "v"
    assert registry.delete("other")
    registry.set("n" * 10, "v" * 50)
