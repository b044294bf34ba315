"""Tests that every transport must pass: a suite, to be subclassed per transport and run by pytest."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from girih.comm.rpc import Client, Frame, Reply, Server
from girih.comm.rpc.frames import OWN_PART_BYTES, PackedFrame
from girih.errors import RemoteError, WireError, WireTimeout
from support.transport_breaks import BreakSuite
from support.transport_ends import (
    DTYPES,
    ECHO,
    FAIL,
    SECRET,
    SLOW,
    TWICE,
    Handler,
    same,
    until,
)


class TransportSuite(BreakSuite):
    """The suite; a subclass says what it is of, see :class:`TransportEnds`."""

    def test_fields_and_arrays_come_back(self, client: Client) -> None:
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 100, (3, 5, 7)).astype(d) for d in DTYPES]
        arrays += [np.empty((0, 4), np.float32), np.array(5, np.int16), np.arange(3, dtype=np.uint8)]
        fields = (0, -1, 2**63 - 1, -(2**63))
        frame = client.call(ECHO, fields, arrays).wait(10)
        assert frame.kind == ECHO
        assert frame.fields == fields
        same(frame.arrays, arrays)
        assert all(a.flags.aligned and not a.flags.writeable for a in frame.arrays)

    def test_large_arrays_come_back_and_outlive_the_connection(self, client: Client) -> None:
        arrays = [np.arange(n, dtype=np.int64) for n in (2047, 2048, 8192, 100_000, 1_000_000)]
        frames = [client.call(ECHO, (), arrays).wait(10) for _ in range(3)]
        client.close()
        for frame in frames:
            same(frame.arrays, arrays)

    def test_many_arrays_up_to_the_limit(self, client: Client) -> None:
        arrays = [np.full(n, n, np.int32) for n in range(4096)]
        same(client.call(ECHO, (), arrays).wait(10).arrays, arrays)
        large = [np.full(OWN_PART_BYTES // 4, n, np.int32) for n in range(4096)]  # each in a part of its own
        same(client.call(ECHO, (), large).wait(30).arrays, large)
        with pytest.raises(WireError, match="4097 arrays, at most 4096"):
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
    def test_what_cannot_be_sent_is_refused(
        self, client: Client, fields: tuple[int, ...], arrays: tuple[NDArray[Any], ...], message: str
    ) -> None:
        with pytest.raises(WireError, match=message):
            client.call(ECHO, fields, arrays)

    def test_errors_of_the_handler_come_back(self, client: Client) -> None:
        with pytest.raises(RemoteError, match="ValueError: no such row 9"):
            client.call(FAIL, (9,)).wait(10)
        assert client.call(TWICE, (1,)).wait(10).fields == (1,)
        assert client.call(ECHO, (2,)).wait(10).fields == (2,)

    def test_replies_from_other_threads_and_out_of_order(self, client: Client, handler: Handler) -> None:
        calls = [client.call(SLOW, (n,)) for n in range(4)]
        requests = [handler.held.get(timeout=10) for _ in calls]
        assert not any(call.done() for call in calls)
        for request in requests[::-1]:
            thread = threading.Thread(target=request.reply, args=(request.frame.fields,))
            thread.start()
            thread.join()
        assert [call.wait(10).fields for call in calls] == [(n,) for n in range(4)]

    def test_callbacks(self, client: Client) -> None:
        done: queue.Queue[object] = queue.Queue()
        call = client.call(ECHO, (4,))
        call.add_done_callback(done.put)
        assert done.get(timeout=10) is call
        call.add_done_callback(done.put)
        assert done.get(timeout=0) is call
        assert call.done()

    def test_a_wait_that_ends_early_may_be_repeated(self, client: Client, handler: Handler) -> None:
        call = client.call(SLOW, (7,))
        with pytest.raises(WireTimeout, match=r"kind 2: no answer within 0.01 s; the call goes on"):
            call.wait(0.01)
        handler.held.get(timeout=10).reply((8,))
        assert call.wait(10).fields == (8,)

    def test_concurrent_callers_and_clients(self, server: Server, handler: Handler) -> None:
        failures: list[Exception] = []

        def call(client: Client, number: int) -> None:
            try:
                for n in range(20):
                    array = np.full(3000 * (n % 3) + 1, number * 100 + n)
                    same(client.call(ECHO, (number * 100 + n,), (array,)).wait(10).arrays, (array,))
            except Exception as error:
                failures.append(error)

        with (
            self.connect(server.address, secret=SECRET) as a,
            self.connect(server.address, secret=SECRET) as b,
        ):
            threads = [threading.Thread(target=call, args=((a, b)[n % 2], n)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures
        assert len(handler.clients) == 2
        assert set(handler.ran.values()) == {1}

    def test_buffers_are_sent_as_they_are(self, client: Client, handler: Handler) -> None:
        call = client.call(SLOW, (1,))
        request = handler.held.get(timeout=10)
        for size in (10, 100_000):
            ours, theirs = client.buffer(np.float32, size), request.buffer(np.int64, 2, size)
            assert ours.shape == (size,)
            assert theirs.shape == (2, size)
            assert [ours.dtype.name, theirs.dtype.name] == ["float32", "int64"]
            ours[:], theirs[:] = size, size + 1
            (got,) = client.call(ECHO, (), (ours,)).wait(10).arrays
            assert (got == size).all()
        request.reply((), (theirs, theirs[1, 5:]))
        whole, part = call.wait(10).arrays
        assert (whole == 100_001).all()
        assert part.shape == (99_995,)
        assert (part == 100_001).all()

    def test_slow_requests_outlive_the_patience_with_connections(
        self, server: Server, handler: Handler
    ) -> None:
        with self.connect(server.address, secret=SECRET, timeout_s=0.05) as client:
            client.call(ECHO, (1,)).wait(10)
            call = client.call(SLOW, (3,))
            request = handler.held.get(timeout=10)
            time.sleep(0.3)
            assert not call.done()
            request.reply((5,))
            assert call.wait(10).fields == (5,)
        assert handler.ran == {1: 1, 3: 1}

    def test_old_requests_do_not_keep_replies(self, server: Server, handler: Handler, client: Client) -> None:
        call = client.call(SLOW, (1,))
        big = np.zeros(1 << 19)
        for _ in range(4):
            client.call(ECHO, (), (big,)).wait(10)
        (peer,) = server._peers.values()
        until(lambda: not peer._kept)
        handler.held.get(timeout=10).reply()
        call.wait(10)

    def test_wrong_secret(self, server: Server, handler: Handler) -> None:
        with self.connect(server.address, secret=b"guessed", timeout_s=0.3) as client:
            calls = [client.call(ECHO, (1,)), client.call(ECHO, (1,), (np.zeros(100_000),))]
            for call in calls:
                with pytest.raises(
                    WireTimeout, match=r"kind 0: no lasting connection for 0.3 s.*same secret"
                ):
                    call.wait(10)
        assert server.num_refused >= 2
        assert not handler.ran
        assert not server._peers

    def test_a_message_beyond_the_limits_ends_its_connection_alone(self, handler: Handler) -> None:
        with (
            self.listen(handler, address=self.address, secret=SECRET) as server,
            self.connect(server.address, secret=SECRET, timeout_s=0.5) as client,
            self.connect(server.address, secret=SECRET) as other,
        ):
            assert client.call(ECHO, (1,)).wait(10).fields == (1,)
            held = other.call(SLOW, (2,))
            packed = PackedFrame(Frame(ECHO, (3,)))
            packed._counts = 1, 4097
            call = Reply(client.address, ECHO, lambda _, timeout_s: timeout_s)
            with client._session.lock:
                client._send(call, packed)
            with pytest.raises(WireTimeout, match="no lasting connection"):
                call.wait(10)
            assert server.num_damaged > 1
            handler.held.get(timeout=10).reply()
            held.wait(10)
            assert other.num_reconnects == 0
        assert handler.ran == {1: 1, 2: 1}

    def test_a_reply_beyond_the_limits_fails_the_request(
        self, server: Server, client: Client, handler: Handler
    ) -> None:
        call = client.call(SLOW)
        with pytest.raises(WireError, match="4097 arrays"):
            handler.held.get(timeout=10).reply((), [np.zeros(1)] * 4097)
        with pytest.raises(RemoteError, match="4097 arrays"):
            call.wait(10)

    def test_close_while_calls_are_outstanding(self, server: Server, handler: Handler) -> None:
        client = self.connect(server.address, secret=SECRET)
        call = client.call(SLOW)
        request = handler.held.get(timeout=10)
        client.close()
        client.close()
        with pytest.raises(WireError, match="closed on this side"):
            call.wait(10)
        with pytest.raises(WireError, match="closed on this side"):
            client.call(ECHO)
        request.reply()  # to nobody
