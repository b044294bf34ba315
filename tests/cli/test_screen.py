"""Tables that commands print: in full, whether a file or another program reads them, or a narrow terminal shows them."""

import io

import pytest
from rich.console import Console

from girih.cli import show
from girih.cli.show import metrics_table

NAMES = [f"{name}@{k}" for k in (1, 5, 10, 20, 50, 100) for name in ("recall", "ndcg")] + ["mrr"]
METRICS = {"is_click": {"auc": 0.7, "num_examples": 1000, "ranking": dict.fromkeys(NAMES, 0.1234567)}}


def test_a_table_is_cut_by_no_edge_where_output_is_no_terminal(capsys):
    metrics_table(METRICS, "run on test")
    header, values = (line for line in capsys.readouterr().out.splitlines() if "AUC" in line or "0.7" in line)
    assert header.replace("┃", " ").split() == ["label", "AUC", "num", "examples", *NAMES]
    assert len(values.replace("│", " ").split()) == 3 + len(NAMES)


@pytest.mark.parametrize("width", [80, 50])
def test_a_metric_a_row_where_the_terminal_is_narrower_than_the_table(monkeypatch, width):
    out = io.StringIO()
    monkeypatch.setattr(
        show, "screen", lambda: Console(file=out, width=width, force_terminal=True, no_color=True)
    )
    metrics_table(METRICS, "run on test")
    lines = [line.strip("│ ").split("│") for line in out.getvalue().splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["AUC", "0.70000"],
        ["num examples", "1,000"],
        *([name, "0.12346"] for name in NAMES),
    ]
    assert out.getvalue().startswith("run on test\n")


def test_a_metric_a_column_where_the_terminal_has_room(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(
        show, "screen", lambda: Console(file=out, width=80, force_terminal=True, no_color=True)
    )
    metrics_table({"is_click": {"auc": 0.7, "logloss": 0.5}}, "run on test")
    assert [line.strip("│ ").split() for line in out.getvalue().splitlines() if "│" in line] == [
        ["is_click", "│", "0.70000", "│", "0.50000"]
    ]
