"""Processes on a Ray cluster of this host: a real head, real actors."""

import os
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs pip install girih[cluster]")

from girih.cluster.launchers.ray.launcher import RayLauncher, join_cluster  # noqa: E402
from girih.cluster.options import ClusterOptions, RoleResources  # noqa: E402
from girih.cluster.roles import RoleName  # noqa: E402
from girih.errors import ConfigError  # noqa: E402
from girih.processes.segments import hold, new_prefix_of_nodes  # noqa: E402
from support import launcher_suite  # noqa: E402
from support.launcher_suite import LauncherSuite  # noqa: E402

pytestmark = pytest.mark.slow

LOADERS = {RoleName.LOADER: 3}
ADDRESS = "GIRIH_TEST_RAY"


@pytest.fixture(autouse=True)
def _cluster(ray_address, monkeypatch):
    monkeypatch.setenv(ADDRESS, ray_address)  # also for processes that a test starts


def launcher(segments="", cpus=0.5, **options):
    if not ray.is_initialized():
        join_cluster(os.environ[ADDRESS])
    return RayLauncher(
        LOADERS, {RoleName.LOADER: RoleResources(cpus=cpus)}, hello={"segments": segments}, **options
    )


class TestRayLauncher(LauncherSuite):
    def make(self, segments=""):
        return launcher(segments)

    def traces(self):
        """Ray keeps connections and threads of its own: what is left is threads of ours."""
        return 0, sum(thread.name.startswith("girih") for thread in threading.enumerate())

    def clean_up(self):
        """Ray kills what its actors started, which has no time to remove anything: the next process of the node does."""
        os.close(hold(new_prefix_of_nodes(), "test"))
        return False


def test_what_the_cluster_has_not_is_named_with_what_is_free():
    launcher().close()
    with pytest.raises(
        ConfigError, match=r"no room for the run's 3 processes .*: asked CPU 3000; free CPU \d"
    ):
        launcher(cpus=1000.0, placed_s=2.0)


def test_a_process_that_cannot_write_where_the_launcher_does_says_on_which_node(tmp_path):
    seen = tmp_path / "seen"
    made = RayLauncher(
        {RoleName.EMBEDDING_SERVER: 1},
        {RoleName.EMBEDDING_SERVER: RoleResources()},
        hello={"segments": ""},
        seen=str(seen),
    )
    handle = made.start(RoleName.EMBEDDING_SERVER, 0, 0, 1)
    assert handle.wait(launcher_suite.TOLD_S) == 2
    assert f"does not see the folder {tmp_path}" in handle.last_words()
    handle.close()
    made.close()


def test_a_process_whose_placement_group_is_gone_is_not_waited_for():
    """Ray would have its actor wait for ever (ray#57726)."""
    made = launcher()
    made.close()
    until = time.monotonic() + 20
    while made.has_place():
        assert time.monotonic() < until
        time.sleep(0.1)
    with pytest.raises(Exception, match="loader 1 cannot be started: its placement group is gone"):
        made.start(RoleName.LOADER, 1, 0, 1)


def test_a_message_that_is_sent_twice_is_heard_once():
    """Calls of Ray may run twice: messages have numbers."""
    from girih.cluster.launchers.ray.agent import Agent, Order

    order = Order(
        name=RoleName.LOADER, index=0, incarnation=0, threads=1, folder=str(Path.cwd()), launched_from="here", seen="",
        trainer=(), num_trainers=1, hello={"segments": ""}, environment={},
    )  # fmt: skip
    agent = Agent(order, "127.0.0.1")
    sent = []
    agent._process.pipe.send = sent.append
    for number, message in ((1, {"a": 1}), (1, {"a": 1}), (2, {"b": 1}), (1, {"a": 1})):
        agent.send(number, message)
    assert sent == [{"a": 1}, {"b": 1}]
    agent.kill()
    assert [event for event in agent.events(0) if "status" in event] == [{"status": -9, "words": ""}]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:1",
            r"cluster '127.0.0.1:1' cannot be reached: .*; expected auto, or HOST:PORT of the head",
        ),
        ("nowhere:x", r"cluster 'nowhere:x' cannot be reached"),
        ("ray://127.0.0.1:10001", r"start girih on a node of the cluster, or as a Ray job"),
    ],
)
def test_an_address_that_is_none_is_one_line_at_once(address, message):
    with pytest.raises(ConfigError, match=message):
        join_cluster(address)


def test_resources_are_of_roles_that_the_run_has():
    options = ClusterOptions(resources={"trainer": {"cpus": 4.0, "gpus": 1.0, "memory": 1 << 30}})
    counts = {RoleName.TRAINER: 2, RoleName.LOADER: 1}
    found = options.resources_of(counts, on_gpus=False)
    assert found[RoleName.TRAINER].bundle() == {"CPU": 4.0, "GPU": 1.0, "memory": float(1 << 30)}
    assert found[RoleName.LOADER].bundle() == {"CPU": 1.0}
    assert ClusterOptions().resources_of(counts, on_gpus=True)[RoleName.TRAINER].gpus == 1.0
    with pytest.raises(ConfigError, match="this run has no trainer; expected one of loader"):
        options.resources_of({RoleName.LOADER: 1}, on_gpus=False)


def test_what_nobody_on_a_node_holds_is_removed_and_what_somebody_does_is_not():
    alive, dead = new_prefix_of_nodes(), new_prefix_of_nodes()
    held, let_go = hold(alive, "loader-0"), hold(dead, "loader-0")
    for prefix in (alive, dead):
        Path("/dev/shm", f"{prefix}0-rows").write_bytes(b"rows")
    os.close(let_go)
    another = hold(alive, "loader-1")
    assert Path("/dev/shm", f"{alive}0-rows").exists()
    assert not Path("/dev/shm", f"{dead}0-rows").exists()
    for descriptor in (held, another):
        os.close(descriptor)
    os.close(hold(new_prefix_of_nodes(), "loader-0"))
    assert not Path("/dev/shm", f"{alive}0-rows").exists()
