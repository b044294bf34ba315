"""Examples of serving below ``deploy/``: what they say is what girih, Ray Serve and KServe take."""

import importlib.util
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from girih import cli
from girih.cli import cli as commands
from serving.serving_site import inputs_of

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_predictor_of_kserve_is_a_command_that_is_there():
    service, runtime = yaml.safe_load_all((DEPLOY / "kserve" / "inferenceservice.yaml").read_text())
    assert (service["kind"], runtime["kind"]) == ("InferenceService", "ServingRuntime")
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    assert service["spec"]["predictor"]["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"  # by which KServe knows it
    program, command = container["command"]
    words = container["args"]
    given = commands.get_command(None, command).make_context(command, words).params
    assert (program, given["model"], given["host"]) == ("girih", "/mnt/models", "0.0.0.0")
    assert given["port"] == container["ports"][0]["containerPort"]
    for probe, path in (("readinessProbe", "ready"), ("livenessProbe", "live")):
        assert container[probe]["httpGet"] == {"path": f"/v2/health/{path}", "port": given["port"]}


def test_examples_are_short():
    for name in ("ray/serve.py", "kserve/inferenceservice.yaml"):
        lines = (DEPLOY / name).read_text().splitlines()
        code = [line for line in lines if line.strip() and not line.startswith("#")]
        assert len(code) <= 32, name


@pytest.mark.heavy
def test_ray_serve_answers_as_predict_does(log_source, tmp_path, monkeypatch, ray_address):
    pytest.importorskip("ray.serve", reason="needs pip install 'ray[serve]'", exc_type=ImportError)
    import ray
    from ray import serve

    columns = ["user", "item", "tags", "x0"]
    table = pq.read_table(log_source / "test.parquet").select(columns).slice(0, 64)
    pq.write_table(table, tmp_path / "some.parquet")
    for words in (
        ["train", log_source / "config.toml", "--run", tmp_path / "run", "--set", "train.max_steps=3"],
        ["predict", tmp_path / "run", "--data", tmp_path / "some.parquet", "--out", tmp_path / "out.parquet"],
        ["export", tmp_path / "run", "--out", tmp_path / "model"],
    ):
        assert cli.run([str(word) for word in words]) == 0
    monkeypatch.setenv("GIRIH_MODEL", str(tmp_path / "model"))
    spec = importlib.util.spec_from_file_location("example_of_ray_serve", DEPLOY / "ray" / "serve.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ray.init(address=ray_address, log_to_driver=False, ignore_reinit_error=True)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18_765})
        serve.run(example.app, name="girih", route_prefix="/")
        body = json.dumps({"inputs": inputs_of(table)}).encode()
        request = urllib.request.Request("http://127.0.0.1:18765/v2/models/run/infer", body)
        for attempt in range(30):
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    (output,) = json.load(response)["outputs"]
                break
            except urllib.error.URLError:
                assert attempt < 29
                time.sleep(1)
        expected = pq.read_table(tmp_path / "out.parquet")["prediction"].to_numpy()
        np.testing.assert_array_equal(np.array(output["data"], np.float32), expected)
    finally:
        serve.shutdown()
        ray.shutdown()
