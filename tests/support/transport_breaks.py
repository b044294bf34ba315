"""Tests of every transport when connections break and processes end: a part of the suite."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from girih.comm.rpc import Client, Server
from girih.errors import Lost, WireTimeout
from support.faults import Faults
from support.transport_ends import (
    COUNT,
    ECHO,
    SECRET,
    SLOW,
    Handler,
    TransportEnds,
    break_connection,
    same,
    until,
)


class BreakSuite(TransportEnds):
    """Connections that break in the middle of anything, and servers that are gone or restarted."""

    def test_a_server_that_is_gone(self, handler: Handler) -> None:
        server = self.listen(handler, address=self.address, secret=SECRET)
        with self.connect(server.address, secret=SECRET) as client:
            call = client.call(SLOW)
            handler.held.get(timeout=10)
            server.close()
            began_s = time.monotonic()
            for each in (call, client.call(ECHO)):
                with pytest.raises(WireTimeout, match="no process listens at the address any more"):
                    each.wait(10)
            assert time.monotonic() - began_s < 2

    def test_both_sides_forget_what_the_other_has(
        self, server: Server, handler: Handler, client: Client
    ) -> None:
        for n in range(20):
            client.call(ECHO, (n,), (np.zeros(10_000),)).wait(10)
        (peer,) = server._peers.values()
        assert not client._session._kept
        assert len(peer._kept) <= 1

    def test_calls_to_a_life_that_ended_are_lost_and_later_ones_go_to_the_next(
        self, handler: Handler
    ) -> None:
        server = self.listen(handler, address=self.address, secret=SECRET, incarnation=3)
        lives = [server]
        with self.connect(server.address, secret=SECRET, resolve=lambda: lives[-1].address) as client:
            assert client.call(ECHO, (0,)).wait(10).fields == (0,)
            assert client.incarnation == 3
            calls = [client.call(SLOW, (n,)) for n in (1, 2)]
            handler.held.get(timeout=10)
            handler.held.get(timeout=10).reply()
            calls[1].wait(10)
            server.close()
            until(lambda: client._session.connection is None)
            early = client.call(ECHO, (3,))
            lives.append(self.listen(handler, address=self.address, secret=SECRET, incarnation=4))
            with lives[-1]:
                with pytest.raises(Lost, match=r"kind 2: lost, .* restarted \(incarnation 3, now 4\)"):
                    calls[0].wait(10)
                assert early.wait(10).fields == (3,)
                assert client.call(ECHO, (4,)).wait(10).fields == (4,)
                assert (client.incarnation, client.num_lost, client.num_reconnects) == (4, 1, 1)
                assert client.address == lives[-1].address
        assert handler.ran == dict.fromkeys(range(5), 1)

    def test_a_server_that_does_not_know_the_session_runs_nothing_again(
        self, server: Server, handler: Handler, client: Client
    ) -> None:
        call = client.call(SLOW, (1,))
        request = handler.held.get(timeout=10)
        server._peers.clear()  # as after an hour without a connection
        break_connection(client)
        with pytest.raises(Lost, match="does not know this connection any more"):
            call.wait(10)
        request.reply()
        assert client.call(COUNT, (2,)).wait(10).fields == (2, 1)
        assert handler.ran == {1: 1, 2: 1}

    @pytest.mark.parametrize(
        "faults",
        [
            Faults(broken=0.15),
            Faults(broken=0.1, refused=0.3),
            Faults(delay_s=0.01),
            Faults(corrupt=0.2),
            Faults(doubled=0.2, swapped=0.2, dropped=0.05),
            Faults(
                broken=0.05, refused=0.1, delay_s=0.005, delay=0.2, corrupt=0.15, doubled=0.1, dropped=0.03
            ),
        ],
        ids=["broken", "refused", "delay", "corrupt", "disorder", "all"],
    )
    def test_each_request_runs_once_whatever_happens(
        self, server: Server, handler: Handler, faults: Faults
    ) -> None:
        rng = np.random.default_rng(1)
        with (
            self.faulty(server.address, replace(faults, seed=3)) as a,
            self.faulty(server.address, replace(faults, seed=4)) as b,
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
            assert a.num_lost == b.num_lost == 0
            num_reconnects = a.num_reconnects + b.num_reconnects
            damaged = a.num_damaged + b.num_damaged + server.num_damaged
        assert handler.ran == dict.fromkeys(range(60), 1)
        assert num_reconnects > 0 or not faults.broken
        assert damaged > 0 or not faults.corrupt

    def test_replies_that_a_broken_connection_took_along_are_sent_again(
        self, server: Server, handler: Handler
    ) -> None:
        with self.faulty(server.address, Faults(broken=0.3, seed=1)) as client:
            calls = [client.call(SLOW, (n,), (np.full(5000, n),)) for n in range(30)]
            for _ in calls:
                request = handler.held.get(timeout=10)
                request.reply(request.frame.fields, (np.array(request.frame.arrays[0]),))
            for n, call in enumerate(calls):
                frame = call.wait(20)
                assert frame.fields == (n,)
                assert (frame.arrays[0] == n).all()
        assert handler.ran == dict.fromkeys(range(30), 1)

    def test_a_connection_that_is_cut(self, server: Server, handler: Handler) -> None:
        with self.faulty(server.address, Faults(cut_after=10)) as client:
            calls = [client.call(ECHO, (n,)) for n in range(20)]
            with pytest.raises(WireTimeout):
                calls[-1].wait(10)
            with pytest.raises(WireTimeout):
                client.call(ECHO, (99,)).wait(10)
        assert set(handler.ran.values()) == {1}
        assert 99 not in handler.ran
