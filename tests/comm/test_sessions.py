"""Sessions as plain objects: messages arrive once and in order over connections that break, without sockets, clocks and threads."""

import random
from collections import deque

import numpy as np
import pytest

from girih.comm.rpc.frames import Frame, Header, PackedFrame, Status
from girih.comm.rpc.session import RpcSession
from girih.errors import WireError


def packed(number):
    return PackedFrame(Frame(1, (number,), (np.zeros(8, np.uint8),)))


class Side:
    """A side that sends by a wire that breaks, and notes what comes."""

    def __init__(self):
        self.session, self.wire, self.came, self.num_sent = RpcSession(1), deque(), [], 0

    def send(self, is_connected):
        self.num_sent += 1
        message = self.session.keep(Status.REQUEST, 0, packed(self.num_sent)), self.num_sent
        if is_connected:
            self.wire.append(message)

    def take(self, message):
        header, content = message
        if self.session.on_message(header):
            self.came.append(content)

    def send_again(self, received):
        self.wire = deque((header, header.number) for header, _ in self.session.resume(received))


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_once_and_in_order_however_often_the_connection_breaks(seed):
    chance, sides, is_connected = random.Random(seed), (Side(), Side()), True
    for _ in range(500):
        side, other = chance.sample(sides, 2)
        event = chance.random()
        if event < 0.4:
            side.send(is_connected)
        elif event < 0.9 and side.wire:
            other.take(side.wire.popleft())
        elif event < 0.95:
            is_connected = False
            for each in sides:  # what is on its way is lost
                each.wire.clear()
        elif not is_connected:
            is_connected = True
            side.send_again(other.session.received)
            other.send_again(side.session.received)
    for side, other in (sides, sides[::-1]):
        side.send_again(other.session.received)
        while side.wire:
            other.take(side.wire.popleft())
        assert other.came == list(range(1, side.num_sent + 1))


def test_what_the_other_side_has_is_dropped_and_the_rest_is_kept_until_the_session_ends():
    session = RpcSession(7)
    headers = [session.keep(Status.REPLY, number, packed(number)) for number in (5, 6, 7)]
    assert [(header.number, header.request) for header in headers] == [(1, 5), (2, 6), (3, 7)]
    assert session.kept_bytes == 24
    session.on_message(Header(Status.ACKNOWLEDGE, 0, 0, 2))  # which is not counted itself
    assert session.received == 0
    assert session.kept_bytes == 8
    assert [header.number for header, _ in session.resume(2)] == [3]
    session.end()
    assert session.keep(Status.REPLY, 8, packed(8)).number == 4
    assert (session.kept_bytes, list(session.resume(3))) == (0, [])


def test_a_message_that_came_is_known_and_one_that_lacks_its_forerunner_is_refused():
    session = RpcSession(0)
    assert session.on_message(Header(Status.REQUEST, 1, 0, 0))
    assert not session.on_message(Header(Status.REQUEST, 1, 0, 0))
    with pytest.raises(WireError, match="message 3 came after 1"):
        session.on_message(Header(Status.REQUEST, 3, 0, 0))
    session.restart(9)  # the other side knows nothing of it any more
    assert (session.number, session.received) == (9, 0)
    assert session.on_message(Header(Status.REQUEST, 1, 0, 0))
