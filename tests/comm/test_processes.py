"""Other processes that die, strangers that talk, and what is left behind."""

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from girih.comm.rpc import connect, listen
from girih.comm.rpc import server as server_module
from girih.comm.transports import lanes
from girih.comm.transports import socket_server as sockets_module
from girih.comm.transports.streams import laid_out
from girih.errors import WireError, WireTimeout

SECRET = b"of this run"
SERVER = """
import sys, threading
from girih.comm.rpc import listen
server = listen(lambda r: r.reply(r.frame.fields, r.frame.arrays), address=sys.argv[1], secret=b"of this run")
print(server.address, flush=True)
threading.Event().wait()
"""
SLOW_SERVER = """
import sys, threading
from girih.comm.rpc import listen
server = listen(lambda r: r.frame.kind or r.reply(), address=sys.argv[1], secret=b"of this run")
print(server.address, flush=True)
threading.Event().wait()
"""
CLIENT = """
import sys, threading
import numpy as np
from girih.comm.rpc import connect
client = connect(sys.argv[1], secret=b"of this run")
held = client.call(1, (), (np.zeros(100_000),)).wait(10)
print("there", flush=True)
threading.Event().wait()
"""


def left_behind(*processes):
    """Files of these processes; others may run beside."""
    folders = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return {
        path
        for folder in folders
        if folder.is_dir()
        for pid in processes
        for path in folder.glob(f"girih-{pid}-*")
    }


def message(*parts):
    return b"".join(laid_out([np.frombuffer(part, np.uint8) for part in parts]))


def ended(connection):
    connection.settimeout(10)
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.005)


