"""PICASSO's Figure 3: the share of the training data that the most frequent ids cover.

The paper sorts the ids of each feature by frequency: 20 % of the ids cover 70 % of the training data on average, and up to 99 %. Features with few
ids say nothing about caches, so those with less than ``--least-ids`` are left out.

    GIRIH_DATA=... girih bench picasso_fig3 --json docs/results/picasso-fig3.json
    girih bench picasso_fig3 --data zipf generated

``zipf`` is the law of the workloads of ``picasso.py``. The others are the data of the quality experiments.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import numpy as np
import pages
import picasso
import strategy_quality
import tomli_w
from experiments import find_data
from numpy.typing import NDArray

from girih.app.run_config import RunConfig
from girih.data.batch import Batch

DATA = {"kuairand": "kuairand/dnn", "frappe": "frappe/dnn", "generated": "generated/dnn"}
"""Data → case of ``strategy_quality``."""
ZIPF = "zipf"
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
ZIPF_BATCH, ZIPF_FILES = 4096, 8
TITLE = "share of the training data that the most frequent ids cover"
PAPER = {"20 %": "0.70", "most at 20 %": "0.99"}


def main() -> None:
    parser = harness.parser("picasso_fig3", __doc__)
    pages.add_option(parser, page_parts)
    parser.add_argument("--data", nargs="+", default=[*DATA, ZIPF], choices=[*DATA, ZIPF])
    parser.add_argument("--least-ids", type=int, default=100, help="different ids of a feature that counts")
    options = parser.parse_args()
    report = harness.Report("picasso_fig3", options)
    table = report.table(
        TITLE,
        {"data": "{}", "features": "{}", "ids": "{:,}", "different ids": "{:,}",
         **{f"{share:.0%}".replace("%", " %"): "{:.2f}" for share in SHARES}, "least at 20 %": "{:.2f}", "most at 20 %": "{:.2f}"},
    )  # fmt: skip
    for data in options.data:
        found = {
            name: counts for name, counts in _counts(parser, data).items() if len(counts) >= options.least_ids
        }
        if not found:
            report.skip(data, f"no feature has {options.least_ids} different ids")
            continue
        table.row({"data": data, **covered_by(found)})
    report.finish()


def covered_by(found: Mapping[int, NDArray[np.int64]]) -> dict[str, Any]:
    """Columns of a data set: means over its features.

    Args:
        found: number of a feature → int64[different ids], how often each occurs.
    """
    columns: dict[str, Any] = {
        "features": len(found),
        "ids": int(sum(counts.sum() for counts in found.values())),
        "different ids": sum(map(len, found.values())),
    }
    for share in SHARES:
        each = [covered(counts, share) for counts in found.values()]
        columns[f"{share:.0%}".replace("%", " %")] = mean(each)
        if share == 0.2:
            columns |= {"least at 20 %": min(each), "most at 20 %": max(each)}
    return columns


def covered(counts: NDArray[np.int64], share: float) -> float:
    """The share of all occurrences that a share of the ids has, the most frequent ids first.

    Args:
        counts: int64[different ids].
    """
    descending = np.sort(counts)[::-1]
    return float(descending[: max(1, round(share * len(counts)))].sum() / counts.sum())


def _counts(parser: argparse.ArgumentParser, data: str) -> dict[int, NDArray[np.int64]]:
    """Number of a feature → how often each of its ids occurs in the training data."""
    if data == ZIPF:
        train = picasso.write_epoch(picasso.WIDE_DEEP, ZIPF_BATCH, ZIPF_FILES, distinct=ZIPF_FILES)
        made = picasso.config(picasso.WIDE_DEEP, train, ZIPF_BATCH)
    else:
        if data == "generated":
            strategy_quality.generate()
        else:
            find_data(parser)
        made = strategy_quality.CASES[DATA[data]].config(strategy_quality.ONE, 1.0, 1, quick=False)
    parts: dict[int, list[NDArray[np.int64]]] = {}
    for batch in _batches(made):
        for feature in range(batch.num_features):
            parts.setdefault(feature, []).append(batch.ids[batch.ids_of(feature)].copy())
    return {feature: np.unique(np.concatenate(ids), return_counts=True)[1] for feature, ids in parts.items()}


def _batches(made: Mapping[str, Any]) -> Iterator[Batch]:
    """One epoch of the training data of a config."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(tomli_w.dumps(dict(made)))
        yield from RunConfig.load(file).dataset("train")


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of ``docs/scale.md``."""
    rows = pages.rows(results, TITLE)
    shares = [f"{share:.0%}".replace("%", " %") for share in SHARES]
    lines = [
        [row["data"], f"{row['features']}", f"{row['different ids']:,}", *(f"{row[share]:.2f}" for share in shares),
         f"{row['least at 20 %']:.2f} to {row['most at 20 %']:.2f}"]
        for row in rows
    ]  # fmt: skip
    if lines:
        lines.append(
            [
                "the paper, five data sets",
                "",
                "",
                *(PAPER.get(share, "–") for share in shares),
                f"up to {PAPER['most at 20 %']}",
            ]
        )
    header = (
        "data",
        "features",
        "different ids",
        *(f"{share} of the ids" for share in shares),
        "features at 20 %",
    )
    return {"skew": pages.table(header, lines)}


if __name__ == "__main__":
    main()
