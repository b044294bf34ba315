"""Bytes on a stream, a handshake and a port that are nearly what is expected: they raise what is expected, and take no memory."""

import random
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.comm.rpc import Frame, transport
from girih.comm.rpc.frames import MOST_BYTES, Header, PackedFrame, unpack
from girih.comm.rpc.transport import HELLO_BYTES, WELCOME_BYTES, Hello, Welcome
from girih.comm.service import connect, listen
from girih.comm.transports.streams import SocketStream, laid_out
from girih.errors import WireError
from girih.kernels.buffers import Buffers
from support.transport_ends import until

SECRET = b"of this run, and of no other"
FRAME = Frame(3, (1, -2), (np.arange(9), np.zeros((2, 3), np.float32), np.zeros(5000)))
MESSAGE = b"".join(bytes(view) for view in laid_out(PackedFrame(FRAME).parts(Header(0, 1, 0, 0))))


class Taking(Buffers):
    """Counts the bytes that are asked for, of which it gives few."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def take(self, dtype, *shape):
        self.most = max(self.most, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return super().take(dtype, *(min(each, 1 << 20) for each in shape))


def spoiled(dice, data):
    """Some bytes are others, gone, doubled or cut off."""
    data = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(min(len(data), 200 if dice.random() < 0.8 else len(data)) or 1)
        what = dice.randrange(4)
        if what == 0 and data:
            data[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        elif what == 1:
            del data[at : at + dice.randint(1, 16)]
        elif what == 2:
            data[at:at] = data[at : at + dice.randint(1, 16)]
        else:
            data[at : at + 8] = dice.choice([bytes(8), b"\xff" * 8, dice.randbytes(8)])
    return bytes(data)


def hear(data):
    """Reads a stream to its end; returns how many frames it had, and the most memory that was asked for at once."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        buffers = Taking()
        stream, found = SocketStream(ours, buffers), 0
        try:
            while (parts := stream.receive()) is not None:
                unpack(parts)
                found += 1
        except WireError:
            pass
        return found, buffers.most


def play(dice):
    found, most = hear(spoiled(dice, MESSAGE) + MESSAGE)
    assert found <= 3
    assert most <= MOST_BYTES + (1 << 16)


def test_what_is_expected_is_read():
    assert hear(MESSAGE * 2)[0] == 2


@settings(deadline=None, max_examples=300, database=None)
@given(st.randoms(use_true_random=False))
def test_a_spoiled_stream_raises_wire_errors_alone(dice):
    play(dice)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_many_spoiled_streams():
    dice = random.Random(3)
    for _ in range(300_000):
        play(dice)


@settings(deadline=None, max_examples=200, database=None)
@given(st.randoms(use_true_random=False))
def test_a_spoiled_handshake_opens_nothing(dice):
    challenged = transport.challenge()
    hello = transport.pack_hello(SECRET, challenged, Hello(5, 6))
    assert transport.unpack_hello(SECRET, challenged, hello) == Hello(5, 6)
    welcome = transport.pack_welcome(SECRET, challenged, hello, Welcome(1, 2, 3))
    for said, size, read in (
        (hello, HELLO_BYTES, lambda said: transport.unpack_hello(SECRET, challenged, said)),
        (welcome, WELCOME_BYTES, lambda said: transport.unpack_welcome(SECRET, challenged, hello, said)),
    ):
        other = spoiled(dice, said)[:size].ljust(size, b"\0")
        if other != said:
            with pytest.raises(WireError):
                read(other)


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_garbage_on_a_port_changes_nothing(scheme):
    dice = random.Random(5)
    ran = []
    with listen(
        lambda r: (ran.append(1), r.reply()), address=f"{scheme}://127.0.0.1:*", secret=SECRET
    ) as server:
        host, port = server.address.partition("://")[2].split(":")
        for _ in range(200):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(spoiled(dice, MESSAGE)[: dice.randint(1, 400)])
        until(lambda: server.num_refused == 200)
        assert not server._peers
        assert not ran
        with connect(server.address, secret=SECRET) as client:
            client.call(1).wait(10)
