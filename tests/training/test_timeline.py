"""The timeline as a file: what Perfetto takes as it is meant."""

import json
from itertools import pairwise

from girih.training.summary import write_timeline


def events_of(path, processes):
    write_timeline(path, processes, {"step": 1.25})
    written = json.loads(path.read_text())
    assert written["totals_s"] == {"step": 1.25}
    return written["traceEvents"]


def test_each_process_is_named_and_times_begin_with_the_first_span(tmp_path):
    inner_first = [("inner", 10.5, 0.25), ("outer", 10.0, 1.0)]  # as they end
    found = events_of(
        tmp_path / "t.json", {"trainer 0": inner_first, "loader 0": [("dispatch", 10.125, 0.5)]}
    )
    assert found == [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "trainer 0"}},
        {"name": "inner", "ph": "X", "pid": 0, "tid": 0, "ts": 500_000, "dur": 250_000},
        {"name": "outer", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1_000_000},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "loader 0"}},
        {"name": "dispatch", "ph": "X", "pid": 1, "tid": 0, "ts": 125_000, "dur": 500_000},
    ]


def test_spans_that_touch_do_not_overlap_when_they_are_rounded(tmp_path):
    spans, at = [], 0.0
    for number in range(200):
        spans.append((str(number), at, (number % 7) * 0.7e-6))
        at += (number % 7) * 0.7e-6
    events = [e for e in events_of(tmp_path / "t.json", {"trainer 0": spans}) if e["ph"] == "X"]
    for one, next_one in pairwise(events):
        assert one["ts"] + one["dur"] <= next_one["ts"]


def test_spans_that_go_on_at_the_same_time_have_tracks_of_their_own(tmp_path):
    spans = [
        ("allreduce", 1.0, 1.0),
        ("backward", 0.5, 3.0),
        ("allreduce", 1.5, 1.0),
        ("allreduce", 2.0, 0.5),  # the first one is over
        ("allreduce", 2.25, 0.5),
    ]
    events = [e for e in events_of(tmp_path / "t.json", {"trainer 0": spans}) if e["ph"] == "X"]
    assert [e["tid"] for e in events] == [1, 0, 2, 1, 3]


def test_a_run_without_spans_is_still_a_file(tmp_path):
    assert [e["ph"] for e in events_of(tmp_path / "t.json", {"trainer 0": []})] == ["M"]
