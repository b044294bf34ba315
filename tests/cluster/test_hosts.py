"""Where processes are to run."""

from girih.cluster.roles import HostSpec, host_of


def test_a_process_has_the_host_of_its_title_or_of_its_role_or_this_one():
    left, right = HostSpec(("ip", "netns", "exec", "left"), "10.0.0.1"), HostSpec(host="10.0.0.2")
    hosts = {"trainer": left, "trainer 1": right}
    assert host_of(hosts, "trainer", 0) is left
    assert host_of(hosts, "trainer", 1) is right
    assert host_of(hosts, "trainer", 11) is left
    assert host_of(hosts, "loader", 0) == HostSpec() == HostSpec((), "127.0.0.1", {})
