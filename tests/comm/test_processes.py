"""Other processes that die, and what is left behind."""

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from girih.comm import service
from girih.comm.rpc import server as server_module
from girih.comm.service import connect, listen
from girih.comm.transports import shared_memory
from girih.comm.transports.addresses import parse_address
from girih.comm.transports.shared_memory import LaneFile
from girih.comm.transports.sockets import SocketListener
from girih.errors import Lost, WireError, WireTimeout
from support import inproc
from support.transport_ends import until

SECRET = b"of this run"
SERVER = """
import sys, threading
from girih.comm.service import listen
server = listen(lambda r: r.reply(r.frame.fields, r.frame.arrays), address=sys.argv[1], secret=b"of this run")
print(server.address, flush=True)
threading.Event().wait()
"""
SLOW_SERVER = """
import sys, threading
from girih.comm.service import listen
server = listen(lambda r: r.frame.kind or r.reply(), address=sys.argv[1], secret=b"of this run")
print(server.address, flush=True)
threading.Event().wait()
"""
CLIENT = """
import sys, threading
import numpy as np
from girih.comm.service import connect
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
    with connect(address, secret=SECRET) as client:
        array = np.arange(100_000)
        (got,) = client.call(3, (1,), (array,)).wait(10).arrays
        assert not left_behind(os.getpid(), process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(WireTimeout, match="kind 3: the connection was lost, and no process listens"):
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
        waiting = threading.Thread(target=calls[0].exception, args=(10,))
        waiting.start()
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        for call in calls:
            with pytest.raises(WireTimeout, match="kind 1: the connection was lost, and no process listens"):
                call.wait(10)
        assert time.monotonic() - began < 1.5
        waiting.join()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(WireTimeout, match="no process listens at the address any more"):
                client.call(0).wait(10)
            assert time.monotonic() - began < 0.5


def test_a_server_that_comes_back_is_found_again():
    with listen(lambda r: r.reply(r.frame.fields), secret=SECRET) as server:
        address = server.address
        client = connect(address, secret=SECRET)
        assert client.call(0, (1,)).wait(10).fields == (1,)
    with client:
        until(lambda: client._session.connection is None)
        call = client.call(0, (2,))
        with listen(lambda r: r.reply(r.frame.fields), address=address, secret=SECRET):
            assert call.wait(10).fields == (2,)
            assert client.call(0, (3,)).wait(10).fields == (3,)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_what_a_killed_server_took_along_is_lost_and_its_next_life_is_found_elsewhere(child, address):
    process, first = child(SLOW_SERVER, address)
    found = []

    def resolve():
        if not found:
            raise LookupError("not yet")
        return found[0]

    with connect(first, secret=SECRET, resolve=resolve) as client:
        client.call(0).wait(10)
        calls = [client.call(1, (n,), (np.zeros(200_000),)) for n in range(3)]
        client.call(0).wait(10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.7)
        assert not any(call.done() for call in calls)  # it may come back
        found.append(child(SLOW_SERVER, address)[1])
        for call in calls:
            with pytest.raises(Lost, match="restarted"):
                call.wait(10)
        client.call(0).wait(10)
        assert client.num_lost == 3


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
    monkeypatch.setattr(server_module, "_SESSION_S", 0.1)
    with listen(lambda r: r.reply((), r.frame.arrays), secret=SECRET) as server:
        process, said = child(CLIENT, server.address)
        assert said == "there"
        assert len(server._peers) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not server._peers)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://", "inproc://*"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_fails_raises_at_all_replies(address, waits, monkeypatch):
    held = queue.Queue()
    ends = inproc if address.startswith("inproc") else service
    with ends.listen(held.put, address=address, secret=SECRET) as server:
        client = ends.connect(server.address, secret=SECRET)
        calls = [client.call(n) for n in range(3)]
        requests = [held.get(timeout=10) for _ in calls]

        def fail(header, frame):
            raise RuntimeError("of this test")

        monkeypatch.setattr(
            client, "_handle_message", fail
        )  # behind "receive", which the thread may be in already
        if waits:
            timer = threading.Timer(0.05, requests[1].reply)
            timer.start()
        else:
            requests[1].reply()
            until(calls[0].done)
        for call in calls:
            with pytest.raises(WireError, match="closed on this side: RuntimeError"):
                call.wait(10)
        with pytest.raises(WireError, match="closed on this side"):
            client.call(0)
        client.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
@pytest.mark.parametrize("amid_a_message", [False, True])
def test_a_signal_that_interrupts_a_waiting_thread_loses_no_reply(address, amid_a_message, monkeypatch):
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    held = queue.Queue()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with (
            listen(held.put, address=address, secret=SECRET) as server,
            connect(server.address, secret=SECRET) as client,
        ):
            calls = [client.call(n) for n in range(3)]
            requests = [held.get(timeout=10) for _ in calls]
            if amid_a_message:
                receive = type(client._session.connection).receive

                def interrupted(connection):
                    if threading.current_thread() is threading.main_thread() and not client.num_reconnects:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    return receive(connection)

                monkeypatch.setattr(type(client._session.connection), "receive", interrupted)
                threading.Timer(0.05, requests[0].reply).start()
            else:
                threading.Timer(
                    0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
                ).start()
            with pytest.raises(Interrupt):
                calls[0].wait(10)
            for request in requests[amid_a_message:]:
                request.reply((request.frame.kind,))
            for call in calls:
                call.wait(10)
            assert client.num_reconnects == amid_a_message
            assert client.num_lost == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_client_that_is_closed_ends_the_wait_of_another_thread(address):
    held = queue.Queue()
    with listen(held.put, address=address, secret=SECRET) as server:
        client = connect(server.address, secret=SECRET)
        call = client.call(1)
        held.get(timeout=10)
        threading.Timer(0.05, client.close).start()
        start = time.monotonic()
        with pytest.raises(WireError, match="closed on this side"):
            call.wait(30)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_server_that_fails_closes_and_its_clients_notice(address, monkeypatch, caplog):
    held = queue.Queue()
    server = listen(held.put, address=address, secret=SECRET)
    with connect(server.address, secret=SECRET) as client:
        call = client.call(1)
        request = held.get(timeout=10)

        def fail(*_):
            raise RuntimeError("of this test")

        monkeypatch.setattr(server, "_receive", fail)
        other = client.call(2)
        for each in (call, other):
            with pytest.raises(WireTimeout, match="no process listens"):
                each.wait(10)
        request.reply()  # to nobody
    server.close()
    assert "the server failed and is closed" in caplog.text


def test_a_killed_client_is_forgotten_and_leaves_nothing(child, monkeypatch):
    monkeypatch.setattr(server_module, "_TIDY_S", 0.02)
    monkeypatch.setattr(server_module, "_SESSION_S", 0.1)
    with listen(lambda r: r.reply((), r.frame.arrays), address="shm://", secret=SECRET) as server:
        process, said = child(CLIENT, server.address)
        assert said == "there"
        assert len(server._peers) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not server._peers)
    assert not left_behind(os.getpid(), process.pid)


def test_a_client_that_closes_is_forgotten():
    with listen(lambda r: r.reply(), secret=SECRET) as server:
        with connect(server.address, secret=SECRET) as client:
            client.call(0).wait(10)
            assert len(server._peers) == 1
        until(lambda: not server._peers)


def test_a_killed_client_leaves_nothing_whenever_it_dies(child):
    """Names of shared memory stayed behind where a client died before the server had taken them."""
    for _ in range(3):
        process, said = child(
            "import sys\n" + CLIENT.replace("held =", "print('there', flush=True)\nheld ="), "shm://@x"
        )
        assert said == "there"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not left_behind(os.getpid(), process.pid)


def test_a_host_without_shared_memory_uses_the_socket(monkeypatch, caplog):
    def refuse(*_):
        raise OSError("full")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with (
        listen(lambda r: r.reply((), r.frame.arrays), address="shm://", secret=SECRET) as server,
        connect(server.address, secret=SECRET) as client,
    ):
        assert len(client.call(0, (), (np.zeros(100_000),)).wait(10).arrays[0]) == 100_000
    assert "no shared memory, all goes through the socket: full" in caplog.text


def test_files_and_threads_are_closed():
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    threads = threading.active_count()
    for ends, address in ((service, "tcp://127.0.0.1:*"), (service, "shm://"), (inproc, "inproc://*")):
        for _ in range(3):
            with ends.listen(lambda r: r.reply(), address=address, secret=SECRET) as server:
                for _ in range(3):
                    with ends.connect(server.address, secret=SECRET) as client:
                        client.call(0, (), (np.zeros(100_000),)).wait(10)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() == threads


class TestLanes:
    @pytest.fixture
    def lane(self):
        made = shared_memory.LaneFile.make(1 << 20)
        other = shared_memory.LaneFile(os.dup(made.file))
        outward = shared_memory.OutLane(made)
        yield outward, other
        outward.close()
        other.close()

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
        array = outward.buffer(np.dtype(np.int64), (1 << 16,))
        array[:] = 5
        sent = outward.send(array[8:].view(np.uint8))
        part = inward.view(*sent, (1 << 19) - 64)[100:]
        assert (part[4:].view(np.int64) == 5).all()
        del array
        assert outward.buffer(np.dtype(np.int64), (1 << 16,)) is not None
        assert outward.send(np.zeros((1 << 19) + 1, np.uint8)) is None
        del part
        assert outward.send(np.zeros((1 << 19) + 1, np.uint8)) is not None

    def test_memory_that_the_system_refuses_is_no_room(self, lane, monkeypatch):
        def refuse(*_):
            raise OSError("full")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert lane[0].send(np.zeros(1 << 16, np.uint8)) is None
        assert lane[0].buffer(np.dtype(np.int8), (1 << 16,)) is None

    def test_a_file_that_is_no_lane_is_refused(self, tmp_path):
        with open(tmp_path / "file", "wb+") as file, pytest.raises(WireError, match="not a lane"):
            shared_memory.LaneFile(file.fileno())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_an_address_that_is_none_leaves_no_descriptor():
    before = descriptors()
    for _ in range(5):
        with pytest.raises(WireError):
            service.connect("nonsense", secret=SECRET)
    assert descriptors() == before


def test_memory_of_which_half_cannot_be_made_is_given_back(monkeypatch):
    """As where this process runs out of descriptors: all goes through the socket."""
    real, made = LaneFile.make, []

    def make(num_bytes):
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(real(num_bytes))
        return made[0]

    monkeypatch.setattr(LaneFile, "make", make)
    endpoint = parse_address("shm://")
    listener = SocketListener(endpoint, *endpoint.listen())
    assert listener.lanes() == []
    assert made[0].file == -1
    listener.close()
