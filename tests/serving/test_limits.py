"""What ``girih serve`` allows each client: bytes of headers and bodies, seconds, connections, memory of the process."""

import contextlib
import json
import multiprocessing
import signal
import socket
import sys
import time

import numpy as np
import pytest

from girih import cli
from girih.cli import bench
from girih.errors import ConfigError
from girih.serving.limits import DRAIN_S, ServeOptions
from serving.serving_site import Site

pytest.importorskip("httptools")
MEGABYTE = 1 << 20
INFER = "/v2/models/run/infer"
INPUTS = [
    {"name": "user", "datatype": "INT64", "shape": [2], "data": [3, 4]},
    {"name": "item", "datatype": "INT64", "shape": [2], "data": [7, 8]},
    {"name": "tags", "datatype": "INT64", "shape": [2, 1], "data": [[1], [2]]},
    {"name": "x0", "datatype": "FP32", "shape": [2], "data": [1.0, 2.5]},
]
BODY = json.dumps({"inputs": INPUTS}).encode()


@pytest.fixture(scope="module")
def model(log_source, tmp_path_factory):
    """An exported model."""
    path = tmp_path_factory.mktemp("limited")
    words = ["train", log_source / "config.toml", "--run", path / "run", "--set", "train.max_steps=2"]
    assert cli.run([str(word) for word in words]) == 0
    assert cli.run(["export", str(path / "run"), "--out", str(path / "model")]) == 0
    return path / "model"


@pytest.fixture(scope="module")
def site(model):
    """A server with small limits."""
    words = ["--max-header-bytes", 8000, "--max-bytes", MEGABYTE, "--max-unfinished-bytes", 2 * MEGABYTE]
    with Site(model, *words, "--request-timeout", 1.5, "--max-connections", 40) as site:
        yield site
        assert site.stop() == 130
        assert [line for line in site.errors if line.strip()] == []


