"""Processes on a Ray cluster of this host: a real head, real actors."""

import os
import subprocess
import sys
import threading

import pytest

ray = pytest.importorskip("ray", reason="needs pip install girih[cluster]")

from girih.cluster.launchers.ray.launcher import RayCluster, RayLauncher  # noqa: E402
from girih.cluster.options import RoleResources  # noqa: E402
from girih.cluster.roles import RoleName  # noqa: E402
from girih.testing.launcher_suite import LauncherSuite  # noqa: E402

PORT = 26379


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """A cluster of its own, which processes that tests start find by its address."""
    command = [sys.executable, "-m", "ray.scripts.scripts"]
    options = ["--head", f"--port={PORT}", "--num-cpus=100", "--include-dashboard=false", "--disable-usage-stats",
               f"--temp-dir=/tmp/girih-ray-{os.getpid()}"]  # fmt: skip
    subprocess.run([*command, "start", *options], check=True, capture_output=True)
    yield
    ray.shutdown()
    subprocess.run([*command, "stop", "--force"], check=True, capture_output=True)


class TestRayLauncher(LauncherSuite):
    def make(self, segments=""):
        if not ray.is_initialized():
            RayCluster(f"127.0.0.1:{PORT}")
        return RayLauncher(
            {RoleName.LOADER: 3}, {RoleName.LOADER: RoleResources(cpus=0.5)}, hello={"segments": segments}
        )

    def traces(self):
        """Ray keeps connections and threads of its own: what is left is threads of ours."""
        return 0, sum(thread.name.startswith("girih") for thread in threading.enumerate())
