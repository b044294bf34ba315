"""What every transport holds, without and with faults: one suite, run for each."""

import queue
import threading
from dataclasses import replace

import numpy as np
import pytest

from girih.comm.rpc import Faults, Limits, connect, listen
from girih.errors import RemoteError, WireError, WireTimeout

SECRET = b"of this run"
ECHO, FAIL, SLOW, COUNT, TWICE, CLOSE = range(6)
DTYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


class Handler:
    """Answers by kind; counts how often each first field was asked."""

    def __init__(self):
        self.ran = {}
        self.clients = set()
        self.held = queue.Queue()

    def __call__(self, request):
        kind, fields, arrays = request.frame.kind, request.frame.fields, request.frame.arrays
        self.clients.add(request.client)
        if fields:
            self.ran[fields[0]] = self.ran.get(fields[0], 0) + 1
        if kind == ECHO:
            request.reply(fields, arrays)
        elif kind == FAIL:
            raise ValueError(f"no such row {fields[0]}")
        elif kind == SLOW:
            self.held.put(request)
        elif kind == COUNT:
            request.reply((fields[0], self.ran[fields[0]]))
        elif kind == TWICE:
            request.reply(fields)
            request.reply(fields)


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


class TransportSuite:
    address: str

    @pytest.fixture
    def handler(self):
        return Handler()

    @pytest.fixture
    def server(self, handler):
        with listen(handler, address=self.address, secret=SECRET) as server:
            yield server
        assert not [t for t in threading.enumerate() if t.name.startswith("girih ")]

    @pytest.fixture
    def client(self, server):
        with connect(server.address, secret=SECRET) as client:
            yield client

    def test_fields_and_arrays_come_back(self, client):
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 100, (3, 5, 7)).astype(d) for d in DTYPES]
        arrays += [np.empty((0, 4), np.float32), np.array(5, np.int16), np.arange(3, dtype=np.uint8)]
        fields = (0, -1, 2**63 - 1, -(2**63))
        frame = client.call(ECHO, fields, arrays).wait(10)
        assert frame.kind == ECHO
        assert frame.fields == fields
        same(frame.arrays, arrays)
        assert all(a.flags.aligned and not a.flags.writeable for a in frame.arrays)

    def test_large_arrays_come_back_and_outlive_the_connection(self, client):
        arrays = [np.arange(n, dtype=np.int64) for n in (2047, 2048, 8192, 100_000, 1_000_000)]
        frames = [client.call(ECHO, (), arrays).wait(10) for _ in range(3)]
        client.close()
        for frame in frames:
            same(frame.arrays, arrays)

    def test_many_arrays_up_to_the_limit(self, client):
        arrays = [np.full(n, n, np.int32) for n in range(256)]
        same(client.call(ECHO, (), arrays).wait(10).arrays, arrays)
        with pytest.raises(WireError, match="257 arrays, at most 256"):
            client.call(ECHO, (), [*arrays, arrays[0]])

    @pytest.mark.parametrize(
        ("fields", "arrays", "message"),
        [
            ((2**63,), (), "int64"),
            (tuple(range(13)), (), "13 fields"),
            ((), (np.zeros((4, 4))[:, 1],), "C-contiguous"),
            ((), (np.zeros((1, 1, 1, 1)),), "3 dims"),
            ((), (np.zeros(3, ">i4"),), ">i4"),
            ((), (np.array(["a"]),), "<U1"),
        ],
    )
    def test_what_cannot_be_sent_is_refused(self, client, fields, arrays, message):
        with pytest.raises(WireError, match=message):
            client.call(ECHO, fields, arrays)

    def test_errors_of_the_handler_come_back(self, client):
        with pytest.raises(RemoteError, match="ValueError: no such row 9"):
            client.call(FAIL, (9,)).wait(10)
        assert client.call(TWICE, (1,)).wait(10).fields == (1,)
        assert client.call(ECHO, (2,)).wait(10).fields == (2,)

    def test_replies_from_other_threads_and_out_of_order(self, client, handler):
        calls = [client.call(SLOW, (n,)) for n in range(4)]
        requests = [handler.held.get(timeout=10) for _ in calls]
        assert not any(call.done() for call in calls)
        for request in requests[::-1]:
            thread = threading.Thread(target=request.reply, args=(request.frame.fields,))
            thread.start()
            thread.join()
        assert [call.wait(10).fields for call in calls] == [(n,) for n in range(4)]

    def test_callbacks(self, client):
        done = queue.Queue()
        call = client.call(ECHO, (4,))
        call.on_done(done.put)
        assert done.get(timeout=10) is call
        call.on_done(done.put)
        assert done.get(timeout=0) is call
        assert call.done()

    def test_a_wait_that_ends_early_may_be_repeated(self, client, handler):
        call = client.call(SLOW, (7,))
        with pytest.raises(WireTimeout, match=r"kind 2: no answer within 0.01 s, after . tries"):
            call.wait(0.01)
        handler.held.get(timeout=10).reply((8,))
        assert call.wait(10).fields == (8,)

    def test_concurrent_callers_and_clients(self, server, handler):
        failures = []

        def call(client, number):
            try:
                for n in range(20):
                    array = np.full(3000 * (n % 3) + 1, number * 100 + n)
                    same(client.call(ECHO, (number * 100 + n,), (array,)).wait(10).arrays, (array,))
            except Exception as error:
                failures.append(error)

        with connect(server.address, secret=SECRET) as a, connect(server.address, secret=SECRET) as b:
            threads = [threading.Thread(target=call, args=((a, b)[n % 2], n)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sent, received = a.bytes_sent + b.bytes_sent, a.bytes_received + b.bytes_received
        assert not failures
        assert len(handler.clients) == 2
        assert set(handler.ran.values()) == {1}
        assert sent <= server.bytes_received
        assert received <= server.bytes_sent

    def test_buffers_are_sent_as_they_are(self, client, handler):
        call = client.call(SLOW, (1,))
        request = handler.held.get(timeout=10)
        for size in (10, 100_000):
            ours, theirs = client.buffer(np.float32, size), request.buffer(np.int64, 2, size)
            assert ours.shape == (size,)
            assert theirs.shape == (2, size)
            assert (ours.dtype, theirs.dtype) == (np.float32, np.int64)
            ours[:], theirs[:] = size, size + 1
            (got,) = client.call(ECHO, (), (ours,)).wait(10).arrays
            assert (got == size).all()
        request.reply((), (theirs, theirs[1, 5:]))
        whole, part = call.wait(10).arrays
        assert (whole == 100_001).all()
        assert part.shape == (99_995,)
        assert (part == 100_001).all()

    def test_slow_requests_outlive_the_tries(self, server, handler):
        with connect(server.address, secret=SECRET, timeout_s=0.05, retries=1) as client:
            call = client.call(SLOW, (3,))
            request = handler.held.get(timeout=10)
            assert not call._done.wait(0.5)
            request.reply((5,))
            assert call.wait(10).fields == (5,)
            assert client.retried > 2
        assert handler.ran == {3: 1}

    def test_old_requests_do_not_keep_replies(self, server, handler, client):
        call = client.call(SLOW, (1,))
        big = np.zeros(1 << 19)
        for _ in range(4):
            client.call(ECHO, (), (big,)).wait(10)
        (memory,) = server._clients.values()
        for _ in range(1000):
            if not memory.replies:
                break
            threading.Event().wait(0.005)
        assert not memory.replies
        handler.held.get(timeout=10).reply()
        call.wait(10)

    def test_wrong_secret(self, server, handler):
        with connect(server.address, secret=b"guessed", timeout_s=0.05, retries=1) as client:
            with pytest.raises(WireTimeout, match=r"kind 0: no answer after 2 tries of 0.05 s.*same secret"):
                client.call(ECHO, (1,)).wait(10)
            with pytest.raises(WireTimeout):
                client.call(ECHO, (1,), (np.zeros(100_000),)).wait(10)
        assert server.num_refused >= 4
        assert not handler.ran

    def test_frames_beyond_the_limits(self, handler):
        limits = Limits(most_bytes=100_000, most_arrays=2)
        with (
            listen(handler, address=self.address, secret=SECRET, limits=limits) as server,
            connect(server.address, secret=SECRET, timeout_s=0.1, retries=1) as client,
        ):
            with pytest.raises(WireTimeout):
                client.call(ECHO, (1,), (np.zeros(20_000, np.uint8),) * 6).wait(10)
            with pytest.raises(WireTimeout):
                client.call(ECHO, (1,), (np.zeros(1, np.uint8),) * 3).wait(10)
            with pytest.raises(WireTimeout):
                client.call(ECHO, (1,), (np.zeros(1 << 20, np.uint8),)).wait(10)
            assert server.num_damaged >= 2
            assert client.call(ECHO, (2,), timeout_s=2).wait(10).fields == (2,)
        assert handler.ran == {2: 1}

    def test_a_reply_beyond_the_limits_fails_the_request(self, server, client, handler):
        call = client.call(SLOW)
        with pytest.raises(WireError, match="257 arrays"):
            handler.held.get(timeout=10).reply((), [np.zeros(1)] * 257)
        with pytest.raises(RemoteError, match="257 arrays"):
            call.wait(10)

    def test_close_while_calls_are_outstanding(self, server, handler):
        client = connect(server.address, secret=SECRET)
        call = client.call(SLOW)
        request = handler.held.get(timeout=10)
        client.close()
        client.close()
        with pytest.raises(WireError, match="closed on this side"):
            call.wait(10)
        with pytest.raises(WireError, match="closed on this side"):
            client.call(ECHO)
        request.reply()  # to nobody

    def test_a_server_that_is_gone(self, handler):
        server = listen(handler, address=self.address, secret=SECRET)
        with connect(server.address, secret=SECRET, timeout_s=0.05, retries=2) as client:
            call = client.call(SLOW)
            handler.held.get(timeout=10)
            server.close()
            with pytest.raises(WireTimeout, match="after 3 tries"):
                call.wait(10)
            assert client.retried == 2

    def test_forgotten_replies_do_not_run_again(self, handler):
        limits = Limits(most_replies=1)
        with (
            listen(handler, address=self.address, secret=SECRET, limits=limits) as server,
            connect(server.address, secret=SECRET) as client,
        ):
            slow = client.call(SLOW, (1,))
            for n in range(2, 5):
                client.call(COUNT, (n,)).wait(10)
            handler.held.get(timeout=10).reply()
            slow.wait(10)
            (memory,) = server._clients.values()
            assert len(memory.replies) <= 1
        assert set(handler.ran.values()) == {1}

    @pytest.mark.parametrize(
        "faults",
        [
            Faults(drop=0.15),
            Faults(duplicate=0.5),
            Faults(reorder=0.2, duplicate=0.2),
            Faults(delay_s=0.03, duplicate=0.2),
            Faults(corrupt=0.2),
            Faults(drop=0.05, duplicate=0.1, reorder=0.1, delay_s=0.02, delay=0.2, corrupt=0.05),
        ],
        ids=["drop", "duplicate", "reorder", "delay", "corrupt", "all"],
    )
    def test_each_request_runs_once_whatever_happens(self, handler, faults):
        rng = np.random.default_rng(1)
        options = {"timeout_s": 0.02, "retries": 50, "checksums": True}
        with (
            listen(handler, address=self.address, secret=SECRET, checksums=True) as server,
            connect(server.address, secret=SECRET, faults=replace(faults, seed=3), **options) as a,
            connect(server.address, secret=SECRET, faults=replace(faults, seed=4), **options) as b,
        ):
            calls, sent = [], []
            for n in range(60):
                client = (a, b)[n % 2]
                arrays = [rng.integers(0, 99, size) for size in (3, 5000, n % 4)]
                calls.append(client.call((ECHO, COUNT)[n % 3 == 0], (n,), arrays))
                sent.append(arrays)
                if n % 10 == 9:
                    calls[n - 5].wait(10)
            for n, call in enumerate(calls):
                frame = call.wait(20)
                if n % 3:
                    assert frame.fields == (n,)
                    same(frame.arrays, sent[n])
                else:
                    assert frame.fields == (n, 1)
            retried = a.retried + b.retried
            damaged = a.num_damaged + b.num_damaged + server.num_damaged
        assert handler.ran == dict.fromkeys(range(60), 1)
        assert retried > 0 or not faults.drop
        assert damaged > 0 or not faults.corrupt

    def test_a_connection_that_is_cut(self, server, handler):
        faults = Faults(cut_after=10)
        with connect(server.address, secret=SECRET, timeout_s=0.03, retries=1, faults=faults) as client:
            calls = [client.call(ECHO, (n,)) for n in range(20)]
            with pytest.raises(WireTimeout):
                calls[-1].wait(10)
            with pytest.raises(WireTimeout):
                client.call(ECHO, (99,)).wait(10)
        assert set(handler.ran.values()) == {1}
        assert 99 not in handler.ran


class TestTCP(TransportSuite):
    address = "tcp://127.0.0.1:*"


class TestShared(TransportSuite):
    address = "shm://"


class TestInproc(TransportSuite):
    address = "inproc://*"
