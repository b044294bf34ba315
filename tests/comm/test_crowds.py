"""Many strangers at once, peers that do not take their answers, and messages that are said again."""

import logging
import os
import resource
import socket
import time

import numpy as np
import pytest
from wiretap import Listening, dial, ended

from girih.comm.rpc import Frame
from girih.comm.rpc import server as server_module
from girih.comm.rpc import server as strangers_module
from girih.comm.rpc.frames import Header, PackedFrame, Status, unpack
from girih.comm.rpc.transport import HELLO_BYTES, Hello
from girih.comm.service import connect, dialer, listen
from support.transport_ends import until

SECRET = b"of this run, and of no other"
CROWD = 3000


@pytest.fixture(params=["tcp", "tls"])
def server(request):
    with listen(
        lambda r: r.reply(r.frame.fields), address=f"{request.param}://127.0.0.1:*", secret=SECRET
    ) as server:
        yield server


@pytest.fixture
def few_descriptors():
    """Leaves this process twenty descriptors more. Gaps below those that it has are filled until the test closes what is returned."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave_few():
        highest = max(map(int, os.listdir("/proc/self/fd")))
        held = [socket.socket()]
        while held[-1].fileno() <= highest:
            held.append(socket.socket())
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 20, before[1]))
        return held

    yield leave_few
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def works(server):
    with connect(server.address, secret=SECRET) as client:
        return client.call(1, (5,)).wait(10).fields == (5,)


def test_thousands_who_say_nothing_keep_nobody_out_and_take_few_descriptors(server):
    with connect(server.address, secret=SECRET) as early:
        assert early.call(1, (1,)).wait(10).fields == (1,)
        crowd = []
        for n in range(CROWD):
            crowd.append(dial(server))
            if len(crowd) > 300:  # this process has not so many either
                crowd.pop(0).close()
            if n % 500 == 499:
                assert works(server)
                assert early.call(1, (n,)).wait(10).fields == (n,)
                assert len(server._strangers) <= server_module._MOST_STRANGERS
        assert early.num_reconnects == 0
        for stranger in crowd:
            stranger.close()
    until(lambda: server.num_refused == CROWD)


def test_a_crowd_that_takes_all_descriptors_makes_room(server, few_descriptors):
    with connect(server.address, secret=SECRET) as early:
        assert early.call(1, (1,)).wait(10).fields == (1,)
        held = few_descriptors()
        crowd = []
        try:
            for _ in range(60):
                crowd.append(dial(server))
        except OSError:
            crowd.pop().close()
        crowd.pop().close()
        assert early.call(1, (2,)).wait(10).fields == (2,)
        until(lambda: server.num_refused or len(server._strangers) < 20)
        for opened in (*crowd, *held):
            opened.close()
        assert works(server)


class Silent:
    def __init__(self, origin):
        self.origin = origin


def test_a_crowd_from_one_host_leaves_the_strangers_of_others_alone():
    strangers = server_module.Strangers("tcp://here")
    first = Silent("a")
    for each in (first, Silent("b"), Silent("b"), Silent("c")):
        strangers[each] = 1.0
    assert strangers.first_to_leave().origin == "b"
    del strangers[strangers.first_to_leave()]
    assert strangers.first_to_leave() is first
    assert len(strangers) == 3
    assert strangers.find_expired(1.0) == []
    assert strangers.find_expired(1.1) == list(strangers)


def test_each_host_that_was_refused_is_told_once_with_what_it_said(caplog):
    with listen(lambda r: r.reply(), secret=SECRET) as server, caplog.at_level(logging.WARNING):
        for n in range(20):
            with dial(server) as stranger:
                if n != 3:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_BYTES))
            until(lambda n=n: server.num_refused == n + 1)
    (told,) = caplog.messages
    assert "refused a connection from 127.0.0.1, which changes nothing: " in told
    assert "b'GET / HT'" in told


def test_who_is_told_of_is_limited(caplog, monkeypatch):
    monkeypatch.setattr(strangers_module, "_MOST_TOLD", 3)
    strangers = strangers_module.Strangers("tcp://here")
    for n in range(10):
        strangers.log_refusal(Silent(f"10.0.0.{n}"), "garbage")
    assert len(caplog.messages) == 3
    assert caplog.messages[-1].endswith("garbage; further refusals from anywhere are not logged")


def raw(server):
    connection, _ = dialer(server.address).dial(SECRET, Hello(0, 0), 5.0)
    return connection


def ask(connection, number, *fields):
    connection.send(PackedFrame(Frame(1, fields)).parts(Header(Status.REQUEST, number, 0, 0)))


ANSWER_BYTES = 1 << 20


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tls://127.0.0.1:*", "shm://"])
def test_a_slow_reader_is_not_heard_until_it_reads_and_loses_nothing(address, monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_UNSENT_BYTES", 1 << 22)
    ran = []

    def handle(request):
        ran.append(request.frame.fields[0])
        request.reply(request.frame.fields, (np.zeros(ANSWER_BYTES, np.uint8),))

    with listen(handle, address=address, secret=SECRET) as server:
        slow = raw(server)
        for n in range(400):
            ask(slow, n + 1, n)
        assert until_quiet(ran) < 200
        (peer,) = server._peers.values()
        assert peer.kept_bytes < 200 << 20  # of 400 MiB
        assert works_beside(server)
        found = []
        until(lambda: take(slow, found) == 400, 30)
        assert found == [n for n in ran if n >= 0] == list(range(400))
        slow.close()


def until_quiet(ran):
    """How many were answered once no more are."""
    before = -1
    while before != len(ran) or not ran:
        before = len(ran)
        time.sleep(0.2)
    return before


def works_beside(server):
    with connect(server.address, secret=SECRET) as client:
        return client.call(1, (-1,)).wait(10).fields == (-1,)


def take(connection, found):
    connection.flush()
    while (parts := connection.receive()) is not None:
        field = unpack(parts)[1].fields[0]
        if field >= 0:
            found.append(field)
        del parts
    return len(found)


def test_who_leaves_too_many_answers_is_forgotten(monkeypatch, caplog):
    monkeypatch.setattr(server_module, "_MOST_KEPT_BYTES", 1 << 24)
    held = []
    with listen(held.append, secret=SECRET) as server:
        slow = raw(server)
        for n in range(40):
            ask(slow, n + 1, n)
        until(lambda: len(held) == 40)
        (peer,) = server._peers.values()
        for request in held:
            request.reply((), (np.zeros(ANSWER_BYTES, np.uint8),))
        until(lambda: not server._peers)
        assert peer.kept_bytes == 0
        assert not peer._kept
        slow.close()
    assert "a client left" in caplog.text


def test_a_message_that_is_said_again_runs_once(server):
    ran = []
    server._handler = lambda request: (ran.append(request.frame.fields[0]), request.reply())
    connection = raw(server)
    for number, field in [(1, 10), (1, 10), (2, 20), (1, 10), (2, 99), (3, 30)]:
        ask(connection, number, field)
    until(lambda: 30 in ran)
    assert ran == [10, 20, 30]
    connection.close()


def test_a_whole_conversation_that_is_said_again_is_refused_and_changes_nothing():
    ran = []
    with listen(lambda r: (ran.append(1), r.reply()), secret=SECRET) as server:
        ear = Listening(server)
        with connect(ear.address, secret=SECRET) as client:
            client.call(1).wait(10)
        ear.join()
        with dial(server) as stranger:
            stranger.sendall(ear.heard[0])
            assert ended(stranger)
        until(lambda: server.num_refused == 1)
    assert ran == [1]
