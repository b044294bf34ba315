"""The page of the metrics: its Python runs, its table names what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from girih.metrics import LabelMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_python_blocks_run(capsys):
    names = {"__name__": "docs_metrics"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "docs/metrics.md", "exec"), names)
    assert "click: auc 0.87500  auprc 0.83333  logloss 0.47209" in capsys.readouterr().out


def test_the_table_names_every_metric():
    rows = "".join(re.findall(r"^\| (`.*?) \|", PAGE.partition("\n`features` counts")[0], flags=re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == {field.name for field in dataclasses.fields(LabelMetrics)}
