"""The page of a run: whole, parts missing, parts damaged, and no run at all."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
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
    for spec in specs(page):
        assert "http" not in json.dumps(spec)
    assert "NaN" not in shown
    assert "None" not in shown
    return page, shown


def specs(page):
    """All charts, in order."""
    texts = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return [json.loads(text, parse_constant=pytest.fail) for text in texts]


def rows_of(spec):
    return spec["datasets"][spec["data"]["name"]]


def readings(page, title):
    """Series of the chart of a title: name to rows, as the chart holds them."""
    card = next(card for card in page.split("<figure")[1:] if f"<b>{title}</b>" in card)
    series = {}
    for row in rows_of(specs(card)[0]):
        series.setdefault(row.pop("series"), []).append(row)
    return series


def records_of(directory, *keys, split=None):
    """Of each line of metrics.jsonl, some values."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in keys} for line in lines if line.get("split") == split]


def test_the_page_asks_nothing_of_the_network(run_directory):
    page, _ = page_in(run_directory)
    bundle = max(re.findall(r"<script>(.*?)</script>", page, re.DOTALL), key=len)
    assert page.count(bundle) == page.count("window.vegaEmbed=") == 1
    rest = page.replace(bundle, "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|src=|<iframe", rest)
    assert re.findall(r'href="(.*?)"', rest) == ["timeline.json"]
    assert len(rest) < 500_000
    assert len(page) < 1_500_000
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
    for expected in ("20261105", "normalized entropy", "long_view", "1,000,000"):
        assert expected in shown
    charts = re.findall(r"<figcaption><b>(.*?)</b>", page)
    curves = [
        "Training loss",
        "AUC",
        "Logloss",
        "Speed",
        "Rows",
        "Memory",
        "Hit rate",
        "Imbalance",
        "Learning rate",
    ]
    assert charts == [*curves, "click", "long_view"]
    for title, key in (("AUC", "auc"), ("Logloss", "logloss")):
        assert readings(page, title) == {
            split: records_of(run_directory, "step", key, split=split) for split in ("valid", "test")
        }
    assert len(readings(page, "AUC")["valid"]) == 12
    summary = json.loads((run_directory / "summary.json").read_text())
    for label in ("click", "long_view"):
        curve = summary["by_label"][label]["calibration_curve"]
        assert readings(page, label) == {
            label: [{"prediction": one["prediction"], "label": one["label"]} for one in curve]
        }
    assert "shaded: extremes" in shown  # 1,500 records were thinned
    assert 'class="notes"' not in page


NUMBERS = """
[labels]
names = ["spent", "click"]
loss = { spent = "huber" }
"""
CURVE = [{"prediction": 0.5, "label": 0.5}]
BY_LABEL = {
    "spent": {"auc": None, "mae": 0.75, "rmse": 1.25, "calibration_curve": []},
    "click": {"auc": 0.5, "calibration_curve": CURVE},
}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("config", [NUMBERS, ""], ids=["config", ""])
def test_errors_take_the_place_of_auc_where_the_first_label_is_a_number(tmp_path, ended, config):
    (tmp_path / "config.toml").write_text(config)
    begun = ["MAE", "RMSE"] if config else ["AUC", "Logloss"]  # nothing else tells yet
    assert re.findall(r"<figcaption><b>(.*?)</b>", page_in(tmp_path)[0])[1:3] == begun
    lines, splits = [{"step": 10, "examples": 640, "loss": 0.5}], ("valid", "progressive")
    for step in (10, 20):
        errors = {"auc": None, "logloss": None, "mae": 8.125 / step, "rmse": 12.5 / step}
        lines += [{"step": step, "split": split, **errors} for split in splits]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if ended:
        summary = {"auc": None, "logloss": None, "by_label": BY_LABEL}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    page, shown = page_in(tmp_path)
    charts = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert charts[:4] == ["Training loss", "MAE", "RMSE", "Speed"]
    assert charts[-1] == ("click" if ended else "Memory")  # no calibration of a number
    for title, key in (("MAE", "mae"), ("RMSE", "rmse")):
        lines = {split: records_of(tmp_path, "step", key, split=split) for split in splits}
        assert readings(page, title) == lines
    tiles = re.findall(r"<dt>(.*?)</dt>", page[: page.index("<h2>")])
    assert ("AUC" in tiles, "MAE" in tiles, "RMSE" in tiles) == (False, True, ended)
    for value in ("0.75000", "1.25000") if ended else ("0.40625",):
        assert value in shown[: shown.index("Curves")]


