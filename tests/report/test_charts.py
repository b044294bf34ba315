"""What is drawn: the values, the axes, and nothing where there is nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.report.charts import MAX_POINTS, Axis, line_chart

STEP, LOSS = Axis("step", "step", ",.0f", from_zero=True), Axis("loss", "Training loss")


def rows_of(spec):
    return spec["datasets"][spec["data"]["name"]]


def encodings(spec):
    return [layer["encoding"] for layer in spec["layer"]]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(-1e12, 1e12, allow_nan=False)), min_size=1, max_size=400
    )
)
def test_values_are_the_records_or_lie_between_their_extremes(pairs):
    records = [{"step": step, "loss": loss} for step, loss in sorted(pairs)]
    spec = line_chart(STEP, LOSS, {"train": records})
    rows = rows_of(json.loads(json.dumps(spec, allow_nan=False)))
    if len(records) <= MAX_POINTS:
        assert rows == [{"series": "train", **record} for record in records]
    else:
        assert len(rows) == MAX_POINTS
        assert min(row["least"] for row in rows) == min(loss for _, loss in pairs)
        assert max(row["greatest"] for row in rows) == max(loss for _, loss in pairs)


def test_axes_begin_at_zero_where_they_should():
    speed = Axis("samples_per_s", "Speed", ",.0f", from_zero=True)
    records = [{"step": step, "samples_per_s": 50_000 + step, "loss": 1.0} for step in range(0, 3001, 100)]
    drawn = encodings(line_chart(STEP, speed, {"Speed": records}))[-1]
    assert drawn["x"]["scale"] == {"zero": True, "nice": False}
    assert drawn["y"]["scale"]["zero"]
    assert drawn["y"]["axis"] == {"format": "~s"}  # 50k
    assert not encodings(line_chart(STEP, LOSS, {"loss": records}))[-1]["y"]["scale"]["zero"]


@pytest.mark.parametrize("value", [0.82447, 0.43528, 0.0, -3.5, 1e-7, 250.0])
@pytest.mark.parametrize("num_points", [1, 3])
def test_equal_values_have_one_tick_that_shows_them(value, num_points):
    records = [{"step": step, "auc": value} for step in range(1, num_points + 1)]
    drawn = encodings(line_chart(STEP, Axis("auc", "AUC"), {"test": records}))[-1]
    assert drawn["y"]["axis"] == {"values": [value], "format": ".5f"}
    low, high = drawn["y"]["scale"]["domain"]
    assert low <= value - 0.01 < value + 0.01 <= high
    assert not drawn["y"]["scale"]["nice"]


def test_memory_is_drawn_in_its_unit():
    memory = Axis("rss_bytes", "Memory", ".3f", unit=2**30)
    assert rows_of(line_chart(STEP, memory, {"m": [{"step": 1, "rss_bytes": 3 << 29}]})) == [
        {"series": "m", "step": 1, "rss_bytes": 1.5}
    ]


def test_values_show_under_the_pointer_with_the_name_where_there_are_several():
    records = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    for names in (["valid"], ["valid", "test"]):
        spec = line_chart(STEP, LOSS, dict.fromkeys(names, records))
        told = [each["field"] for each in encodings(spec)[-1]["tooltip"]]
        assert told == ["series"] * (len(names) > 1) + ["step", "loss"]
        assert spec["params"][0]["select"]["nearest"]
        legend = encodings(spec)[-1]["color"]["legend"]
        assert (legend is None) == (len(names) == 1)
        assert encodings(spec)[-1]["color"]["sort"] == names


@pytest.mark.parametrize("points", [[], [{"step": 1, "loss": None}, {"step": None, "loss": 2.0}]])
def test_only_a_chart_with_points_is_drawn(points):
    assert line_chart(STEP, LOSS, {"a": points}, diagonal=True) is None
    assert line_chart(STEP, LOSS, {}) is None


def test_a_dashed_line_says_where_both_are_equal():
    spec = line_chart(
        Axis("p", "predicted"), Axis("y", "seen"), {"a": [{"p": 0.25, "y": 0.75}]}, diagonal=True
    )
    assert spec["datasets"][spec["layer"][0]["data"]["name"]] == [
        {"p": 0.0, "y": 0.0},
        {"p": 0.75, "y": 0.75},
    ]
    assert "strokeDash" in spec["layer"][0]["mark"]
