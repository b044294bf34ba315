"""The registry of a run: what it keeps, who may ask it, and what becomes of those who wait."""

import pickle
import socket
import threading
import time
from contextlib import suppress

import pytest

from girih.comm.registry import (
    Entry,
    LocalRegistry,
    RegistryServer,
    RemoteRegistry,
    frames,
    register,
    resolve,
    resolver,
)
from girih.comm.registry import client as client_module
from girih.errors import WireError, WireTimeout

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


def test_a_key_is_waited_for_and_not_for_ever(registry, server, monkeypatch):
    monkeypatch.setattr(client_module, "_ONE_WAIT_S", 0.05)
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
    assert resolve(registry, "loader", 1) == Entry("tcp://127.0.0.1:1", 0)
    register(registry, "loader", 1, Entry("tcp://127.0.0.1:2", 1, 77, "left"))
    assert resolve(registry, "loader", 1) == Entry("tcp://127.0.0.1:2", 1, 77, "left")
    assert resolver(registry, "loader", 1)() == "tcp://127.0.0.1:2"
    with pytest.raises(LookupError, match="loader 0"):
        resolver(registry, "loader", 0)()
    with pytest.raises(WireTimeout, match="role/loader/0"):
        resolve(registry, "loader", 0, 0.05)


def test_it_travels_to_other_processes(remote):
    remote.set("a", "1")
    other = pickle.loads(pickle.dumps(remote))
    assert other.get("a") == "1"
    other.close()


def test_whoever_does_not_know_the_secret_is_refused(server):
    stranger = RemoteRegistry(server.address, b"of another run")
    with pytest.raises(WireError, match="no proof of the run's secret"):
        stranger.get("a")
    assert server.num_refused == 1


@pytest.mark.parametrize(
    "said", [b"", b"\xff\xff\xff\xff", b"\0\0\0\2{}", b"\0\0\0\4null", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_stranger_who_proves_nothing_is_dropped_in_time(server, said):
    server._proof_s = 0.2
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(said)
        start = time.monotonic()
        with suppress(ConnectionResetError):
            while connection.recv(1 << 10):  # its challenge, and then the end
                pass
        assert time.monotonic() - start < 5
    deadline = time.monotonic() + 5
    while server.num_refused != 1:
        assert time.monotonic() < deadline


def test_strangers_that_dribble_and_too_many_of_them_leave_room_for_who_belongs_here(server):
    server._proof_s = 0.5
    host, port = server.address.split(":")
    strangers = [socket.create_connection((host, int(port)), 10) for _ in range(100)]
    try:
        for stranger in strangers:
            stranger.sendall(b"\0")
        remote = RemoteRegistry(server.address, SECRET)
        remote.set("a", "1")
        assert remote.get("a") == "1"
        remote.close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_client_that_would_give_the_secret_to_an_impostor_gives_nothing():
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            with connection:
                frames.send(connection, {"challenge": "00"})
                heard.append(frames.receive(connection, 1 << 10))
                frames.send(connection, {"proof": "00"})

        thread = threading.Thread(target=pretend)
        thread.start()
        remote = RemoteRegistry(f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
        with pytest.raises(WireError, match="it does not know the secret"):
            remote.set("a", "1")
        thread.join(10)
    assert SECRET.decode() not in str(heard)


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
    with pytest.raises(WireError, match="cannot be reached"):
        RemoteRegistry(server.address, SECRET).get("a")
