"""The cost model against Table 2 of the DES paper, all fifteen cells."""

import json
import sys

import pytest

pytestmark = pytest.mark.usefixtures("folder")


def test_table_2_is_what_the_formulas_give(tmp_path, monkeypatch, capsys):
    import des_table2

    monkeypatch.delenv("GIRIH_DATA", raising=False)
    file = tmp_path / "des.json"
    monkeypatch.setattr(sys, "argv", ["des_table2.py", "--batches", "--json", str(file)])
    des_table2.main()
    report = json.loads(file.read_text())
    rows = report["tables"][0]["rows"]
    assert [row["batch"] for row in rows] == [512, 1024, 2048, 4096, 8192]
    assert max(row["largest deviation"] for row in rows) <= 0.0005  # as printed, rounded
    assert "narrow data" in report["skipped"]


def test_savings_do_not_depend_on_the_number_of_workers():
    import des_savings

    for workers in (2, 4, 64):
        found = des_savings.saving(512, 147_664, width=8, columns=9, num_workers=workers)
        assert found == pytest.approx(0.99376, abs=1e-5)