def connect(site):
    host, port = site.url.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(*lines, path=INFER, method="POST"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def good(**options):
    return head(f"Content-Length: {len(BODY)}", **options) + BODY


def read_all(connection):
    """Everything until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def status_and_error(data):
    lines, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in lines.lower(), data
    return int(lines.split()[1]), json.loads(body)["error"]


def answers_of(connection, num_answers):
    """Status of each answer on a connection that goes on."""
    statuses = []
    with connection.makefile("rb") as file:
        for _ in range(num_answers):
            statuses.append(int(file.readline().split()[1]))
            length = 0
            while (line := file.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            file.read(length)
    return statuses


def answer_of(connection):
    """Status of one answer on a connection that goes on."""
    return answers_of(connection, 1)[0]


def trickle(connection):
    """Sends a byte now and then."""
    for _ in range(1000):
        connection.sendall(b" ")
        time.sleep(0.02)


def refused(site, reason):
    """How many clients were refused for a reason."""
    _, _, body = site.ask("GET", "/metrics")
    lines = [line.split() for line in body.decode().splitlines()]
    name = f'girih_serving_refused_total{{reason="{reason}"}}'
    return next((float(line[1]) for line in lines if line[0] == name), 0.0)


def long_head(size):
    """A request for metrics with a head of exactly so many bytes."""
    return head(
        "X: " + "x" * (size - len(head("X: ", path="/metrics", method="GET"))), path="/metrics", method="GET"
    )


@pytest.mark.parametrize("step", [1 << 20, 97])
def test_heads_have_a_most_size(site, step):
    with connect(site) as connection:
        data = long_head(8000)
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        assert answer_of(connection) == 200
        connection.sendall(long_head(8001))
        assert status_and_error(read_all(connection)) == (431, "headers of more than 8,000 bytes")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 25_000,
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX: " + b"a" * 100_000,
        b"\r\n" * 50_000,
        b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 100_000,
        b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"a:\r\n" * 25_000,
        b"POST /v2 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 100_000,
    ],
)
def test_unfinished_heads_and_trailers_are_refused(site, begin):
    before = refused(site, "headers")
    with connect(site) as connection:
        connection.sendall(begin)
        assert status_and_error(read_all(connection))[0] == 431
    assert refused(site, "headers") == before + 1


def test_requests_have_a_most_number_of_headers(site):
    with connect(site) as connection:
        connection.sendall(head(*["a: b"] * 900, path="/metrics", method="GET"))
        assert answer_of(connection) == 200
        connection.sendall(head(*["a: b"] * 1100, path="/metrics", method="GET"))
        assert status_and_error(read_all(connection))[0] == 431


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", [INFER, "/v2/models/r%75n/infer?a=b", "/metrics", "/v2/none", "/"])
def test_bodies_have_a_most_size_whatever_their_path(site, path, method):
    before = refused(site, "size")
    for lines in (
        [f"Content-Length: {MEGABYTE + 1}"],
        [f"Content-Length: {MEGABYTE + 1}", "Expect: 100-continue"],
        [f"Content-Length: {MEGABYTE + 1}", "Connection: Upgrade", "Upgrade: h2c"],
    ):
        with connect(site) as connection:
            connection.sendall(head(*lines, path=path, method=method))
            status, error = status_and_error(read_all(connection))
            assert (status, error[:48]) == (413, "a body of 1,048,577 bytes; expected at most 1,04")
    with connect(site) as connection:
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        connection.sendall(head("Transfer-Encoding: chunked", path=path, method=method) + 17 * chunk)
        assert status_and_error(read_all(connection))[0] == 413
    assert refused(site, "size") == before + 4


def test_a_body_of_the_most_size_is_answered_however_it_comes(site):
    body = BODY + b" " * (MEGABYTE - len(BODY))
    sent = head(f"Content-Length: {MEGABYTE}") + body
    chunks = b"".join(b"40\r\n%b\r\n" % body[start : start + 64] for start in range(0, len(body), 64))
    tail = b"0\r\nX: y\r\n\r\n"
    with connect(site) as connection:
        for data in (sent, head("Transfer-Encoding: chunked") + chunks + tail, good()):
            connection.sendall(data)
            assert answer_of(connection) == 200


def test_requests_have_a_most_time(site):
    before = refused(site, "time")
    start = time.monotonic()
    begins = [
        b"POST ",
        b"GET /metrics HTTP/1.1\r\nX:",
        head("Content-Length: 100"),
        head("Content-Length: 100", path="/metrics") + b"{}",
        head("Transfer-Encoding: chunked") + b"3\r\nabc\r\n",
    ]
    with contextlib.ExitStack() as closing:
        connections = [closing.enter_context(connect(site)) for _ in begins]
        for connection, begin in zip(connections, begins, strict=True):
            connection.sendall(begin)
        slow = closing.enter_context(connect(site))
        slow.sendall(head("Content-Length: 1000"))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(slow)
        for connection in connections:
            assert status_and_error(read_all(connection)) == (408, "no whole request in 1.5 seconds")
    assert 1.5 <= time.monotonic() - start < 15
    assert refused(site, "time") == before + 6


@pytest.mark.slow
def test_connections_that_send_nothing_are_closed(site):
    with connect(site) as fresh, connect(site) as idle:
        idle.sendall(good())
        assert answer_of(idle) == 200
        assert fresh.recv(1) == b""  # after the time of a request
        assert idle.recv(1) == b""  # after the time for idle connections


def test_too_many_connections_are_refused_and_the_others_stay(site):
    with contextlib.ExitStack() as closing:
        kept = []
        for number in range(40):
            kept.append(closing.enter_context(connect(site)))
            kept[-1].sendall(good())
            assert answer_of(kept[-1]) == 200, number
        for _ in range(3):
            with connect(site) as connection:
                data = read_all(connection)
                assert b"Retry-After: 1" in data.replace(b"retry-after", b"Retry-After")
                assert status_and_error(data) == (503, "too many connections are open; try again later")
        for connection in kept:
            connection.sendall(good())
            assert answer_of(connection) == 200
    deadline = time.monotonic() + 20
    while True:
        with connect(site) as connection:
            connection.sendall(good())
            with contextlib.suppress(ConnectionResetError, IndexError):
                if answer_of(connection) == 200:
                    break
        assert time.monotonic() < deadline
    assert refused(site, "connections") >= 3


def test_the_greediest_connection_leaves_where_all_hold_too_much(site):
    before = refused(site, "bytes")
    begin = head(f"Content-Length: {MEGABYTE}")
    with contextlib.ExitStack() as closing:
        large = closing.enter_context(connect(site))
        large.sendall(begin + bytes(900_000))
        time.sleep(0.2)
        others = [closing.enter_context(connect(site)) for _ in range(5)]
        for connection in others:
            connection.sendall(begin + bytes(300_000))
        status, error = status_and_error(read_all(large))
        assert status == 503
        assert error == "unfinished requests hold more than 2,097,152 bytes; try again later"
        with connect(site) as connection:
            connection.sendall(good())
            assert answer_of(connection) == 200
    assert refused(site, "bytes") == before + 1


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answers_is_closed(site):
    with connect(site) as greedy:
        greedy.setblocking(False)
        is_open, deadline = True, time.monotonic() + 60
        while is_open:  # until the server closes, since the client does not read in time
            assert time.monotonic() < deadline
            try:
                greedy.send(head(path="/metrics", method="GET") * 1000)
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:
                is_open = False
        with connect(site) as connection:
            connection.sendall(good())
            assert answer_of(connection) == 200


@pytest.mark.parametrize(
    "path", ["http://x:80" + INFER, "HTTPS://x" + INFER + "?a=/b", INFER + "/", INFER + "#a"]
)
def test_paths_may_be_absolute_and_end_with_a_slash(site, path):
    with connect(site) as connection:
        others = head(path="http://x?a=/v2", method="GET") + head(path="*", method="OPTIONS")
        connection.sendall(good(path=path) + others)
        assert answers_of(connection, 3) == [200, 404, 404]


@pytest.mark.parametrize("step", [1 << 20, 7])
def test_the_body_of_a_request_to_upgrade_is_no_other_request(site, step):
    lines = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"]
    other = head(path="/v2", method="GET")
    with connect(site) as connection:
        upgrade = head(*lines, f"Content-Length: {len(BODY)}") + BODY  # as Java's client begins
        tunnel = head(f"Content-Length: {len(other)}", path="x:80", method="CONNECT") + other
        data = upgrade + tunnel + good()
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        assert answers_of(connection, 3) == [200, 404, 200]
        connection.sendall(head(*lines, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n")
        assert status_and_error(read_all(connection))[0] == 400


def test_outputs_are_named_once(site):
    status, content = site.infer({"inputs": INPUTS, "outputs": [{"name": "prediction"}] * 2})
    assert (status, content["error"]) == (400, "output 'prediction' occurs twice")


@pytest.mark.slow
def test_a_server_ends_soon_whatever_its_clients_hold(model):
    with Site(model) as site, contextlib.ExitStack() as closing:
        connections = [closing.enter_context(connect(site)) for _ in range(4)]
        for connection, begin in zip(
            connections, (b"", b"GET ", head("Content-Length: 9"), good()), strict=True
        ):
            connection.sendall(begin)
        assert answer_of(connections[-1]) == 200
        start = time.monotonic()
        site.process.send_signal(signal.SIGTERM)
        assert site.process.wait(20) == 130
        assert time.monotonic() - start < DRAIN_S + 3
        assert [line for line in site.errors if line.strip()] == []


def test_contradictory_limits_are_refused():
    with pytest.raises(ConfigError, match="max_unfinished_bytes = 1,000: expected at least max_bytes, 2,000"):
        ServeOptions(max_bytes=2000, max_unfinished_bytes=1000)
    for name in ("max_header_bytes", "max_unfinished_bytes", "request_timeout", "max_connections"):
        with pytest.raises(ConfigError, match=f"serve: {name} = 0: expected"):
            ServeOptions(**{name: 0})


@pytest.fixture
def greedy():
    """The greedy clients of the benchmark."""
    sys.path.insert(0, str(bench.FOLDER))
    import greedy

    yield greedy
    sys.path.remove(str(bench.FOLDER))


@pytest.mark.slow
def test_memory_stays_bounded_with_two_hundred_greedy_clients(model, greedy):
    with Site(model) as site:
        pid, address = site.process.pid, (site.url.split(":")[0], int(site.url.split(":")[1]))
        for _ in range(20):
            assert site.infer(BODY)[0] == 200
        idle = most = greedy.rss_megabytes(pid)
        context = multiprocessing.get_context("spawn")
        kinds = list(greedy.KINDS)
        process = context.Process(target=greedy.crowd, args=(address, kinds, INFER, good(), 200, 12.0))
        process.start()
        num_answers = 0
        while process.is_alive():
            status, content = site.infer(BODY)
            assert status == 200, content
            num_answers += 1
            most = max(most, greedy.rss_megabytes(pid))
        assert num_answers >= 3
        assert most - idle < 64
        deadline = time.monotonic() + 30
        while greedy.rss_megabytes(pid) - idle >= 16:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        status, content = site.infer(BODY)
        assert status == 200
        assert np.isfinite(content["outputs"][0]["data"]).all()
        assert site.stop() == 130
