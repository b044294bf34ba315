"""Ticks, labels and places of the plots."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from girih.report.svg import BASE, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Series, line_chart, tick_labels


def texts(chart):
    return re.findall(r'<text class="tick (?:end|middle)"[^>]*>([^<]*)<', chart)


@pytest.mark.parametrize(
    ("ticks", "scale", "expected"),
    [
        ([0.2, 0.4, 0.6], "plain", ["0.2", "0.4", "0.6"]),
        ([0.0, 0.05, 0.1], "plain", ["0", "0.05", "0.10"]),
        ([0, 5000, 10_000], "thousands", ["0", "5 k", "10 k"]),
        ([0, 2000, 4000], "thousands", ["0", "2,000", "4,000"]),
        ([0, 500_000, 1_000_000], "thousands", ["0", "0.5 M", "1.0 M"]),
        ([0, 2**29, 2**30], "bytes", ["0", "0.5 GiB", "1.0 GiB"]),
        ([0, 200 * 2**20, 400 * 2**20], "bytes", ["0", "200 MiB", "400 MiB"]),
        ([-1.0, 0.0, 1.0], "plain", ["-1", "0", "1"]),
    ],
)
def test_labels_share_a_suffix_and_their_decimals(ticks, scale, expected):
    assert tick_labels(ticks, scale) == expected


def test_axes_are_named_and_begin_at_zero_where_they_should():
    points = [(step, 50_000 + step) for step in range(0, 3001, 100)]
    chart = line_chart(
        "Speed", Axis("step", "thousands", True), Axis("samples/s", "thousands", True), [Series("a", points)]
    )
    assert texts(chart)[:3] == ["0", "10 k", "20 k"]
    assert texts(chart)[-1] == "step"
    assert "<small>samples/s</small>" in chart


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(-1e12, 1e12, allow_nan=False, allow_subnormal=False)),
        min_size=1,
        max_size=400,
    ),
    st.booleans(),
    st.sampled_from(["plain", "thousands", "bytes"]),
)
def test_every_mark_lies_inside(points, from_zero, scale):
    points = sorted(points)
    chart = line_chart(
        "t", Axis("step", "thousands", from_zero), Axis("y", scale, from_zero), [Series("a", points)]
    )
    line = re.search(r'<polyline class="line c1" points="([^"]*)"', chart)[1]
    for point in line.split():
        x, y = map(float, point.split(","))
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= BASE + 0.1
    assert 2 + 2 + 1 <= len(texts(chart)) <= 12 + 12 + 1
    assert len(set(texts(chart))) >= 4
    assert BASE < HEIGHT


def test_a_flat_line_and_a_single_point_have_an_axis():
    for points in ([(5, 0.5)], [(1, 0.5), (2, 0.5)], [(1, 0.0)], [(1, -3.0)], [(0, 0.0)]):
        chart = line_chart("t", Axis("step"), Axis("y"), [Series("a", points)])
        assert len(texts(chart)) >= 5


def test_only_a_chart_with_points_is_drawn():
    assert "<svg" not in line_chart("t", Axis("step"), Axis("y"), [Series("a", [(1, None), (None, 2.0)])])
    reference = Series("as predicted", [(0, 0), (1, 1)], dashed=True)
    assert "Nothing recorded." in line_chart("t", Axis("step"), Axis("y"), [reference])
    assert "Nothing recorded." in line_chart("t", Axis("step"), Axis("y"), [])
