"""Places where checkpoints can lie: a directory, memory, and a real S3 server on this machine."""

import importlib.util
import logging
import uuid

import fsspec
import pytest

PLACES = ["directory", "memory", "s3"]


@pytest.fixture(scope="session")
def s3_server():
    """Starts an S3 server with a bucket ``girih``, to which fsspec and the processes of a test go."""
    missing = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; pip install 'girih[dev]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files = fsspec.filesystem("s3", use_listings_cache=False)
        files.mkdir("girih")
        yield files
        type(files).clear_instance_cache()
    server.stop()


@pytest.fixture
def s3_address(s3_server):
    """Of a run, empty."""
    return f"s3://girih/{uuid.uuid4().hex}"


@pytest.fixture(params=PLACES)
def address(request, tmp_path):
    """Where checkpoints may be written; empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3_address")
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "place")
