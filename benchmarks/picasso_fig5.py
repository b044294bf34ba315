"""PICASSO's Figure 5: the time of a step by kind of work, with model parallelism (MP) and with parameter servers (PS).

The three workloads run as the paper's models did before PICASSO: without packing, interleaving and prefetching. MP is ``synchronous``, PS is
``asynchronous`` with an embedding server, a worker and a loader for each of two trainers. Values are shares of a step of the first trainer, by its spans.
A span of one kind hides no other kind, except that an AllReduce runs during the backward pass.

    girih bench picasso_fig5 --hosts benchmarks/picasso_hosts.toml --json docs/results/picasso-fig5.json
    girih bench picasso_fig5 --workloads W&D --rate 200mbit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import harness
import pages
import picasso
from picasso import Found

SCHEDULE = {"packing": False, "prefetch": False, **picasso.ALONE}
SERVED = dict.fromkeys(("loaders", "embedding_workers", "embedding_servers"), picasso.TRAINERS)
STRATEGIES: dict[str, dict[str, Any]] = {
    "MP": {"name": "synchronous", "trainers": picasso.TRAINERS},
    "PS": {
        "name": "asynchronous",
        "trainers": picasso.TRAINERS,
        "staleness": 0,
        "transport": "tcp",
        **SERVED,
    },
}
KINDS = {
    "reading": ("read",),
    "waiting for rows": ("pull", "wait for rows"),
    "sending gradients of rows": ("push", "wait for update"),
    "forward and backward": ("forward", "backward"),
    "optimizer and parameters": ("apply",),
}
"""Kind of work → spans of a trainer, which follow each other."""
EXCHANGES, ALL_REDUCE, PROCESSOR = (
    "exchanges of rows, in all threads",
    "AllReduce, during backward",
    "trainer's processor",
)
PAPER = {
    "W&D": "reading and memory about 20 %",
    "CAN": "communication about 60 % (MP), 70 % (PS)",
    "MMoE": "computation about 50 %",
}
TITLE = "shares of a step"


def main() -> None:
    parser = picasso.parser("picasso_fig5", __doc__, batch=512, workloads=list(picasso.WORKLOADS), hosts=True)
    pages.add_option(parser, page_parts)
    options = picasso.parsed(parser)
    report = harness.Report("picasso_fig5", options)
    bench = picasso.Bench.of(options, "picasso-fig5")
    reason = bench.missing()
    if reason is not None:
        report.skip("all", reason)
        report.finish()
        return
    cases = {
        (name, arm): bench.case(
            f"{name}/{arm}",
            bench.workload(picasso.WORKLOADS[name]),
            {"schedule": SCHEDULE},
            strategy=strategy,
        )
        for name in options.workloads
        for arm, strategy in STRATEGIES.items()
    }
    shares = dict.fromkeys((*KINDS, "rest", EXCHANGES, ALL_REDUCE, PROCESSOR), "{:.0%}")
    table = report.table(TITLE, {"workload": "{}", "strategy": "{}", "ms a step": "{:.0f}", **shares})
    for (name, arm), runs in bench.measured(cases).items():
        table.row({"workload": name, "strategy": arm, **divided(runs)})
    print(bench.kept.told())
    report.finish()


def divided(runs: Sequence[Found]) -> dict[str, float]:
    """Columns of a case: milliseconds of a step, and shares of it."""

    def share(*spans: str) -> float:
        return picasso.middle(
            runs, lambda window: sum(window["phases_s"].get(span, 0.0) for span in spans) / window["step_s"]
        )

    kinds = {kind: share(*spans) for kind, spans in KINDS.items()}
    exchanges = {
        span
        for run in runs
        for window in run["windows"]
        for span in window["phases_s"]
        if span.startswith("exchange")
    }
    return {
        "ms a step": 1e3 * picasso.middle(runs, lambda window: window["step_s"]),
        **kinds,
        "rest": max(0.0, 1 - sum(kinds.values())),
        EXCHANGES: share(*exchanges),
        ALL_REDUCE: share("allreduce"),
        PROCESSOR: picasso.middle(runs, lambda window: window["cpu_s_each"]["trainer 0"] / window["step_s"]),
    }


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of ``docs/scale.md``."""
    columns = (*KINDS, "rest", EXCHANGES, ALL_REDUCE, PROCESSOR)
    lines = [
        [row["workload"], row["strategy"], f"{row['ms a step']:.0f}", *(f"{row[name]:.0%}" for name in columns), PAPER[row["workload"]]]
        for row in pages.rows(results, TITLE)
    ]  # fmt: skip
    table = pages.table(("workload", "strategy", "ms per step", *columns, "published"), lines)
    return {"breakdown": pages.paragraphs(f"{pages.measured(results)}.", table) if table else None}


if __name__ == "__main__":
    main()
