"""A Ray cluster of this host: a real head, as ``ray start`` makes one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

import pytest

READY_S = 60.0


@pytest.fixture(scope="session")
def ray_address():
    """``HOST:PORT`` of its head, with room for many small processes."""
    pytest.importorskip("ray", reason="needs pip install girih[cluster]")
    folder = tempfile.mkdtemp(prefix="girih-ray-")  # short: sockets are in it
    port, client_port = free_port(), free_port()
    options = [
        "--head", "--block", f"--port={port}", f"--ray-client-server-port={client_port}", "--num-cpus=100",
        "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}",
    ]  # fmt: skip
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "RAY_worker_niceness": "0"},
    )
    address = f"127.0.0.1:{port}"
    until = time.monotonic() + READY_S
    while not listens(port):
        assert head.poll() is None
        assert time.monotonic() < until
        time.sleep(0.2)
    yield address
    import ray

    ray.shutdown()
    head.terminate()
    try:
        head.wait(20.0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def free_port():
    """A port that nobody listened at a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listens(port):
    """Whether anybody does."""
    with socket.socket() as dialing:
        return dialing.connect_ex(("127.0.0.1", port)) == 0
