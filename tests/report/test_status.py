"""``girih status`` of runs that are over, or of what is none; tests/strategies/test_reports.py has those under way."""

import io
import json
import re
import time

import pytest
from rich.console import Console

from girih import cli
from girih.report.status import COLUMNS, _bottleneck, status_of
from girih.telemetry.peer_status import BOTTLENECK

SUMMARY = {
    "steps": 100, "num_examples": 6400, "samples_per_s": 1234.5, "auc": 0.75, "logloss": 0.5, "num_rows": 99, "lost_updates": 0,
    "checkpoint_step": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "does not exist; give a run directory, as `girih train --run` makes it"),
        (lambda path: path.write_text(""), "is a file; give a run directory"),
        (lambda path: path.mkdir(), "not a run directory (no config.toml or metrics.jsonl in it)"),
    ],
)
@pytest.mark.parametrize("option", ["--watch", "--json"])
def test_what_is_no_run_is_told_in_one_line(tmp_path, capsys, make, told, option):
    make(tmp_path / "run")
    assert cli.run(["status", str(tmp_path / "run"), option]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    (line,) = error.splitlines()
    assert line.startswith(f"girih: {tmp_path / 'run'}: ")
    assert told in line


def test_a_run_that_has_ended_is_its_summary_and_one_without_is_told_to_go_on(tmp_path, capsys):
    record = {"step": 50, "loss": 0.625, "samples_per_s": 10.0}
    lines = [json.dumps(record), json.dumps({"step": 50, "split": "valid"}), '{"step": 5']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert cli.run(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "there is no checkpoint to go on from: train again, in another directory" in out
    assert "--resume" not in out
    (tmp_path / "checkpoints" / "step-00000050").mkdir(parents=True)
    assert cli.run(["status", str(tmp_path)]) == 0  # a program's own run has no config
    assert f"go on with: a program that calls trainer.load({str(tmp_path)!r})" in capsys.readouterr().out
    (tmp_path / "config.toml").write_text("")
    assert cli.run(["status", str(tmp_path), "--watch"]) == 0
    out = capsys.readouterr().out
    assert "stopped before its end, step 50, loss 0.62500" in out
    assert f"go on with: girih train {tmp_path}/config.toml --run {tmp_path} --resume" in out
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert cli.run(["status", str(tmp_path), "--json", "--watch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["processes"], found["record"]) == ("ended", [], record)
    assert found["summary"] == SUMMARY
    assert cli.run(["status", str(tmp_path)]) == 0
    assert "ended, 100 steps, 6,400 examples, 1,234 samples/s, AUC 0.75000" in capsys.readouterr().out


def test_the_bottleneck_is_whoever_waits_least_while_the_run_trains_if_anybody_works_most_of_the_time(
    tmp_path,
):
    def process(role, busy, rate=None):
        return {"role": role, "index": 0, "busy": busy, "samples_per_s": rate}

    waiting = [process("trainer", 0.25, 900.0), process("embedding-server", 0.875), process("loader", None)]
    assert _bottleneck(waiting) == {"role": "embedding-server", "index": 0, "busy": 0.875}
    waiting[1]["busy"] = BOTTLENECK - 0.01  # each waits for the others in turn
    assert _bottleneck(waiting) is None
    waiting[1]["busy"] = 0.875
    waiting[0]["samples_per_s"] = 0.0  # it evaluates
    assert _bottleneck(waiting) is None
    (tmp_path / "config.toml").write_text("")
    assert status_of(tmp_path)["bottleneck"] is None


@pytest.fixture
def six(tmp_path):
    """A run of six processes, of another host, which said something a moment ago."""
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "live").mkdir()
    roles = ("trainer", "trainer", "loader", "embedding-worker", "embedding-server", "embedding-server")
    stats = {"histograms": {"staleness": {"4": 100}}, "counters": {}}
    for pid, role in enumerate(roles, start=1_234_560):
        index, now_s = roles[: pid - 1_234_560].count(role), time.time()
        now, then = (
            {
                "at_s": now_s - ago,
                "cpu_s": 100 - 0.75 * ago,
                "rss_bytes": 1500 << 20,
                "stats": {
                    **stats,
                    "busy_s": 100 - 0.5 * ago,
                    "live": {
                        "examples": 1e6 - 1e5 * ago,
                        "steps": 123_456,
                        "rows": {"user": 12_345_678},
                        "queues": {"ready": 4},
                    },
                },
            }
            for ago in (0, 4)
        )
        shown = {"role": role, "index": index, "incarnation": 0, "pid": pid, "start": "", "host": "another"}
        shown |= {"begun_s": now_s - 4000, "endpoint": "", "now": now, "then": then}
        (tmp_path / "live" / f"{role}-{index}.json").write_text(json.dumps(shown))
    return tmp_path


def cells(lines):
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line[:1] in "│┃"]


def test_the_table_is_printed_in_full_where_output_is_no_terminal(six, capsys):
    assert cli.run(["status", str(six)]) == 0
    header, *rows, _ = cells(capsys.readouterr().out.splitlines())
    assert header == list(COLUMNS)
    assert {row[header.index("pid")] for row in rows} == {str(pid) for pid in range(1_234_560, 1_234_566)}
    assert {row[header.index("cores")] for row in rows} == {"0.75"}
    assert "embedding-server 1" in {row[0] for row in rows}


def test_a_narrow_terminal_shows_fewer_columns_each_whole_and_the_pid_among_them(six, monkeypatch):
    out = io.StringIO()
    narrow = Console(file=out, width=80, force_terminal=True, no_color=True, color_system=None)
    monkeypatch.setattr("girih.cli.runs.screen", lambda: narrow)
    assert cli.run(["status", str(six)]) == 0
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert max(len(line) for line in lines if line[:1] in "│┃") <= 80
    header, *rows, _ = cells(lines)
    assert {"role", "pid", "state", "samples/s", "memory"} <= set(header) < set(COLUMNS)
    assert {row[header.index("pid")] for row in rows} == {str(pid) for pid in range(1_234_560, 1_234_566)}
    assert "embedding-server 1" in {row[0] for row in rows}
