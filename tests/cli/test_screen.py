"""Tables that commands print: in full where a file or another program reads them, and with every name in full always."""

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
def test_a_narrow_terminal_cuts_no_name(monkeypatch, width):
    out = io.StringIO()
    monkeypatch.setattr(show, "screen", lambda: Console(file=out, width=width, force_terminal=True))
    metrics_table(METRICS, "run on test")
    assert "…" not in out.getvalue()