@pytest.fixture
def child():
    started = []

    def start(code, address):
        process = subprocess.Popen(
            [sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_killed_server_is_a_timeout_and_leaves_nothing(child, address):
    process, address = child(SERVER, address)
    with connect(address, secret=SECRET, timeout_s=0.1, retries=1) as client:
        array = np.arange(100_000)
        (got,) = client.call(3, (1,), (array,), timeout_s=10).wait(10).arrays
        assert not left_behind(os.getpid(), process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(WireTimeout, match="kind 3: no answer after 2 tries"):
            client.call(3, (2,), (array,)).wait(10)
    np.testing.assert_array_equal(got, array)
    assert not left_behind(os.getpid(), process.pid)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_killed_server_is_noticed_long_before_the_timeout(child, address):
    process, address = child(SLOW_SERVER, address)
    with connect(address, secret=SECRET) as client:
        client.call(0, (1,)).wait(10)
        calls = [client.call(1, (n,), (np.zeros(200_000),)) for n in range(3)]
        client.call(0).wait(10)
        waiting = threading.Thread(target=calls[0]._done.wait, args=(10,))
        waiting.start()
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        for call in calls:
            with pytest.raises(WireTimeout, match="kind 1: the connection was lost, and nobody listens"):
                call.wait(10)
        assert time.monotonic() - began < 1.5
        waiting.join()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(WireTimeout, match="nobody listens there any more"):
                client.call(0).wait(10)
            assert time.monotonic() - began < 0.5


def test_a_server_that_comes_back_is_found_again():
    with listen(lambda r: r.reply(r.frame.fields), secret=SECRET) as server:
        address = server.address
        client = connect(address, secret=SECRET, timeout_s=1.0)
        assert client.call(0, (1,)).wait(10).fields == (1,)
    with client:
        call = client.call(0, (2,))
        with listen(lambda r: r.reply(r.frame.fields), address=address, secret=SECRET):
            assert call.wait(10).fields == (2,)
            assert client.call(0, (3,)).wait(10).fields == (3,)


def test_a_server_that_comes_late():
    with socket.create_server(("127.0.0.1", 0)) as drawn:
        address = f"tcp://127.0.0.1:{drawn.getsockname()[1]}"
    with connect(address, secret=SECRET) as client:
        call = client.call(0, (1,), (np.arange(100_000),))
        time.sleep(0.3)
        assert not call.done()
        with listen(lambda r: r.reply(r.frame.fields, r.frame.arrays), address=address, secret=SECRET):
            assert len(call.wait(5).arrays[0]) == 100_000


def test_a_killed_client_of_tcp_is_forgotten(child, monkeypatch):
    monkeypatch.setattr(server_module, "_TIDY_S", 0.02)
    monkeypatch.setattr(sockets_module, "_LOST_S", 0.1)
    with listen(lambda r: r.reply((), r.frame.arrays), secret=SECRET) as server:
        process, said = child(CLIENT, server.address)
        assert said == "there"
        assert len(server._clients) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not server._clients)
        assert not server._channel._trusted
        assert not server._channel._lost_s


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://", "inproc://*"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_fails_raises_at_all_replies(address, waits, monkeypatch):
    held = queue.Queue()
    with listen(held.put, address=address, secret=SECRET) as server:
        client = connect(server.address, secret=SECRET)
        calls = [client.call(n) for n in range(3)]
        requests = [held.get(timeout=10) for _ in calls]

        def fail():
            raise RuntimeError("of this test")

        monkeypatch.setattr(client._channel, "receive", fail)
        if waits:
            timer = threading.Timer(0.05, requests[1].reply)
            timer.start()
        else:
            requests[1].reply()
            until(lambda: calls[0].done())
        for call in calls:
            with pytest.raises(WireError, match="closed on this side: RuntimeError"):
                call.wait(10)
        with pytest.raises(WireError, match="closed on this side"):
            client.call(0)
        client.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_server_that_fails_closes_and_its_clients_notice(address, monkeypatch, caplog):
    held = queue.Queue()
    server = listen(held.put, address=address, secret=SECRET)
    with connect(server.address, secret=SECRET) as client:
        call = client.call(1)
        request = held.get(timeout=10)

        def fail(*_):
            raise RuntimeError("of this test")

        monkeypatch.setattr(server, "_heard", fail)
        other = client.call(2)
        for each in (call, other):
            with pytest.raises(WireTimeout, match="nobody listens"):
                each.wait(10)
        request.reply()  # to nobody
    server.close()
    assert "the server failed and is closed" in caplog.text


def test_a_killed_client_is_forgotten_and_leaves_nothing(child, monkeypatch):
    monkeypatch.setattr(server_module, "_TIDY_S", 0.02)
    with listen(lambda r: r.reply((), r.frame.arrays), address="shm://", secret=SECRET) as server:
        process, said = child(CLIENT, server.address)
        assert said == "there"
        assert len(server._clients) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not server._clients)
    assert not left_behind(os.getpid(), process.pid)


def test_a_client_that_closes_is_forgotten():
    with listen(lambda r: r.reply(), secret=SECRET) as server:
        with connect(server.address, secret=SECRET) as client:
            client.call(0).wait(10)
            assert len(server._clients) == 1
        until(lambda: not server._clients)


def test_shared_memory_that_nobody_accepts_goes_with_the_client():
    with (
        listen(lambda r: r.reply(), address="shm://", secret=SECRET) as server,
        connect(server.address, secret=b"guessed", timeout_s=0.02, retries=0) as client,
        pytest.raises(WireTimeout),
    ):
        client.call(0).wait(10)
    assert not left_behind(os.getpid())


def test_garbage_from_strangers_is_counted_and_harmless():
    rng = np.random.default_rng(0)
    with listen(lambda r: r.reply(r.frame.fields), secret=SECRET) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        place = (host, int(port))
        with socket.create_connection(place) as stranger:
            stranger.sendall(rng.bytes(5000))
            assert ended(stranger)
        until(lambda: server.num_damaged == 1)
        with socket.create_connection(place) as huge:  # a name, then more than a stranger may send
            huge.sendall(message(bytes(16)) + struct.pack("<4sIQ", b"GRM1", 1, 1 << 62) + rng.bytes(100_000))
            until(lambda: server.num_damaged == 2)
            assert not server._clients
        with socket.create_connection(place) as nameless:
            nameless.sendall(message(bytes(17)))
            assert ended(nameless)
        with socket.create_connection(place) as crowd:
            crowd.sendall(message(bytes(16)) + struct.pack("<4sI", b"GRM1", 1 << 31))
            assert ended(crowd)
        with socket.create_connection(place) as speaker:  # speaks messages, but no frames
            speaker.sendall(message(bytes(16)))
            for size in (0, 1, 100, 10_000):
                speaker.sendall(message(rng.bytes(size), b"", rng.bytes(7)))
            until(lambda: server.num_damaged + server.num_refused >= 8)
        with connect(server.address, secret=SECRET) as client:
            assert client.call(1, (5,)).wait(10).fields == (5,)


def test_files_and_threads_are_closed():
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    threads = threading.active_count()
    for address in ("tcp://127.0.0.1:*", "shm://", "inproc://*"):
        for _ in range(3):
            with listen(lambda r: r.reply(), address=address, secret=SECRET) as server:
                for _ in range(3):
                    with connect(server.address, secret=SECRET) as client:
                        client.call(0, (), (np.zeros(100_000),)).wait(10)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() == threads


class TestLanes:
    @pytest.fixture
    def lane(self):
        made = lanes.LaneFile.make(1 << 20)
        other = lanes.LaneFile.open(made.name)
        made.unlink()
        outward, inward = lanes.OutLane(made), lanes.InLane(other)
        yield outward, inward
        outward.close()
        inward.close()

    def test_room_comes_back_in_any_order(self, lane):
        outward, inward = lane
        rng = np.random.default_rng(0)
        views = []
        for n in range(500):
            part = np.full(int(rng.integers(1 << 14, 1 << 17)), n % 251, np.uint8)
            sent = outward.send(part)
            while sent is None:
                del views[int(rng.integers(len(views)))]
                sent = outward.send(part)
            views.append((n % 251, inward.view(*sent, len(part))))
            for value, view in views:
                assert view[0] == view[-1] == value
        del views, view
        assert outward.send(np.zeros(1 << 20, np.uint8)) is not None

    def test_room_stays_while_either_side_sees_it(self, lane):
        outward, inward = lane
        array = outward.buffer(np.dtype(np.int64), (1 << 16,), 1 << 19)
        array[:] = 5
        sent = outward.send(array[8:].view(np.uint8))
        part = inward.view(*sent, (1 << 19) - 64)[100:]
        assert (part[4:].view(np.int64) == 5).all()
        del array
        assert outward.buffer(np.dtype(np.int64), (1 << 16,), 1 << 19) is not None
        assert outward.send(np.zeros((1 << 19) + 1, np.uint8)) is None
        del part
        assert outward.send(np.zeros((1 << 19) + 1, np.uint8)) is not None

    def test_memory_that_the_system_refuses_is_no_room(self, lane, monkeypatch):
        def refuse(*_):
            raise OSError("full")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert lane[0].send(np.zeros(1 << 16, np.uint8)) is None
        assert lane[0].buffer(np.dtype(np.int8), (1 << 16,), 1 << 16) is None

    @pytest.mark.parametrize("name", ["../etc/passwd", "girih-", "girih-1-" + "0" * 31 + "/", ""])
    def test_names_of_other_files_are_refused(self, name):
        with pytest.raises(OSError, match="no lane's name"):
            lanes.LaneFile.open(name)
