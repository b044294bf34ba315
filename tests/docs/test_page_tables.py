"""Measured tables of the pages against their results: each column of a page is one column of a result, rounded."""

from itertools import groupby

import pytest
from kept_results import table
from page_tables import PageTable, compare, numbers, tables_of


def pivot(rows, keys, over, columns):
    """One row for each value of the keys, with columns side by side for each value of ``over``."""
    merged = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        side = " ".join(str(row[name]) for name in over)
        merged.setdefault(key, dict(zip(keys, key, strict=True))).update({f"{side}, {name}": row[name] for name in columns})
    return list(merged.values())


def ratios(rows, *pairs):
    """Rows with a column more for each (name, dividend, divisor)."""
    return [row | {name: _ratio(row.get(over), row.get(under)) for name, over, under in pairs} for row in rows]


def _ratio(over, under):
    return over / under if over and under else None


def joined(rows, others, *keys):
    """Rows with the columns of the other rows that have the same keys."""
    by_key = {tuple(str(other[key]) for key in keys): other for other in others}
    return [row | by_key.get(tuple(str(row[key]) for key in keys), {}) for row in rows]


MEASURED = {
    ("persia", "as root", 0): lambda: (
        table("persia-wire/1gbit", "steps over") + table("persia-wire/200mbit", "steps over")
    ),
    ("persia", "Table 2", 0): lambda: (
        table("strategy-quality", "quality") + table("strategy-quality/one-rate", "quality")
    ),
    ("persia", "Table 2", 1): lambda: table("strategy-quality", "how rates"),
    ("persia", "By trainers", 0): lambda: pivot(
        table("persia-fig8.json", "samples/s"), ["trainers"], ["strategy"], ["samples/s", "of synchronous", "CPU ms a step"]
    ),
    ("persia", "Figure 6", 0): lambda: table("persia-fig6", "seconds"),
    ("persia", "Figure 9", 0): lambda: pivot(
        table("persia-fig9", "left"), ["server's cores", "arena"], ["rows"], ["samples/s", "of the smallest", "server CPU ms a step"]
    ),
    ("persia", "Figure 9", 1): lambda: table("persia-fig9", "right"),
    ("persia", "Theorem 1", 0): lambda: table("persia-theorem1", "test AUC"),
    ("persia", "Balance", 0): lambda: table("persia-balance.json", "keys"),
    ("des", "By the paper", 0): lambda: table("des-table2.json", "Table 2"),
    ("des", "On the wire", 0): lambda: table("des-table2.json", "bytes that a trainer sends"),
    ("des", "Where substitution loses", 0): lambda: table("des-table2.json", "bytes that a trainer would"),
    ("des", "Table 5", 0): lambda: joined(
        table("des-table5", "ms a step"), table("des-table5", "bytes a step"), "link", "batch", "model", "strategy"
    ),
    ("des", "Table 5", 1): lambda: pivot(
        table("des-table5", "how many"), ["batch", "model", "link", "paper: communication", "paper: samples/s"], ["beside"],
        ["communication", "and waiting", "bytes", "busiest direction", "samples/s of substitution"],
    ),
    ("des", "Tables 3 and 4", 0): lambda: table("strategy-quality", "quality"),
    ("des", "Tables 3 and 4", 1): lambda: table("strategy-quality", "how rates"),
    ("des", "Tables 3 and 4", 2): lambda: table("stream", "AUC of each day"),
    ("picasso", "Table III", 0): lambda: table("picasso-table3", "AUC by batch"),
    ("picasso", "Table IV", 1): lambda: table("picasso-table4", "each part"),
    ("picasso", "Table V:", 0): lambda: table("picasso-table5.json", "operations"),
    ("picasso", "Table VI:", 0): lambda: table("picasso-table6", "hit ratio"),
    ("picasso", "Table VII:", 0): lambda: table("picasso-table7", "twelve"),
    ("picasso", "Table VIII", 0): lambda: table("picasso-table8", "samples/s"),
    ("picasso", "Figure 14", 0): lambda: table("picasso-fig15", "samples/s"),
    ("picasso", "Packing alone", 0): lambda: table("kernels-packing.json", "Packing"),
    ("hierarchical", "Measured", 0): lambda: table("hierarchical-quality/generated", "normalised"),
    ("hierarchical", "Measured", 1): lambda: (
        table("hierarchical-quality/kuairand", "normalised") + table("hierarchical-quality/decayed", "normalised")
    ),
    ("hierarchical", "Measured", 2): lambda: table("hierarchical-quality/eight-bits", "normalised"),
    ("hierarchical", "Measured", 4): lambda: table("hierarchical-speed.json", "ablation"),
    ("hierarchical", "Measured", 5): lambda: table("hierarchical-speed.json", "batches"),
    ("hierarchical", "Measured", 6): lambda: table("hierarchical-speed.json", "processor"),
    ("benchmarks", "Results", 0): lambda: table("train.json", "Training"),
    ("benchmarks", "Results", 1): lambda: table("kernels.json", "Sparse half: "),
    ("benchmarks", "thresholds", 0): lambda: table("thresholds.json", "Copies"),
    ("benchmarks", "freshness", 0): lambda: table("freshness.json", "from an update"),
    ("benchmarks", "ssd_reads", 0): lambda: table("ssd-reads.json", "20,000"),
    ("operations", "What comes back", 0): lambda: table("faults.json", "one process"),
    ("operations", "What comes back", 1): lambda: table("soak.json", "from a fault"),
    ("serving", "Elsewhere", 0): lambda: table("serving.json", "DeepFM"),
}  # fmt: skip


def page_table(page, section, place):
    matching = [kept for kept in tables_of(f"docs/{page}.md") if kept.section.startswith(section)]
    return matching[place]


@pytest.mark.parametrize(("page", "section", "place"), MEASURED, ids=[" ".join(map(str, key)) for key in MEASURED])
def test_a_table_is_that_of_its_result(page, section, place):
    rows = MEASURED[page, section, place]()
    compared = compare(page_table(page, section, place), rows, apart=())
    assert not compared.faults, "\n".join(compared.faults)