def test_thinning_keeps_the_mean_and_the_extremes(make_run):
    directory = make_run("thinned", num_records=2400)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    lines[1234]["loss"] = 9.0
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = page_in(directory)
    points = readings(page, "Training loss")["Training loss"]
    assert len(points) == 240
    losses = [line["loss"] for line in lines[:10]]
    assert points[0] == {
        "step": 55,
        "loss": pytest.approx(sum(losses) / 10),
        "least": min(losses),
        "greatest": max(losses),
    }
    assert [at for at, point in enumerate(points) if point["greatest"] == 9.0] == [123]


def test_a_short_run_is_drawn_record_by_record(make_run):
    directory = make_run("short", num_records=200)
    page, shown = page_in(directory)
    for title, key in (
        ("Training loss", "loss"),
        ("Speed", "samples_per_s"),
        ("Rows", "rows"),
        ("Hit rate", "hit_rate"),
        ("Imbalance", "imbalance"),
    ):
        assert readings(page, title) == {title: records_of(directory, "step", key)}
    memory = [row["rss_bytes"] * 2**30 for row in readings(page, "Memory")["Memory"]]
    assert memory == [row["rss_bytes"] for row in records_of(directory, "rss_bytes")]
    assert "shaded: extremes" not in shown


def test_the_timeline_shows_six_steps_and_all_phases(run_directory):
    page, shown = page_in(run_directory)
    spec = specs(page)[-1]
    lanes = ["read", "step", "pull", "forward", "loss", "backward", "push", "apply"]
    assert spec["encoding"]["y"]["sort"] == lanes
    rows = rows_of(spec)
    steps = [row for row in rows if row["phase"] == "step"]
    assert len(steps) == 6
    assert {row["phase"] for row in rows} == set(lanes)
    recorded = [e for e in json.loads((run_directory / "timeline.json").read_text()) if e["name"] == "step"]
    first = next(at for at, event in enumerate(recorded) if event["dur"] / 1000 == steps[0]["ms"])
    assert [row["ms"] for row in steps] == [event["dur"] / 1000 for event in recorded[first : first + 6]]
    assert [row["from_ms"] for row in steps] == [
        (event["ts"] - recorded[first]["ts"]) / 1000 for event in recorded[first : first + 6]
    ]
    assert min(row["from_ms"] for row in rows) == 0
    assert max(row["to_ms"] for row in rows) == steps[-1]["to_ms"]
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


ZEROS = ("staleness_max", "staleness_mean", "lost_updates")


def test_zeros_that_mean_not_applicable_are_left_out(run_directory):
    summary = json.loads((run_directory / "summary.json").read_text())
    summary["wire_bytes"] |= {"dense": 3_000_000}
    (run_directory / "summary.json").write_text(json.dumps(summary))
    page = write_report(run_directory).read_text()
    assert "wire_bytes.dense" in page
    assert [name for name in (*ZEROS, "wire_bytes.gradients") if name in page] == []
    (run_directory / "plan.json").write_text(json.dumps({"roles": {"trainer": 2, "embedding-server": 1}}))
    page = write_report(run_directory).read_text()
    assert all(name in page for name in ZEROS)


def test_zeros_of_a_plan_without_messages_are_left_out(run_directory):
    summary = json.loads((run_directory / "summary.json").read_text())
    summary["plan"] = {"bytes_per_step": 0, "bytes": {"ids": 0.0, "dense": 0.0}}
    (run_directory / "summary.json").write_text(json.dumps(summary))
    assert "plan." not in page_in(run_directory)[1]
    summary["plan"] = {
        "bytes_per_step": 12,
        "bytes": {"ids": 0.0, "dense": 12.0},
        "owners": {"user": 0, "item": 1},
    }
    (run_directory / "summary.json").write_text(json.dumps(summary))
    shown = page_in(run_directory)[1]
    assert "ids 0, dense 12" in shown
    assert "user 0, item 1" in shown


