"""Persia's Figure 9: samples/s of hybrid while its tables grow, and a key space of 10¹² under LRU.

One table that all 26 features share. The embedding server makes the rows first, asked as a worker asks; then come
steps of DeepFM (400-400-400) whose ids are drawn from all rows alike, so that hardly any row is in a cache.

    girih bench persia_fig9
    girih bench persia_fig9 --rows 1_000_000 10_000_000
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import fleet
import harness

SPACE = 10**12
ROW_BYTES, SPARE_BYTES = 150, 3 << 30
SERVER = "embedding-server 0"


def main() -> None:
    parser = harness.parser("persia_fig9", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="examples of a trainer")
    parser.add_argument("--lru-rows", type=int, default=5_000_000, help="max_rows of the table of 10¹² keys")
    options = parser.parse_args()
    report = harness.Report("persia_fig9", options)
    table = report.table(
        "steps by rows, ids drawn from all alike",
        {"rows": "{:,}", "GB of the server": "{:.2f}", "samples/s": "{:,.0f}", "of the smallest": "{:.2f}×",
         "server CPU ms a step": "{:.1f}", "CPU ms a step": "{:.0f}", "rows made a second": "{:,.0f}",
         **fleet.DISTURBED},
    )  # fmt: skip
    runs = [
        _run(rows, options) if harness.available_bytes() > ROW_BYTES * rows + SPARE_BYTES else None
        for rows in options.rows
    ]
    for rows, run in zip(options.rows, runs, strict=True):
        if run is None:
            report.skip(f"{rows:,} rows", f"too little memory: {harness.available_bytes() / 1e9:.0f} GB")
            continue
        rate, last = fleet.median(run, "samples_per_s"), run["windows"][-1]
        table.row(
            {
                "rows": last["rows"],
                "GB of the server": last["rss_bytes"][SERVER] / 1e9,
                "samples/s": rate,
                "of the smallest": rate / fleet.median(runs[0] or run, "samples_per_s"),
                "server CPU ms a step": 1e3 * last["cpu_s_each"][SERVER],
                "CPU ms a step": 1e3 * fleet.median(run, "cpu_s"),
                "rows made a second": rows / run["fill_s"],
                **fleet.disturbance(run),
            }
        )
    table = report.table(
        f"{SPACE:,} keys drawn alike, LRU of {options.lru_rows:,} rows",
        {"step": "{}", "rows": "{:,}", "GB of the server": "{:.3f}", "samples/s": "{:,.0f}",
         **fleet.DISTURBED},
    )  # fmt: skip
    run = _run(options.lru_rows, options, space=SPACE, bounded=options.lru_rows)
    for note, window in zip(run["notes"][1:], run["windows"], strict=True):
        table.row(
            {
                "step": note["step"],
                "rows": window["rows"],
                "GB of the server": window["rss_bytes"][SERVER] / 1e9,
                "samples/s": window["samples_per_s"],
                **fleet.disturbance(run),
            }
        )
    report.not_identical(f"evicted rows: {run['summary']['store'].get('evicted')}")
    report.finish()


def _run(
    rows: int, options: argparse.Namespace, *, space: int | None = None, bounded: int | None = None
) -> dict[str, Any]:
    """Steps over a table of so many rows, ids drawn from a space of keys (that of the rows where None)."""
    eviction = "" if bounded is None else f'eviction = {{ name = "lru", max_rows = {bounded} }}\n'
    with tempfile.TemporaryDirectory() as directory:
        config = fleet.write_task(
            Path(directory), rows=(3 if space else 1) * 400_000, cardinality=space or rows, zipf=None, dim=options.dim,
            table=eviction or "\n",
        )  # fmt: skip
        strategy = f'strategy = {{name = "hybrid", trainers = {options.trainers}}}'
        overrides = (strategy, f"data.batch_size = {options.batch * options.trainers}")
        windows = 10 if space else 4
        return fleet.measure(fleet.Plan(str(config), overrides, fill=rows, windows=windows))


if __name__ == "__main__":
    main()
