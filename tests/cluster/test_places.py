"""Where processes are to run."""

from girih.cluster import Place
from girih.cluster.places import place_of


def test_a_process_has_the_place_of_its_title_or_of_its_role_or_is_on_this_host():
    left, right = Place(("ip", "netns", "exec", "left"), "10.0.0.1"), Place(host="10.0.0.2")
    places = {"trainer": left, "trainer 1": right}
    assert place_of(places, "trainer", 0) is left
    assert place_of(places, "trainer", 1) is right
    assert place_of(places, "trainer", 11) is left
    assert place_of(places, "loader", 0) == Place() == Place((), "127.0.0.1", {})