FEATURES = {
    "user": {"table": "user", "rows": 7555, "ids": 150_000, "evaluated_ids": 15_000, "unseen": 0.0279},
    "history": {"table": "item", "rows": 4065, "ids": 367_511, "evaluated_ids": 0, "unseen": None},
    "odd": {"table": None, "rows": "many"},
    "no object": 3,
}


def features_in(page):
    """Cells of the table of features."""
    table = page.partition("<h2>Features</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]


def test_a_table_shows_rows_ids_and_the_unseen_share_of_each_feature(run_directory):
    summary = json.loads((run_directory / "summary.json").read_text())
    (run_directory / "summary.json").write_text(json.dumps(summary | {"features": FEATURES}))
    page, shown = page_in(run_directory)
    assert features_in(page) == [
        ["user", "user", "7,555", "2.8 %", "150,000", "15,000"],
        ["history", "item", "4,065", "–", "367,511", "0"],
        ["odd", "–", "–", "–", "–", "–"],
    ]
    assert "features." not in shown


@pytest.mark.parametrize("more", [{}, {"features": {}}, {"features": [1]}], ids=["absent", "empty", "odd"])
def test_a_summary_without_features_has_no_table_of_them(run_directory, more):
    summary = json.loads((run_directory / "summary.json").read_text())
    (run_directory / "summary.json").write_text(json.dumps(summary | more))
    assert "<h2>Features" not in page_in(run_directory)[0]


def test_the_final_evaluation_is_drawn_if_it_is_the_only_one(run_directory):
    lines = [{"step": step, "examples": 64 * step, "loss": 0.5} for step in (10, 20)]
    (run_directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = json.loads((run_directory / "summary.json").read_text())
    (run_directory / "summary.json").write_text(json.dumps(summary | {"evaluated_on": "test", "steps": 20}))
    page, shown = page_in(run_directory)
    assert "Nothing was evaluated" not in shown
    for title, key, value in (("AUC", "auc", 0.98213), ("Logloss", "logloss", 0.2512)):
        assert readings(page, title) == {"test": [{"step": 20, key: value}]}


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


@pytest.mark.slow
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
    assert len(readings(page, "Training loss")["Training loss"]) == 240


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
    ("summary", "timeline", "config"),
    [
        ("{", "[{", "[model"),
        ("[1]", "{}", f"x = {'9' * 5000}"),
        ("{", "[" * 100_000, f"x = {'[' * 5000}"),
    ],
    ids=["cut short", "other types", "too deep"],
)
def test_damaged_parts_are_left_out(run_directory, summary, timeline, config):
    (run_directory / "summary.json").write_text(summary)
    (run_directory / "timeline.json").write_text(timeline)
    (run_directory / "config.toml").write_text(config)
    notes = page_in(run_directory)[1]
    for note in ("summary.json is damaged", "timeline.json is damaged", "config.toml is not valid TOML"):
        assert note in notes


def test_missing_spans_and_damaged_lines_are_noted(run_directory):
    (run_directory / "timeline.json").write_text("[]")
    (run_directory / "metrics.jsonl").write_text("\x00\x01")
    notes = page_in(run_directory)[1]
    assert "holds no spans" in notes
    assert "1 line is damaged" in notes


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
    assert readings(page, "Training loss") == {"Training loss": [{"step": 2, "loss": 0.5}]}
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
    assert readings(page, "AUC")["valid"][-1] == {"step": 5000, "auc": 0.5}
    steps = [row["step"] for row in readings(page, "Training loss")["Training loss"]]
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
        "features": {evil: {"table": evil, "rows": evil}},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    events = [{"name": evil, "ph": "X", "ts": at, "dur": 5, "tid": evil} for at in range(0, 200, 10)]
    (run / "timeline.json").write_text(json.dumps(events))
    page, _ = page_in(run)
    assert page.count("<script>") == 2
    assert page.count("alert(1)") > page.count("<script>alert(1)") == 0
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
        {"prediction": one.prediction, "label": one.label} for one in metrics.first.calibration_curve
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
    with pytest.raises(StorageFullError, match="no space left"):
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


@pytest.mark.slow
def test_only_a_page_imports_altair():
    words = "import sys, girih.cli as c; [c.cli.get_command(None, n) for n in c.COMMANDS]; sys.exit('altair' in sys.modules or 'vl_convert' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
