"""TLS between processes of a run: what is heard on the way, who is believed, and what changed bytes do."""

import contextlib
import hashlib
import socket
import ssl
import threading

import numpy as np
import pytest
from wiretap import Listening, dial, ended

from girih.comm.registry import LocalRegistry, RegistryServer
from girih.comm.registry.remote import RemoteRegistry
from girih.comm.rpc.transport import HELLO_BYTES, Hello
from girih.comm.service import connect, dialer, listen
from girih.comm.transports import tls
from girih.errors import ConfigError, WireError, WireTimeout
from support.transport_ends import until

SECRET = b"of this run, and of no other"
WORD = b"a row that nobody else is to read" * 1000


@pytest.fixture(params=["tls", "tcp"])
def scheme(request):
    return request.param


def test_who_hears_what_goes_by_learns_nothing_of_it(scheme):
    word = np.frombuffer(WORD, np.uint8)
    with listen(
        lambda r: r.reply((), r.frame.arrays), address=f"{scheme}://127.0.0.1:*", secret=SECRET
    ) as server:
        ear = Listening(server, scheme=scheme)
        with connect(ear.address, secret=SECRET) as client:
            assert client.call(1, (), (word,)).wait(10).arrays[0].tobytes() == WORD
        ear.join()
    assert all(len(said) > len(WORD) for said in ear.heard)
    assert [WORD[:33] in said for said in ear.heard] == [scheme == "tcp"] * 2


@pytest.mark.parametrize("position", [20, 500, 5000, 25_000])
def test_a_byte_that_is_changed_on_the_way_costs_a_connection_and_changes_nothing(position):
    taken = []

    def handle(request):
        taken.append(hashlib.sha256(request.frame.arrays[0]).digest())
        request.reply(request.frame.fields)

    with listen(handle, address="tls://127.0.0.1:*", secret=SECRET) as server:
        ear = Listening(server, scheme="tls", spoil=position)
        with connect(ear.address, secret=SECRET) as client:
            assert client.call(1, (5,), (np.frombuffer(WORD, np.uint8),)).wait(20).fields == (5,)
        ear.join()
    assert taken == [hashlib.sha256(WORD).digest()]
    assert client.num_lost == 0


def test_what_was_heard_opens_nothing_when_it_is_said_again():
    ran = []
    with listen(lambda r: ran.append(r.reply(())), address="tls://127.0.0.1:*", secret=SECRET) as server:
        ear = Listening(server, scheme="tls")
        with connect(ear.address, secret=SECRET) as client:
            client.call(1).wait(10)
        ear.join()
        with dial(server) as stranger:
            stranger.sendall(ear.heard[0])
            assert ended(stranger)
        until(lambda: server.num_refused == 1)
    assert len(ran) == 1


@pytest.mark.parametrize("who", ["another run", "no key", "no TLS"])
def test_who_has_not_the_runs_key_is_refused_before_he_is_asked_for_a_proof(who):
    with listen(lambda r: r.reply(), address="tls://127.0.0.1:*", secret=SECRET) as server:
        if who == "another run":
            with pytest.raises((WireError, OSError)):
                dialer(server.address).dial(b"guessed", Hello(0, 0), 5.0)
        elif who == "no key":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with (
                dial(server) as stranger,
                contextlib.suppress(OSError),  # he may hear of it while he speaks or listens
                context.wrap_socket(stranger) as secured,
            ):
                secured.sendall(bytes(HELLO_BYTES))
                assert not secured.recv(100)
        else:
            with dial(server) as stranger:
                stranger.sendall(bytes(HELLO_BYTES))
                assert ended(stranger)
        until(lambda: server.num_refused == 1)
        assert not server._peers
        with connect(server.address, secret=SECRET) as client:
            client.call(1).wait(10)


def test_a_client_believes_no_server_of_another_run():
    with (
        listen(lambda r: r.reply(), address="tls://127.0.0.1:*", secret=b"of another") as server,
        connect(server.address, secret=SECRET, timeout_s=0.3) as client,
        pytest.raises(WireTimeout, match="certificate verify failed"),
    ):
        client.call(1).wait(10)


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        began = dialer(f"tls://{host}:{port}")
        threading.Timer(0.2, began.stop).start()
        with pytest.raises(OSError, match=r"EOF|[Bb]roken|closed"):
            began.dial(SECRET, Hello(0, 0), 30.0)


def test_a_registry_is_asked_over_tls():
    server = RegistryServer(LocalRegistry(), SECRET, encrypt=True)
    remote = RemoteRegistry(server.address, SECRET)
    try:
        assert server.address.startswith("tls://127.0.0.1:")
        remote.set("a", "1")
        assert remote.get("a") == "1"
    finally:
        remote.close()
        server.close()


def test_a_certificate_is_the_same_in_each_process_and_another_in_each_run():
    (one, _), (again, _), (other, _) = (tls._certificate(secret) for secret in (b"a", b"a", b"b"))
    assert one == again != other


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(tls.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'girih\[encrypt\]'"):
        RegistryServer(LocalRegistry(), SECRET, encrypt=True)
