"""Who does not know the run's secret gets nothing, keeps nothing busy, and hears nothing; who knows it ends only himself."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from wiretap import Listening, dial, ended

from girih.comm.rpc import server as server_module
from girih.comm.rpc.transport import CHALLENGE_BYTES, HELLO_BYTES, Hello, pack_hello
from girih.comm.service import connect, dialer, listen
from girih.comm.transports.streams import laid_out
from girih.errors import WireError, WireTimeout
from support.transport_ends import until

SECRET = b"of this run, and of no other"


@pytest.fixture
def server():
    with listen(lambda r: r.reply(r.frame.fields), secret=SECRET) as server:
        yield server


def works(server):
    with connect(server.address, secret=SECRET) as client:
        return client.call(1, (5,)).wait(10).fields == (5,)


def test_the_secret_never_travels_and_what_was_heard_opens_nothing(server):
    ear = Listening(server)
    with connect(ear.address, secret=SECRET) as client:
        assert client.call(1, (5,)).wait(10).fields == (5,)
    ear.join()
    assert not any(SECRET in bytes(said) for said in ear.heard)
    for said in ear.heard:
        assert len(said) > HELLO_BYTES
        with dial(server) as stranger:
            stranger.sendall(said[:HELLO_BYTES])  # to another challenge
            assert ended(stranger)
    assert server.num_refused == 2
    assert works(server)


def test_a_server_without_the_secret_gets_no_calls():
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        def play():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"girih\x03\x00\x00" + bytes(32))
                said.extend(connection.recv(1 << 16))
                with contextlib.suppress(OSError):
                    connection.sendall(bytes(100))
                    said.extend(connection.recv(1 << 16))

        thread = threading.Thread(target=play)
        thread.start()
        with (
            connect(address, secret=SECRET, timeout_s=0.3) as client,
            pytest.raises(WireTimeout, match="same secret"),
        ):
            client.call(1, (5,), (np.zeros(1000),)).wait(10)
        thread.join()
    assert len(said) == HELLO_BYTES


@pytest.mark.parametrize("wrong", ["secret", "challenge", "sign", "garbage"])
def test_who_cannot_prove_it_is_refused_before_anything_else_is_read(server, wrong):
    with dial(server) as stranger:
        challenge = stranger.recv(CHALLENGE_BYTES)
        secret = b"guessed" if wrong == "secret" else SECRET
        if wrong == "challenge":
            challenge = challenge[:-1] + bytes([challenge[-1] ^ 1])
        hello = pack_hello(secret, challenge, Hello(0, 0))
        if wrong == "sign":
            hello = b"GIRIH" + hello[5:]
        if wrong == "garbage":
            hello = np.random.default_rng(0).bytes(HELLO_BYTES)
        stranger.sendall(hello)
        assert ended(stranger)
    assert server.num_refused == 1
    assert server.num_damaged == 0
    assert not server._peers
    assert works(server)


def test_a_stranger_is_heard_for_a_fixed_number_of_bytes_only(server):
    def flood(stranger):
        for _ in range(10_000):
            stranger.sendall(bytes(1 << 16))

    with dial(server) as stranger, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        flood(stranger)
    assert server.num_refused == 1
    assert server.num_damaged == 0
    assert not server._peers  # only a session's bytes are read as messages
    assert works(server)


def test_strangers_that_say_nothing_or_too_little_are_dropped(server, monkeypatch):
    monkeypatch.setattr(server_module, "_STRANGER_S", 0.2)
    with dial(server) as silent, dial(server) as slow:
        until(lambda: len(server._strangers) == 2)
        slow.sendall(bytes(HELLO_BYTES - 1))
        assert works(server)
        assert ended(silent)
        assert ended(slow)
    assert not server._strangers
    assert server.num_refused == 2


def test_a_crowd_of_strangers_keeps_others_waiting_for_a_moment_only(server, monkeypatch):
    monkeypatch.setattr(server_module, "_STRANGER_S", 0.3)
    monkeypatch.setattr(server_module, "_MOST_STRANGERS", 3)
    crowd = [dial(server) for _ in range(9)]
    until(lambda: len(server._strangers) == 3)
    assert works(server)
    for stranger in crowd:
        stranger.close()


WITHOUT_DESCRIPTORS = """
import os, resource, sys, time
from girih.comm.service import listen
server = listen(lambda r: r.reply(), secret=b"of this run, and of no other")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(server.address, flush=True)
sys.stdin.readline()
began = time.process_time()
time.sleep(1)
print(time.process_time() - began, flush=True)
for file in taken:
    os.close(file)
sys.stdin.readline()
"""


def test_a_listener_without_descriptors_waits_and_then_goes_on():
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        address = process.stdout.readline().strip()
        with connect(address, secret=SECRET) as client:
            call = client.call(1)
            time.sleep(0.2)
            process.stdin.write("\n")
            process.stdin.flush()
            assert float(process.stdout.readline()) < 0.2
            call.wait(10)
        assert "cannot take connections now" in process.communicate("\n")[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "shm://"])
def test_a_bad_message_of_somebody_trusted_ends_his_connection_alone(address):
    rng = np.random.default_rng(0)
    shape = bytes.fromhex("47524948 0300 0000 0000 00 00 0100 0000") + bytes(24)  # one array, (0, 2**63)
    with (
        listen(lambda r: r.reply(r.frame.fields), address=address, secret=SECRET) as server,
        connect(server.address, secret=SECRET) as other,
    ):
        assert other.call(1, (5,)).wait(10).fields == (5,)
        bad = [
            rng.bytes(5000),
            _message(shape),
            _message(),
            _message(b"LANE12345"),
            _message(b"LANE" + rng.bytes(20)),
        ]
        bad += [_message(rng.bytes(size), rng.bytes(7)) for size in (0, 1, 100, 10_000)]
        bad += [b"GRM1" + b"\xff" * 4, b"GRM1\x01\0\0\0" + b"\xff" * 8]
        for each in bad:
            connection, _ = dialer(server.address).dial(SECRET, Hello(0, 0), 5.0)
            stream = getattr(connection, "stream", connection)
            stream.socket.setblocking(True)
            stream.socket.sendall(each)
            assert ended(stream.socket)
            connection.close()
        until(lambda: server.num_damaged >= len(bad) - 1)  # one looks like no message that is cut short
        assert other.call(1, (6,)).wait(10).fields == (6,)
        assert other.num_reconnects == 0


def _message(*parts):
    return b"".join(laid_out([np.frombuffer(part, np.uint8) for part in parts]))


def test_a_wrong_secret_is_a_wire_error_at_once_for_who_dials(server):
    with pytest.raises(WireError, match="instead of greeting"):
        dialer(server.address).dial(b"guessed", Hello(0, 0), 5.0)
