"""Links measured by real trainers."""

import time

import pytest

from companions import SECRET, together
from girih.app.machine import measure_links
from girih.planner.calibration import LINKS, Link
from girih.planner.costs import link_s

SIZES = (264, 4104, 65_544, 1_048_584)
LEAST_S = 1e-5  # for 1 MiB to be written and moved: nothing moves 100 GB a second


def calibrate(ranks):
    """A short calibration, the time it took, and whether trainers are in step still."""
    start = time.monotonic()
    links = measure_links(ranks, host="127.0.0.1", secret=SECRET, sizes=SIZES, point_s=0.01)
    found = links and {name: [link.latency_s, link.bytes_per_s, link.points] for name, link in links.items()}
    return [found, time.monotonic() - start, ranks.sum([1.0])[0]]


@pytest.mark.parametrize("size", [2, 3])
def test_trainers_measure_and_fit_all_links(size):
    (found, took_s, _), *others = all_told = together(calibrate, size)
    assert [each[0] for each in others] == [None] * (size - 1)
    assert [each[2] for each in all_told] == [size] * size
    assert set(found) == set(LINKS)
    for name, (latency_s, bytes_per_s, points) in found.items():
        measured = dict(points)
        assert tuple(measured) == SIZES, name
        assert all(0 < seconds < took_s for seconds in measured.values()), name
        assert measured[SIZES[-1]] > LEAST_S, name
        link = Link(latency_s, bytes_per_s)
        ratios = [link_s(name, each, size, link) / seconds for each, seconds in points]
        assert any(ratio == pytest.approx(1) for ratio in ratios), name  # a fit goes through a point or two
