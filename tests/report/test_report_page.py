"""The page of a run: whole, parts missing, parts damaged, and no run at all."""

from __future__ import annotations

import errno
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser

import pytest

from girih.errors import RunDirectoryError, StorageFullError
from girih.metrics import Scores
from girih.report import write_report

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Balanced(HTMLParser):
    """Refuses a tag that is closed by another's end, and collects text and headings."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text.append(data)


def page_in(directory):
    path = write_report(directory)
    assert path == directory / "report.html"
    page = path.read_text(encoding="utf-8")
    shown = " ".join(Balanced(page).text)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert "NaN" not in shown
    assert "None" not in shown
    return page, shown


def readings(page, title):
    """Series of the chart of a title: name to (step, value) as the read-out shows them."""
    card = next(card for card in page.split("<figure")[1:] if f"<b>{title}</b>" in card)
    _, series = json.loads(unescape(re.search(r'data-points="([^"]*)"', card)[1]))
    return {name: [(x, y) for _, x, y in points] for name, points in series}


def test_the_page_asks_nothing_of_the_network(run_directory):
    page, _ = page_in(run_directory)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|src=|<iframe", page)
    assert len(page) < 400_000
    assert [path.name for path in run_directory.iterdir() if path.name.startswith(".")] == []


def test_the_page_shows_what_the_run_wrote(run_directory):
    page, shown = page_in(run_directory)
    for expected in (
        "deepfm · local · bfloat16",
        "0.98213",
        "61.2 k",
        "5.38 M",
        "61.4 M",
        "16 min 45 s",
        "finished",
    ):
        assert expected in shown
    for expected in ("wire_bytes.gradients", "20261105", "Normalised entropy", "long_view", "1,000,000"):
        assert expected in shown
    charts = re.findall(r"<figcaption><b>(.*?)</b>", page)
    curves = ["Training loss", "AUC", "Logloss", "Speed", "Rows", "Memory", "Hit rate", "Learning rate"]
    assert charts == [*curves, "click", "long_view"]
    assert set(readings(page, "AUC")) == {"valid", "test"}
    assert readings(page, "AUC")["test"] == [("15,000", "0.98139")]
    assert len(readings(page, "AUC")["valid"]) == 12
    assert len(readings(page, "click")["click"]) == 20
    assert readings(page, "Memory")["memory"][-1][1].endswith(" GiB")
    assert "least to greatest" in shown  # 1,500 records were thinned
    assert 'class="notes"' not in page


def test_thinning_keeps_the_mean_and_the_extremes(make_run):
    directory = make_run("thinned", num_records=2400)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    lines[1234]["loss"] = 9.0
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = page_in(directory)
    points = readings(page, "Training loss")["train"]
    assert len(points) == 240
    mean = sum(line["loss"] for line in lines[:10]) / 10
    assert points[0] == ("55", f"{mean:.5f}")
    band = re.search(r'class="band c1" points="([^"]*)"', page)[1].split()
    ys = [float(point.split(",")[1]) for point in band]
    assert ys.index(min(ys)) == 123  # the spike is in bucket 123, and at the top


def test_the_timeline_shows_six_steps_and_all_phases(run_directory):
    page, shown = page_in(run_directory)
    drawn = page[page.index('<svg class="strip"') :]
    assert len(re.findall(r"<title>step: ", drawn)) == 6
    assert re.findall(r'class="lane"[^>]*>(\w+)<', drawn) == [
        "read", "step", "pull", "forward", "loss", "backward", "push", "apply",
    ]  # fmt: skip
    assert "6 typical steps: " in shown
    table = page[page.index("Time by phase") :]
    names = re.findall(r"<tr><td>(\w+)</td>", table)
    assert names[:3] == ["step", "backward", "forward"]
    events = json.loads((run_directory / "timeline.json").read_text())
    total = sum(event["dur"] for event in events if event["name"] == "backward") / 1e6
    assert f"<td>{total:,.3f} s</td>" in table


def test_the_steps_shown_are_typical_ones(run_directory):
    at, events = 0, []
    for step in range(40):
        length = 1_000_000 if step in (0, 20, 21) else 1000  # a warm-up, and an evaluation in the middle
        events.append({"name": "forward", "ph": "X", "ts": at, "dur": length})
        at += length
    (run_directory / "timeline.json").write_text(json.dumps(events))
    assert "6 typical rounds of forward: 6 ms" in page_in(run_directory)[1]


def test_totals_of_the_whole_run_come_before_those_of_the_recording(run_directory):
    events = json.loads((run_directory / "timeline.json").read_text())
    totals = {"backward": 402.0, "evaluate": 100.5, "odd": None}
    (run_directory / "timeline.json").write_text(json.dumps({"traceEvents": events, "totals_s": totals}))
    page, shown = page_in(run_directory)
    table = page[page.index("Time by phase") :]
    assert re.findall(r"<tr><td>(\w+)</td><td>(.*?)<", table)[:2] == [
        ("backward", "40.0 %"),
        ("evaluate", "10.0 %"),
    ]
    assert "Over the whole run" in shown
    (run_directory / "summary.json").unlink()
    (run_directory / "metrics.jsonl").unlink()
    assert "Over the whole recording" in page_in(run_directory)[1]


def test_a_timeline_without_a_step_phase_goes_by_its_longest(run_directory):
    events = [e for e in json.loads((run_directory / "timeline.json").read_text()) if e["name"] != "step"]
    events = [*events, {"name": "process_name", "ph": "M", "args": {}}, {"ph": "X", "ts": None, "dur": 1}]
    (run_directory / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    shown = page_in(run_directory)[1]
    assert "6 typical rounds of backward" in shown
    (run_directory / "timeline.json").write_text(json.dumps(events[:5]))
    assert "The whole recording" in page_in(run_directory)[1]


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(run_directory):
    (run_directory / "summary.json").unlink()
    (run_directory / "timeline.json").unlink()
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15010, "examples": 614')
    page, shown = page_in(run_directory)
    for expected in ("no summary yet", "the run goes on", "There is no timeline.json", "1 line is damaged"):
        assert expected in shown
    assert "deepfm · local · bfloat16" in shown
    assert "valid, step 15,000" in shown
    assert "Calibration" not in shown
    assert len(readings(page, "Training loss")["train"]) == 240


@pytest.mark.parametrize("metrics", [None, "", "\n\n", '{"step": 1', "[]\n3\nnull\n"])
def test_a_run_that_has_just_begun_says_so(tmp_path, metrics):
    (tmp_path / "config.toml").write_text('[model]\nname = "fm"\n[strategy]\nname = "local"\n')
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    page, shown = page_in(tmp_path)
    assert "fm · local" in shown
    assert "There is no training record yet" in shown
    assert "Nothing was evaluated yet" in shown
    assert page.count("Nothing recorded.") == 6


def test_a_run_from_python_has_no_config(run_directory):
    (run_directory / "config.toml").unlink()
    assert "started from Python" in page_in(run_directory)[1]


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("summary.json", "{", "summary.json is damaged"),
        ("summary.json", "[1]", "summary.json is damaged"),
        ("timeline.json", "[{", "timeline.json is damaged"),
        ("timeline.json", "{}", "timeline.json is damaged"),
        ("timeline.json", "[]", "holds no spans"),
        ("timeline.json", "[" * 100_000, "timeline.json is damaged"),
        ("config.toml", "[model", "config.toml is not valid TOML"),
        ("metrics.jsonl", "\x00\x01", "1 line is damaged"),
    ],
)
def test_a_damaged_part_is_left_out(run_directory, name, text, note):
    (run_directory / name).write_text(text)
    assert note in page_in(run_directory)[1]


def test_odd_values_are_shown_as_a_dash_or_a_gap(run_directory):
    lines = [
        '{"step": 1, "loss": NaN, "rows": "many", "samples_per_s": null}',
        '{"step": 2, "loss": 0.5, "rows": true}',
        '{"step": 3, "loss": Infinity}',
        '{"step": 3, "split": "valid", "auc": null}',
    ]
    (run_directory / "metrics.jsonl").write_text("\n".join(lines))
    odd = {"auc": None, "logloss": float("nan"), "by_label": {"click": {"auc": "x", "calibration_curve": 3}}}
    (run_directory / "summary.json").write_text(json.dumps(odd | {"wire_bytes": {}, "staleness_mean": 0.25}))
    page, shown = page_in(run_directory)
    assert readings(page, "Training loss") == {"train": [("2", "0.50000")]}
    assert page.count("Nothing recorded.") == 6
    assert "–" in shown


def test_a_resumed_run_is_drawn_once(run_directory):
    again = [
        {"step": 5000, "loss": 1.5},
        {"step": 5010, "loss": 1.25},
        {"step": 5000, "split": "valid", "auc": 0.5},
    ]
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in again)
    page, _ = page_in(run_directory)
    assert readings(page, "AUC")["valid"][-1] == ("5,000", "0.50000")
    steps = [int(step.replace(",", "")) for step, _ in readings(page, "Training loss")["train"]]
    assert steps == sorted(steps)
    assert steps[-1] <= 5010


def test_everything_is_escaped(tmp_path):
    evil = '"><script>alert(1)</script>'
    run = tmp_path / "<b>run"
    run.mkdir()
    (run / "config.toml").write_text(f"[model]\nname = '{evil}'\n")
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.5}) + "\n" + json.dumps({"step": 1, "split": evil, "auc": 0.5})
    )
    curve = [{"prediction": 0.5, "label": 0.5, "count": 1}]
    summary = {
        "strategy": evil,
        evil: evil,
        "by_label": {evil: {"calibration_curve": curve}},
        "x": {evil: evil},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    events = [{"name": evil, "ph": "X", "ts": at, "dur": 5, "tid": evil} for at in range(0, 200, 10)]
    (run / "timeline.json").write_text(json.dumps(events))
    page, _ = page_in(run)
    assert page.count("<script>") == 1
    assert "<b>run" not in page
    assert "alert(1)" in page


def test_secrets_of_the_config_are_not_shown(run_directory):
    (run_directory / "config.toml").write_text(
        '[data]\ntrain = "s3://key:hunter2@host/x"\n[data.options]\nsecret = "hunter3"\n'
        "options = { api_key = 'hunter4', token=\"hunter5\", other = 1 }\nnum_tokens = 7\n"
    )
    page, shown = page_in(run_directory)
    assert "hunter" not in page
    assert 'train = "s3://key:***@host/x"' in shown
    assert 'secret = "***"' in shown
    assert "other = 1" in shown
    assert "num_tokens = 7" in shown


def test_the_calibration_plot_takes_what_metrics_give(run_directory):
    scores = Scores()
    scores.add([float(i % 10) - 5 for i in range(200)], [float(i % 3 == 0) for i in range(200)])
    metrics = scores.result(["click"])
    summary = json.loads((run_directory / "summary.json").read_text()) | {"by_label": metrics.as_dict()}
    (run_directory / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    points = readings(page_in(run_directory)[0], "click")["click"]
    assert points == [
        (f"{one.prediction:.5f}", f"{one.label:.5f}") for one in metrics.first.calibration_curve
    ]
    assert len(points) == 10


def test_what_is_no_run_directory_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("empty", "no config.toml or metrics.jsonl"),
    ):
        with pytest.raises(RunDirectoryError, match=message) as raised:
            write_report(tmp_path / name)
        assert "\n" not in str(raised.value)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_page_that_cannot_be_written_leaves_nothing(run_directory):
    (run_directory / "report.html").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_report(run_directory)
    assert [path.name for path in run_directory.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_is_told_and_leaves_nothing(run_directory, monkeypatch):
    def write_half(path, text, encoding):
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", write_half)
    with pytest.raises(StorageFullError, match="no room left"):
        write_report(run_directory)
    assert not [path.name for path in run_directory.iterdir() if "report" in path.name]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(run_directory):
    run_directory.chmod(0o500)
    try:
        with pytest.raises(RunDirectoryError, match="Permission denied"):
            write_report(run_directory)
    finally:
        run_directory.chmod(0o700)
