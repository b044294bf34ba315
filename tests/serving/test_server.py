"""``girih serve``: real processes, asked by a client that is not ours, by hand, and by those who mean no good."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from girih import cli
from girih.serving.limits import ServeOptions
from girih.serving.server import Workers, bind_socket
from girih.serving.signature import LENGTHS
from serving.serving_site import Site, inputs_of, tensors_of

pytest.importorskip("httptools")
COLUMNS = ["user", "item", "tags", "x0"]
ROOT = Path(__file__).parents[2]


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture(scope="module")
def place(log_source, tmp_path_factory):
    """An exported model, 128 rows of its test data, and what ``girih predict`` says of them; only read."""
    path = tmp_path_factory.mktemp("place")
    assert run("train", log_source / "config.toml", "--run", path / "run", "--set", "train.max_steps=9") == 0
    table = pq.read_table(log_source / "test.parquet").select(COLUMNS)
    table = table.filter(pc.is_valid(table["x0"])).slice(0, 128)  # tensors of bytes have no missing values
    pq.write_table(table, path / "some.parquet")
    assert run("predict", path / "run", "--data", path / "some.parquet", "--out", path / "out.parquet") == 0
    assert run("export", path / "run", "--out", path / "clicks") == 0
    return path


@pytest.fixture(scope="module")
def table(place):
    return pq.read_table(place / "some.parquet")


@pytest.fixture(scope="module")
def expected(place):
    return pq.read_table(place / "out.parquet")["prediction"].to_numpy()


@pytest.fixture(scope="module")
def site(place):
    """A server that all tests of this file ask, whatever others did to it before."""
    with Site(place / "clicks", "--max-batch", 200, "--max-bytes", 1 << 20) as site:
        yield site
        assert site.process.poll() is None
        assert site.stop() == 130
        assert said(site) == []


def said(site):
    """What it wrote to standard error, without the empty line behind ^C."""
    return [line for line in site.errors if line.strip()]


def predictions(answer):
    status, content = answer
    assert status == 200, content
    (output,) = content["outputs"]
    return np.array(output["data"], np.float32)


def test_it_speaks_the_protocol(site, place):
    assert site.name == "run"
    status, server = site.get("/v2")
    assert (status, server["name"], server["extensions"]) == (200, "girih", ["binary_tensor_data"])
    assert site.get("/v2/health/live") == (200, {"live": True})
    assert site.get("/v2/health/ready") == (200, {"ready": True})
    status, model = site.get("/v2/models/run")
    assert status == 200
    assert model == site.get("/v2/models/run/versions/9")[1]
    assert (model["name"], model["versions"], model["platform"]) == ("run", ["9"], "girih")
    assert model["inputs"][0]["parameters"]["datatypes"][-2:] == ["INT64", "BYTES"]
    assert model["inputs"][-1] == {"name": "x0", "datatype": "FP32", "shape": [-1]}
    assert model["outputs"] == [{"name": "prediction", "datatype": "FP32", "shape": [-1]}]
    for path in ("/v2/models/run/ready", "/v2/models/run/versions/9/ready"):
        assert site.get(path) == (200, {"name": "run", "ready": True})
    for path, told in (
        ("/v2/models/other", "model 'other' is not here; this server has 'run'"),
        ("/v2/models/run/versions/8", "version '8' of 'run' is not here; this server has 9"),
        ("/v2/models/run/versions/8/ready", "version '8' of 'run' is not here; this server has 9"),
        ("/v3", "GET /v3: no such path; see /v2 and /v2/models/NAME"),
    ):
        assert site.get(path) == (404, {"error": told})
    assert site.get("/v2/models/run/infer")[0] == 405


def test_answers_in_json_are_those_of_predict(site, table, expected):
    inputs = inputs_of(table)
    status, content = site.infer({"id": "seven", "inputs": inputs})
    assert (status, content["id"], content["model_name"], content["model_version"]) == (
        200,
        "seven",
        "run",
        "9",
    )
    (output,) = content["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("prediction", "FP32", [128])
    np.testing.assert_array_equal(np.array(output["data"], np.float32), expected)
    asked = [{"name": "prediction", "parameters": {"binary_data": False}}]
    versioned = site.ask(
        "POST", "/v2/models/run/versions/9/infer", json.dumps({"inputs": inputs, "outputs": asked})
    )
    assert json.loads(versioned[2])["outputs"] == [output]


def test_a_strangers_client_gets_answers(site, table, expected):
    client = pytest.importorskip("tritonclient.http")
    with client.InferenceServerClient(site.url) as connection:
        assert connection.is_server_live()
        assert connection.is_server_ready()
        assert connection.is_model_ready("run")
        assert connection.is_model_ready("run", "9")
        assert connection.get_server_metadata()["name"] == "girih"
        assert connection.get_model_metadata("run")["versions"] == ["9"]
        for binary_in in (False, True):
            for strings in (False, True):  # ids as their decimal spelling
                inputs = []
                for tensor in tensors_of(table).values():
                    values, datatype = tensor.values, tensor.datatype
                    if strings and datatype == "INT64":
                        values, datatype = (
                            np.array([str(each).encode() for each in values.tolist()], object),
                            "BYTES",
                        )
                    inputs.append(client.InferInput(tensor.name, list(tensor.shape), datatype))
                    inputs[-1].set_data_from_numpy(values, binary_data=binary_in)
                for outputs in (
                    None,
                    [client.InferRequestedOutput("prediction", binary_data=True)],
                    [client.InferRequestedOutput("prediction", binary_data=False)],
                ):
                    answer = connection.infer("run", inputs, request_id="4", outputs=outputs)
                    np.testing.assert_array_equal(answer.as_numpy("prediction"), expected)
                    assert answer.get_response()["id"] == "4"
        inputs = [client.InferInput("wrong", [1], "INT64")]
        inputs[0].set_data_from_numpy(np.zeros(1, np.int64))
        with pytest.raises(client.InferenceServerException, match="input 'wrong': no feature reads it"):
            connection.infer("run", inputs)


def test_what_all_candidates_share_is_sent_once(site, table, expected):
    inputs = {each["name"]: each for each in inputs_of(table)}
    row = next(row for row, tags in enumerate(table["tags"].to_pylist()) if tags)
    user, tags = table["user"][row].as_py(), table["tags"][row].as_py()
    shared = [
        {"name": "user", "datatype": "INT64", "shape": [1], "data": [user]},
        {"name": "tags", "datatype": "INT64", "shape": [len(tags)], "data": tags},
        {"name": "tags" + LENGTHS, "datatype": "INT32", "shape": [1], "data": [len(tags)]},
        inputs["item"],
        inputs["x0"],
    ]
    repeated = [
        {"name": "user", "datatype": "INT64", "shape": [128], "data": [user] * 128},
        {"name": "tags", "datatype": "INT64", "shape": [128 * len(tags)], "data": tags * 128},
        {"name": "tags" + LENGTHS, "datatype": "INT32", "shape": [128], "data": [len(tags)] * 128},
        inputs["item"],
        inputs["x0"],
    ]
    found = predictions(site.infer({"inputs": shared}))
    np.testing.assert_array_equal(found, predictions(site.infer({"inputs": repeated})))
    np.testing.assert_allclose(found[row], expected[row], rtol=1e-5)
    words = [
        each | {"datatype": "BYTES", "data": [str(user)]} if each["name"] == "user" else each
        for each in shared
    ]
    np.testing.assert_array_equal(found, predictions(site.infer({"inputs": words})))


def test_shapes_may_be_of_two_dims_and_values_null(site):
    one = [
        {"name": "user", "datatype": "INT64", "shape": [2, 1], "data": [[3], [None]]},
        {"name": "item", "datatype": "BYTES", "shape": [2], "data": ["7", "seven"]},
        {"name": "tags", "datatype": "INT32", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
        {"name": "x0", "datatype": "FP64", "shape": [2], "data": [1, 2.5]},
    ]
    found = predictions(site.infer({"inputs": one}))
    assert found.shape == (2,)
    flat = [each | {"data": [3, None]} if each["name"] == "user" else each for each in one]
    flat = [each | {"data": [1, 2, 3, 4]} if each["name"] == "tags" else each for each in flat]
    np.testing.assert_array_equal(found, predictions(site.infer({"inputs": flat})))


def test_metrics_are_for_prometheus(site, table):
    def now():
        status, headers, body = site.ask("GET", "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        lines = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    before = now()
    site.infer({"inputs": inputs_of(table)})
    site.infer(b"nothing")
    after = now()
    assert after["girih_serving_examples_total"] == before.get("girih_serving_examples_total", 0) + 128
    for name in ('girih_serving_requests_total{status="200"}', 'girih_serving_requests_total{status="400"}'):
        assert after[name] == before.get(name, 0) + 1
    assert after["girih_serving_seconds_count"] == before.get("girih_serving_seconds_count", 0) + 2
    assert after["girih_serving_step"] == 9
    assert after["girih_serving_version"] == 0
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = {re.sub(r"(_bucket|_count|_sum)?(\{.*)?$", "", name) for name in after}
    for name in (name for name in names if not name.endswith("_created")):
        assert f"`{name}`" in page


def changed(table, name, **values):
    return [each | values if each["name"] == name else each for each in inputs_of(table)]


def bad_requests(table):
    """A body, headers, the status and the sentence that comes back."""
    inputs = inputs_of(table)
    yield b"", {}, 400, "the body is not JSON"
    yield b"{not json", {}, 400, "the body is not JSON at line 1, character 2; expected an inference request"
    yield b"\xff\xfe\x00", {}, 400, "the body is not JSON: byte 2 is not text in UTF-16"
    yield b'{"a": "\xff"}', {}, 400, "the body is not JSON: byte 7 is not text in UTF-8; expected an"
    yield b"[" + b"7" * 5000, {}, 400, "the body is not JSON: a number has more than 4,300 digits; expected"
    yield b"[" * 100_000, {}, 400, "the body is not JSON: lists or objects are nested too deeply"
    for content in ([], 7, None, {}, {"inputs": {}}, {"inputs": "user"}):
        yield content, {}, 400, "the body has no list of inputs"
    yield {"inputs": []}, {}, 400, "the list of inputs is empty"
    yield {"inputs": [7]}, {}, 400, "input 0 has no name"
    yield {"inputs": [{}]}, {}, 400, "input 0 has no name"
    yield {"inputs": [*inputs, inputs[0]]}, {}, 400, "input 'user' occurs twice"
    yield {"inputs": inputs[1:]}, {}, 400, "input 'user' is missing; expected user, item, tags, x0"
    yield (
        {"inputs": [*inputs, inputs[0] | {"name": "usr"}]},
        {},
        400,
        "input 'usr': no feature reads it; did you mean 'user'?",
    )
    for shape in (None, [], [1, 2, 3], ["x"], [-1], [1.5], {}, [True], 128):
        yield {"inputs": changed(table, "user", shape=shape)}, {}, 400, "expected [n], or [n, length]"
    yield (
        {"inputs": changed(table, "user", shape=[127])},
        {},
        400,
        "input 'user': 128 values for a shape of [127]; expected 127",
    )
    yield {"inputs": changed(table, "user", shape=[1 << 62, 1 << 62])}, {}, 400, "has too many values"
    yield {"inputs": changed(table, "user", data=None)}, {}, 400, "input 'user': data is not a list"
    yield {"inputs": changed(table, "user", data=["a"] * 128)}, {}, 400, "expected values of INT64"
    yield {"inputs": changed(table, "user", data=[{}] * 128)}, {}, 400, "expected values of INT64"
    yield {"inputs": changed(table, "user", data=[0.5] * 128)}, {}, 400, "expected values of INT64"
    yield {"inputs": changed(table, "user", data=[1 << 70] * 128)}, {}, 400, "expected values of INT64"
    for name, value, told in (
        (
            "user",
            0.5,
            "input 'user': value 0 is 0.5; expected values of INT64, integers from -9223372036854775808 to",
        ),
        ("user", True, "input 'user': value 0 is true; expected values of INT64"),
        ("user", "\ud800", 'value 0 is "\\ud800"; expected values of INT64'),
        ("x0", 1e300, "input 'x0': value 0 is 1e+300; expected values of FP32, numbers up to 3.4e+38"),
        ("x0", True, "input 'x0': value 0 is true; expected values of FP32"),
        ("x0", "a", "input 'x0': value 0 is \"a\"; expected values of FP32"),
        ("x0", 1 << 200, "expected values of FP32"),
    ):
        datatype = {"user": "INT64", "x0": "FP32"}[name]
        yield {"inputs": changed(table, name, datatype=datatype, data=[value] * 128)}, {}, 400, told
    words = ["a"] * 127 + ["\ud800"]
    yield (
        {"inputs": changed(table, "user", datatype="BYTES", data=words)},
        {},
        400,
        "input 'user': value 127 is \"\\ud800\"; expected values of BYTES, Unicode strings",
    )
    yield (
        {"inputs": changed(table, "x0", datatype="BYTES", data=["a"] * 128)},
        {},
        400,
        "request: column 'x0' (BYTES) of feature 'x0': expected numbers",
    )
    yield (
        {"inputs": changed(table, "user", shape=[128, 1], data=[[1]] * 127 + [1])},
        {},
        400,
        "mixes values and lists",
    )
    yield (
        {"inputs": changed(table, "user", datatype="INT46")},
        {},
        400,
        "datatype = 'INT46'; did you mean 'INT64'?",
    )
    yield {"inputs": changed(table, "user", datatype=None)}, {}, 400, "datatype = null"
    uneven = [[1, 2], [], *[[1]] * 126]
    yield {"inputs": changed(table, "user", shape=[128, 1], data=uneven)}, {}, 400, "lists of other lengths"
    none = changed(table, "user", shape=[2_000_000_000, 0], data=[])
    yield {"inputs": none}, {}, 413, "2,000,000,000 examples in one request; expected at most 200"
    yield (
        {"inputs": changed(table, "user", datatype="FP32", data=[0.5] * 128)},
        {},
        400,
        "ids are integers or strings",
    )
    yield {"inputs": changed(table, "x0", datatype="BYTES", data=["a"] * 128)}, {}, 400, "expected numbers"
    yield (
        {"inputs": changed(table, "x0", data=[float("inf")] * 128)},
        {},
        400,
        "request, row 1: column 'x0' = inf: expected a finite number",
    )
    three = [{"name": "user", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}, *inputs[1:]]
    yield (
        {"inputs": three},
        {},
        400,
        "input 'user' has 3 examples, 'item' has 128; expected as many, or 1 for all",
    )
    yield {"inputs": [{**three[0], "shape": [0], "data": []}, *inputs[1:]]}, {}, 400, "no examples"
    lengths = next(each for each in inputs if each["name"] == "tags" + LENGTHS)
    for bad, told in (
        ([-1, *lengths["data"][1:]], "lengths from -1"),
        ([1 << 20] * 128, "expected 0 to"),
        ([0] * 128, "sums to 0; expected as many"),
    ):
        yield {"inputs": changed(table, "tags" + LENGTHS, data=bad)}, {}, 400, told
    yield (
        {"inputs": changed(table, "tags" + LENGTHS, datatype="FP32")},
        {},
        400,
        "expected INT32 or INT64 of [n]",
    )
    many = [{"name": name, "datatype": "INT64", "shape": [201], "data": [1] * 201} for name in COLUMNS]
    yield (
        {"inputs": many},
        {},
        413,
        "201 examples in one request; expected at most 200: send several requests",
    )
    bomb = [
        {"name": "tags", "datatype": "INT64", "shape": [50_000], "data": [1] * 50_000},
        {**lengths, "shape": [1], "data": [50_000]},
    ]
    yield (
        {"inputs": [*inputs[:2], *bomb, inputs[-1]]},
        {},
        413,
        "values in one request; expected at most 4,194,304",
    )
    yield b" " * ((1 << 20) + 1), {}, 413, "a body of 1,048,577 bytes; expected at most 1,048,576"
    yield {"inputs": inputs, "id": 7}, {}, 400, "id is not a string"
    yield (
        {"inputs": inputs, "outputs": [{"name": "predictions"}]},
        {},
        400,
        "output 'predictions': the model has none of that name; did you mean 'prediction'?",
    )
    yield {"inputs": inputs, "outputs": [{}]}, {}, 400, "output 0 has no name; expected one of the"
    yield {"inputs": inputs, "outputs": 7}, {}, 400, "outputs is not a list"
    yield {"inputs": inputs, "parameters": 7}, {}, 400, "parameters is not an object"
    yield (
        {"inputs": inputs, "parameters": {"binary_data_output": 7}},
        {},
        400,
        "binary_data_output = 7: expected true or false",
    )
    yield {"inputs": inputs}, {"Content-Encoding": "gzip"}, 400, "Content-Encoding = 'gzip'"
    for size in ("x", "-1", "99999999", "1" * 30):
        yield (
            {"inputs": inputs},
            {"Inference-Header-Content-Length": size},
            400,
            "Inference-Header-Content-Length",
        )


def binary(header, tail):
    head = json.dumps(header).encode()
    return head + tail, {"Inference-Header-Content-Length": str(len(head))}


def bad_binaries(table):
    others = [each for each in inputs_of(table) if each["name"] != "user"]

    def user(size, datatype="INT64", shape=(128,)):
        described = {"name": "user", "datatype": datatype, "shape": list(shape)}
        return {"inputs": [described | {"parameters": {"binary_data_size": size}}, *others]}

    yield (
        *binary(user(1024), b"\0" * 1023),
        "binary_data_size = 1024; expected at most the 1,023 bytes that are left",
    )
    yield *binary(user(1023), b"\0" * 1023), "1,023 bytes for INT64[128]; expected 1,024"
    yield *binary(user(1024), b"\0" * 1025), "1 bytes are left after the inputs; expected none"
    for size in (-1, 1.5, "8", True, 1 << 70):
        yield *binary(user(size), b"\0" * 8), "binary_data_size"
    yield *binary(user(8, "BYTES", (1,)), b"\xff" * 8), "are not 1 strings"
    yield *binary(user(8, "BYTES", (2,)), b"\0\0\0\0\5\0\0\0"), "are not 2 strings"
    yield *binary(user(8, "BYTES", (1,)), b"\0\0\0\0\0\0\0\0"), "are not 1 strings"
    yield *binary(user(8, "BF16", (4,)), b"\0" * 8), "datatype = 'BF16'"
    yield (
        *binary({"inputs": [{"name": "user", "datatype": "INT64", "shape": [1], "parameters": 7}]}, b""),
        "parameters is not an object",
    )
    yield (
        *binary({"inputs": [{"name": "user", "datatype": "INT64", "shape": [1]}]}, b""),
        "neither data nor the parameter",
    )


def test_wrong_and_hostile_requests_get_one_sentence_and_the_server_lives(site, table, expected):
    for content, headers, status, told in bad_requests(table):
        try:
            found, answer = site.infer(content, headers)
        except (BrokenPipeError, ConnectionResetError):  # it did not read all of what is too large
            assert status == 413
            continue
        assert (found, list(answer)) == (status, ["error"]), (str(content)[-200:], told, str(answer)[:200])
        assert told in answer["error"], (told, answer)
        assert "\n" not in answer["error"]
        assert len(answer["error"]) < 600
    for body, headers, told in bad_binaries(table):
        found, answer = site.infer(body, headers)
        assert found == 400
        assert told in answer["error"], (told, answer)
    np.testing.assert_array_equal(predictions(site.infer({"inputs": inputs_of(table)})), expected)


def test_what_is_no_http_and_who_goes_away_hinder_nobody(site, table, expected):
    host, port = site.url.split(":")
    body = json.dumps({"inputs": inputs_of(table)}).encode()
    head = f"POST /v2/models/run/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for sent in (
        b"\0" * 100,
        b"GARBAGE\r\n\r\n",
        head + body[:100],
        head.replace(b"Length: ", b"Length: -"),
        b"GET / HTTP/9\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent)
    idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(20)]
    np.testing.assert_array_equal(predictions(site.infer({"inputs": inputs_of(table)})), expected)
    chunked = b"POST /v2/models/run/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(chunked)
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # it reads no more than it takes
            connection.sendall(piece * 1000)
    for connection in idle:
        connection.close()
    np.testing.assert_array_equal(predictions(site.infer({"inputs": inputs_of(table)})), expected)


def answered(connection):
    """(status, JSON) of one answer; that it goes on is left out."""
    with connection.makefile("rb", buffering=0) as file:
        status, length = int(file.readline().split()[1]), 0
        if status == 100:
            assert file.readline() == b"\r\n"
            status = int(file.readline().split()[1])
        while (line := file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = b""
        while len(body) < length:
            body += file.read(length - len(body))
    return status, json.loads(body)


@pytest.fixture
def asking(site, table):
    """A connection, and a function that makes a request: its head, given lines of it, and its body."""
    host, port = site.url.split(":")
    content = json.dumps({"inputs": inputs_of(table)}).encode()

    def request(*lines, path="/v2/models/run/infer", version="1.1", body=content):
        lines = (f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *lines)
        return "\r\n".join((*lines, "", "")).encode(), body

    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection, request


def test_requests_are_answered_however_their_bytes_come(asking, expected):
    connection, request = asking
    head, body = request()
    for size in (len(head) + len(body), 1000, 77):
        for start in range(0, len(head + body), size):
            connection.sendall((head + body)[start : start + size])
            time.sleep(0.001)
        np.testing.assert_array_equal(predictions(answered(connection)), expected)
    unknown = request(path="/v2/models/none/infer")
    slow, odd = request("Expect: 100-continue"), request(path="/v2/models/r%75n/infer?a=b")
    ways = [request(), slow, unknown, request(), odd, request(body=b"{}"), request()]
    connection.sendall(b"".join(head + body for head, body in ways))  # all at once; answers keep the order
    np.testing.assert_array_equal(predictions(answered(connection)), expected)
    np.testing.assert_array_equal(predictions(answered(connection)), expected)
    assert answered(connection)[0] == 404
    np.testing.assert_array_equal(predictions(answered(connection)), expected)
    np.testing.assert_array_equal(predictions(answered(connection)), expected)
    assert answered(connection)[0] == 400
    np.testing.assert_array_equal(predictions(answered(connection)), expected)


@pytest.mark.parametrize(("lines", "version"), [(("Connection: close",), "1.1"), ((), "1.0")])
def test_a_connection_ends_where_its_client_wants_it(asking, expected, lines, version):
    connection, request = asking
    connection.sendall(b"".join(request(*lines, version=version)))
    np.testing.assert_array_equal(predictions(answered(connection)), expected)
    assert connection.recv(1) == b""


@pytest.mark.slow
def test_a_request_that_is_on_its_way_when_the_server_ends_is_answered(place, table, expected):
    with Site(place / "clicks") as site:
        host, port = site.url.split(":")
        body = json.dumps({"inputs": inputs_of(table)}).encode()
        head = (
            f"POST /v2/models/run/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head + body[:100])
            until(lambda: site.get("/v2/health/live")[0] == 200)
            site.process.send_signal(signal.SIGTERM)
            until(lambda: refuses(host, int(port)))
            connection.sendall(body[100:])
            np.testing.assert_array_equal(predictions(answered(connection)), expected)
            assert connection.recv(1) == b""
        assert site.process.wait(timeout=60) == 130


def refuses(host, port):
    """Whether no process listens any more."""
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


def test_many_clients_at_once_each_get_their_own(site, table, expected):
    wrong = []

    def ask(number):
        for start in range(number, 120, 16):
            part = table.slice(start, 8)
            found = predictions(site.infer({"inputs": inputs_of(part)}))
            if not np.allclose(found, expected[start : start + 8], rtol=1e-5):
                wrong.append(start)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def girih(*words, **options):
    command = [sys.executable, "-m", "girih", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


def test_a_port_that_is_taken_and_other_mistakes_are_one_line(site, place, tmp_path, capsys):
    port = site.url.split(":")[1]
    found = girih("serve", place / "clicks", "--port", port)
    told = f"girih: --port {port}: 127.0.0.1:{port} is taken; name another, or 0 for any that is free\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", told)
    for words, told in (
        (
            (place / "clicks", "--host", "192.0.2.1", "--port", "0"),
            "--host 192.0.2.1 --port 0: cannot assign requested address; expected an address of this machine",
        ),
        ((tmp_path / "none",), "no such"),
        ((tmp_path,), "checkpoint"),
        ((place / "clicks", "--workers", "0"), "serve: workers = 0: expected"),
    ):
        assert run("serve", *words) == 2
        found = capsys.readouterr()
        assert (found.out, found.err.count("\n")) == ("", 1)
        assert told in found.err


@pytest.mark.slow
def test_a_run_is_exported_on_the_way_and_ctrl_c_ends_it(place, table, expected):
    with Site(place / "run", "--name", "mine") as site:
        assert site.name == "mine"
        np.testing.assert_array_equal(predictions(site.infer({"inputs": inputs_of(table)})), expected)
        assert site.stop(signal.SIGINT) == 130
    assert said(site) == [f"{place / 'run'}: exporting step-00000009 to {place / 'run' / 'exported'}\n"]


def pss_kib(pid, directory):
    """Proportional set size of the files of rows in a process's memory."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(".safetensors") and str(directory) in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="the system does not say what processes share"
)
def test_workers_share_a_port_and_the_memory_of_the_tables_and_one_that_dies_is_replaced(
    place, table, expected
):
    with Site(place / "clicks", "--workers", 2) as site:
        content = {"inputs": inputs_of(table)}
        workers = children_of(site.process.pid)
        assert len(workers) == 2
        for _ in range(40):
            np.testing.assert_array_equal(predictions(site.infer(content)), expected)
        status, _, body = site.ask("GET", "/metrics")
        assert (status, b'girih_serving_requests_total{status="200"} 40.0' in body) == (200, True)  # of both
        size = sum(file.stat().st_size for file in (place / "clicks").glob("rows-*")) / 1024
        shares = [pss_kib(pid, place / "clicks") for pid in workers]
        assert sum(shares) < 1.1 * size + 8
        os.kill(workers[0], signal.SIGKILL)
        until(
            lambda: (
                len(children_of(site.process.pid)) == 2 and workers[0] not in children_of(site.process.pid)
            )
        )
        until(lambda: any("started another" in line for line in site.errors))
        for _ in range(10):
            np.testing.assert_array_equal(predictions(site.infer(content)), expected)
        both = children_of(site.process.pid)
        site.process.kill()  # whoever looks after them is gone: so are they
        until(lambda: not any(os.path.exists(f"/proc/{pid}") and is_alive(pid) for pid in both))


class Replaced(Exception):
    """Ends whoever looks after workers."""


@pytest.mark.heavy
def test_a_worker_is_replaced_once_the_system_starts_processes_again(place, monkeypatch):
    told, errors = [], [OSError(errno.EAGAIN, "no more processes")] * 2
    popen = subprocess.Popen

    def tell(line):
        told.append(line)
        if "started another" in line:
            raise Replaced

    def started(*words, **options):
        if errors:
            raise errors.pop()
        return popen(*words, **options)

    with (
        bind_socket("127.0.0.1", 0) as listening,
        Workers(place / "clicks", "run", ServeOptions(workers=2), listening, tell) as workers,
    ):
        gone = workers._workers[0].process
        gone.kill()
        monkeypatch.setattr(subprocess, "Popen", started)
        with pytest.raises(Replaced):
            workers.watch()
    begin = f"worker {gone.pid} ended with status -9; "
    assert [line for line in told if line.startswith("worker")] == [
        f"{begin}cannot start another: [Errno 11] no more processes; tries again",
        f"{begin}started another",
    ]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
