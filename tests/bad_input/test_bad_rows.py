"""Rows that cannot be used: named by file and line, or skipped, counted and shown."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

GOOD = ["1,2.5,4,1,1.0", "2,0.5,2,0,0.5", "3,,5,1,2", "4,1e3,1,0,1"]
CSV = """
data = {format = "csv", train = "rows.csv", valid = "GONE", test = "GONE", batch_size = 2}
features = [{name = "user", kind = "categorical"}, {name = "price", kind = "numeric"}]
labels = {names = ["click", "liked"], derive = {liked = "rating >= 4"}, weight = "weight"}
model = {name = "dnn", hidden = [4]}
"""

LINES = [
    ("1,2,3,2,1", "column 'click' = '2': expected a label in [0, 1]; derive it, as in derive = { click = \"click > 1\" }"),
    ("1,2,3,-1,1", "column 'click' = '-1': expected a label in [0, 1]; derive it, as in derive = { click = \"click > 0\" }"),
    ("1,nan,3,1,1", "column 'price' = 'nan': expected a finite number"),
    ("1,2,high,1,1", "column 'rating' = 'high': expected a number to derive the label from"),
    ("1,2,3,1,-1", "column 'weight' = '-1': expected a finite weight ≥ 0"),
    ("1,2,3", "3 cells: expected 5, separated by ','"),
    ('"1,2,3,1,1', 'a quote " is not closed on its line'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_bad_line_of_csv(site, line, message):
    site.configure(CSV)
    site.write_lines("rows.csv", "user,price,rating,click,weight", *GOOD[:2], line, *GOOD[2:])
    assert f"{site / 'rows.csv'}, line 4: {message}" in site.refusal(*site.train())
    shown = site.girih(*site.train("--set", "data.on_bad_row=skip"))
    assert "train: 1 bad row was skipped, the first: " in shown
    assert f"line 4: {message}" in shown
    summary = json.loads((site / "run" / "summary.json").read_text())
    assert summary["skipped_rows"] == {"train": 1}
    assert summary["num_examples"] == len(GOOD)


ROWS = [
    ({"price": float("nan")}, "column 'price' = nan: expected a finite number"),
    ({"click": None}, "column 'click' is missing: expected a label in [0, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ROWS, ids=[str(change) for change, _ in ROWS])
def test_a_bad_row_of_parquet(site, change, message):
    good = {"user": 1, "price": 2.0, "rating": 3, "click": 1.0, "weight": 1.0}
    rows = [good, good, good, good | change, good]
    pq.write_table(pa.Table.from_pylist(rows), site / "rows.parquet", row_group_size=2)
    site.configure(CSV.replace('format = "csv", train = "rows.csv"', 'train = "rows.parquet"'))
    assert f"{site / 'rows.parquet'}, row 4 (row group 2): {message}" in site.refusal(*site.train())
    assert "train: 1 bad row was skipped" in site.girih(*site.train("--set", "data.on_bad_row=skip"))


def test_a_bad_line_of_criteo(site):
    site.configure(
        'data = {format = "criteo", train = "day_0", valid = "GONE", test = "GONE"}\n'
        'features = [{name = "C1", kind = "categorical"}, {name = "I1", kind = "numeric"}]\n'
        'labels.names = ["label"]'
    )
    good = "\t".join(["1", *("3" for _ in range(13)), *("68fd1e64" for _ in range(26))])
    site.write_lines("day_0", good, good, good.replace("68fd1e64", "", 1)[:-9], good)
    assert f"{site / 'day_0'}, line 3: 39 cells: expected 40, separated by '\\t'" in site.refusal(
        *site.train()
    )
    site.write_lines("day_0", good, "7" + good[1:])
    assert "day_0, line 2: column 'label' = '7': expected a label in [0, 1]" in site.refusal(*site.train())
    assert "1 bad row was skipped" in site.girih(*site.train("--set", "data.on_bad_row=skip"))


PAIRS = [
    ("1 5:1", "1 pairs: expected 2, one for each feature"),
    ("3 5:1 6:2", "column 'click' = '3': expected a label in [0, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), PAIRS, ids=[line for line, _ in PAIRS])
def test_a_bad_line_of_libsvm(site, line, message):
    site.configure(CSV.partition("labels")[0].replace("csv", "libsvm"))
    site.write_lines("rows.libsvm", "1 5:1 6:2", line, "0 7:1 6:0")
    assert f"{site / 'rows.libsvm'}, line 2: {message}" in site.refusal(*site.train())
    assert "1 bad row was skipped" in site.girih(*site.train("--set", "data.on_bad_row=skip"))


def test_when_every_row_is_bad(site):
    site.configure(CSV)
    site.write_lines("rows.csv", "user,price,rating,click,weight", "1,2,3,4,5", "1,2,3,4,5")
    line = site.refusal(*site.train("--set", "data.on_bad_row=skip"))
    assert f"every row is bad; the first: {site / 'rows.csv'}, line 2: column 'click' = '4'" in line


def test_a_bad_row_among_the_validation_data_comes_late(site):
    rows = pq.read_table(site / "valid.parquet").to_pylist()
    rows[7]["click"] = 5
    pq.write_table(pa.Table.from_pylist(rows), site / "valid.parquet")
    line = site.refusal_after_writing(*site.train(), before=2)  # two records of the steps
    assert f"{site / 'valid.parquet'}, row 8 (row group 1): column 'click' = 5: expected a label" in line
    assert not (site / "run" / "summary.json").exists()
    assert "AUC" in site.girih(*site.train("--resume", "--set", "data.on_bad_row=skip"))


def test_evaluate_and_predict_count_what_they_skip(trained):
    rows = pq.read_table(trained / "test.parquet").to_pylist()
    rows[7]["price"] = float("nan")
    pq.write_table(pa.Table.from_pylist(rows), trained / "odd.parquet")
    odd, run = trained / "odd.parquet", trained / "run"
    assert "row 8 (row group 1): column 'price' = nan" in trained.refusal("evaluate", run, "--data", odd)
    words = ("predict", run, "--data", odd, "--out", trained / "out.parquet")
    assert "row 8 (row group 1): column 'price' = nan" in trained.refusal(*words)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[data]", '[data]\non_bad_row = "skip"'))
    assert "1 bad row was skipped, the first: " in trained.girih("evaluate", run, "--data", odd)
    assert "without a prediction: 1 bad row was skipped" in trained.girih(*words)
    assert pq.read_metadata(trained / "out.parquet").num_rows == 59
