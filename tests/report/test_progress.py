"""Progress, in a terminal and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from girih.report import text
from girih.report.progress import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(terminal, width=100):
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system="truecolor" if terminal else None,
    )


def record(step, **changes):
    line = {"step": step, "examples": step * 1000, "epoch": 0, "loss": 0.5, "samples_per_s": 25_000.0}
    return line | {"rows": 1_234_567, "hit_rate": 0.975} | changes


def lines_of(where):
    return where.file.getvalue().splitlines()


def test_lines_come_now_and_then_and_the_last_one_always(clock):
    where = console(terminal=False)
    with Progress(100_000, console=where, every_s=10, clock=clock) as progress:
        for step in range(1, 26):
            progress.update(record(step))
            clock.now += 1
    lines = lines_of(where)
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 11", "step 21", "step 25"]
    assert lines[1] == (
        "step 11  examples 11,000 of 100,000 (11.0 %)  "
        "0.50000 loss  25.0 k samples/s  1.23 M rows  97.5 % hits  1:29 left"
    )


def test_lines_hold_no_escape_codes_and_are_not_wrapped(clock):
    where = console(terminal=False, width=20)
    with Progress(None, console=where, clock=clock) as progress:
        progress.update(record(1, loss=float("nan"), hit_rate=None))
        progress.message("[red]a/path[0] is written")
    assert lines_of(where) == [
        "step 1  examples 1,000  25.0 k samples/s  1.23 M rows",
        "[red]a/path[0] is written",
    ]


def test_time_left_counts_from_where_a_resumed_run_started(clock):
    where = console(terminal=False)
    with Progress(100_000, console=where, every_s=0, clock=clock) as progress:
        progress.update(record(50))
        clock.now += 10
        progress.update(record(60))  # 1,000 a second, evaluations included, whatever the record says
    assert [line.rsplit("  ", 1)[1] for line in lines_of(where)] == ["0:02 left", "0:40 left"]


def test_evaluations_stay():
    where = console(terminal=False)
    progress = Progress(None, console=where)
    progress.on_evaluation({"step": 1200, "split": "valid", "auc": 0.91234567, "logloss": 0.25, "gauc": None})
    progress.on_evaluation({"step": 1200, "split": "test", "auc": None})
    assert lines_of(where) == [
        "step 1,200  valid  auc 0.91235  logloss 0.25000",
        "step 1,200  test  no metric is defined here",
    ]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"auc": 0.75, "auc_last_hour": 0.875}, "0.87500 AUC of the last hour  0.75000 of all"),
        ({"mae": 1.5, "mae_last_hour": 1.25, "rmse": 2.0}, "1.25000 MAE of the last hour  1.50000 of all"),
        ({"mae": 1.5, "mae_last_hour": None}, "1.50000 of all"),
    ],
)
def test_what_progressive_validation_says_stands_beside_the_loss(metrics, told):
    where = console(terminal=False)
    progress = Progress(None, console=where)
    progress.on_evaluation({"step": 1, "split": "progressive", **metrics})
    progress.update(record(1, samples_per_s=None, rows=None, hit_rate=None))
    assert lines_of(where) == [f"step 1  examples 1,000  0.50000 loss  {told}"]


def test_a_plan_says_who_owns_what_and_where_another_strategy_would_send_less():
    where = console(terminal=False)
    predicted = {"dense": "split", "bytes_per_step": 3 << 20, "synchronous_bytes_per_step": 1 << 20}
    plan = {"placement": {**{f"c{i}": 0 for i in range(8)}, "x": 1}, "predicted": predicted}
    Progress(None, console=where).on_plan(plan)
    Progress(None, console=where).on_plan({**plan, "predicted": {**predicted, "bytes_per_step": 1 << 19}})
    Progress(None, console=where).on_plan(
        {"placement": {}, "predicted": predicted}
    )  # nothing is spread: no line
    cut = {"schedule": {"micro_batches": 3}, "predicted": {"micro_batches": {"why": "by eq. 2"}}}
    Progress(None, console=where).on_plan({**cut, "placement": {}})
    features, less, _, more, parts = lines_of(where)
    assert parts == "micro-batches: 3 (by eq. 2)"
    assert features == "features by trainer: 0 c0, c1, c2, c3, c4, c5 and 2 more; 1 x; upper network: split"
    assert less.startswith(
        "a trainer sends 3.00 MiB per step; strategy 'synchronous' would send 1.00 MiB, which is less"
    )
    assert more == "a trainer sends 512 KiB per step; strategy 'synchronous' would send 1.00 MiB"


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("total", [100_000, None])
def test_the_bar_keeps_to_one_line_and_messages_stay_above(clock, width, total):
    where = console(terminal=True, width=width)
    with Progress(total, console=where, clock=clock) as progress:
        progress.on_metrics(record(1))
        clock.now += 10
        progress.on_metrics(record(37))
        progress.message("checkpoint written")
    written = where.file.getvalue()
    assert "\x1b[?25l" in written  # the cursor is hidden
    assert written.rstrip().endswith("\x1b[?25h")  # and comes back
    plain = Console(file=io.StringIO(), record=True, width=width)
    plain.print(progress._bar.get_renderable())
    shown = plain.export_text().splitlines()
    assert len(shown) == 1
    assert ("37 %" if total else "37.0 k examples") in shown[0]
    assert "0.50000 loss" in shown[0]
    assert "…" not in shown[0]
    if width == 100 and total:
        assert "0.50000 loss  25.0 k samples/s  1.23 M rows  97.5 % hits  0:18 left" in shown[0]
    assert "checkpoint written" in written


def interrupted(progress):
    with progress:
        progress.update(record(1))
        raise KeyboardInterrupt


def test_the_bar_stops_when_the_run_fails():
    where = console(terminal=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Progress(10, console=where))
    assert where.file.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.short(9999), "9,999"),
        (text.short(10_000), "10.0 k"),
        (text.short(999_999), "1.00 M"),
        (text.short(5_382_000), "5.38 M"),
        (text.short(1e14), "100 T"),
        (text.short(None), "–"),
        (text.size(1023), "1,023 B"),
        (text.size(1.3 * 2**30), "1.30 GiB"),
        (text.percent(0.9731), "97.3 %"),
        (text.duration(4.2), "4.2 s"),
        (text.duration(185), "3 min 05 s"),
        (text.duration(7800), "2 h 10 min"),
        (text.duration(float("inf")), "–"),
        (text.fraction(0.984124), "0.98412"),
        (text.count(5382), "5,382"),
        (text.count(True), "–"),
    ],
)
def test_numbers_read_as_people_read_them(shown, expected):
    assert shown == expected
